"""Check that a run learned: read its `metrics.jsonl`, print the accuracy, and exit with 1 if a check fails.

    python infra/ci/check_learning.py runs/gsm8k-grpo/demo --start-at-most 0.55 --end-at-least 0.80 --staleness 1

Needs the standard library only.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from pathlib import Path


def read_metrics(path: Path) -> list[dict[str, float | None]]:
    """Return one dictionary per step, in order."""
    complete, _, _ = path.read_bytes().rpartition(b"\n")  # the run may still be writing the last line
    return [json.loads(line) for line in complete.splitlines() if line.strip()]


def values(steps: list[dict[str, float | None]], name: str) -> list[float]:
    """Return the values of one metric, without the steps in which it is absent or null."""
    return [value for step in steps if (value := step.get(name)) is not None]


def problems(steps: list[dict[str, float | None]], start: float, end: float, staleness: float) -> list[str]:
    """Return the failed checks of a run; the list is empty if the run learned.

    Args:
        steps: Metrics of the run.
        start: Maximum accuracy before the first step.
        end: Minimum accuracy after the last step.
        staleness: Value that `staleness/max` must reach in at least one step, as proof that the run was asynchronous.
    """
    failures = []
    accuracy = values(steps, "eval/accuracy")
    if len(accuracy) < 2:
        return [
            f"found evaluations in {len(accuracy)} of {len(steps)} steps; expected one before and one after training"
        ]
    if not accuracy[0] <= start:
        failures.append(f"accuracy before training is {accuracy[0]:.3f}; expected at most {start}")
    if not accuracy[-1] >= end:
        failures.append(f"accuracy after training is {accuracy[-1]:.3f}; expected at least {end}")
    highest = max(values(steps, "staleness/max"), default=math.nan)
    if not highest >= staleness:
        failures.append(f"the run was not asynchronous: highest staleness {highest}, expected {staleness:g} or more")
    broken = [name for name in ("reward/mean", "loss/policy") if not all(map(math.isfinite, values(steps, name)))]
    if broken:
        failures.append(f"not finite in at least one step: {', '.join(broken)}")
    return failures


def main() -> int:
    """Print the result; return 0 if the run learned, else 1."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--start-at-most", type=float, default=0.55, help="maximum accuracy before training")
    parser.add_argument("--end-at-least", type=float, default=0.80, help="minimum accuracy after training")
    parser.add_argument(
        "--staleness", type=float, default=1.0, help="value that staleness/max must reach in at least one step"
    )
    arguments = parser.parse_args()
    metrics = arguments.run_dir / "metrics.jsonl"
    if not metrics.exists():
        print(f"{metrics} does not exist: the run wrote no metrics", file=sys.stderr)
        return 1
    steps = read_metrics(metrics)
    failures = problems(steps, arguments.start_at_most, arguments.end_at_least, arguments.staleness)
    curve = " ".join(f"{value:.3f}" for value in values(steps, "eval/accuracy"))
    print(f"{arguments.run_dir}: {len(steps)} steps, accuracy {curve}")
    for failure in failures:
        print(f"  {failure}", file=sys.stderr)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
