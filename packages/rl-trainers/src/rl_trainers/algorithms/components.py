"""The parts of an algorithm that are found by name, ours and anybody's alike.

A part is a function whose constants are keyword-only arguments, or a class that takes them so and whose objects are
called like the function. What it is called with, and gives back, depends on what it is:

- policy loss (`rl.policy_losses`): `loss(terms: PolicyTerms) -> (losses [N], marks)`;
- correction (`rl.corrections`): `correction(off: OffPolicy) -> (weights [N], marks)`;
- mask (`rl.masks`): `mask(off: OffPolicy) -> dropped, bool [N]`; see `SecondMomentMask` for one that has to look at the
  whole minibatch;
- advantage estimator (`rl.advantages`): `estimator(outcomes: Outcomes) -> (advantages [B, T], returns or None)`.

Marks are bool [N] by name; their fractions of the trained tokens are reported.
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

DROPPED_KEY = "moment_dropped"
"""bool [B, T]: tokens that the second-moment mask drops."""


@dataclass(frozen=True, kw_only=True)
class DivergenceMask:
    """`rl_trainers.algorithms.functional.correction.divergence_mask` with its constants."""

    bound: float
    estimator: str = "k3"
    over: str = "token"

    def __post_init__(self) -> None:
        for name, known in (("estimator", DIVERGENCES), ("over", ("token", "sum", "mean", "max"))):
            found = getattr(self, name)
            require(found in known, f"algorithm.mask.options.{name}", f"one of {', '.join(known)}", found)

    def __call__(self, off: OffPolicy) -> torch.Tensor:
        """Dropped tokens, bool [N]."""
        return divergence_mask(off, bound=self.bound, estimator=self.estimator, over=self.over)


@dataclass(frozen=True, kw_only=True)
class SecondMomentMask:
    """M2PO's mask (arXiv 2510.01161, algorithm 1), over each minibatch, whatever the ranks and micro-batches that share
    it.

    A mask that has `prepare` is shown the whole batch, with its old log-probs, before the first loss; what it adds to
    the batch its call finds in `off.packed`.

    The log-ratio is that of the policy at the start of the step to the sampler: exact in the step's first minibatch; a
    later one's ratio has moved on by what the minibatches before it changed.
    """

    threshold: float
    """tau_M2."""

    def prepare(self, batch: TensorDict, parallel: ParallelContext) -> None:
        """Add which tokens are dropped (collective)."""
        log_ratio = torch.where(batch["loss_mask"], batch[PROXIMAL_KEY] - batch["logprobs"], 0.0)
        held = trust_region_tokens(log_ratio, batch["advantages"])
        minibatch = batch[MINIBATCH_KEY][:, None].expand_as(held)[held].long()
        count = int(parallel.max_over_replicas(torch.tensor(max(batch[MINIBATCH_KEY].tolist(), default=-1)))) + 1
        found = second_moment_outliers(log_ratio[held], minibatch, count, self.threshold, parallel.sum_over_replicas)
        batch[DROPPED_KEY] = torch.zeros_like(held).masked_scatter(held, found)

    def __call__(self, off: OffPolicy) -> torch.Tensor:
        """Dropped tokens, bool [N]."""
        return off.packed[DROPPED_KEY]
