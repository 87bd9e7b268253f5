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
            section 4.1.2); `group_mean`: r - mean, Dr. GRPO (arXiv 2503.20783); `leave_one_out`: r - mean of the
            others, RLOO (arXiv 2402.14740); `none`: r itself, REINFORCE.

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
    elif baseline == "leave_one_out":
        advantages = deviation * (size / (size - 1).clamp(min=1))[group]
    elif baseline == "none":
        return GroupAdvantages(rewards.clone(), number, int(alone.sum()), int(flat.sum()))
    else:
        raise ValueError(f"unknown baseline {baseline!r}")
    advantages = torch.where((flat | alone)[group], 0.0, advantages)
    return GroupAdvantages(advantages, number, int(alone.sum()), int(flat.sum()))
