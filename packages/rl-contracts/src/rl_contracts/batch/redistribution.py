"""Assign each sequence of a batch to a rank and a minibatch.

The batch is split into minibatches in global order of (group, episode) before minibatches are sharded over
data-parallel replicas. The same sequences thus share an optimizer step for any number of replicas. Within a minibatch,
the costs of the replicas are balanced (`sequence_costs`). This may split a group, which is safe because later stages
use ids, not positions. Sequences of one unit (entry `unit_ids`, such as the two completions of a preference pair) stay
together.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from rl_contracts.batch.image_entries import images_of
from rl_contracts.batch.packing import balance, even_ranges
from rl_contracts.batch.sequence_exchange import agree_on_entries, send_sequences
from rl_contracts.batch.trajectory import UNIT_KEY, lengths, select

if TYPE_CHECKING:
    from tensordict import TensorDict

    from rl_contracts.batch.parallel import ParallelContext

__all__ = ["MINIBATCH_KEY", "redistribute", "shard_batch"]

MINIBATCH_KEY = "minibatch"
"""Entry int64 [B]: index of the minibatch of the step that trains on the sequence."""
PATCH_PIXELS = 14 * 14
"""Pixels of a patch in costs. Most vision encoders have patches of 14 x 14 or 16 x 16 pixels."""


def sequence_keys(batch: TensorDict) -> torch.Tensor:
    """Return the keys that decide the destination of each sequence, int64 [B, 3] or [B, 4].

    The columns are group id, episode id * 2^32 + length, cost, and the unit id if the batch has the entry `unit_ids`.
    """
    columns = [batch["group_ids"], (batch["episode_ids"] << 32) + lengths(batch), sequence_costs(batch)]
    return torch.stack(columns + ([batch[UNIT_KEY]] if UNIT_KEY in batch else []), 1)


def sequence_costs(batch: TensorDict) -> torch.Tensor:
    """Return the cost of each sequence, int64 [B]: its tokens, and the patches of its images for the vision encoder."""
    patches = [sum(image.width * image.height for image in images) // PATCH_PIXELS for images in images_of(batch)]
    return lengths(batch) + torch.tensor(patches, dtype=torch.int64)


def assign(keys: torch.Tensor, replicas: int, minibatches: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Assign sequences to replicas and minibatches. The result is the same on all ranks.

    Args:
        keys: `sequence_keys` of all sequences, [n, 3] or [n, 4].
        replicas: number of data-parallel replicas.
        minibatches: number of minibatches per step.

    Returns:
        index, replica and minibatch of each sequence, int64 [n] each. Sequences are sorted by replica, then by
        minibatch, then in global order.
    """
    order = _global_order(keys)
    unit = _units(keys, order)
    total = int(unit.max()) + 1 if len(unit) else 0
    costs = torch.zeros(total, dtype=torch.int64).index_add(0, unit, keys[order, 2])
    replica, minibatch = torch.zeros(2, total, dtype=torch.int64)  # per unit
    for index, unit_range in enumerate(even_ranges(total, minibatches)):
        minibatch[unit_range.start : unit_range.stop] = index
        for owner, offsets in enumerate(balance(costs[unit_range.start : unit_range.stop].tolist(), replicas)):
            replica[torch.tensor(offsets, dtype=torch.int64) + unit_range.start] = owner
    order_by_destination = torch.argsort((replica * minibatches + minibatch)[unit], stable=True)
    return order[order_by_destination], replica[unit][order_by_destination], minibatch[unit][order_by_destination]


def sequence_lengths(keys: torch.Tensor) -> torch.Tensor:
    """Return the number of real tokens of each sequence, int64 [n], from its `sequence_keys`."""
    return keys[:, 1] & 0xFFFFFFFF


def global_order(batch: TensorDict) -> torch.Tensor:
    """Return the sequence indices sorted by (group id, episode id), int64 [B].

    The sort is stable: sequences of one episode keep their order.
    """
    return _global_order(sequence_keys(batch))


def _global_order(keys: torch.Tensor) -> torch.Tensor:
    by_episode = torch.argsort(keys[:, 1] >> 32, stable=True)
    return by_episode[torch.argsort(keys[by_episode, 0], stable=True)]


