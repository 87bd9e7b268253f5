"""M2PO's mask, which depends on all tokens of a minibatch at once."""

from __future__ import annotations

import math

import torch


def bound_by_trust_region(log_ratio: torch.Tensor, advantages: torch.Tensor) -> torch.Tensor:
    """Tokens that a trust region may hold back: the policy has already moved the way the advantage pushes, (A > 0 and
    ratio > 1) or (A < 0 and ratio < 1). bool, same shape."""
    return log_ratio * advantages > 0


def second_moment_cutoff(squares: torch.Tensor, threshold: float) -> float:
    """The largest squared log-ratio that may stay (M2PO, arXiv 2510.01161).

    The largest are masked until the mean of the rest, the estimate of the second moment M2, is at most `threshold`.
    Equal values stay or go together, so the result does not depend on their order.

    Args:
        squares: [K] squared log-ratios of the tokens that a trust region may hold back, over the whole minibatch.
        threshold: tau_M2 (the paper: 0.04).

    Returns:
        the cut-off: tokens up to it stay; -inf where even the smallest alone is above, inf where all may stay.
    """
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
