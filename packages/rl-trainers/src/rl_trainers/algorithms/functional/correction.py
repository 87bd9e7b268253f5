"""Between the policy that sampled a token (`behaviour`) and the one at the start of the update (`old`).

Corrections make a detached factor of a token's loss of pi_old / pi_behaviour; masks drop tokens. The denominator of the
aggregation is counted before they drop or shrink anything, so that dropping a token does not make the others louder.
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
    """Of each token, float [N] and detached; and marks, bool [N]: their fractions of trained tokens are reported."""


@dataclass(slots=True)
class OffPolicy:
    """One packed micro-batch in the eyes of a correction or a mask."""

    log_ratio: torch.Tensor
    """[N] log pi_old - log pi_behaviour; detached, 0 where not trained."""
    trained: torch.Tensor
    """bool [N]."""
    packed: PackedBatch
    """What else there is: `advantages`, `versions`, `truncated`, ..."""

    def ratio(self, level: str) -> torch.Tensor:
        """pi_old / pi_behaviour [N]: of the `token`, of its row (`sequence`: the product over the row's trained tokens)
        or the row's `geometric` mean per token."""
        return ratio_of(LEVELS[level](self))


LEVELS: dict[str, Callable[[OffPolicy], torch.Tensor]] = {
    "token": lambda off: off.log_ratio,
    "sequence": lambda off: off.packed.sequence_sums(off.log_ratio)[off.packed.sequence_of_token],
    "geometric": lambda off: sequence_means(off.log_ratio, off.trained, off.packed)[off.packed.sequence_of_token],
}
"""Log-ratios [N] by name."""


def plain_weights(off: OffPolicy, *, level: str) -> Weights:
    """The ratio itself: importance sampling."""
    return off.ratio(level), {}


def truncated_weights(off: OffPolicy, *, level: str, cap: float, floor: float = 0.0) -> Weights:
    """The ratio, at least `floor` and at most `cap`: truncated importance sampling (Ionides 2008; between server and
    trainer: TIS, Yao et al. 2025; as the weight of the decoupled objective: AReaL, arXiv 2505.24298, eq. 5)."""
    ratio = off.ratio(level)
    return ratio.clamp(floor, cap), {"correction/capped": (ratio > cap) | (ratio < floor)}


def masked_weights(off: OffPolicy, *, level: str, floor: float, cap: float) -> Weights:
    """The ratio where floor <= ratio <= cap, else 0: IcePop (Ring-1T, arXiv 2510.18855) of tokens, masked importance
    sampling of sequences."""
    ratio = off.ratio(level)
    dropped = outside_range(ratio, floor, cap)
    return ratio.masked_fill(dropped, 0.0), {"correction/masked": dropped}


def ratio_mask(off: OffPolicy, *, level: str, low: float, high: float) -> torch.Tensor:
    """Drop the tokens whose ratio (of their row, with the levels `sequence` and `geometric`) is below `low` or above
    `high`; bool [N]."""
    return outside_range(off.ratio(level), low, high)


def divergence_mask(off: OffPolicy, *, bound: float, estimator: str = "k3", over: str = "token") -> torch.Tensor:
    """Drop what diverges by more than `bound`, as verl's `rollout_rs`; bool [N].

    Args:
        bound: largest divergence that is kept, in nats.
        estimator: of a token, with r = pi_old / pi_behaviour: `k1` is |log r|, `k2` (log r)^2 / 2, `k3` r - 1 - log r.
            Bounds of the ratio itself, verl's k1, are `ratio_mask`.
        over: whose divergence is bounded: the `token`'s, or the `sum`, `mean` or `max` over the trained tokens of its
            row, which is dropped as a whole.
    """
    values = DIVERGENCES[estimator](off.log_ratio)
    if over == "token":
        return ~(values <= bound)
    rows = off.packed.sequence_of_token
    if over == "max":
        of_row = values.new_zeros(off.packed.num_sequences).index_reduce(0, rows, values, "amax")
    else:
        of_row = off.packed.sequence_sums(values) if over == "sum" else sequence_means(values, off.trained, off.packed)
    return ~(of_row <= bound)[rows]


DIVERGENCES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "k1": lambda log_ratio: log_ratio.abs(),
    "k2": lambda log_ratio: log_ratio.square() / 2,
    "k3": lambda log_ratio: log_ratio.expm1() - log_ratio,
}


