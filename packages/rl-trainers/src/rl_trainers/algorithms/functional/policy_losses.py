"""Policy losses. See `terms` for what they are given and return."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from rl_contracts.config import require

if TYPE_CHECKING:
    from rl_trainers.algorithms.functional.policy_terms import PolicyTerms, TokenLoss

__all__ = ["cispo_loss", "clip_loss", "importance_loss", "reinforce_loss", "sapo_loss"]


def clip_loss(terms: PolicyTerms, *, clip_low: float, clip_high: float, dual_clip: float = 0.0) -> TokenLoss:
    """PPO's clipped surrogate (arXiv 1707.06347, eq. 7), with separate bounds (DAPO, arXiv 2503.14476, eq. 8) and dual
    clip (arXiv 1912.09729).

    loss = -min(rho A, clip(rho, 1 - clip_low, 1 + clip_high) A); where A < 0 and `dual_clip` is c, at most -c A. With
    the row's ratio this is GSPO (arXiv 2507.18071, eq. 5).

    Args:
        clip_low, clip_high: distances below and above 1 at which the ratio is clipped.
        dual_clip: c > 1, or 0 for none.

    Returns:
        losses, and the marks `clip/low`, `clip/high` (the clip is what decides) and, with dual clip, `clip/dual`.
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
    """loss = -rho A: the surrogate without a clip (conservative policy iteration; arXiv 1707.06347, eq. 6). M2PO (arXiv
    2510.01161, eq. 5) is this with its mask."""
    return -terms.ratio * terms.advantages, {}


def reinforce_loss(terms: PolicyTerms) -> TokenLoss:
    """loss = -A log pi_theta (Williams 1992). Its gradient is that of the policy that sampled the tokens only."""
    return -terms.advantages * terms.logprobs, {}


def cispo_loss(terms: PolicyTerms, *, clip_low: float, clip_high: float) -> TokenLoss:
    """Clipped importance weights (MiniMax-M1, arXiv 2506.13585, eqs. 4 and 5).

    loss = -sg[clip(rho, 1 - clip_low, 1 + clip_high)] A log pi_theta: the weight is clipped, the token keeps its
    gradient. The paper has no lower bound (clip_low = 1) and tunes the upper one.

    Returns:
        losses, and the marks `clip/low` and `clip/high` (weights that were clipped, whatever the advantage).
    """
    ratio = terms.ratio.detach()
    weight = ratio.clamp(1 - clip_low, 1 + clip_high)
    marks = {"clip/low": ratio < 1 - clip_low, "clip/high": ratio > 1 + clip_high}
    return -weight * terms.advantages * terms.logprobs, marks


def sapo_loss(terms: PolicyTerms, *, tau_positive: float = 1.0, tau_negative: float = 1.05) -> TokenLoss:
    """A soft gate in place of the clip (SAPO, arXiv 2511.20347).

    loss = -(4 / tau) sigmoid(tau (rho - 1)) A, tau = tau_positive where A > 0, else tau_negative. On policy its
    gradient is that of -rho A; away from rho = 1 it fades by 4 p (1 - p), p = sigmoid(tau (rho - 1)).

    Returns:
        losses, and the mark `gate/closed`: tokens whose gradient the gate has at least halved.
    """
    least = min(tau_positive, tau_negative)
    require(least > 0, "algorithm.loss.options.tau_positive, tau_negative", "more than 0", least)
    tau = torch.where(terms.advantages > 0, tau_positive, tau_negative)
    gate = torch.sigmoid(tau * (terms.ratio - 1))
    with torch.no_grad():
        closed = (4 * gate * (1 - gate) <= 0.5) & terms.trained
    return -4 / tau * gate * terms.advantages, {"gate/closed": closed}
