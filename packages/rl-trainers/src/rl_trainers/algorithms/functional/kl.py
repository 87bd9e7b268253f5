"""How far two policies are apart, from the log-probs of tokens that one of them sampled."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from rl_trainers.algorithms.functional.policy_terms import MAX_LOG_RATIO

if TYPE_CHECKING:
    import torch

__all__ = ["ESTIMATORS", "bounded_k3", "k3", "kl_estimate", "weighted_kl"]


def k3(d: torch.Tensor) -> torch.Tensor:
    """exp(-d) - 1 + d, never negative: with the difference taken by `expm1`, which stays exact where d is small."""
    return (-d).expm1() + d


def bounded_k3(d: torch.Tensor) -> torch.Tensor:
    """`k3`, at most 10 and without gradient beyond, as in verl, SkyRL and NeMo-RL: of d = -30 it is 1e13."""
    return k3(d.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)).clamp(max=10.0)


ESTIMATORS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "k1": lambda d: d,
    "k2": lambda d: d.square() / 2,
    "k3": bounded_k3,
}
"""By name, of d = log pi - log ref."""


def kl_estimate(logprobs: torch.Tensor, reference: torch.Tensor, estimator: str) -> torch.Tensor:
    """Per-token estimate of KL(pi || ref) from tokens that pi sampled (Schulman, "Approximating KL divergence", 2020).

    With d = log pi - log ref: k1 = d (unbiased, may be negative), k2 = d^2 / 2 (biased, low variance), k3 = exp(-d) - 1
    + d (unbiased, never negative; see `bounded_k3`).

    Differentiated as a loss, they are something else (d times grad log pi is the unbiased gradient of KL(pi || ref)):
    k1 gives grad log pi, whose mean is zero: nothing is regularised. k2 gives d grad log pi: right. k3 gives (1 -
    exp(-d)) grad log pi: right to first order in d, and in the mean that of KL(ref || pi), where ref and pi have the
    same support. See `weighted_kl`.

    Args:
        logprobs, reference: float, same shape.
        estimator: one of `ESTIMATORS`.
    """
    return ESTIMATORS[estimator](logprobs - reference)


def weighted_kl(estimate: torch.Tensor, ratio: torch.Tensor) -> torch.Tensor:
    """The estimate times pi_theta / pi_old, with the ratio's gradient (DeepSeek-V3.2, arXiv 2512.02556, eq. 7).

    On policy its gradient is (k + k') grad log pi: for k1 (d + 1) grad log pi and for k3 d grad log pi, both unbiased
    for KL(pi || ref). For k2 it is (d^2 / 2 + d) grad log pi, which is not.
    """
    return ratio * estimate
