"""Algorithm components that are looked up by name. Built-in and third-party components use the same interfaces.

A component is a function whose constants are keyword-only arguments. It can also be a class that takes the constants as
keyword arguments and whose instances are called like the function. The entry-point group determines the signature:

- policy loss (`rl.policy_losses`): `loss(terms: PolicyTerms) -> (losses [N], marks)`
- correction (`rl.corrections`): `correction(off: OffPolicy) -> (weights [N], marks)`
- mask (`rl.masks`): `mask(off: OffPolicy) -> dropped, bool [N]`; `SecondMomentMask` shows a mask over a whole minibatch
- advantage estimator (`rl.advantages`): `estimator(outcomes: EpisodeRewards) -> (advantages [B, T], returns or None)`

Marks are named bool [N] tensors. The fraction of trained tokens that each one marks is reported as a metric.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from rl_contracts.batch.redistribution import MINIBATCH_KEY
from rl_contracts.config import require
from rl_trainers.algorithms.functional.correction import (
    DIVERGENCES,
    OffPolicy,
    divergence_mask,
    second_moment_outliers,
    trust_region_tokens,
)
from rl_trainers.algorithms.proximal import PROXIMAL_KEY

if TYPE_CHECKING:
    from tensordict import TensorDict

    from rl_contracts.batch.parallel import ParallelContext

SECOND_MOMENT_DROPPED_KEY = "moment_dropped"
"""Batch entry, bool [B, T]: tokens that the second-moment mask drops."""


@dataclass(frozen=True, kw_only=True)
class DivergenceMask:
    """Mask of `rl_trainers.algorithms.functional.correction.divergence_mask`, with its constants checked on loading."""

    bound: float
    estimator: str = "k3"
    over: str = "token"

    def __post_init__(self) -> None:
        for name, choices in (("estimator", DIVERGENCES), ("over", ("token", "sum", "mean", "max"))):
            value = getattr(self, name)
            require(value in choices, f"algorithm.mask.options.{name}", f"one of {', '.join(choices)}", value)

    def __call__(self, off: OffPolicy) -> torch.Tensor:
        """Return the dropped tokens, bool [N]."""
        return divergence_mask(off, bound=self.bound, estimator=self.estimator, over=self.over)


@dataclass(frozen=True, kw_only=True)
class SecondMomentMask:
    """M2PO's mask (arXiv 2510.01161, algorithm 1) over each minibatch, across all ranks and micro-batches.

    If a mask has a method `prepare`, the actor calls it with the whole batch and its old log-probs before the first
    loss. The entries that it adds to the batch are then available in `off.packed`.

    The log-ratio compares the policy at the start of the step with the sampler. It is exact in the first minibatch; in
    later ones it ignores the updates of the previous minibatches.
    """

    threshold: float
    """Upper bound of the second moment, tau_M2."""

    def prepare(self, batch: TensorDict, parallel: ParallelContext) -> None:
        """Add the entry that marks the dropped tokens (collective)."""
        log_ratio = torch.where(batch["loss_mask"], batch[PROXIMAL_KEY] - batch["logprobs"], 0.0)
        in_trust_region = trust_region_tokens(log_ratio, batch["advantages"])
        minibatch = batch[MINIBATCH_KEY][:, None].expand_as(in_trust_region)[in_trust_region].long()
        count = int(parallel.max_over_replicas(torch.tensor(max(batch[MINIBATCH_KEY].tolist(), default=-1)))) + 1
        is_outlier = second_moment_outliers(
            log_ratio[in_trust_region], minibatch, count, self.threshold, parallel.sum_over_replicas
        )
        batch[SECOND_MOMENT_DROPPED_KEY] = torch.zeros_like(in_trust_region).masked_scatter(in_trust_region, is_outlier)

    def __call__(self, off: OffPolicy) -> torch.Tensor:
        """Return the dropped tokens, bool [N]."""
        return off.packed[SECOND_MOMENT_DROPPED_KEY]
