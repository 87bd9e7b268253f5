"""The critic, a value model that learns together with the policy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from rl_contracts.batch.trajectory import PackedBatch
from rl_contracts.config import require
from rl_contracts.engine import Stats, TokenOutputs, TrainEngine
from rl_contracts.errors import EngineError
from rl_trainers.algorithms.credit import RETURNS_KEY, VALUES_KEY
from rl_trainers.algorithms.functional.value_and_preference_losses import (
    clipped_value_loss,
    explained_variance,
    variance_sums,
)
from rl_trainers.learners.optimizer_steps import take_steps, trained_tokens

if TYPE_CHECKING:
    from tensordict import TensorDict


@dataclass(frozen=True)
class ValueLoss:
    """The clipped value loss of one packed micro-batch."""

    clip: float
    """Distance from the old value at which the value is clipped; 0 disables clipping."""

    def __call__(self, outputs: TokenOutputs, packed: PackedBatch) -> tuple[torch.Tensor, Stats]:
        """Return `(loss_sum, stats)` over trained tokens.

        The statistics are `value/mean`, `return/mean` and `clip/value` (fraction with a larger clipped loss).
        """
        trained = packed["loss_mask"]
        values, old, returns = (
            torch.where(trained, x, 0.0) for x in (values_of(outputs), packed[VALUES_KEY], packed[RETURNS_KEY])
        )
        losses, clipped = clipped_value_loss(values, old, returns, self.clip)
        count = trained.sum().float()
        stats: Stats = {
            "value/mean": (values.detach().sum(), count),
            "return/mean": (returns.sum(), count),
            "clip/value": ((clipped & trained).sum().float(), count),
        }
        return losses.sum(), stats


class Critic:
    """Estimates values and learns from the returns (every method is collective).

    Args:
        engine: a model with a value head, whose outputs have `values`.
        clip: clip distance of the value loss; 0 disables clipping.
        minibatches: optimizer steps per training batch, the same as for the policy.

    Raises:
        ConfigError: `clip` is negative.
    """

    def __init__(self, engine: TrainEngine, clip: float = 0.2, minibatches: int = 1) -> None:
        require(clip >= 0, "critic.clip", "0 (off) or more", clip)
        self.engine, self.clip, self.minibatches = engine, clip, minibatches

    def values(self, batch: TensorDict) -> torch.Tensor:
        """Return the value before each token, float32 [B, T]; entry t comes from the hidden state at t - 1."""
        return self.engine.forward(batch, lambda outputs, _: values_of(outputs))

    def explained_variance(self, batch: TensorDict) -> float | None:
        """Return the fraction of the variance of the returns that the values explain, at most 1.

        Returns None if the returns do not vary.
        """
        sums = variance_sums(batch[VALUES_KEY], batch[RETURNS_KEY], batch["loss_mask"])
        return explained_variance(self.engine.parallel.sum_over_replicas(sums))

    def update(self, batch: TensorDict) -> dict[str, float | None]:
        """Take one optimizer step per minibatch towards `returns`.

        Returns:
            The engine's statistics over the minibatches, under `critic/`.
        """
        statistics = take_steps(self.engine, batch, ValueLoss(self.clip), trained_tokens, self.minibatches)
        return {f"critic/{name}": value for name, value in statistics.items()}


def values_of(outputs: TokenOutputs) -> torch.Tensor:
    """Return the values of a model's outputs.

    Raises:
        EngineError: the model has no value head.
    """
    if outputs.values is None:
        raise EngineError("critic: the engine's outputs have no values; build it with a value head (head=value).")
    return outputs.values
