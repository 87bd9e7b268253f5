"""A packed micro-batch as the ranks of a replica read it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state
from torch import Tensor
from torch.autograd.function import once_differentiable

from rl_contracts.batch.trajectory import PackedBatch
from rl_engines_megatron.model.attention import Segments


@dataclass(frozen=True, slots=True)
class PackedSequences:
    """This context rank's part of a packed row, which all tensor ranks and pipeline stages are given alike.

    Sequences are padded behind their ends where they have to divide; padding is seen by nothing before it.
    """

    ids: Tensor
    """int64 [n]."""
    targets: Tensor
    """int64 [n] the token behind each, of the same sequence where there is one."""
    temperature: Tensor
    """float32 [n]."""
    segments: Segments
    """Where the sequences lie."""
    places: Tensor
    """int64 [N] where each token of the micro-batch lies in what is gathered from the context ranks."""
    first: Tensor
    """bool [N] whether it is the first of its sequence."""
    owner: Tensor
    """int64 [n] the sequence of each token; of padding, the number of sequences."""
    sizes: Tensor
    """int64 [S] tokens of each sequence, without padding, over all context ranks."""

    def outputs(self, values: Tensor, of_previous: bool) -> Tensor:
        """What each token's state says, [n], as an entry per token of the micro-batch, [N], on all context ranks.

        Args:
            of_previous: entry t is what the state at t - 1 says, 0 for the first; else what the state at t says.
        """
        if self.segments.places is not None:
            values = _Gather.apply(values, parallel_state.get_context_parallel_group())
        if not of_previous:
            return values[self.places]
        return values[F.pad(self.places[:-1], (1, 0))].masked_fill(self.first, 0.0)


def make_packed_sequences(packed: PackedBatch, divisor: int, device: torch.device, least: int = 0) -> PackedSequences:
    """Lay a micro-batch out over context ranks; one without tokens becomes a sequence of padding.

    Args:
        packed: whole, on `device`.
        divisor: each context rank's part has a multiple of this many tokens.
        least: it is filled up to this many tokens, which another one has with its padding.
    """
    ranks = parallel_state.get_context_parallel_world_size()
    lengths = padded_lengths(packed, divisor)
    if sum(lengths) < least:
        lengths.append(least - sum(lengths))
    edges = F.pad(torch.tensor(lengths).cumsum(0), (1, 0)).to(device)
    place = edges[packed.sequence_of_token] + packed.position_ids
    total = sum(lengths)
    ids = torch.zeros(total, dtype=torch.int64, device=device).index_copy(0, place, packed["input_ids"])
    heat = torch.ones(total, device=device).index_copy(0, place, packed.per_token("temperature").float())
    mine, where = _shares(edges, ranks)
    cu, longest = edges.to(torch.int32), max(lengths)
    segments = Segments(
        "thd", cu, cu, max_seqlen_q=longest, max_seqlen_kv=longest, lengths=tuple(lengths), places=where
    )
    places = place if where is None else where[place]
    sizes, first = packed.cu_seqlens.diff().long(), packed.position_ids == 0
    owner = torch.full_like(ids, len(sizes)).index_copy(0, place, packed.sequence_of_token)
    of_token = (ids, ids.roll(-1), heat, owner)
    ids, targets, heat, owner = of_token if mine is None else (values[mine] for values in of_token)
    return PackedSequences(ids, targets, heat, segments, places, first, owner, sizes)


def padded_lengths(packed: PackedBatch, divisor: int) -> list[int]:
    """Tokens of each sequence of a micro-batch with its padding, over all context ranks, and of what fills it up."""
    ranks = parallel_state.get_context_parallel_world_size()
    multiple = 2 * ranks if ranks > 1 else 1
    lengths = [-(-length // multiple) * multiple for length in packed.cu_seqlens.diff().tolist()]
    missing = -(sum(lengths) // ranks) % divisor if lengths else 2 * divisor
    if missing:
        lengths.append((missing + divisor * (ranks > 1 and missing % 2)) * ranks)
    return lengths


def _shares(edges: Tensor, ranks: int) -> tuple[Tensor | None, Tensor | None]:
    """This context rank's tokens of a row, [n], and where each token lies in what is gathered from all, [P]."""
    if ranks == 1:
        return None, None
    sizes = edges.diff()
    offset = torch.arange(int(edges[-1]), device=edges.device) - edges[:-1].repeat_interleave(sizes)
    piece = offset // (sizes // (2 * ranks)).repeat_interleave(sizes)
    order = torch.minimum(piece, 2 * ranks - 1 - piece).argsort(stable=True)
    size, rank = len(order) // ranks, parallel_state.get_context_parallel_rank()
    return order[rank * size : (rank + 1) * size], order.argsort()


class _Gather(torch.autograd.Function):
    """What all ranks hold, end to end. All compute the same loss of it, so each follows its own part's gradient."""

    @staticmethod
    def forward(ctx, values: Tensor, group: dist.ProcessGroup) -> Tensor:  # type: ignore[no-untyped-def]
        ctx.group = group
        out = values.new_empty(len(values) * dist.get_world_size(group))
        dist.all_gather_into_tensor(out, values.contiguous(), group=group)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[no-untyped-def]
        return grad.chunk(dist.get_world_size(ctx.group))[dist.get_rank(ctx.group)].contiguous(), None
