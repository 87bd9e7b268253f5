"""Figures of a run: what any code records, how it adds up over episodes and ranks, and the file that it ends in.

A mean is kept as (sum, weight) until it is read, so that it can be added up over micro-batches, episodes and ranks
first: a mean of means would depend on how the work was split. What could not be measured is None, never 0.
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
"""A number, or a tensor with one element on any device (it is not read before the results are asked for)."""

NOTHING: dict[Kind, float] = {"mean": 0.0, "sum": 0.0, "min": math.inf, "max": -math.inf}
"""Of each kind, the value that changes nothing."""
_PLAIN = frozenset((float, int, bool))


class Metric(NamedTuple):
    """One name's state."""

    kind: Kind
    value: Scalar
    """Weighted sum of the values (`mean`, `sum`), or the extreme one."""
    weight: Scalar
    """Sum of the weights: what a mean is divided by; 0 where nothing was recorded."""

    def result(self) -> float | None:
        """The mean, sum or extreme. None where nothing was recorded, but 0 for a sum."""
        if self.kind == "sum":
            return float(self.value)
        if not self.weight:
            return None
        return float(self.value / self.weight if self.kind == "mean" else self.value)


class Metrics:
    """Metrics by name, each with how it combines. Any thread may add to them.

    Example:
        >>> metrics = Metrics()
        >>> metrics.add("length", 3.0, weight=2)
        >>> metrics.add("length", 6.0)
        >>> metrics.add("retries", 1, kind="sum")
        >>> metrics.results()
        {'length': 4.0, 'retries': 1.0}
    """

    __slots__ = ("_figures",)

    def __init__(self) -> None:
        self._figures: dict[str, Metric] = {}

    def add(self, name: str, value: Scalar, weight: Scalar = 1.0, kind: Kind = "mean") -> None:
        """Record a value; see `record`."""
        self._merge(name, _metric(name, value, weight, kind))

    def merge(self, other: Metrics) -> None:
        """Add what others recorded, for example on another rank; a name need not be known here.

        Raises:
            ConfigError: a name stands for different kinds.
        """
        for name, figure in list(other._figures.items()):
            self._merge(name, figure)

    def drain(self) -> Metrics:
        """What was recorded so far. These figures start anew; names stay known: 0 for sums, None for the others, until
        something is recorded again."""
        taken = Metrics()
        with _lock:
            taken._figures = self._figures
            self._figures = {n: Metric(f.kind, NOTHING[f.kind], 0.0) for n, f in taken._figures.items()}
        return taken

    def over_replicas(self, parallel: ParallelContext) -> Metrics:
        """The figures of all data-parallel replicas together (collective)."""
        whole = Metrics()
        for part in parallel.gather_json(self.to_json(), replicas=True):
            whole.merge(Metrics.from_json(part))
        return whole

    def results(self) -> dict[str, float | None]:
        """The mean, sum or extreme of each name; None where nothing was recorded."""
        return {name: figure.result() for name, figure in self._read().items()}

    def to_json(self) -> dict[str, list[Any]]:
        """`{name: [kind, value, weight]}`."""
        return {name: list(figure) for name, figure in self._read().items()}

    @classmethod
    def from_json(cls, value: Mapping[str, list[Any]]) -> Self:
        """Inverse of `to_json`."""
        figures = cls()
        figures._figures = {name: Metric(*figure) for name, figure in value.items()}
        return figures

    def _merge(self, name: str, new: Metric) -> None:
        with _lock:
            known = self._figures.get(name)
            if known is not None and known.kind != new.kind:
                raise ConfigError(
                    f"metric {name!r} is a {known.kind}, but is now recorded as a {new.kind}; use another name."
                )
            self._figures[name] = (
                Metric(new.kind, _combine(new.kind, known.value, new.value), known.weight + new.weight)
                if known is not None
                else new
            )

    def _read(self) -> dict[str, Metric]:
        """All figures as floats, with one transfer per device."""
        figures = dict(self._figures)
        numbers = [scalar for figure in figures.values() for scalar in figure[1:]]
        for device in {number.device for number in numbers if _is_tensor(number)}:
            import torch

            indices = [i for i, number in enumerate(numbers) if _is_tensor(number) and number.device == device]
            read = torch.stack([numbers[index] for index in indices]).tolist()
            for index, number in zip(indices, read, strict=True):
                numbers[index] = number
        return {
            name: Metric(figure.kind, *numbers[2 * i : 2 * i + 2]) for i, (name, figure) in enumerate(figures.items())
        }


_lock = threading.Lock()
"""Of all figures: it is held for a few additions only, and a lock for each episode's would cost more."""

_collector: ContextVar[Metrics | None] = ContextVar("rl_figures", default=None)


