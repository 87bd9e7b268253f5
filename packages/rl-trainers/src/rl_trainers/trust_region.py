"""M2PO's mask over each minibatch, made before it is cut into micro-batches and whatever the ranks that share it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from rl_contracts.sharding import MINIBATCH_KEY
from rl_trainers.functional.second_moment import bound_by_trust_region, second_moment_cutoff

if TYPE_CHECKING:
    from tensordict import TensorDict

    from rl_contracts.parallel import ParallelContext


def second_moment_mask(
    batch: TensorDict, threshold: float, minibatches: int, parallel: ParallelContext
) -> torch.Tensor:
    """Tokens that stay, bool [B, T]; True wherever the trust region holds nothing back (collective).

    The log-ratio is that of the policy at the start of the step to the sampler: exact in the step's first minibatch; a
    later one's ratio has moved on by what the minibatches before it changed.

    Args:
        batch: with `prox_logprobs`, `advantages` and `minibatch`.
        threshold: bound of the mean squared log-ratio.
        minibatches: how many the step has; each has its own cut-off.
    """
    trained = batch["loss_mask"]
    log_ratio = torch.where(trained, batch["prox_logprobs"] - batch["logprobs"], 0.0)
    squares = log_ratio.double().square()
    bound = bound_by_trust_region(log_ratio, batch["advantages"]) & trained
    kept = torch.ones_like(trained)
    for number in range(minibatches):
        rows = (batch[MINIBATCH_KEY] == number)[:, None]
        parts = parallel.gather_tensors({"squares": squares[bound & rows]})
        cutoff = second_moment_cutoff(torch.cat([part["squares"] for part in parts]), threshold)
        kept &= ~(bound & rows & (squares > cutoff))
    return kept
