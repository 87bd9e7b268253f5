"""What a batch of answers looks like in numbers, over all replicas."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from tensordict import TensorDict

    from rl_contracts.parallel import ParallelContext

OLDEST = 4
"""Ages of tokens from here on are counted together."""


def summarise(batch: TensorDict, version: int, parallel: ParallelContext) -> dict[str, float | None]:
    """Figures of one training batch (collective).

    Args:
        batch: this rank's rows.
        version: the trainer's version when the batch left the runtime.

    Returns:
        `reward/mean`, `reward/std` (sample std over rows), `length/mean` (generated tokens), `truncated/share`,
        `staleness/mean` and `staleness/max` (version minus a row's oldest token's), `staleness/share_...` (see
        `_token_shares`), `tokens/trained`, `rows`. None where there is nothing to average.
    """
    learn = batch["loss_mask"]
    generated = batch["versions"] >= 0
    # the largest int stands for "no generated token", so that such rows do not count
    oldest = torch.where(generated, batch["versions"], torch.iinfo(torch.int32).max).amin(-1)
    answered = generated.any(-1)
    age = torch.where(answered, version - oldest, 0).double()
    rewards = batch["rewards"].double()
    sums = torch.stack(
        [
            torch.tensor(float(len(rewards)), dtype=torch.float64),
            rewards.sum(),
            rewards.square().sum(),
            generated.sum().double(),
            batch["truncated"].sum().double(),
            age.sum(),
            answered.sum().double(),
            learn.sum().double(),
        ]
    )
    rows, reward, squares, tokens, truncated, ages, answers, trained = parallel.sum_over_replicas(sums).tolist()
    oldest_age = parallel.max_over_replicas(age.amax().reshape(1) if len(age) else torch.zeros(1, dtype=torch.float64))
    variance = (squares - reward**2 / rows) / (rows - 1) if rows > 1 else None
    return {
        "rows": rows,
        "tokens/trained": trained,
        "reward/mean": reward / rows if rows else None,
        "reward/std": max(variance, 0.0) ** 0.5 if variance is not None else None,
        "length/mean": tokens / rows if rows else None,
        "truncated/share": truncated / rows if rows else None,
        "staleness/mean": ages / answers if answers else None,
        "staleness/max": oldest_age.item() if answers else None,
        **_token_shares(batch, version, parallel),
    }


def _token_shares(batch: TensorDict, version: int, parallel: ParallelContext) -> dict[str, float | None]:
    """`staleness/share_0` to `staleness/share_3` and `staleness/share_4_and_more`: the share of trained tokens of each
    age, version minus the token's (collective). None without a trained token."""
    trained = batch["versions"][batch["loss_mask"] & (batch["versions"] >= 0)]
    age = (version - trained).clamp(0, OLDEST).long()
    counts = parallel.sum_over_replicas(torch.bincount(age, minlength=OLDEST + 1).double())
    total = counts.sum().item()
    names = [f"staleness/share_{n}" for n in range(OLDEST)] + [f"staleness/share_{OLDEST}_and_more"]
    return {name: n / total if total else None for name, n in zip(names, counts.tolist(), strict=True)}
