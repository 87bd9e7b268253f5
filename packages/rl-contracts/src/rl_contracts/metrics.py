"""Numbers of a run: sums with explicit denominators, named by task-local scopes; and the file that they end in.

A mean is kept as (sum, denominator) until it is exported, so that it can be added up over micro-batches and ranks
first: a mean of means would depend on how the batch was split. What could not be measured is None, never 0.
"""

from __future__ import annotations

import json
import math
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any, Literal, NamedTuple

from rl_contracts.errors import ConfigError, DataError
from rl_contracts.logging import get_logger

logger = get_logger("metrics")

Kind = Literal["mean", "sum", "min", "max"]
Scalar = Any
"""A number, or a tensor with one element on any device (it is not read before the export)."""


class Statistic(NamedTuple):
    """One name's state, ready to travel: plain floats that JSON or a tensor can hold."""

    kind: Kind
    value: float
    """Sum of the values (`mean`, `sum`), or the extreme one."""
    denominator: float
    """What a mean is divided by; for the other kinds, how many values there were."""

    def merge(self, other: Statistic) -> Statistic:
        """The statistic of both together.

        Raises:
            ConfigError: they are of different kinds.
        """
        if self.kind != other.kind:
            raise ConfigError(f"expected two statistics of one kind, found {self.kind} and {other.kind}")
        if self.kind in ("mean", "sum") or (self.denominator and other.denominator):
            value = _combine(self.kind, self.value, other.value)
        else:
            value = self.value if self.denominator else other.value
        return Statistic(self.kind, value, self.denominator + other.denominator)

    def result(self) -> float | None:
        """The mean, sum or extreme; None if nothing was recorded or the denominator is zero."""
        if not self.denominator:
            return None
        return self.value / self.denominator if self.kind == "mean" else self.value


def merge_statistics(parts: Iterable[Mapping[str, Statistic]]) -> dict[str, Statistic]:
    """Statistics of several ranks as one; a name need not be known to all of them.

    Raises:
        ConfigError: a name stands for different kinds on two ranks.
    """
    merged: dict[str, Statistic] = {}
    for part in parts:
        for name, statistic in part.items():
            merged[name] = merged[name].merge(statistic) if name in merged else statistic
    return merged


class StatsTracker:
    """Collects statistics from any thread or task.

    Example:
        >>> tracker = StatsTracker()
        >>> with tracker.scope("actor"):
        ...     tracker.add("loss", 6.0, denominator=4)
        ...     tracker.add("loss", 2.0, denominator=4)
        ...     tracker.maximum("ratio/max", 1.5)
        >>> tracker.export()
        {'actor/loss': 1.0, 'actor/ratio/max': 1.5}
        >>> tracker.export()
        {'actor/loss': None, 'actor/ratio/max': None}
    """

    def __init__(self) -> None:
        self._scope: ContextVar[str] = ContextVar("scope", default="")
        self._lock = threading.Lock()
        self._kinds: dict[str, Kind] = {}
        self._values: dict[str, tuple[Scalar, Scalar]] = {}

    @contextmanager
    def scope(self, name: str) -> Iterator[None]:
        """Put `name/` before the names recorded inside, in this task or thread and in tasks that it starts."""
        token = self._scope.set(f"{self._scope.get()}{name}/")
        try:
            yield
        finally:
            self._scope.reset(token)

    def add(self, name: str, value_sum: Scalar, denominator: Scalar) -> None:
        """Add to a mean: the sum of some values, and what the sum is to be divided by (their number, say)."""
        self._record("mean", name, value_sum, denominator)

    def scalar(self, name: str, value: Scalar) -> None:
        """Add one value to a mean."""
        self._record("mean", name, value, 1)

    def total(self, name: str, value: Scalar) -> None:
        """Add to a sum that is not divided by anything."""
        self._record("sum", name, value, 1)

    def minimum(self, name: str, value: Scalar) -> None:
        """Keep the least value."""
        self._record("min", name, value, 1)

    def maximum(self, name: str, value: Scalar) -> None:
        """Keep the greatest value."""
        self._record("max", name, value, 1)

    @contextmanager
    def timer(self, name: str) -> Iterator[None]:
        """Add the seconds spent inside to the sum `name`, also when an error ends it."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.total(name, time.perf_counter() - start)

    def export(
        self,
        reduce: Callable[[dict[str, Statistic]], Mapping[str, Statistic]] | None = None,
        reset: bool = True,
    ) -> dict[str, float | None]:
        """The figures by name: sum over denominator, sum, or extreme. Tensors are read here, once per device.

        Args:
            reduce: turns this process's statistics into those of all ranks before the division, for example
                `lambda mine: merge_statistics(gather(mine))`.
            reset: start anew. Names stay known and are None until something is recorded again.
        """
        statistics: Mapping[str, Statistic] = self._take(reset)
        if reduce is not None:
            statistics = reduce(dict(statistics))
        return {name: statistic.result() for name, statistic in statistics.items()}

    def _record(self, kind: Kind, name: str, value: Scalar, denominator: Scalar) -> None:
        full = self._scope.get() + name
        value, denominator = _keep(full, value), _keep(full, denominator)
        with self._lock:
            known = self._kinds.setdefault(full, kind)
            if known != kind:
                raise ConfigError(f"metric {full!r} is a {known}, but is now recorded as a {kind}; use another name")
            if full in self._values:
                old_value, old_denominator = self._values[full]
                value, denominator = _combine(kind, old_value, value), old_denominator + denominator
            self._values[full] = (value, denominator)

    def _take(self, reset: bool) -> dict[str, Statistic]:
        with self._lock:
            kinds, values = dict(self._kinds), dict(self._values)
            if reset:
                self._values.clear()
        flat = _read([scalar for pair in values.values() for scalar in pair])
        numbers = {name: (flat[2 * i], flat[2 * i + 1]) for i, name in enumerate(values)}
        return {name: Statistic(kind, *numbers.get(name, (0.0, 0.0))) for name, kind in kinds.items()}


class MetricsWriter:
    """Appends one JSON object per step to a file, readable while the run goes on.

    JSON has no NaN or infinity: such a value becomes null, is warned of by name, and is counted in the record's
    `metrics/non_finite`. A figure must not end a run; what must end it (non-finite gradients) is guarded elsewhere.

    Args:
        path: made with its directory if it does not exist, else continued; a last line that a killed process left
            unfinished is cut off.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.non_finite = 0
        """Non-finite values met so far."""
        _cut_unfinished_line(self.path)

    def write(self, record: Mapping[str, Scalar | None]) -> None:
        """Append a record; it is on disk (flushed to the system) when this returns.

        Raises:
            DataError: a value is not a number, a tensor with one element, or None.
        """
        line: dict[str, Any] = {}
        bad: list[str] = []
        for name, value in record.items():
            line[name] = None if value is None else _number(name, value)
            if isinstance(line[name], float) and not math.isfinite(line[name]):
                bad.append(f"{name}={line[name]}")
                line[name] = None
        if bad:
            self.non_finite += len(bad)
            line["metrics/non_finite"] = len(bad)
            logger.warning("non-finite metrics written as null (%d so far): %s", self.non_finite, ", ".join(bad))
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line, allow_nan=False) + "\n")


