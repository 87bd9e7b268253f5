"""Take the screenshots of the docs: the live view in a terminal, and the site.

    uv run python infra/docs/pictures.py RUN SITE

RUN is a run directory with completions, and SITE the output directory of `infra/docs/build.sh`. The script needs
Chromium. Check the new files in docs/images before you commit them. Take screenshots of reports by hand.
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
from rl_monitor.progress import METRICS

IMAGES = Path(__file__).parents[2] / "docs" / "images"
COLORS = 128
"""Number of colors of a screenshot. Text and curves need no more, and the file has a third of the size."""


def terminal(run: Path) -> str:
    """Return the live view of a run as SVG, without the web fonts that rich embeds."""
    steps = yaml.safe_load((run / "config.yaml").read_text())["total_steps"]
    view = RunView(str(Path(*run.parts[-3:])), steps, METRICS, stage="training")
    for line in (run / "metrics.jsonl").read_text().splitlines():
        if not (record := json.loads(line)).get("evaluation"):
            view.add(record)
    console = Console(record=True, width=110, height=40, file=io.StringIO(), force_terminal=True)
    Screen(view, run, console).update_completion()
    console.print(view)
    plain = re.sub(r"@font-face \{\{.*?\}\}\s*", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL)
    return console.export_svg(title="gsm8k-grpo", code_format=plain)


def screenshot(page: Path, target: Path, width: int, height: int) -> None:
    """Save a screenshot of a page, in pixels `width` x `height`, with Chromium."""
    browser = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    assert browser, "found no Chromium or Chrome on the PATH; run infra/ci/browser.sh to install it"
    with tempfile.TemporaryDirectory() as scratch:
        image = Path(scratch) / "screenshot.png"
        options = (
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            "--hide-scrollbars",
            "--run-all-compositor-stages-before-draw",
        )
        output = (f"--window-size={width},{height}", f"--user-data-dir={scratch}/profile", f"--screenshot={image}")
        subprocess.run([browser, *options, *output, page.absolute().as_uri()], check=True, capture_output=True)
        Image.open(image).convert("RGB").quantize(COLORS).save(target, optimize=True)


def main() -> None:
    """Take both screenshots."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("site", type=Path)
    arguments = parser.parse_args()
    (IMAGES / "terminal.svg").write_text(terminal(arguments.run.absolute()))
    screenshot(arguments.site / "README.html", IMAGES / "site.png", 1280, 900)


if __name__ == "__main__":
    main()
