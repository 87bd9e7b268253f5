"""Policy-gradient losses, per token."""

from __future__ import annotations

import torch

from rl_contracts.engine import Stats


def clipped_policy_loss(
    logprobs: torch.Tensor,
    old_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    weights: torch.Tensor,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> tuple[torch.Tensor, Stats]:
    """PPO's clipped surrogate (arXiv 1707.06347, eq. 7), with separate bounds (DAPO, arXiv 2503.14476) and dual clip
    (arXiv 1912.09729).

    loss_t = -min(rho A, clip(rho, 1 - clip_low, 1 + clip_high) A), rho = exp(logprobs - old_logprobs); where A < 0 and
    `dual_clip` is c,
    at most -c A.

    Args:
        logprobs: [N] of the policy that learns; carries gradient.
        old_logprobs: [N] of the policy at the start of this update.
        advantages: [N].
        weights: [N] weight of each token in the sum; 0 where not trained.
        clip_low, clip_high: distances below and above 1 at which the ratio is clipped.
        dual_clip: c > 1, or None.

    Returns:
        the weighted sum of the losses, and (sum, denominator) over trained tokens of `clip/low`, `clip/high`,
        `ratio/mean`,
        `ratio/max` and the estimates of KL(old || new) `kl_old/k1` and `kl_old/k3`.
    """
    trained = weights > 0
    # a token that is not trained may hold anything; it must not even make a NaN that 0 would not silence
    delta = torch.where(trained, logprobs - old_logprobs, 0.0)
    ratio = delta.exp()
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high)
    surrogate = torch.minimum(ratio * advantages, clipped * advantages)
    if dual_clip is not None:
        surrogate = torch.where(advantages < 0, torch.maximum(surrogate, dual_clip * advantages), surrogate)
    loss = -(surrogate * weights).sum()
    with torch.no_grad():
        count = trained.sum().float()
        stats: Stats = {
            "clip/low": (((ratio < 1 - clip_low) & (advantages < 0) & trained).sum().float(), count),
            "clip/high": (((ratio > 1 + clip_high) & (advantages > 0) & trained).sum().float(), count),
            "ratio/mean": ((ratio * trained).sum(), count),
            "ratio/max": ((ratio * trained).amax() if len(ratio) else count, count),
            "kl_old/k1": ((-delta).sum(), count),
            "kl_old/k3": ((torch.where(trained, ratio - 1 - delta, 0.0)).sum(), count),
        }
    return loss, stats


def importance_weights(
    old_logprobs: torch.Tensor, behaviour_logprobs: torch.Tensor, cap: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """pi_old / pi_beh per token, truncated from above at `cap`: the weight of the decoupled objective (AReaL, arXiv
    2505.24298, eq. 5).

    Args:
        old_logprobs, behaviour_logprobs: float32, same shape.
        cap: upper bound of the weight (truncated importance sampling).

    Returns:
        (weights, whether each was capped), detached.
    """
    ratio = (old_logprobs.detach() - behaviour_logprobs).exp()
    return ratio.clamp(max=cap), ratio > cap
