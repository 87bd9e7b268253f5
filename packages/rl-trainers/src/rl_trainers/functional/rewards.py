"""Shaping of rewards before anything is learned from them."""

from __future__ import annotations

import torch

EPS = 1e-6


def overlong_penalty(lengths: torch.Tensor, maximum: int, cache: int) -> torch.Tensor:
    """Soft punishment of long answers (DAPO, arXiv 2503.14476, eq. 13): 0 up to maximum - cache tokens, then linear to
    -1 at maximum, and -1 beyond.

    Args:
        lengths: [E] generated tokens.
        maximum: L_max, in tokens.
        cache: L_cache, in tokens, 1 to maximum.

    Returns:
        float32 [E], -1 to 0.
    """
    return ((maximum - cache - lengths).float() / cache).clamp(-1.0, 0.0)


def shaped(rewards: torch.Tensor, scale: float, bias: float, clip: float) -> torch.Tensor:
    """clamp(scale * r + bias, -clip, clip), float32 [E]; clip 0 switches clipping off."""
    result = rewards * scale + bias
    return result.clamp(-clip, clip) if clip else result


def normalised(rewards: torch.Tensor, group: torch.Tensor | None = None) -> torch.Tensor:
    """(r - mean) / (std + 1e-6) with the sample std (ddof 1), over all rewards or within groups; 0 where all are equal
    or there is one.

    Args:
        rewards: float32 [E].
        group: int64 [E], 0 to G - 1; None: all rewards are one group.
    """
    group = torch.zeros(len(rewards), dtype=torch.int64) if group is None else group
    number = int(group.max()) + 1 if len(group) else 0
    size = torch.zeros(number).index_add(0, group, torch.ones_like(rewards))
    mean = torch.zeros(number).index_add(0, group, rewards) / size
    deviation = rewards - mean[group]
    std = (torch.zeros(number).index_add(0, group, deviation.square()) / (size - 1).clamp(min=1)).sqrt()
    # equal rewards whose mean is not exact in float32 leave a deviation of a few ulp, which the std would blow up
    flat = std <= EPS * mean.abs().clamp(min=1)
    return torch.where(flat[group], 0.0, deviation / (std + EPS)[group])


def terminal_rewards(rewards: torch.Tensor, loss_mask: torch.Tensor) -> torch.Tensor:
    """Each row's reward on its last *trained* token, 0 elsewhere, float32 [B, T]; a row without one keeps none.

    Args:
        rewards: float32 [B].
        loss_mask: bool [B, T].
    """
    last = loss_mask & (loss_mask.flip(-1).cumsum(-1).flip(-1) == 1)
    return torch.where(last, rewards[:, None], 0.0)


def to_trained_tokens(values: torch.Tensor, loss_mask: torch.Tensor) -> torch.Tensor:
    """Per-token rewards moved to where they can be learned from: each to the last trained token at or before it, or to
    the row's first one where there is none before. [B, T]; a row without a trained token keeps nothing."""
    place = torch.arange(loss_mask.shape[1]).expand_as(loss_mask)
    latest = torch.where(loss_mask, place, -1).cummax(-1).values
    first = loss_mask.int().argmax(-1, keepdim=True)
    target = torch.where(latest >= 0, latest, first)
    return torch.where(loss_mask, torch.zeros_like(values).scatter_add(1, target, values), 0.0)
