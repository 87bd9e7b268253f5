"""Where the proximal ("old") log-probs come from: those of the policy at the start of the update, to which ratios are
taken."""

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
"""float32 [B, T], where a forward pass before the update computes them."""


@dataclass(frozen=True)
class Proximal:
    """A way to get them."""

    logprobs: Callable[[TokenOutputs, PackedBatch], torch.Tensor]
    """Of a packed micro-batch in its loss, [N]; may hold anything where not trained."""
    prepare: Callable[[TensorDict, TrainEngine], None] = lambda batch, engine: None
    """Adds to a batch what `logprobs` needs (collective)."""


def _recompute(batch: TensorDict, engine: TrainEngine) -> None:
    batch[PROXIMAL_KEY] = engine.forward(batch, lambda outputs, _: outputs.logprobs)


def _staleness(batch: TensorDict, engine: TrainEngine) -> None:
    batch["staleness"] = (engine.version - batch["versions"]).clamp(min=0)


def _interpolated(outputs: TokenOutputs, packed: PackedBatch) -> torch.Tensor:
    return interpolated_logprobs(outputs.logprobs, packed["logprobs"], packed["staleness"])


PROXIMALS = {
    "recompute": Proximal(lambda outputs, packed: packed[PROXIMAL_KEY], _recompute),
    "current": Proximal(lambda outputs, packed: outputs.logprobs.detach()),
    "behaviour": Proximal(lambda outputs, packed: packed["logprobs"]),
    "interpolate": Proximal(_interpolated, _staleness),
}