def outside_range(ratio: torch.Tensor, low: float, high: float) -> torch.Tensor:
    """Whether low <= ratio <= high does not hold, which it does not for a NaN."""
    return ~((ratio >= low) & (ratio <= high))


def trust_region_tokens(log_ratio: torch.Tensor, advantages: torch.Tensor) -> torch.Tensor:
    """Tokens that a trust region may hold back: the policy has already moved the way the advantage pushes, (A > 0 and
    ratio > 1) or (A < 0 and ratio < 1). PPO clips no others, and M2PO constrains no others (arXiv 2510.01161, section
    5.2, "Only constrain trust-region tokens"). bool, same shape."""
    return log_ratio * advantages > 0


def second_moment_outliers(
    log_ratio: torch.Tensor, minibatch: torch.Tensor, count: int, threshold: float, add_up: AddUp = lambda table: table
) -> torch.Tensor:
    """Which tokens are dropped, so that the second moment of the others is bounded (M2PO, arXiv 2510.01161, algorithm
    1).

    Of the trust-region tokens T of a minibatch the largest are masked until the mean of the rest, the estimate of the
    second moment (eq. 4, over T), is at most `threshold`. Equal values stay or go together, so the result does not
    depend on their order.

    The mean of all squares up to a value does not fall as the value grows, so the first value that makes it too large
    is found digit by digit: the bits of |log-ratio|, which are ordered as it is, eight at a time, with the sum and
    number of squares for each of 256 digits. That is all that holders of parts of the tokens exchange: four tables,
    however many tokens there are.

    Args:
        log_ratio: float32 [K], of this holder's trust-region tokens.
        minibatch: int64 [K], to which each belongs.
        count: minibatches.
        threshold: tau_M2 (the paper: 0.04).
        add_up: sums a float64 tensor over all holders. Where a mean is `threshold` to the last of float64's digits, the
            order of the sum decides.

    Returns:
        bool [K].
    """
    import torch

    keys = log_ratio.float().abs().view(torch.int32).long()
    squares = log_ratio.double().square()
    first = torch.zeros(count, dtype=torch.int64)
    below = torch.zeros(count, 1, 2, dtype=torch.float64)
    for shift in (24, 16, 8, 0):
        here = keys >> shift + 8 == first[minibatch]
        place = (minibatch * 256 + (keys >> shift & 255))[here]
        table = torch.zeros(count * 256, 2, dtype=torch.float64)
        table.index_add_(0, place, torch.stack([squares[here], torch.ones_like(squares[here])], 1))
        up_to = below + add_up(table).view(count, 256, 2).cumsum(1)
        digit = (up_to[..., 0] <= threshold * up_to[..., 1]).sum(1)  # 256, which carries, where all of them fit
        first = first * 256 + digit
        below = torch.cat([below, up_to], 1)[torch.arange(count), digit][:, None]
    return keys >= first[minibatch]


def interpolated_logprobs(logprobs: torch.Tensor, behaviour: torch.Tensor, age: torch.Tensor) -> torch.Tensor:
    """log pi_old between the sampler and the policy that learns, by version and linear in the log (A-3PO, arXiv
    2512.06547).

    The update that begins at version v' makes v' + 1; a token of version v, of age v' - v, is age / (age + 1) of the
    way from the sampler to the policy that learns: a fresh one is the sampler's, an old one nearly the learner's.

    Args:
        logprobs: [N] of the policy that learns.
        behaviour: [N] as sampled.
        age: [N] of each token, in versions.

    Returns:
        [N], detached.
    """
    age = age.to(logprobs.dtype)
    return behaviour.lerp(logprobs.detach(), age / (age + 1))
