"""How old the trained tokens of a batch are, in versions."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from tensordict import TensorDict

    from rl_contracts.parallel import ParallelContext

OLDEST = 4
"""Ages from here on are counted together."""


def token_shares(batch: TensorDict, version: int, parallel: ParallelContext) -> dict[str, float | None]:
    """`staleness/share_0` to `staleness/share_3` and `staleness/share_4_and_more`: the share of trained tokens of each
    age, version minus the token's (collective). None without a trained token."""
    age = (version - batch["versions"][batch["loss_mask"]]).clamp(0, OLDEST).long()
    counts = parallel.sum_over_replicas(torch.bincount(age, minlength=OLDEST + 1).double())
    total = counts.sum().item()
    names = [f"staleness/share_{n}" for n in range(OLDEST)] + [f"staleness/share_{OLDEST}_and_more"]
    return {name: n / total if total else None for name, n in zip(names, counts.tolist(), strict=True)}