def _is_tensor(value: Scalar) -> bool:
    """Whether it is a torch tensor, judged without importing torch."""
    return hasattr(value, "detach") and hasattr(value, "device")


def _keep(name: str, value: Scalar) -> Scalar:
    """A value as it is accumulated: a float, or a detached float64 tensor that was not waited for."""
    if not _is_tensor(value):
        return float(value)
    if value.numel() != 1:
        raise DataError(f"metric {name!r}: expected one number, found a tensor of shape {tuple(value.shape)}")
    value = value.detach().reshape(())
    # Apple's GPU knows no float64. Adding 0 copies, since the caller may go on to change the tensor in place.
    return (value.float() if value.device.type == "mps" else value.double()) + 0.0


def _combine(kind: Kind, old: Scalar, new: Scalar) -> Scalar:
    if kind in ("mean", "sum"):
        return old + new
    if _is_tensor(old) or _is_tensor(new):
        tensor, other = (old, new) if _is_tensor(old) else (new, old)
        if _is_tensor(other):
            return tensor.minimum(other) if kind == "min" else tensor.maximum(other)
        return tensor.clamp(max=other) if kind == "min" else tensor.clamp(min=other)
    if math.isnan(old) or math.isnan(new):
        return math.nan
    return min(old, new) if kind == "min" else max(old, new)


def _read(values: list[Scalar]) -> list[float]:
    """All values as floats, with one transfer per device."""
    by_device: dict[Any, list[int]] = {}
    for index, value in enumerate(values):
        if _is_tensor(value):
            by_device.setdefault(value.device, []).append(index)
    numbers = list(values)
    if by_device:
        import torch

        for indices in by_device.values():
            stacked = torch.stack([values[index] for index in indices]).tolist()
            for index, number in zip(indices, stacked, strict=True):
                numbers[index] = number
    return [float(number) for number in numbers]


def _number(name: str, value: Scalar) -> int | float:
    if hasattr(value, "item"):  # tensors, and numpy's scalars and arrays
        if getattr(value, "size", 1) != 1 and not _is_tensor(value):
            raise DataError(f"metric {name!r}: expected one number, found an array of shape {value.shape}")
        value = _keep(name, value).item() if _is_tensor(value) else value.item()
    if isinstance(value, int | float):
        return value
    raise DataError(f"metric {name!r}: expected a number or None, found {type(value).__name__} {value!r}")


def _cut_unfinished_line(path: Path) -> None:
    if not path.exists():
        return
    with path.open("rb+") as file:
        content = file.read()
        if content and not content.endswith(b"\n"):
            file.truncate(content.rfind(b"\n") + 1)
            file.flush()
            os.fsync(file.fileno())
