"""Which rank learns from which row, and in which minibatch.

Minibatches are cut in global order of (group, episode) before they are sharded over data-parallel replicas, so that the
same rows meet in the same optimizer step however many replicas there are. Within a minibatch the replicas' tokens are
balanced, which may split a group: nothing that follows looks at positions, only at ids. Rows of one unit (the entry
`unit_ids`: the two answers of a preference pair) are never parted.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from rl_contracts.batch.packing import balance, even_ranges
from rl_contracts.batch.sequence_exchange import agree_on_entries, send_sequences
from rl_contracts.batch.trajectory import UNIT_KEY, lengths, select

if TYPE_CHECKING:
    from tensordict import TensorDict

    from rl_contracts.batch.parallel import ParallelContext

__all__ = ["MINIBATCH_KEY", "redistribute", "shard_batch"]

MINIBATCH_KEY = "minibatch"
"""int64 [B]: the minibatch of the step in which a row is learned from."""


def sequence_keys(batch: TensorDict) -> torch.Tensor:
    """What of each row decides where it goes, int64 [B, 2]: its group id; its episode id * 2^32 + its length. With the
    entry `unit_ids` that is the third column."""
    columns = [batch["group_ids"], (batch["episode_ids"] << 32) + lengths(batch)]
    return torch.stack(columns + ([batch[UNIT_KEY]] if UNIT_KEY in batch else []), 1)


def assign(keys: torch.Tensor, replicas: int, minibatches: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Deal rows out to replicas; the same on every rank.

    Args:
        keys: of all rows, see `sequence_keys`.

    Returns:
        index of each row, its replica and its minibatch, int64 [n] each; rows of one replica side by side, by
        minibatch, and in global order within it.
    """
    order = _global_order(keys)
    unit = _units(keys, order)
    total = int(unit.max()) + 1 if len(unit) else 0
    tokens = torch.zeros(total, dtype=torch.int64).index_add(0, unit, sequence_lengths(keys[order]))
    replica, minibatch = torch.zeros(2, total, dtype=torch.int64)  # of each unit
    for number, part in enumerate(even_ranges(total, minibatches)):
        minibatch[part.start : part.stop] = number
        for owner, chosen in enumerate(balance(tokens[part.start : part.stop].tolist(), replicas)):
            replica[torch.tensor(chosen, dtype=torch.int64) + part.start] = owner
    by_place = torch.argsort((replica * minibatches + minibatch)[unit], stable=True)
    return order[by_place], replica[unit][by_place], minibatch[unit][by_place]


def sequence_lengths(keys: torch.Tensor) -> torch.Tensor:
    """Real tokens of rows, int64 [n], of their `sequence_keys`."""
    return keys[:, 1] & 0xFFFFFFFF


def global_order(batch: TensorDict) -> torch.Tensor:
    """Row indices, int64 [B], sorted by (group id, episode id); rows of one episode keep their order."""
    return _global_order(sequence_keys(batch))


def _global_order(keys: torch.Tensor) -> torch.Tensor:
    by_episode = torch.argsort(keys[:, 1] >> 32, stable=True)
    return by_episode[torch.argsort(keys[by_episode, 0], stable=True)]


def _units(keys: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    """Unit of each row of `order`, int64 [n], counted from 0 by the first row; a row by itself is a unit."""
    places = torch.arange(len(order))
    if keys.shape[1] == 2:
        return places
    names, unit = torch.unique(keys[order, 2], return_inverse=True)
    first = torch.full((len(names),), len(order)).scatter_reduce(0, unit, places, "amin")
    return first.argsort().argsort()[unit]


def shard_batch(batch: TensorDict, parallel: ParallelContext, minibatches: int = 1) -> TensorDict:
    """This replica's rows of a batch that every replica holds whole, with the entry `minibatch`.

    With fewer rows (or units of rows) than minibatches, as at the end of the data, some minibatches have none.
    """
    row, replica, minibatch = assign(sequence_keys(batch), parallel.dp_size, minibatches)
    is_local = replica == parallel.dp_rank
    result = select(batch, row[is_local])
    result[MINIBATCH_KEY] = minibatch[is_local]
    return result


def redistribute(batch: TensorDict, parallel: ParallelContext, minibatches: int = 1) -> TensorDict:
    """Send rows to the ranks that learn from them (collective): from what each collected to its replica's share.

    A rank sends and receives no more than it had and gets, however many ranks there are; of other ranks' rows it learns
    16 bytes each (24 where there are units), which decide where they go.

    Args:
        batch: this rank's rows; none on a rank that collects none, such as one that is not its replica's head. Only
            tensors travel. What stands behind a row's end does not.

    Returns:
        its share of every minibatch, with the entry `minibatch`.

    Raises:
        EngineError: the ranks' rows have different entries (rewards of tokens excepted, which are 0 where rows have
            none), or a rank is lost; on every rank.
    """
    if parallel.world_size == 1:
        return shard_batch(batch, parallel, minibatches)
    entries, batch = agree_on_entries(batch, parallel)
    columns = 2 + (UNIT_KEY in entries)
    keys = sequence_keys(batch) if len(batch) else torch.zeros(0, columns, dtype=torch.int64)
    found = parallel.gather_bytes(keys.numpy().tobytes())
    sizes = torch.tensor([len(part) // (8 * columns) for part in found])
    everyone = torch.frombuffer(bytearray(b"".join(found)), dtype=torch.int64).view(-1, columns) if any(found) else keys
    row, replica, minibatch = assign(everyone, parallel.dp_size, minibatches)
    lengths = sequence_lengths(everyone)[row]
    # All ranks of a replica need its rows. So that none sends a row to each of them, rows are dealt out evenly over the
    # replica's ranks, their carriers, which then pass them on to one another.
    ranks = parallel.world_size // parallel.dp_size
    within = torch.arange(len(row)) - torch.searchsorted(replica, replica)
    carrier, origin = replica * ranks + within % ranks, torch.arange(len(found)).repeat_interleave(sizes)[row]

    def counts(of: torch.Tensor, weights: torch.Tensor) -> tuple[list[int], list[int]]:
        """Rows and tokens for, or from, each rank."""
        empty = torch.zeros(2, len(found), dtype=torch.int64)
        rows, tokens = empty.index_add(1, of, torch.stack([torch.ones_like(weights), weights])).tolist()
        return rows, tokens

    leaving, held = _sorted(origin == parallel.rank, carrier), _sorted(carrier == parallel.rank, origin)
    hops = [(1, counts(carrier[leaving], lengths[leaving]), counts(origin[held], lengths[held]))]
    if ranks > 1:
        local_parts = torch.arange(ranks) + parallel.dp_rank * ranks
        sent = counts(local_parts.repeat_interleave(len(held)), lengths[held].repeat(ranks))
        held = torch.cat([_sorted(carrier == rank, origin) for rank in local_parts.tolist()])
        hops.append((ranks, sent, counts(carrier[held], lengths[held])))
    index = row[leaving] - int(sizes[: parallel.rank].sum())
    result = send_sequences(batch, index, entries, hops, lengths[held], parallel)[torch.argsort(held)]
    result[MINIBATCH_KEY] = minibatch[replica == parallel.dp_rank]
    return result


def _sorted(local: torch.Tensor, by: torch.Tensor) -> torch.Tensor:
    """Places of the plan where `mine` holds, by the rank at the other end."""
    places = local.nonzero()[:, 0]
    return places[torch.argsort(by[places], stable=True)]
