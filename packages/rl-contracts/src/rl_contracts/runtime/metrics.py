"""Metrics of a run: recording, accumulation over episodes and ranks, and the file `metrics.jsonl`.

A mean is stored as (sum, weight) until it is read, so that it accumulates over micro-batches, episodes and ranks. A
mean of means would depend on how the work was split. A value that could not be measured is None, never 0.
"""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Self, get_args

from rl_contracts.errors import ConfigError, DataError
from rl_contracts.runtime.json_lines import LineFile
from rl_contracts.runtime.logging import get_logger

if TYPE_CHECKING:
    from rl_contracts.batch.parallel import ParallelContext

__all__ = ["Metrics", "MetricsWriter", "collect", "record", "record_all"]

logger = get_logger("metrics")

Kind = Literal["mean", "sum", "min", "max"]
Scalar = Any
"""A number, or a tensor with one element on any device (read only when results are requested)."""

NOTHING: dict[Kind, float] = {"mean": 0.0, "sum": 0.0, "min": math.inf, "max": -math.inf}
"""Neutral value of each kind, which does not change a result."""
_PLAIN = frozenset((float, int, bool))


class Metric(NamedTuple):
    """Accumulated state of one metric."""

    kind: Kind
    value: Scalar
    """Weighted sum of the values (`mean`, `sum`), or their extreme (`min`, `max`)."""
    weight: Scalar
    """Sum of the weights, the divisor of a mean; 0 if nothing was recorded."""

    def result(self) -> float | None:
        """Return the mean, sum or extreme. Without recorded values, this is 0 for a sum and None otherwise."""
        if self.kind == "sum":
            return float(self.value)
        if not self.weight:
            return None
        return float(self.value / self.weight if self.kind == "mean" else self.value)


class Metrics:
    """Metrics by name, each with the kind that defines how its values combine. Thread-safe.

    Example:
        >>> metrics = Metrics()
        >>> metrics.add("length", 3.0, weight=2)
        >>> metrics.add("length", 6.0)
        >>> metrics.add("retries", 1, kind="sum")
        >>> metrics.results()
        {'length': 4.0, 'retries': 1.0}
    """

    __slots__ = ("_metrics",)

    def __init__(self) -> None:
        self._metrics: dict[str, Metric] = {}

    def add(self, name: str, value: Scalar, weight: Scalar = 1.0, kind: Kind = "mean") -> None:
        """Record a value; see `record`."""
        self._merge(name, _metric(name, value, weight, kind))

    def merge(self, other: Metrics) -> None:
        """Add the metrics of another object, for example of another rank, including names that are new to this object.

        Raises:
            ConfigError: the two objects record a name as different kinds.
        """
        for name, metric in list(other._metrics.items()):
            self._merge(name, metric)

    def drain(self) -> Metrics:
        """Return the metrics recorded so far, and reset this object.

        The names remain: a sum is 0 and the other kinds are None until a value is recorded again.
        """
        drained = Metrics()
        with _lock:
            drained._metrics = self._metrics
            self._metrics = {n: Metric(m.kind, NOTHING[m.kind], 0.0) for n, m in drained._metrics.items()}
        return drained

    def over_replicas(self, parallel: ParallelContext) -> Metrics:
        """Return the merged metrics of all data-parallel replicas (collective)."""
        merged = Metrics()
        for replica in parallel.gather_json(self.to_json(), replicas=True):
            merged.merge(Metrics.from_json(replica))
        return merged

    def results(self) -> dict[str, float | None]:
        """Return the mean, sum or extreme of each name; see `Metric.result`."""
        return {name: metric.result() for name, metric in self._read().items()}

    def to_json(self) -> dict[str, list[Any]]:
        """Return `{name: [kind, value, weight]}`."""
        return {name: list(metric) for name, metric in self._read().items()}

    @classmethod
    def from_json(cls, value: Mapping[str, list[Any]]) -> Self:
        """Build metrics from the result of `to_json`."""
        metrics = cls()
        metrics._metrics = {name: Metric(*metric) for name, metric in value.items()}
        return metrics

    def _merge(self, name: str, new: Metric) -> None:
        with _lock:
            old = self._metrics.get(name)
            if old is not None and old.kind != new.kind:
                raise ConfigError(
                    f"metric {name!r} is a {old.kind}, but is now recorded as a {new.kind}; use another name."
                )
            self._metrics[name] = (
                Metric(new.kind, _combine(new.kind, old.value, new.value), old.weight + new.weight)
                if old is not None
                else new
            )

    def _read(self) -> dict[str, Metric]:
        """Return all metrics as floats, with one transfer per device."""
        metrics = dict(self._metrics)
        numbers = [scalar for metric in metrics.values() for scalar in metric[1:]]
        for device in {number.device for number in numbers if _is_tensor(number)}:
            import torch

            indices = [i for i, number in enumerate(numbers) if _is_tensor(number) and number.device == device]
            values = torch.stack([numbers[index] for index in indices]).tolist()
            for index, number in zip(indices, values, strict=True):
                numbers[index] = number
        return {
            name: Metric(metric.kind, *numbers[2 * i : 2 * i + 2]) for i, (name, metric) in enumerate(metrics.items())
        }


