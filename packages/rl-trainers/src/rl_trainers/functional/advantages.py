"""Advantages of whole episodes from their rewards. Groups are found by id, never by position."""

from __future__ import annotations

from dataclasses import dataclass

import torch

EPS = 1e-6


@dataclass(slots=True)
class GroupAdvantages:
    """Advantages and what was odd about the groups."""

    advantages: torch.Tensor
    """float32 [E]."""
    groups: int
    """Groups seen."""
    singletons: int
    """Groups of one episode; their advantage is 0."""
    zero_variance: int
    """Groups of several episodes with equal rewards; their advantages are 0."""


def group_advantages(rewards: torch.Tensor, group_ids: torch.Tensor, baseline: str) -> GroupAdvantages:
    """Advantage of each episode within its group.

    Args:
        rewards: float32 [E], one per episode.
        group_ids: int64 [E].
        baseline: `group_mean_std`: (r - mean) / (std + 1e-6) with the sample std (ddof 1), GRPO (arXiv 2402.03300,
            section 4.1.2); `group_mean`: r - mean, Dr. GRPO (arXiv 2503.20783); `group_mean_batch_std`: (r - mean) /
            (std of all rewards + 1e-6), LitePPO (arXiv 2508.08221); `leave_one_out`: r - mean of the others, RLOO
            (arXiv 2402.14740); `none`: r itself, REINFORCE.

    Raises:
        ValueError: an unknown baseline.
    """
    _, group = torch.unique(group_ids, return_inverse=True)
    number = int(group.max()) + 1 if len(group) else 0
    size = torch.zeros(number).index_add(0, group, torch.ones_like(rewards))
    mean = torch.zeros(number).index_add(0, group, rewards) / size
    deviation = rewards - mean[group]
    squares = torch.zeros(number).index_add(0, group, deviation.square())
    std = (squares / (size - 1).clamp(min=1)).sqrt()
    # equal rewards whose mean is not exact in float32 leave a deviation of a few ulp, which the std would blow up
    flat = (std <= EPS * mean.abs().clamp(min=1)) & (size > 1)
    alone = size == 1
    if baseline == "group_mean_std":
        advantages = deviation / (std + EPS)[group]
    elif baseline == "group_mean":
        advantages = deviation
    elif baseline == "group_mean_batch_std":
        advantages = deviation / ((rewards.std() if len(rewards) > 1 else 0.0) + EPS)
    elif baseline == "leave_one_out":
        advantages = deviation * (size / (size - 1).clamp(min=1))[group]
    elif baseline == "none":
        return GroupAdvantages(rewards.clone(), number, int(alone.sum()), int(flat.sum()))
    else:
        raise ValueError(f"unknown baseline {baseline!r}")
    advantages = torch.where((flat | alone)[group], 0.0, advantages)
    return GroupAdvantages(advantages, number, int(alone.sum()), int(flat.sum()))


def moments(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Number, sum and sum of squares of masked values, to be added over replicas; float64 [3]."""
    kept = torch.where(mask, values, 0.0).double()
    return torch.stack([mask.sum().double(), kept.sum(), kept.square().sum()])


def whitened(values: torch.Tensor, mask: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
    """(A - mean) / (std + 1e-6) with the sample std over all masked values: the batch normalisation of REINFORCE++
    (arXiv 2501.03262). Where they are all equal, 0.

    Args:
        values: float32, any shape.
        mask: bool, same shape.
        total: `moments` over all replicas.

    Returns:
        same shape, 0 where not masked.
    """
    count, first, second = total.tolist()
    mean = first / max(count, 1)
    variance = max(second - count * mean**2, 0.0) / max(count - 1, 1)
    if variance**0.5 <= EPS * max(abs(mean), 1):
        return torch.zeros_like(values)
    return torch.where(mask, (values - mean) / (variance**0.5 + EPS), 0.0)
