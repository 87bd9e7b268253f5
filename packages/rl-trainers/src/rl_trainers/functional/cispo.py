"""CISPO's policy loss."""

from __future__ import annotations

from rl_trainers.functional.terms import PolicyTerms, TokenLoss


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
