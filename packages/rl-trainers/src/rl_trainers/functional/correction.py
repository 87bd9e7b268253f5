"""Between the policy that sampled a token (`behaviour`) and the one at the start of the update (`old`).

Corrections make a detached factor of a token's loss of pi_old / pi_behaviour; masks drop tokens. The denominator of the
aggregation is counted before they drop or shrink anything, so that dropping a token does not make the others louder.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rl_trainers.functional.terms import row_means

if TYPE_CHECKING:
    import torch

    from rl_contracts.trajectory import PackedBatch

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
        return LEVELS[level](self).exp()


LEVELS: dict[str, Callable[[OffPolicy], torch.Tensor]] = {
    "token": lambda off: off.log_ratio,
    "sequence": lambda off: off.packed.row_sums(off.log_ratio)[off.packed.row_of_token],
    "geometric": lambda off: row_means(off.log_ratio, off.trained, off.packed)[off.packed.row_of_token],
}
"""Log-ratios [N] by name."""


def plain_weights(off: OffPolicy, *, level: str) -> Weights:
    """The ratio itself: importance sampling."""
    return off.ratio(level), {}


def truncated_weights(off: OffPolicy, *, level: str, cap: float) -> Weights:
    """min(ratio, cap): truncated importance sampling (Ionides 2008; between server and trainer: TIS, Yao et al. 2025;
    as the weight of the decoupled objective: AReaL, arXiv 2505.24298, eq. 5)."""
    ratio = off.ratio(level)
    return ratio.clamp(max=cap), {"correction/capped": ratio > cap}


def masked_weights(off: OffPolicy, *, level: str, floor: float, cap: float) -> Weights:
    """The ratio where floor <= ratio <= cap, else 0: IcePop (Ring-1T, arXiv 2510.18855) of tokens, masked importance
    sampling of sequences."""
    ratio = off.ratio(level)
    dropped = outside(ratio, floor, cap)
    return ratio.masked_fill(dropped, 0.0), {"correction/masked": dropped}


def ratio_mask(off: OffPolicy, *, level: str, low: float, high: float) -> torch.Tensor:
    """Drop the tokens whose ratio (of their row, with the levels `sequence` and `geometric`) is below `low` or above
    `high`; bool [N]."""
    return outside(off.ratio(level), low, high)


def outside(ratio: torch.Tensor, low: float, high: float) -> torch.Tensor:
    """Whether low <= ratio <= high does not hold, which it does not for a NaN."""
    return ~((ratio >= low) & (ratio <= high))


def trust_region_tokens(log_ratio: torch.Tensor, advantages: torch.Tensor) -> torch.Tensor:
    """Tokens that a trust region may hold back: the policy has already moved the way the advantage pushes, (A > 0 and
    ratio > 1) or (A < 0 and ratio < 1). PPO clips no others, and M2PO constrains no others (arXiv 2510.01161, section
    5.2, "Only constrain trust-region tokens"). bool, same shape."""
    return log_ratio * advantages > 0


def second_moment_cutoff(squares: torch.Tensor, threshold: float) -> float:
    """The largest squared log-ratio that may stay (M2PO, arXiv 2510.01161, algorithm 1).

    Of the trust-region tokens T the largest are masked until the mean of the rest, the estimate of the second moment
    (eq. 4, over T), is at most `threshold`. Equal values stay or go together, so the result does not depend on their
    order.

    Args:
        squares: [K] squared log-ratios of the trust-region tokens, over the whole minibatch.
        threshold: tau_M2 (the paper: 0.04).

    Returns:
        the cut-off: tokens up to it stay; -inf where even the smallest alone is above, inf where all may stay.
    """
    import torch

    if not len(squares):
        return math.inf
    ordered = squares.double().sort().values
    means = ordered.cumsum(0) / torch.arange(1, len(ordered) + 1)
    last_of_equals = torch.cat([ordered[1:] != ordered[:-1], torch.ones(1, dtype=torch.bool)])
    fitting = (last_of_equals & (means <= threshold)).nonzero()
    if not len(fitting):
        return -math.inf
    last = int(fitting[-1])
    return math.inf if last == len(ordered) - 1 else float(ordered[last])


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
