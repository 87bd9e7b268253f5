"""Which rank learns from which row, and in which minibatch.

Minibatches are cut in global order of (group, episode) before they are sharded over data-parallel replicas, so that the
same rows meet in the same optimizer step however many replicas there are. Within a minibatch the replicas' tokens are
balanced, which may split a group: nothing that follows looks at positions, only at ids. Rows of one unit (the entry
`unit_ids`: the two answers of a preference pair) are never parted.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from rl_contracts.packing import balance, cut
from rl_contracts.trajectory import UNIT_KEY, concatenate, lengths, select

if TYPE_CHECKING:
    from tensordict import TensorDict

    from rl_contracts.parallel import ParallelContext

MINIBATCH_KEY = "minibatch"
"""int64 [B]: the minibatch of the step in which a row is learned from."""


def global_order(batch: TensorDict) -> torch.Tensor:
    """Row indices, int64 [B], sorted by (group id, episode id); rows of one episode keep their order."""
    by_episode = torch.argsort(batch["episode_ids"], stable=True)
    return by_episode[torch.argsort(batch["group_ids"][by_episode], stable=True)]


def _units(batch: TensorDict, order: torch.Tensor) -> torch.Tensor:
    """Unit of each row of `order`, int64 [B], counted from 0 by the first row; a row by itself is a unit."""
    places = torch.arange(len(order))
    if UNIT_KEY not in batch:
        return places
    names, unit = torch.unique(batch[UNIT_KEY][order], return_inverse=True)
    first = torch.full((len(names),), len(order)).scatter_reduce(0, unit, places, "amin")
    return first.argsort().argsort()[unit]


def shard_batch(batch: TensorDict, parallel: ParallelContext, minibatches: int = 1) -> TensorDict:
    """This replica's rows of a batch that every replica holds whole, with the entry `minibatch`.

    With fewer rows (or units of rows) than minibatches, as at the end of the data, some minibatches have none.
    """
    order = global_order(batch)
    unit = _units(batch, order)
    total = int(unit.max()) + 1 if len(unit) else 0
    tokens = torch.zeros(total, dtype=torch.int64).index_add(0, unit, lengths(batch)[order])
    minibatch = torch.full((total,), -1)  # of this replica's units
    for number, part in enumerate(cut(total, minibatches)):
        chosen = balance(tokens[part.start : part.stop].tolist(), parallel.dp_size)[parallel.dp_rank]
        minibatch[torch.tensor(chosen, dtype=torch.int64) + part.start] = number
    label = minibatch[unit]
    # by minibatch, and in global order within it
    mine = torch.argsort(label, stable=True)[int((label < 0).sum()) :]
    result = select(batch, order[mine])
    result[MINIBATCH_KEY] = label[mine]
    return result


def redistribute(batch: TensorDict, parallel: ParallelContext, minibatches: int = 1) -> TensorDict:
    """Exchange rows between all ranks (collective): from what each collected to what its replica learns from.

    Args:
        batch: this rank's rows; none on a rank that collects none, such as one that is not its replica's head. Only
            tensors travel.

    Returns:
        its share of every minibatch, with the entry `minibatch`.
    """
    from tensordict import TensorDict

    if parallel.world_size == 1:
        return shard_batch(batch, parallel, minibatches)
    mine = {str(k): v for k, v in batch.items() if isinstance(v, torch.Tensor)}
    parts = [
        TensorDict(part, batch_size=part["input_ids"].shape[:1])
        for part in parallel.gather_tensors(mine, all_ranks=True)
    ]
    return shard_batch(concatenate([part for part in parts if part.batch_size[0]] or parts[:1]), parallel, minibatches)
