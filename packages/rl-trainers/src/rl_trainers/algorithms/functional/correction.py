"""Corrections for the difference between the policy that sampled a token and the policy at the start of the update.

The two are called `behavior` and `old`.

A correction turns pi_old / pi_behavior into a detached factor of a token's loss. A mask drops tokens. The denominator
of the aggregation is counted before either one, so dropping a token does not increase the weight of the others.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rl_trainers.algorithms.functional.policy_terms import ratio_of, sequence_means

if TYPE_CHECKING:
    import torch

    from rl_contracts.batch.trajectory import PackedBatch

    AddUp = Callable[[torch.Tensor], torch.Tensor]
    Weights = tuple[torch.Tensor, dict[str, torch.Tensor]]
    """Detached weights of tokens, float [N], and marks, bool [N] by name; see `rl_trainers.algorithms.components`."""


@dataclass(slots=True)
class OffPolicy:
    """Input of a correction or mask: one packed micro-batch of N tokens."""

    log_ratio: torch.Tensor
    """[N]: log pi_old - log pi_behavior; detached, 0 where not trained."""
    trained: torch.Tensor
    """bool [N]: tokens that are trained."""
    packed: PackedBatch
    """All other entries of the batch: `advantages`, `versions`, `truncated`, ..."""

    def ratio(self, level: str) -> torch.Tensor:
        """Return pi_old / pi_behavior, [N], at a level of `LEVELS`.

        The levels are the `token`, its `sequence` (the product over the sequence's trained tokens) and the `geometric`
        mean over the sequence's trained tokens.
        """
        return ratio_of(LEVELS[level](self))


LEVELS: dict[str, Callable[[OffPolicy], torch.Tensor]] = {
    "token": lambda off: off.log_ratio,
    "sequence": lambda off: off.packed.sequence_sums(off.log_ratio)[off.packed.sequence_of_token],
    "geometric": lambda off: sequence_means(off.log_ratio, off.trained, off.packed)[off.packed.sequence_of_token],
}
"""Functions that return the log-ratios, [N], by level."""


def plain_weights(off: OffPolicy, *, level: str) -> Weights:
    """Return the ratio itself (importance sampling)."""
    return off.ratio(level), {}


def truncated_weights(off: OffPolicy, *, level: str, cap: float, floor: float = 0.0) -> Weights:
    """Return the ratio clipped to [floor, cap]: truncated importance sampling (Ionides 2008).

    It is used between server and trainer (TIS, Yao et al. 2025), and as the weight of the decoupled objective (AReaL,
    arXiv 2505.24298, eq. 5).
    """
    ratio = off.ratio(level)
    return ratio.clamp(floor, cap), {"correction/capped": (ratio > cap) | (ratio < floor)}


def masked_weights(off: OffPolicy, *, level: str, floor: float, cap: float) -> Weights:
    """Return the ratio where floor <= ratio <= cap, else 0.

    This is IcePop (Ring-1T, arXiv 2510.18855) for tokens, and masked importance sampling for sequences.
    """
    ratio = off.ratio(level)
    dropped = outside_range(ratio, floor, cap)
    return ratio.masked_fill(dropped, 0.0), {"correction/masked": dropped}


def ratio_mask(off: OffPolicy, *, level: str, low: float, high: float) -> torch.Tensor:
    """Return the tokens to drop, bool [N]: those with a ratio at `level` below `low` or above `high`."""
    return outside_range(off.ratio(level), low, high)


def divergence_mask(off: OffPolicy, *, bound: float, estimator: str = "k3", over: str = "token") -> torch.Tensor:
    """Return the tokens to drop, bool [N]: those with a divergence above `bound`, as in verl's `rollout_rs`.

    Args:
        off: the micro-batch.
        bound: largest allowed divergence, in nats.
        estimator: divergence of a token, with r = pi_old / pi_behavior. `k1` is |log r|, `k2` is (log r)^2 / 2, and
            `k3` is r - 1 - log r. For bounds of the ratio itself, as in verl's k1, use `ratio_mask`.
        over: `token` bounds the divergence of each token. `sum`, `mean` and `max` bound this statistic over the trained
            tokens of a sequence and drop the whole sequence.
    """
    values = DIVERGENCES[estimator](off.log_ratio)
    if over == "token":
        return ~(values <= bound)
    sequence_of_token = off.packed.sequence_of_token
    if over == "max":
        sequence_values = values.new_zeros(off.packed.num_sequences).index_reduce(0, sequence_of_token, values, "amax")
    else:
        sequence_values = (
            off.packed.sequence_sums(values) if over == "sum" else sequence_means(values, off.trained, off.packed)
        )
    return ~(sequence_values <= bound)[sequence_of_token]


DIVERGENCES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "k1": lambda log_ratio: log_ratio.abs(),
    "k2": lambda log_ratio: log_ratio.square() / 2,
    "k3": lambda log_ratio: log_ratio.expm1() - log_ratio,
}


def outside_range(ratio: torch.Tensor, low: float, high: float) -> torch.Tensor:
    """Return the mask of the ratios outside [low, high]; True for NaN."""
    return ~((ratio >= low) & (ratio <= high))


def trust_region_tokens(log_ratio: torch.Tensor, advantages: torch.Tensor) -> torch.Tensor:
    """Return the tokens that a trust region may constrain; bool, same shape.

    For these tokens, the policy has already moved in the direction of the advantage: (A > 0 and ratio > 1) or (A < 0
    and ratio < 1). PPO clips and M2PO constrains only these tokens (arXiv 2510.01161, section 5.2, "Only constrain
    trust-region tokens").
    """
    return log_ratio * advantages > 0


def second_moment_outliers(
    log_ratio: torch.Tensor,
    minibatch: torch.Tensor,
    count: int,
    threshold: float,
    sum_over_ranks: AddUp = lambda table: table,
) -> torch.Tensor:
    """Return the tokens to drop so that the second moment of the others is bounded.

    This is M2PO's mask (arXiv 2510.01161, algorithm 1).

    Among the trust-region tokens T of a minibatch, the largest squared log-ratios are dropped. The mean of the rest
    estimates the second moment (eq. 4, over T) and is then at most `threshold`. Equal values are kept or dropped
    together, so the result does not depend on their order.

    The mean of the squares up to a cutoff does not decrease if the cutoff grows. A radix search over the bits of
    |log-ratio| can therefore find the smallest dropped value: these bits have the same order as the values. Each of
    four rounds reads eight bits and builds a table with the sum and number of squares for each of the 256 digits. Ranks
    exchange only these four tables, for any number of tokens.

    Args:
        log_ratio: float32 [K], log-ratios of this rank's trust-region tokens.
        minibatch: int64 [K], minibatch of each token.
        count: number of minibatches.
        threshold: tau_M2 (0.04 in the paper).
        sum_over_ranks: sums a float64 tensor over all ranks. If a mean equals `threshold` up to float64 rounding, the
            order of summation decides.

    Returns:
        bool [K].
    """
    import torch

    keys = log_ratio.float().abs().view(torch.int32).long()
    squares = log_ratio.double().square()
    cutoff = torch.zeros(count, dtype=torch.int64)
    moments_below = torch.zeros(count, 1, 2, dtype=torch.float64)
    for shift in (24, 16, 8, 0):
        has_prefix = keys >> shift + 8 == cutoff[minibatch]
        bucket = (minibatch * 256 + (keys >> shift & 255))[has_prefix]
        table = torch.zeros(count * 256, 2, dtype=torch.float64)
        table.index_add_(0, bucket, torch.stack([squares[has_prefix], torch.ones_like(squares[has_prefix])], 1))
        moments_up_to = moments_below + sum_over_ranks(table).view(count, 256, 2).cumsum(1)
        # if all values fit, the digit is 256 and carries into the digits before it
        digit = (moments_up_to[..., 0] <= threshold * moments_up_to[..., 1]).sum(1)
        cutoff = cutoff * 256 + digit
        moments_below = torch.cat([moments_below, moments_up_to], 1)[torch.arange(count), digit][:, None]
    return keys >= cutoff[minibatch]


def interpolated_logprobs(logprobs: torch.Tensor, behavior_logprobs: torch.Tensor, age: torch.Tensor) -> torch.Tensor:
    """Return log pi_old, interpolated between sampler and current policy by version (A-3PO, arXiv 2512.06547).

    The interpolation is linear in the log-probs. An update at version v' produces version v' + 1. A token of version v
    has age v' - v. Its result is age / (age + 1) of the way from the sampler to the current policy. At age 0 the result
    is the sampler's log-prob; for a large age it approaches the current policy's.

    Args:
        logprobs: [N], log-probs of the current policy.
        behavior_logprobs: [N], log-probs of the sampling policy.
        age: [N], age of each token, in versions.

    Returns:
        [N], detached.
    """
    age = age.to(logprobs.dtype)
    return behavior_logprobs.lerp(logprobs.detach(), age / (age + 1))
