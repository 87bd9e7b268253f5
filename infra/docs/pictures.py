"""The screenshots of the docs, taken anew: of a terminal, and of the site. That of a run's page is taken by hand.

    uv run python infra/docs/pictures.py RUN SITE

RUN is the directory of a run with answers, SITE what `infra/docs/build.sh` wrote. Needs Chromium. Look at what it wrote
into docs/images before it is committed.
"""

from __future__ import annotations

import argparse
import io
import json
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

import yaml
from PIL import Image
from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console

from rl_monitor.live import RunView, Screen
from rl_monitor.progress import FIGURES

IMAGES = Path(__file__).parents[2] / "docs" / "images"
COLOURS = 128
"""Of a picture: enough for text and curves, and a third of the bytes."""


def terminal(run: Path) -> str:
    """The live view of a run as SVG, without the fonts that rich would have a browser fetch."""
    steps = yaml.safe_load((run / "config.yaml").read_text())["total_steps"]
    view = RunView(str(Path(*run.parts[-3:])), steps, FIGURES, stage="training")
    for line in (run / "metrics.jsonl").read_text().splitlines():
        if not (record := json.loads(line)).get("evaluation"):
            view.add(record)
    console = Console(record=True, width=110, height=40, file=io.StringIO(), force_terminal=True)
    Screen(view, run, console).update_completion()
    console.print(view)
    plain = re.sub(r"@font-face \{\{.*?\}\}\s*", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL)
    return console.export_svg(title="gsm8k-grpo", code_format=plain)


def screenshot(page: Path, target: Path, width: int, height: int) -> None:
    """A browser's picture of a page."""
    browser = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    assert browser, "expected a Chromium on the PATH, found none"
    with tempfile.TemporaryDirectory() as scratch:
        shot = Path(scratch) / "shot.png"
        options = (
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            "--hide-scrollbars",
            "--run-all-compositor-stages-before-draw",
        )
        place = (f"--window-size={width},{height}", f"--user-data-dir={scratch}/profile", f"--screenshot={shot}")
        subprocess.run([browser, *options, *place, page.absolute().as_uri()], check=True, capture_output=True)
        Image.open(shot).convert("RGB").quantize(COLOURS).save(target, optimize=True)


def main() -> None:
    """Take all of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("site", type=Path)
    arguments = parser.parse_args()
    (IMAGES / "terminal.svg").write_text(terminal(arguments.run.absolute()))
    screenshot(arguments.site / "README.html", IMAGES / "site.png", 1280, 900)


if __name__ == "__main__":
    main()
