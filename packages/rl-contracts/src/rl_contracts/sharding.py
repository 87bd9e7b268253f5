"""Which rank learns from which row, and in which minibatch.

Minibatches are cut in global order of (group, episode) before they are sharded over data-parallel replicas, so that the
same rows meet in the same optimizer step however many replicas there are. Within a minibatch the replicas' tokens are
balanced, which may split a group: nothing that follows looks at positions, only at ids. Rows of one unit (the entry
`unit_ids`: the two answers of a preference pair) are never parted.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rl_contracts.errors import ConfigError
from rl_contracts.packing import balance, cut, units_of

if TYPE_CHECKING:
    import torch
    from tensordict import TensorDict

    from rl_contracts.parallel import ParallelContext

MINIBATCH_KEY = "minibatch"
"""int64 [B]: the minibatch of the step in which a row is learned from."""


def global_order(batch: TensorDict) -> torch.Tensor:
    """Row indices, int64 [B], sorted by (group id, episode id); rows of one episode keep their order."""
    import torch

    by_episode = torch.argsort(batch["episode_ids"], stable=True)
    return by_episode[torch.argsort(batch["group_ids"][by_episode], stable=True)]


def _ordered_units(batch: TensorDict) -> list[list[int]]:
    """Rows that stay together, in global order."""
    from rl_contracts.trajectory import UNIT_KEY

    order = global_order(batch)
    rows: list[int] = order.tolist()
    if UNIT_KEY not in batch:
        return [[row] for row in rows]
    return [[rows[place] for place in unit] for unit in units_of(batch[UNIT_KEY][order].tolist())]


def share(batch: TensorDict, parallel: ParallelContext, minibatches: int = 1) -> TensorDict:
    """This replica's rows of a batch that every replica holds whole, with the entry `minibatch`.

    Raises:
        ConfigError: there are fewer rows (or units of rows) than minibatches.
    """
    import torch

    from rl_contracts.trajectory import lengths, select

    together = _ordered_units(batch)
    if len(together) < minibatches:
        raise ConfigError(
            f"a batch of {len(together)} rows cannot be cut into {minibatches} minibatches; lower actor.minibatches."
        )
    tokens = lengths(batch).tolist()
    mine: list[int] = []
    label: list[int] = []
    for number, part in enumerate(cut(len(together), minibatches)):
        members = together[part.start : part.stop]
        weights = [sum(tokens[row] for row in unit) for unit in members]
        chosen = balance(weights, parallel.dp_size)[parallel.dp_rank]
        rows = [row for index in chosen for row in members[index]]
        mine += rows
        label += [number] * len(rows)
    result = select(batch, mine)
    result[MINIBATCH_KEY] = torch.tensor(label, dtype=torch.int64)
    return result


def redistribute(batch: TensorDict, parallel: ParallelContext, minibatches: int = 1) -> TensorDict:
    """Exchange rows between all ranks (collective): from what each collected to what its replica learns from.

    Args:
        batch: this rank's rows; none on a rank that collects none, such as one that is not its replica's head. Only
            tensors travel.

    Returns:
        its share of every minibatch, with the entry `minibatch`.
    """
    import torch
    from tensordict import TensorDict

    from rl_contracts.trajectory import concatenate

    if parallel.world_size == 1:
        return share(batch, parallel, minibatches)
    mine = {str(k): v for k, v in batch.items() if isinstance(v, torch.Tensor)}
    parts = [
        TensorDict(part, batch_size=part["input_ids"].shape[:1])
        for part in parallel.gather_tensors(mine, all_ranks=True)
    ]
    return share(concatenate([part for part in parts if part.batch_size[0]] or parts[:1]), parallel, minibatches)
