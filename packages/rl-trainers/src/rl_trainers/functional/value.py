"""The critic's loss, and how good it is."""

from __future__ import annotations

import torch


def clipped_value_loss(
    values: torch.Tensor, old_values: torch.Tensor, returns: torch.Tensor, clip: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Half the squared error, of the value or of the value clipped to old +- clip, whichever is larger (PPO's
    implementation; Huang et al., "The 37 implementation details of PPO", detail 9).

    Args:
        values: [N] of the critic that learns; carries gradient.
        old_values: [N] at the start of the update.
        returns: [N] targets.
        clip: 0 for none.

    Returns:
        losses [N], and whether the clipped one was larger, bool [N].
    """
    plain = (values - returns).square()
    if not clip:
        return plain / 2, torch.zeros_like(plain, dtype=torch.bool)
    near = old_values + (values - old_values).clamp(-clip, clip)
    clipped = (near - returns).square()
    return torch.maximum(plain, clipped) / 2, (clipped > plain).detach()


def explained_variance(sums: torch.Tensor) -> float | None:
    """1 - Var(returns - values) / Var(returns), from `variance_sums`; None where the returns do not vary."""
    count, error, squared_error, target, squared_target = sums.tolist()
    if not count:
        return None
    variance = squared_target / count - (target / count) ** 2
    if not variance > 1e-12:
        return None
    return 1 - (squared_error / count - (error / count) ** 2) / variance


def variance_sums(values: torch.Tensor, returns: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """What `explained_variance` needs, to be added over replicas: number, sum and sum of squares of returns - values
    and of returns, over masked tokens; float64 [5]."""
    error = torch.where(mask, returns - values, 0.0).double()
    target = torch.where(mask, returns, 0.0).double()
    return torch.stack([mask.sum().double(), error.sum(), error.square().sum(), target.sum(), target.square().sum()])
