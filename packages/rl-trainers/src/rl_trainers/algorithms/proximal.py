"""Sources of the proximal ("old") log-probs.

These are the log-probs of the policy at the start of the update, the denominator of the policy ratio.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rl_trainers.algorithms.functional.correction import interpolated_logprobs

if TYPE_CHECKING:
    import torch
    from tensordict import TensorDict

    from rl_contracts.batch.trajectory import PackedBatch
    from rl_contracts.engine import TokenOutputs, TrainEngine

PROXIMAL_KEY = "prox_logprobs"
"""Batch entry, float32 [B, T]: proximal log-probs from a forward pass before the update."""


@dataclass(frozen=True)
class Proximal:
    """A source of proximal log-probs."""

    logprobs: Callable[[TokenOutputs, PackedBatch], torch.Tensor]
    """Returns the proximal log-probs of a packed micro-batch, [N]; untrained tokens may have any value."""
    prepare: Callable[[TensorDict, TrainEngine], None] = lambda batch, engine: None
    """Adds the batch entries that `logprobs` reads (collective)."""


def _add_logprobs(batch: TensorDict, engine: TrainEngine) -> None:
    batch[PROXIMAL_KEY] = engine.forward(batch, lambda outputs, _: outputs.logprobs)


def _add_staleness(batch: TensorDict, engine: TrainEngine) -> None:
    batch["staleness"] = (engine.version - batch["versions"]).clamp(min=0)


def _interpolate(outputs: TokenOutputs, packed: PackedBatch) -> torch.Tensor:
    return interpolated_logprobs(outputs.logprobs, packed["logprobs"], packed["staleness"])


PROXIMALS = {
    "recompute": Proximal(lambda outputs, packed: packed[PROXIMAL_KEY], _add_logprobs),
    "current": Proximal(lambda outputs, packed: outputs.logprobs.detach()),
    "behavior": Proximal(lambda outputs, packed: packed["logprobs"]),
    "interpolate": Proximal(_interpolate, _add_staleness),
}
