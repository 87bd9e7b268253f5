"""The check of Markdown files finds injected faults, and the files of the repository pass it."""

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
    (tmp_path / "faulty.md").write_text("# Title\n### Too deep\ntext\n```\nno language\n```\n")
    faulty = subprocess.run([*rumdl, str(tmp_path / "faulty.md")], capture_output=True, text=True, check=False)
    repository = subprocess.run([*rumdl, "."], cwd=ROOT, capture_output=True, text=True, check=False)

    assert faulty.returncode == 1
    for rule in ("MD001", "MD022", "MD040"):
        assert rule in faulty.stdout
    assert repository.returncode == 0, repository.stdout
