"""Shaping of rewards before advantages are computed."""

from __future__ import annotations

import torch


def overlong_penalty(lengths: torch.Tensor, maximum: int, cache: int) -> torch.Tensor:
    """Return the soft penalty for long completions (DAPO, arXiv 2503.14476, eq. 13).

    The penalty is 0 up to maximum - cache tokens, falls linearly to -1 at maximum, and stays -1 beyond.

    Args:
        lengths: [E], generated tokens.
        maximum: L_max, in tokens.
        cache: L_cache, in tokens, 1 to maximum.

    Returns:
        float32 [E], -1 to 0.
    """
    return ((maximum - cache - lengths).float() / cache).clamp(-1.0, 0.0)


def shape(rewards: torch.Tensor, scale: float, bias: float, clip: float) -> torch.Tensor:
    """Return clamp(scale * r + bias, -clip, clip), float32 [E]; clip 0 disables clipping."""
    result = rewards * scale + bias
    return result.clamp(-clip, clip) if clip else result


def terminal_rewards(rewards: torch.Tensor, loss_mask: torch.Tensor) -> torch.Tensor:
    """Put the reward of each sequence on its last *trained* token, 0 elsewhere, float32 [B, T].

    The reward of a sequence without trained tokens is dropped.

    Args:
        rewards: float32 [B].
        loss_mask: bool [B, T].
    """
    last = loss_mask & (loss_mask.flip(-1).cumsum(-1).flip(-1) == 1)
    return torch.where(last, rewards[:, None], 0.0)


def to_trained_tokens(values: torch.Tensor, loss_mask: torch.Tensor) -> torch.Tensor:
    """Move per-token rewards, [B, T], to trained tokens.

    Each reward is added to the last trained token at or before it, or else to the first trained token of the sequence.
    The rewards of a sequence without trained tokens are dropped.
    """
    position = torch.arange(loss_mask.shape[1]).expand_as(loss_mask)
    last_trained = torch.where(loss_mask, position, -1).cummax(-1).values
    first_trained = loss_mask.int().argmax(-1, keepdim=True)
    target = torch.where(last_trained >= 0, last_trained, first_trained)
    return torch.where(loss_mask, torch.zeros_like(values).scatter_add(1, target, values), 0.0)
