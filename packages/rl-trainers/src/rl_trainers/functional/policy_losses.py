"""Policy losses of the PPO family: clipped, unclipped, and plain REINFORCE. See `terms.py` for what they are given."""

from __future__ import annotations

import torch

from rl_trainers.functional.terms import PolicyTerms, TokenLoss


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
    2510.01161) is this with its mask."""
    return -terms.ratio * terms.advantages, {}


def reinforce_loss(terms: PolicyTerms) -> TokenLoss:
    """loss = -A log pi_theta (Williams 1992). Its gradient is that of the policy that sampled the tokens only."""
    return -terms.advantages * terms.logprobs, {}
