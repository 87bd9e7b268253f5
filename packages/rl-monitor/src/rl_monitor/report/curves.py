"""Metrics of a run as curves, downsampled to keep the page small without losing peaks."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from rl_contracts.runtime.json_lines import LineReader
from rl_contracts.runtime.metric_docs import meaning

STAGES = ("rollout_wait", "gap", "sleep", "train", "publish", "save", "recover")
"""Stages of a step in their order, `time/<stage>`. The rest of `time/step` is `other`."""
BANDS = 200
"""Maximum number of points in the chart of stages."""

Curve = tuple[list[int], list[float]]
"""Steps and values."""


def read_records(directory: Path) -> list[dict[str, Any]]:
    """Return the complete records of `metrics.jsonl`, or an empty list before the first one."""
    with closing(LineReader(directory / "metrics.jsonl")) as reader:
        records = [*reader.read()]
    return [record for record in records if isinstance(record, dict) and isinstance(record.get("step"), int)]


def curves_of(records: Sequence[dict[str, Any]], points: int) -> dict[str, Curve]:
    """Return each metric as steps and values, downsampled to about `points` points. Values that are not finite numbers
    are omitted."""
    curves: dict[str, Curve] = {}
    for record in records:
        for name, value in record.items():
            if name != "step" and is_number(value):
                steps, values = curves.setdefault(name, ([], []))
                steps.append(record["step"])
                values.append(value)
    return {name: thinned(curve, points) for name, curve in sorted(curves.items())}


def thinned(curve: Curve, points: int) -> Curve:
    """Downsample a curve to about `points` points: the minimum and maximum of each interval, and both ends."""
    steps, values = curve
    kept_indices: set[int] = set(range(len(steps)))
    if len(steps) > points:
        size = math.ceil(2 * len(steps) / points)
        kept_indices = {0, len(steps) - 1}
        for begin in range(0, len(steps), size):
            interval = range(begin, min(begin + size, len(steps)))
            kept_indices |= {min(interval, key=values.__getitem__), max(interval, key=values.__getitem__)}
    order = sorted(kept_indices)
    return [steps[i] for i in order], [rounded(values[i]) for i in order]


def stages_of(records: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the mean seconds per step of each stage, in at most `BANDS` intervals. Stages without time are omitted.

    The form is `{"steps": [...], "seconds": {stage: [...]}}`."""
    timed = [record for record in records if is_number(record.get("time/step"))]
    size = max(1, math.ceil(len(timed) / BANDS))
    intervals = [timed[begin : begin + size] for begin in range(0, len(timed), size)]
    seconds = {stage: [_mean(interval, f"time/{stage}") for interval in intervals] for stage in STAGES}
    totals = [_mean(interval, "time/step") for interval in intervals]
    accounted = [sum(times) for times in zip(*seconds.values(), strict=True)] if intervals else []
    seconds["other"] = [max(0.0, rounded(a - b)) for a, b in zip(totals, accounted, strict=True)]
    return {
        "steps": [interval[-1]["step"] for interval in intervals],
        "seconds": {stage: values for stage, values in seconds.items() if any(values)},
    }


def notes_of(metrics: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Return `text` and `unit` of each documented metric, and whether it is a `fraction`, with values from 0 to 1."""
    notes: dict[str, dict[str, Any]] = {}
    for name in metrics:
        if entry := meaning(name):
            unit = _unit(name)
            notes[name] = {"text": entry.text, "unit": unit, "fraction": unit.startswith("fraction")}
    return notes


def _unit(name: str) -> str:
    """Return the unit of a metric, or an empty string; the unit of `eval/<name>` is that of `<name>`."""
    entry = meaning(name)
    if entry is None or not entry.unit.startswith("as "):
        return entry.unit.removesuffix(" or -").strip("-") if entry else ""
    inner = name.partition("/")[2]
    return _unit(f"eval/{inner.partition('/')[2]}" if entry.unit.startswith("as eval/") else inner)


def is_number(value: object) -> bool:
    """Return whether a value is a finite number, so that it can be plotted."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def rounded(value: float) -> float:
    """Round to six significant digits to save bytes."""
    return value if isinstance(value, int) else float(f"{value:.6g}")


def _mean(records: Sequence[dict[str, Any]], name: str) -> float:
    values = [record[name] for record in records if is_number(record.get(name))]
    return rounded(sum(values) / len(records)) if values else 0.0