_lock = threading.Lock()
"""Lock of all `Metrics` objects. It is held only for a few additions; one lock per object would cost more."""

_collector: ContextVar[Metrics | None] = ContextVar("rl_metrics", default=None)


def record(name: str, value: Scalar, weight: Scalar = 1.0, kind: Kind = "mean") -> None:
    """Record a custom metric: in a workflow, a reward (also in its worker process), an agent or a loss.

    `metrics.jsonl` contains it under its name, combined over all values since the last step and over all replicas. A
    metric recorded in an evaluation is named `eval/<name>`. Values count even if the episode fails later. Outside a run
    this does nothing.

    Example:
        >>> record("answer/boxed", 1.0)  # fraction of completions

        In a policy loss `record("clip/far", terms.ratio > 4, weight=terms.trained)` is a fraction of trained tokens.

    Args:
        name: name of the metric, other than the built-in ones (`rl_contracts.runtime.metric_docs`).
        value: a number, a bool, or a tensor of any shape. Tensors are not read here, so the call does not wait for the
            device.
        weight: number of items that the value, or each entry of a tensor, stands for; broadcast against the value. A
            mean divides by the sum of the weights, and a sum multiplies by them. Values of weight 0 are ignored.
        kind: how values combine: `mean`, `sum`, `min` or `max`.

    Raises:
        ConfigError: the name was recorded as another kind, or the kind does not exist.
        DataError: the value or weight is not a number, or a number is not finite (tensors are not checked). A reward
            worker also rejects built-in names.
    """
    if not (_is_tensor(value) or _is_tensor(weight)) and weight and not math.isfinite(_number(name, value)):
        raise DataError(
            f"metric {name!r}: expected a finite number, found {value!r}; do not record a value that was not measured."
        )
    if (collector := _collector.get()) is not None:
        collector.add(name, value, weight, kind)


def record_all(metrics: Metrics) -> None:
    """Record metrics that were collected elsewhere, such as in another process."""
    if (collector := _collector.get()) is not None:
        collector.merge(metrics)


@contextmanager
def collect(into: Metrics | None = None) -> Iterator[Metrics]:
    """Collect the metrics recorded in the block, and in the tasks and `asyncio.to_thread` calls that it starts.

    An outer collector does not receive them.

    Args:
        into: metrics to add to; None creates new ones.
    """
    metrics = Metrics() if into is None else into
    token = _collector.set(metrics)
    try:
        yield metrics
    finally:
        _collector.reset(token)