def _units(keys: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    """Return the unit index of each sequence of `order`, int64 [n].

    Units are numbered from 0 in the order of their first sequence. Without unit ids, each sequence is a unit.
    """
    positions = torch.arange(len(order))
    if keys.shape[1] == 3:
        return positions
    labels, unit = torch.unique(keys[order, 3], return_inverse=True)
    first = torch.full((len(labels),), len(order)).scatter_reduce(0, unit, positions, "amin")
    return first.argsort().argsort()[unit]


def shard_batch(batch: TensorDict, parallel: ParallelContext, minibatches: int = 1) -> TensorDict:
    """Return the shard of this replica, with the entry `minibatch`, of a batch that all replicas hold in full.

    With fewer units than minibatches, as may happen in the last batch of the data, some minibatches are empty.
    """
    index, replica, minibatch = assign(sequence_keys(batch), parallel.dp_size, minibatches)
    is_local = replica == parallel.dp_rank
    result = select(batch, index[is_local])
    result[MINIBATCH_KEY] = minibatch[is_local]
    return result


def redistribute(batch: TensorDict, parallel: ParallelContext, minibatches: int = 1) -> TensorDict:
    """Send each sequence to the ranks that train on it (collective).

    The traffic of a rank depends on the sequences that it holds before and after, not on the number of ranks. All ranks
    also receive the keys of all sequences: 24 bytes each, or 32 with unit ids.

    Args:
        batch: sequences collected on this rank; empty on a rank that collects none, such as one that is not a
            data-parallel leader. Only tensors are sent, without padding.
        parallel: ranks to exchange with.
        minibatches: number of minibatches per step.

    Returns:
        shard of this rank's replica, with the entry `minibatch`.

    Raises:
        EngineError: on all ranks, if the batches of two ranks have different entries, or a rank exited. The entry
            `token_rewards` may be missing and is then filled with 0.
    """
    if parallel.world_size == 1:
        return shard_batch(batch, parallel, minibatches)
    entries, batch = agree_on_entries(batch, parallel)
    columns = 3 + (UNIT_KEY in entries)
    keys = sequence_keys(batch) if len(batch) else torch.zeros(0, columns, dtype=torch.int64)
    gathered_keys = parallel.gather_bytes(keys.numpy().tobytes())
    sizes = torch.tensor([len(data) // (8 * columns) for data in gathered_keys])
    all_keys = (
        torch.frombuffer(bytearray(b"".join(gathered_keys)), dtype=torch.int64).view(-1, columns)
        if any(gathered_keys)
        else keys
    )
    index_of, replica, minibatch = assign(all_keys, parallel.dp_size, minibatches)
    token_counts = sequence_lengths(all_keys)[index_of]
    # All ranks of a replica need all of its sequences. The source sends each sequence to one rank of the replica, its
    # carrier; carriers are chosen evenly. The second exchange copies the sequences within the replica.
    ranks = parallel.world_size // parallel.dp_size
    within = torch.arange(len(index_of)) - torch.searchsorted(replica, replica)
    carrier, origin = (
        replica * ranks + within % ranks,
        torch.arange(len(gathered_keys)).repeat_interleave(sizes)[index_of],
    )

    def counts(of: torch.Tensor, weights: torch.Tensor) -> tuple[list[int], list[int]]:
        """Count the sequences and tokens per rank, where `of` is the rank of each sequence."""
        empty = torch.zeros(2, len(gathered_keys), dtype=torch.int64)
        sequences, tokens = empty.index_add(1, of, torch.stack([torch.ones_like(weights), weights])).tolist()
        return sequences, tokens

    to_send, received = (
        _sorted_positions(origin == parallel.rank, carrier),
        _sorted_positions(carrier == parallel.rank, origin),
    )
    hops = [(1, counts(carrier[to_send], token_counts[to_send]), counts(origin[received], token_counts[received]))]
    if ranks > 1:
        replica_ranks = torch.arange(ranks) + parallel.dp_rank * ranks
        sent = counts(replica_ranks.repeat_interleave(len(received)), token_counts[received].repeat(ranks))
        received = torch.cat([_sorted_positions(carrier == rank, origin) for rank in replica_ranks.tolist()])
        hops.append((ranks, sent, counts(carrier[received], token_counts[received])))
    local_index = index_of[to_send] - int(sizes[: parallel.rank].sum())
    result = send_sequences(batch, local_index, entries, hops, token_counts[received], parallel)[
        torch.argsort(received)
    ]
    result[MINIBATCH_KEY] = minibatch[replica == parallel.dp_rank]
    return result


def _sorted_positions(local: torch.Tensor, by: torch.Tensor) -> torch.Tensor:
    """Return the positions where `local` is True, sorted by the rank in `by`."""
    positions = local.nonzero()[:, 0]
    return positions[torch.argsort(by[positions], stable=True)]
