"""Whether a run learned: reads its `metrics.jsonl`, prints what it found, and exits with 1 if it did not.

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
    """One dictionary per step, in order."""
    whole, _, _ = path.read_bytes().rpartition(b"\n")  # the last line may be being written
    return [json.loads(line) for line in whole.splitlines() if line.strip()]


def values(steps: list[dict[str, float | None]], name: str) -> list[float]:
    """What was measured under a name; steps at which it was not (absent or null) are left out."""
    return [value for step in steps if (value := step.get(name)) is not None]


def problems(steps: list[dict[str, float | None]], start: float, end: float, staleness: float) -> list[str]:
    """What is wrong with a run, in words; empty for one that learned.

    Args:
        steps: the run's metrics.
        start: accuracy before the first step, at most.
        end: accuracy after the last step, at least.
        staleness: the highest staleness must reach this, or the run was not asynchronous.
    """
    found = []
    accuracy = values(steps, "eval/accuracy")
    if len(accuracy) < 2:
        return [f"expected an evaluation before and after training, found {len(accuracy)} in {len(steps)} steps"]
    if not accuracy[0] <= start:
        found.append(f"accuracy before training is {accuracy[0]:.3f}; expected at most {start}")
    if not accuracy[-1] >= end:
        found.append(f"accuracy after training is {accuracy[-1]:.3f}; expected at least {end}")
    highest = max(values(steps, "staleness/max"), default=math.nan)
    if not highest >= staleness:
        found.append(f"highest staleness is {highest}; expected at least {staleness:g}: the run was not asynchronous")
    broken = [name for name in ("reward/mean", "loss/policy") if not all(map(math.isfinite, values(steps, name)))]
    if broken:
        found.append(f"not finite: {', '.join(broken)}")
    return found


def main() -> int:
    """Read the arguments, print the verdict; 0 if the run learned."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--start-at-most", type=float, default=0.55, help="accuracy before training")
    parser.add_argument("--end-at-least", type=float, default=0.80, help="accuracy after training")
    parser.add_argument("--staleness", type=float, default=1.0, help="highest staleness that must have been seen")
    arguments = parser.parse_args()
    metrics = arguments.run_dir / "metrics.jsonl"
    if not metrics.exists():
        print(f"{metrics} is not there: the run wrote no metrics", file=sys.stderr)
        return 1
    steps = read_metrics(metrics)
    found = problems(steps, arguments.start_at_most, arguments.end_at_least, arguments.staleness)
    curve = " ".join(f"{value:.3f}" for value in values(steps, "eval/accuracy"))
    print(f"{arguments.run_dir}: {len(steps)} steps, accuracy {curve}")
    for problem in found:
        print(f"  {problem}", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
