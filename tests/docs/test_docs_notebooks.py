"""Run the code cells of docs/notebooks in order, without Jupyter: cells of `!` commands in bash, others in Python."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import matplotlib
import pytest

ROOT = Path(__file__).parents[2]
NOTEBOOK = ROOT / "docs" / "notebooks" / "pretrained_model.ipynb"
SECONDS = 1200
"""Time limit of one cell on a busy machine."""


def run_cells(notebook: Path) -> tuple[dict[str, Any], str]:
    """Return the namespace of the Python cells and the output of the commands."""
    namespace: dict[str, Any] = {"__name__": "__main__"}
    output = ""
    for cell in json.loads(notebook.read_text())["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "code" and source.startswith("!"):
            commands = "set -e\n" + "\n".join(line.removeprefix("!") for line in source.splitlines())
            done = subprocess.run(["bash", "-c", commands], capture_output=True, text=True, timeout=SECONDS)
            assert done.returncode == 0, done.stdout + done.stderr
            output += done.stdout
        elif cell["cell_type"] == "code":
            exec(source, namespace)
    return namespace, output


@pytest.mark.nightly
@pytest.mark.timeout(2 * SECONDS)
def test_notebook_cells_train_the_model_and_show_completions(smollm2, tmp_path, monkeypatch):
    matplotlib.use("Agg")
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    here = tmp_path / "docs" / "notebooks"
    (here / "runs").mkdir(parents=True)
    (here / "runs" / "smollm2").symlink_to(smollm2)
    (tmp_path / "infra").symlink_to(ROOT / "infra")
    monkeypatch.chdir(here)

    namespace, output = run_cells(NOTEBOOK)

    assert [step["version"] for step in namespace["steps"]] == list(range(1, 11))
    assert "The capital of France is Paris." in output
    assert output.count("On which continent is ") >= 4


def test_notebook_is_stored_without_outputs():
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    assert not any(cell.get("outputs") or cell.get("execution_count") for cell in cells)
