"""Figures of a run as curves, thinned so that a page of any run is small, and no peak of one is lost."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

STAGES = ("rollout_wait", "gap", "sleep", "train", "publish", "save", "recover")
"""Stages of a step in their order, `time/<stage>`; what is left of `time/step` is `other`."""
BANDS = 200
"""Points in time of the band of stages at most."""

Curve = tuple[list[int], list[float]]
"""Steps and values."""


def read_records(directory: Path) -> list[dict[str, Any]]:
    """The whole records of a run's `metrics.jsonl`; none where it has none yet."""
    found = []
    with suppress(FileNotFoundError), (directory / "metrics.jsonl").open("rb") as file:
        for line in file:
            with suppress(ValueError):  # half of a line, of a trainer that writes or was killed
                found.append(json.loads(line))
    return [record for record in found if isinstance(record, dict) and isinstance(record.get("step"), int)]


def curves_of(records: Sequence[dict[str, Any]], points: int) -> dict[str, Curve]:
    """Each figure as steps and values, of at most about `points` points: of each of so many stretches the least and the
    greatest value stay. What is no finite number is left out."""
    found: dict[str, Curve] = {}
    for record in records:
        for name, value in record.items():
            if name != "step" and is_number(value):
                steps, values = found.setdefault(name, ([], []))
                steps.append(record["step"])
                values.append(value)
    return {name: thinned(curve, points) for name, curve in sorted(found.items())}


def thinned(curve: Curve, points: int) -> Curve:
    """A curve of at most about `points` points."""
    steps, values = curve
    chosen: set[int] = set(range(len(steps)))
    if len(steps) > points:
        size = math.ceil(2 * len(steps) / points)
        chosen = {0, len(steps) - 1}
        for begin in range(0, len(steps), size):
            stretch = range(begin, min(begin + size, len(steps)))
            chosen |= {min(stretch, key=values.__getitem__), max(stretch, key=values.__getitem__)}
    order = sorted(chosen)
    return [steps[i] for i in order], [rounded(values[i]) for i in order]


def stages_of(records: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """`{"steps": [...], "seconds": {stage: [...]}}`: mean seconds per step of each stage, in at most `BANDS` stretches;
    stages that took no time are left out."""
    timed = [record for record in records if is_number(record.get("time/step"))]
    size = max(1, math.ceil(len(timed) / BANDS))
    stretches = [timed[begin : begin + size] for begin in range(0, len(timed), size)]
    seconds = {stage: [_mean(part, f"time/{stage}") for part in stretches] for stage in STAGES}
    whole = [_mean(part, "time/step") for part in stretches]
    taken = [sum(parts) for parts in zip(*seconds.values(), strict=True)] if stretches else []
    seconds["other"] = [max(0.0, rounded(a - b)) for a, b in zip(whole, taken, strict=True)]
    return {
        "steps": [part[-1]["step"] for part in stretches],
        "seconds": {stage: values for stage, values in seconds.items() if any(values)},
    }


def is_number(value: object) -> bool:
    """Whether it can be drawn."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def rounded(value: float) -> float:
    """To six significant digits, so that it takes few bytes."""
    return value if isinstance(value, int) else float(f"{value:.6g}")


def _mean(records: Sequence[dict[str, Any]], name: str) -> float:
    values = [record[name] for record in records if is_number(record.get(name))]
    return rounded(sum(values) / len(records)) if values else 0.0
