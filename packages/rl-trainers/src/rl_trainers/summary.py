"""What a batch of answers looks like in numbers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from rl_contracts.metrics import Figures

if TYPE_CHECKING:
    from tensordict import TensorDict

OLDEST = 4
"""Ages of tokens from here on are counted together."""


def summarise(batch: TensorDict, version: int) -> Figures:
    """Figures of one training batch: this rank's part of them.

    Args:
        batch: this rank's rows.
        version: the trainer's version when the batch left the runtime.

    Returns:
        `rows`, `tokens/trained`, `reward/mean`, `reward/square` (see `reward_std`), `length/mean` (generated tokens),
        `truncated/share`, `staleness/mean` and `staleness/max` (version minus a row's oldest token's),
        `staleness/share_0` to `staleness/share_3` and `staleness/share_4_and_more` (trained tokens of each age).
    """
    figures = Figures()
    learn, versions, rewards = batch["loss_mask"], batch["versions"], batch["rewards"].double()
    generated = versions >= 0
    # the largest int stands for "no generated token", so that such rows do not count
    oldest = torch.where(generated, versions, torch.iinfo(torch.int32).max).amin(-1)
    age, answered = version - oldest, generated.any(-1)
    figures.add("rows", torch.ones_like(rewards), kind="sum")
    figures.add("tokens/trained", learn, kind="sum")
    figures.add("reward/mean", rewards)
    figures.add("reward/square", rewards.square())
    figures.add("length/mean", generated.sum(-1))
    figures.add("truncated/share", batch["truncated"])
    figures.add("staleness/mean", age, answered)
    figures.add("staleness/max", age, answered, kind="max")
    token_age = (version - versions).clamp(0, OLDEST)
    for old in range(OLDEST + 1):
        name = f"staleness/share_{old}" if old < OLDEST else f"staleness/share_{OLDEST}_and_more"
        figures.add(name, token_age == old, learn & generated)
    return figures


def reward_std(mean: float | None, square: float | None, rows: float | None) -> float | None:
    """Sample standard deviation over rows, from their mean, the mean of their squares, and their number."""
    if mean is None or square is None or rows is None or rows < 2:
        return None
    return max((square - mean**2) * rows / (rows - 1), 0.0) ** 0.5
