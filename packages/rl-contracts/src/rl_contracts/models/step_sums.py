"""Sums of a step over micro-batches and ranks, with a single wait for the device."""

from __future__ import annotations

import math
from itertools import chain

import torch
from torch import Tensor

from rl_contracts.batch.parallel import ParallelContext
from rl_contracts.engine import Stats
from rl_contracts.errors import EngineError

MAXIMUM = "/max"
"""Suffix of statistics that are combined by maximum."""
AUXILIARY = "loss/aux"
"""Auxiliary loss of the MoE routers: the mean over tokens without its factor. It is not part of `loss`."""
RESERVED = ("loss", AUXILIARY, "grad_norm", "lr", "applied", "tokens")
"""Names of the results that the engine itself reports."""


class StepSums:
    """Accumulator of scalars on the device; `reduce` copies all of them to the host at once.

    Args:
        counts: whether `add` has an effect on this rank. All ranks of a replica add the same values, so this is True on
            one rank per replica. `put` has an effect on every rank.
    """

    def __init__(self, counts: bool = True) -> None:
        self._values: dict[str, Tensor] = {}
        self._counts = counts

    def add(self, loss_sum: Tensor, stats: Stats) -> None:
        """Add the loss and the statistics of one micro-batch.

        Raises:
            EngineError: a statistic has the name of one of the engine's own results.
        """
        if not self._counts:
            return
        self.put("loss", loss_sum)
        for name, (total, denominator) in stats.items():
            if name in RESERVED:
                raise EngineError(
                    f"statistic {name!r}: this name is reserved for a result of the engine; rename the statistic."
                )
            if name.endswith(MAXIMUM):
                value = total.detach()
                self._values[name] = torch.maximum(self._values[name], value) if name in self._values else value
            else:
                self.put(f"sum:{name}", total)
                self.put(f"den:{name}", denominator)

    def put(self, name: str, value: Tensor) -> None:
        """Add a scalar that is summed over micro-batches and ranks and returned under its own name."""
        value = value.detach()
        self._values[name] = self._values[name] + value if name in self._values else value

    def reduce(self, parallel: ParallelContext) -> dict[str, float]:
        """Return the totals over micro-batches and ranks (collective).

        Statistics are divided by their denominators; the result is NaN if the denominator is 0.
        """
        rank_values = parallel.gather_json(self._on_host())
        totals: dict[str, float] = {}
        # names may differ: a rank without sequences never calls the loss
        for name in dict.fromkeys(chain(*rank_values)):
            values = [local_values[name] for local_values in rank_values if name in local_values]
            totals[name] = max(values) if name.endswith(MAXIMUM) else sum(values)
        result = {name: value for name, value in totals.items() if not name.startswith(("sum:", "den:"))}
        for name in (name.removeprefix("sum:") for name in totals if name.startswith("sum:")):
            denominator = totals[f"den:{name}"]
            result[name] = totals[f"sum:{name}"] / denominator if denominator else math.nan
        return result

    def _on_host(self) -> dict[str, float]:
        """Return all values, with one wait per device; a loss may keep some statistics in host memory."""
        values: dict[str, float] = {}
        for device in {value.device for value in self._values.values()}:
            on_device = {
                name: value.to(torch.float64) for name, value in self._values.items() if value.device == device
            }
            values |= zip(on_device, torch.stack(list(on_device.values())).tolist(), strict=True)
        return {name: values[name] for name in self._values}
