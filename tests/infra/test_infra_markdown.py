"""The Markdown of the project has one format, and the check of it sees planted faults."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_markdown_check_finds_injected_faults_and_the_repository_passes(tmp_path):
    rumdl = [
        str(Path(sys.executable).with_name("rumdl")),
        "check",
        "--no-cache",
        "--config",
        str(ROOT / "pyproject.toml"),
    ]
    (tmp_path / "planted.md").write_text("# Title\n### Too deep\ntext\n```\nno language\n```\n")
    planted = subprocess.run([*rumdl, str(tmp_path / "planted.md")], capture_output=True, text=True, check=False)
    ours = subprocess.run([*rumdl, "."], cwd=ROOT, capture_output=True, text=True, check=False)

    assert planted.returncode == 1
    for rule in ("MD001", "MD022", "MD040"):
        assert rule in planted.stdout
    assert ours.returncode == 0, ours.stdout
