"""Training on preference pairs improves the accuracy of a reward model and of a policy on held-out pairs."""

import json
import subprocess
import sys
from pathlib import Path

import pytest


def _evaluations(name, steps, directory):
    """Run a command and return its evaluation records before the first and after the last step."""
    command = [str(Path(sys.executable).parent / name), f"run_dir={directory}", f"total_steps={steps}", "seed=1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    records = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    first, *_, last = [record for record in records if "eval/accuracy" in record]
    assert (first["step"], last["step"]) == (0, steps)
    return first, last


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "steps", "accuracy"),
    [("hh-rlhf-rm", 15, 0.55), pytest.param("hh-rlhf-dpo", 30, 0.65, marks=pytest.mark.nightly)],
)
def test_pairs_command_improves_accuracy_on_held_out_pairs(name, steps, accuracy, tmp_path):
    first, last = _evaluations(name, steps, tmp_path / "run")

    assert first["eval/accuracy"] == 0.5, "before training, neither completion is preferred"
    assert last["eval/accuracy"] > accuracy
    assert last["loss/eval"] < first["loss/eval"] - 0.03
    assert last["eval/margin"] > 0
