"""Estimates of the KL divergence of two policies, from log-probs of tokens that one of them sampled."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from rl_trainers.algorithms.functional.policy_terms import MAX_LOG_RATIO

if TYPE_CHECKING:
    import torch

__all__ = ["ESTIMATORS", "bounded_k3", "k3", "kl_estimate", "weighted_kl"]


def k3(d: torch.Tensor) -> torch.Tensor:
    """Return exp(-d) - 1 + d, which is never negative; `expm1` keeps it exact for small d."""
    return (-d).expm1() + d


def bounded_k3(d: torch.Tensor) -> torch.Tensor:
    """Return `k3` clipped to at most 10, without gradient beyond, as in verl, SkyRL and NeMo-RL.

    Unclipped, it would be 1e13 for d = -30.
    """
    return k3(d.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)).clamp(max=10.0)


ESTIMATORS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "k1": lambda d: d,
    "k2": lambda d: d.square() / 2,
    "k3": bounded_k3,
}
"""Estimators by name, as functions of d = log pi - log ref."""


def kl_estimate(logprobs: torch.Tensor, reference: torch.Tensor, estimator: str) -> torch.Tensor:
    """Return a per-token estimate of KL(pi || ref) from tokens sampled by pi.

    The source is Schulman, "Approximating KL divergence", 2020. With d = log pi - log ref:

    - k1 = d: unbiased, may be negative.
    - k2 = d^2 / 2: biased, low variance.
    - k3 = exp(-d) - 1 + d: unbiased, never negative; see `bounded_k3`.

    An unbiased estimate need not have an unbiased gradient. The gradient of KL(pi || ref) is E[d grad log pi]; see
    `weighted_kl` for unbiased gradients of k1 and k3. As a loss:

    - k1 gives grad log pi, which is zero in expectation, so it does not regularize.
    - k2 gives d grad log pi, which is unbiased.
    - k3 gives (1 - exp(-d)) grad log pi, which is correct to first order in d. In expectation it is the gradient of
      KL(ref || pi), if ref and pi have the same support.

    Args:
        logprobs, reference: float, same shape.
        estimator: one of `ESTIMATORS`.
    """
    return ESTIMATORS[estimator](logprobs - reference)


def weighted_kl(estimate: torch.Tensor, ratio: torch.Tensor) -> torch.Tensor:
    """Return the estimate times pi_theta / pi_old, with the ratio's gradient (DeepSeek-V3.2, arXiv 2512.02556, eq. 7).

    On policy, the gradient is (k + k') grad log pi. This is (d + 1) grad log pi for k1 and d grad log pi for k3, both
    unbiased for KL(pi || ref). For k2 it is (d^2 / 2 + d) grad log pi, which is biased.
    """
    return ratio * estimate
