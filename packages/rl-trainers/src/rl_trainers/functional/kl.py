"""Estimates of the divergence from a reference policy."""

from __future__ import annotations

import torch

ESTIMATORS = ("k1", "k2", "k3")


def kl_estimate(logprobs: torch.Tensor, reference: torch.Tensor, estimator: str) -> torch.Tensor:
    """Per-token estimate of KL(pi || ref) from tokens that pi sampled (Schulman, "Approximating KL divergence", 2020).

    With d = log pi - log ref: k1 = d (unbiased, may be negative), k2 = d^2 / 2 (biased, low variance), k3 = exp(-d) - 1
    + d (unbiased, never negative).

    Differentiated as a loss, they are something else (d times grad log pi is the unbiased gradient of KL(pi || ref)):
    k1 gives grad log pi, whose mean is zero: nothing is regularised. k2 gives d grad log pi: right. k3 gives (1 -
    exp(-d)) grad log pi: right to first order in d, and in the mean that of KL(ref || pi), where ref and pi have the
    same support. See `weighted_kl`.

    Args:
        logprobs, reference: float, same shape.

    Raises:
        ValueError: an unknown estimator.
    """
    d = logprobs - reference
    if estimator == "k1":
        return d
    if estimator == "k2":
        return d.square() / 2
    if estimator == "k3":
        return (-d).exp() - 1 + d
    raise ValueError(f"unknown KL estimator {estimator!r}")


def weighted_kl(estimate: torch.Tensor, ratio: torch.Tensor) -> torch.Tensor:
    """The estimate times pi_theta / pi_old, with the ratio's gradient (DeepSeek-V3.2, arXiv 2512.02556, eq. 7).

    On policy its gradient is (k + k') grad log pi: for k1 (d + 1) grad log pi and for k3 d grad log pi, both unbiased
    for KL(pi || ref). For k2 it is (d^2 / 2 + d) grad log pi, which is not.
    """
    return ratio * estimate
