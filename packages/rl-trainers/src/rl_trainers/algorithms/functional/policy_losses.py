"""Policy losses. See `policy_terms` for their input and output."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from rl_contracts.config import require

if TYPE_CHECKING:
    from rl_trainers.algorithms.functional.policy_terms import PolicyTerms, TokenLoss

__all__ = ["cispo_loss", "clip_loss", "importance_loss", "reinforce_loss", "sapo_loss"]


def clip_loss(terms: PolicyTerms, *, clip_low: float, clip_high: float, dual_clip: float = 0.0) -> TokenLoss:
    """Return PPO's clipped surrogate loss (arXiv 1707.06347, eq. 7).

    The bounds are separate (DAPO, arXiv 2503.14476, eq. 8), and there is an optional dual clip (arXiv 1912.09729).

    loss = -min(rho A, clip(rho, 1 - clip_low, 1 + clip_high) A)

    With dual clip c, the loss is at most -c A where A < 0. With the ratio of the sequence this is GSPO (arXiv
    2507.18071, eq. 5).

    Args:
        terms: the micro-batch.
        clip_low, clip_high: distances below and above 1 at which the ratio is clipped.
        dual_clip: c > 1, or 0 to disable the dual clip.

    Returns:
        Losses, and the marks `clip/low` and `clip/high` (tokens whose loss is the clipped term), and `clip/dual` with
        dual clip.

    Raises:
        ConfigError: `dual_clip` is not 0 or more than 1.
    """
    require(dual_clip == 0 or dual_clip > 1, "algorithm.loss.options.dual_clip", "0 (off) or more than 1", dual_clip)
    ratio, advantages = terms.ratio, terms.advantages
    surrogate = torch.minimum(ratio * advantages, ratio.clamp(1 - clip_low, 1 + clip_high) * advantages)
    marks = {
        "clip/low": (ratio < 1 - clip_low) & (advantages < 0),
        "clip/high": (ratio > 1 + clip_high) & (advantages > 0),
    }
    if dual_clip:
        bound = dual_clip * advantages
        marks["clip/dual"] = (advantages < 0) & (surrogate < bound)
        surrogate = torch.where(advantages < 0, torch.maximum(surrogate, bound), surrogate)
    return -surrogate, marks


def importance_loss(terms: PolicyTerms) -> TokenLoss:
    """Return the surrogate without a clip, loss = -rho A (conservative policy iteration; arXiv 1707.06347, eq. 6).

    M2PO (arXiv 2510.01161, eq. 5) combines this loss with its mask.
    """
    return -terms.ratio * terms.advantages, {}


def reinforce_loss(terms: PolicyTerms) -> TokenLoss:
    """Return loss = -A log pi_theta (Williams 1992), whose gradient is correct only for on-policy tokens."""
    return -terms.advantages * terms.logprobs, {}


def cispo_loss(terms: PolicyTerms, *, clip_low: float, clip_high: float) -> TokenLoss:
    """Return the loss with clipped importance weights (MiniMax-M1, arXiv 2506.13585, eqs. 4 and 5).

    loss = -sg[clip(rho, 1 - clip_low, 1 + clip_high)] A log pi_theta

    Only the weight is clipped, so every token keeps its gradient. The paper has no lower bound (clip_low = 1) and tunes
    the upper one.

    Returns:
        Losses, and the marks `clip/low` and `clip/high` (clipped weights, for any advantage).
    """
    ratio = terms.ratio.detach()
    weight = ratio.clamp(1 - clip_low, 1 + clip_high)
    marks = {"clip/low": ratio < 1 - clip_low, "clip/high": ratio > 1 + clip_high}
    return -weight * terms.advantages * terms.logprobs, marks


def sapo_loss(terms: PolicyTerms, *, tau_positive: float = 1.0, tau_negative: float = 1.05) -> TokenLoss:
    """Return the loss with a soft gate instead of a clip (SAPO, arXiv 2511.20347).

    loss = -(4 / tau) sigmoid(tau (rho - 1)) A, with tau = tau_positive where A > 0, else tau_negative

    On policy, the gradient equals the gradient of -rho A. Away from rho = 1 it is scaled by 4 p (1 - p), with
    p = sigmoid(tau (rho - 1)).

    Returns:
        Losses, and the mark `gate/closed` (tokens whose gradient is scaled by at most 1/2).

    Raises:
        ConfigError: a tau is not positive.
    """
    smallest_tau = min(tau_positive, tau_negative)
    require(smallest_tau > 0, "algorithm.loss.options.tau_positive, tau_negative", "more than 0", smallest_tau)
    tau = torch.where(terms.advantages > 0, tau_positive, tau_negative)
    gate = torch.sigmoid(tau * (terms.ratio - 1))
    with torch.no_grad():
        closed = (4 * gate * (1 - gate) <= 0.5) & terms.trained
    return -4 / tau * gate * terms.advantages, {"gate/closed": closed}
