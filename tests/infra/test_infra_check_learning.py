"""infra/ci/check_learning.py accepts runs that learned and names the problem of other runs."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "infra" / "ci" / "check_learning.py"

LEARNED = [
    {"step": 0, "eval/accuracy": 0.31},
    {"step": 1, "eval/accuracy": None, "staleness/max": 0, "reward/mean": 0.4, "loss/policy": 0.1},
    {"step": 2, "eval/accuracy": 0.93, "staleness/max": 2, "reward/mean": 0.9, "loss/policy": None},
]


def check(run_dir: Path, steps: list[dict[str, float | None]]) -> subprocess.CompletedProcess[str]:
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(step) + "\n" for step in steps))
    return subprocess.run([sys.executable, str(SCRIPT), str(run_dir)], capture_output=True, text=True, check=False)


def test_check_learning_run_that_learned_passes(tmp_path: Path) -> None:
    result = check(tmp_path, LEARNED)
    assert result.returncode == 0
    assert "accuracy 0.310 0.930" in result.stdout


@pytest.mark.parametrize(
    ("step", "change", "message"),
    [
        (0, {"eval/accuracy": 0.7}, "before training is 0.700"),
        (2, {"eval/accuracy": 0.5}, "after training is 0.500"),
        (2, {"eval/accuracy": None}, "found evaluations in 1 of 3 steps"),
        (2, {"eval/accuracy": float("nan")}, "after training is nan"),
        (2, {"staleness/max": 0}, "not asynchronous"),
        (1, {"loss/policy": float("nan")}, "not finite in at least one step: loss/policy"),
    ],
)
def test_check_learning_names_an_injected_fault(
    tmp_path: Path, step: int, change: dict[str, float | None], message: str
) -> None:
    steps = [dict(metrics) for metrics in LEARNED]
    steps[step] |= change
    result = check(tmp_path, steps)
    assert result.returncode == 1
    assert message in result.stderr


def test_check_learning_run_without_metrics_fails(tmp_path: Path) -> None:
    result = subprocess.run([sys.executable, str(SCRIPT), str(tmp_path)], capture_output=True, text=True, check=False)
    assert result.returncode == 1
    assert "wrote no metrics" in result.stderr
