"""Preference pairs: a reward model and a policy get better on pairs that they did not see."""

import json
import subprocess
import sys
from pathlib import Path

import pytest


def _evaluations(name, steps, directory):
    """What was found on the held-out pairs before the first and after the last step of a run."""
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
def test_pairs_command_prefers_the_chosen_answers_of_unseen_pairs(name, steps, accuracy, tmp_path):
    first, last = _evaluations(name, steps, tmp_path / "run")

    assert first["eval/accuracy"] == 0.5, "a head of zeros, or the reference itself, prefers neither"
    assert last["eval/accuracy"] > accuracy
    assert last["loss/eval"] < first["loss/eval"] - 0.03
    assert last["eval/margin"] > 0