class MetricsWriter:
    """Writer that appends one JSON object per step to a file, which can be read during the run.

    JSON has no NaN or infinity. Such a value becomes null, with a warning that names it, and counts in the record's
    `metrics/non_finite`. Such a metric must not end a run; the engines check for non-finite gradients.

    Args:
        path: file to append to, created with its directory if missing. An unfinished last line, which a killed
            process leaves, is cut off.
    """

    def __init__(self, path: str | Path) -> None:
        self._file = LineFile(path)
        self.path, self.flush = self._file.path, self._file.flush
        self.non_finite = 0
        """Number of non-finite values written so far."""

    def write(self, record: Mapping[str, Scalar | None]) -> None:
        """Append a record. When this returns, the operating system has the record, unless the disk is temporarily full.

        Raises:
            DataError: a value is not a number, a tensor with one element, or None.
        """
        line = {name: None if value is None else _number(name, value) for name, value in record.items()}
        bad = {name: value for name, value in line.items() if isinstance(value, float) and not math.isfinite(value)}
        if bad:
            self.non_finite += len(bad)
            line |= dict.fromkeys(bad) | {"metrics/non_finite": len(bad)}
            listing = ", ".join(f"{name}={value}" for name, value in bad.items())
            logger.warning("non-finite metrics written as null (%d so far): %s", self.non_finite, listing)
        self._file.write(json.dumps(line, allow_nan=False) + "\n")


def _is_tensor(value: Scalar) -> bool:
    """Return whether a value is a torch tensor, without importing torch."""
    return hasattr(value, "detach") and hasattr(value, "device")


def _metric(name: str, value: Scalar, weight: Scalar, kind: Kind) -> Metric:
    """Convert a recorded value to the form that is accumulated: floats, or float64 scalars on the tensor's device."""
    if kind not in NOTHING:
        raise ConfigError(f"metric {name!r}: expected a kind of {', '.join(get_args(Kind))}, found {kind!r}.")
    if not (type(value) in _PLAIN and type(weight) in _PLAIN):  # fast path: several plain numbers per episode
        if _is_tensor(value) or _is_tensor(weight):
            return _tensor_metric(value, weight, kind)
        value, weight = _number(name, value), _number(name, weight)
    value, weight = float(value), float(weight)
    if not weight:
        return Metric(kind, NOTHING[kind], 0.0)
    return Metric(kind, value * weight if kind in ("mean", "sum") else value, weight)


def _tensor_metric(value: Scalar, weight: Scalar, kind: Kind) -> Metric:
    import torch

    device = value.device if _is_tensor(value) else weight.device
    precise = torch.float32 if device.type == "mps" else torch.float64  # Apple's GPU does not support float64
    value, weight = torch.broadcast_tensors(
        *(
            x.detach().to(precise) if _is_tensor(x) else torch.full((), x, dtype=precise, device=device)
            for x in (value, weight)
        )
    )
    if kind in ("mean", "sum"):
        total = torch.where(weight == 0, 0.0, value * weight).sum()
    elif value.numel():
        masked = torch.where(weight == 0, NOTHING[kind], value)
        total = masked.amin() if kind == "min" else masked.amax()
    else:
        total = value.new_tensor(NOTHING[kind])
    return Metric(kind, total, weight.sum())


def _combine(kind: Kind, old: Scalar, new: Scalar) -> Scalar:
    if kind in ("mean", "sum"):
        return old + new
    if _is_tensor(old) or _is_tensor(new):
        tensor, other = (old, new) if _is_tensor(old) else (new, old)
        return tensor.clamp(max=other) if kind == "min" else tensor.clamp(min=other)
    if math.isnan(old) or math.isnan(new):
        return math.nan
    return min(old, new) if kind == "min" else max(old, new)


def _number(name: str, value: Scalar) -> int | float:
    if hasattr(value, "item"):  # tensors, and numpy's scalars and arrays
        shape = getattr(value, "shape", ())
        if math.prod(shape) != 1:
            raise DataError(f"metric {name!r}: expected one number, found an array of shape {tuple(shape)}")
        value = value.item()
    if isinstance(value, int | float):
        return value
    raise DataError(f"metric {name!r}: expected a number or None, found {type(value).__name__} {value!r}")