def record(name: str, value: Scalar, weight: Scalar = 1.0, kind: Kind = "mean") -> None:
    """Record a figure of one's own: in a workflow, a reward (also in its worker process), an agent or a loss.

    It appears in `metrics.jsonl` under its name, over all that was recorded since the last step, on all replicas; what
    an evaluation records under `eval/<name>`. What was recorded counts, also where the episode fails later. Outside of
    a run it does nothing.

    Example:
        >>> record("answer/boxed", 1.0)  # fraction of answers

        In a policy loss `record("clip/far", terms.ratio > 4, weight=terms.trained)` is a fraction of trained tokens.

    Args:
        name: none of the run's own names (`rl_contracts.runtime.metric_docs`); a reward worker rejects those.
        value: a number or a bool; or a tensor, of any shape, which is not read here (no wait for the device).
        weight: how many things the value speaks of, or each entry of a tensor; broadcast against it. A mean divides by
            the sum of weights, a sum multiplies by them, and what has weight 0 does not count.
        kind: how values combine: `mean`, `sum`, `min` or `max`.

    Raises:
        ConfigError: the name is known as another kind, or there is no such kind.
        DataError: the value or weight is no number, or the value is not finite (a tensor is not read); or a reward
            worker records one of the run's own names.
    """
    if not (_is_tensor(value) or _is_tensor(weight)) and weight and not math.isfinite(_number(name, value)):
        raise DataError(f"metric {name!r}: expected a finite number, found {value!r}; record what was measured only.")
    if (collector := _collector.get()) is not None:
        collector.add(name, value, weight, kind)


def record_all(figures: Metrics) -> None:
    """Record what was collected elsewhere, such as in another process."""
    if (collector := _collector.get()) is not None:
        collector.merge(figures)


@contextmanager
def collect(into: Metrics | None = None) -> Iterator[Metrics]:
    """Collect what is recorded inside the block, and in tasks and `asyncio.to_thread` calls that it starts; an outer
    collector does not see it.

    Args:
        into: where to; None: new figures.
    """
    figures = Metrics() if into is None else into
    token = _collector.set(figures)
    try:
        yield figures
    finally:
        _collector.reset(token)


class MetricsWriter:
    """Appends one JSON object per step to a file, readable while the run goes on.

    JSON has no NaN or infinity: such a value becomes null, is warned of by name, and is counted in the record's
    `metrics/non_finite`. A figure must not end a run; what must end it (non-finite gradients) is guarded elsewhere.

    Args:
        path: made with its directory if it does not exist, else continued; a last line that a killed process left
            unfinished is cut off.
    """

    def __init__(self, path: str | Path) -> None:
        self._file = LineFile(path)
        self.path, self.flush = self._file.path, self._file.flush
        self.non_finite = 0
        """Non-finite values met so far."""

    def write(self, record: Mapping[str, Scalar | None]) -> None:
        """Append a record, which is on disk (flushed to the system) when this returns, unless that is full.

        Raises:
            DataError: a value is not a number, a tensor with one element, or None.
        """
        line = {name: None if value is None else _number(name, value) for name, value in record.items()}
        bad = {name: value for name, value in line.items() if isinstance(value, float) and not math.isfinite(value)}
        if bad:
            self.non_finite += len(bad)
            line |= dict.fromkeys(bad) | {"metrics/non_finite": len(bad)}
            found = ", ".join(f"{name}={value}" for name, value in bad.items())
            logger.warning("non-finite metrics written as null (%d so far): %s", self.non_finite, found)
        self._file.write(json.dumps(line, allow_nan=False) + "\n")


def _is_tensor(value: Scalar) -> bool:
    """Whether it is a torch tensor, judged without importing torch."""
    return hasattr(value, "detach") and hasattr(value, "device")


def _metric(name: str, value: Scalar, weight: Scalar, kind: Kind) -> Metric:
    """A recorded value as it is accumulated: floats, or float64 scalars on the tensor's device."""
    if kind not in NOTHING:
        raise ConfigError(f"metric {name!r}: expected a kind of {', '.join(get_args(Kind))}, found {kind!r}.")
    if not (type(value) in _PLAIN and type(weight) in _PLAIN):  # which most are, several times an episode
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
    precise = torch.float32 if device.type == "mps" else torch.float64  # Apple's GPU knows no float64
    value, weight = torch.broadcast_tensors(
        *(
            x.detach().to(precise) if _is_tensor(x) else torch.full((), x, dtype=precise, device=device)
            for x in (value, weight)
        )
    )
    if kind in ("mean", "sum"):
        total = torch.where(weight == 0, 0.0, value * weight).sum()
    elif value.numel():
        kept = torch.where(weight == 0, NOTHING[kind], value)
        total = kept.amin() if kind == "min" else kept.amax()
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
