"""Layout of a packed micro-batch over the ranks of a replica."""

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
    """Packed tokens of one context rank, the same on all its tensor ranks and pipeline stages.

    With R > 1 context ranks, each sequence is padded at its end to a multiple of 2R tokens. Causal attention keeps
    padding from affecting other tokens. N is the number of tokens of the micro-batch, and n the number of tokens on
    this rank with padding.
    """

    ids: Tensor
    """Token ids, int64 [n]."""
    targets: Tensor
    """Next token of each token, int64 [n]. Meaningless for the last token of a sequence."""
    temperature: Tensor
    """Sampling temperature, float32 [n]."""
    segments: Segments
    """Boundaries of the sequences."""
    places: Tensor
    """Position of each token of the micro-batch in the tensor gathered from the context ranks, int64 [N]."""
    first: Tensor
    """True if each token is the first of its sequence, bool [N]."""
    owner: Tensor
    """Sequence of each token, int64 [n]; for padding, the number of sequences."""
    sizes: Tensor
    """Tokens of each sequence without padding, over all context ranks, int64 [S]."""

    def outputs(self, values: Tensor, of_previous: bool) -> Tensor:
        """Return one entry per token of the micro-batch [N] from this rank's outputs [n], on all context ranks.

        Args:
            values: outputs of the states of this rank.
            of_previous: whether entry t is the output of the state at t - 1, with 0 for the first token; otherwise it
                is the output of the state at t.
        """
        if self.segments.places is not None:
            values = _GatherFromContextRanks.apply(values, parallel_state.get_context_parallel_group())
        if not of_previous:
            return values[self.places]
        return values[F.pad(self.places[:-1], (1, 0))].masked_fill(self.first, 0.0)


def make_packed_sequences(packed: PackedBatch, divisor: int, device: torch.device, least: int = 0) -> PackedSequences:
    """Distribute a micro-batch over context ranks; an empty one becomes a sequence of padding.

    Args:
        packed: the whole micro-batch, on `device`.
        divisor: number that must divide the tokens of each context rank.
        device: device of the result.
        least: minimum number of tokens; padding is added to shorter micro-batches.
    """
    ranks = parallel_state.get_context_parallel_world_size()
    lengths = padded_lengths(packed, divisor)
    if sum(lengths) < least:
        lengths.append(least - sum(lengths))
    edges = F.pad(torch.tensor(lengths).cumsum(0), (1, 0)).to(device)
    place = edges[packed.sequence_of_token] + packed.position_ids
    total = sum(lengths)
    ids = torch.zeros(total, dtype=torch.int64, device=device).index_copy(0, place, packed["input_ids"])
    temperature = torch.ones(total, device=device).index_copy(0, place, packed.per_token("temperature").float())
    local_indices, gathered_positions = _context_split(edges, ranks)
    cu, longest = edges.to(torch.int32), max(lengths)
    segments = Segments(
        "thd", cu, cu, max_seqlen_q=longest, max_seqlen_kv=longest, lengths=tuple(lengths), places=gathered_positions
    )
    places = place if gathered_positions is None else gathered_positions[place]
    sizes, first = packed.cu_seqlens.diff().long(), packed.position_ids == 0
    owner = torch.full_like(ids, len(sizes)).index_copy(0, place, packed.sequence_of_token)
    per_token_tensors = (ids, ids.roll(-1), temperature, owner)
    ids, targets, temperature, owner = (
        per_token_tensors if local_indices is None else (values[local_indices] for values in per_token_tensors)
    )
    return PackedSequences(ids, targets, temperature, segments, places, first, owner, sizes)


def padded_lengths(packed: PackedBatch, divisor: int) -> list[int]:
    """Return the padded length of each sequence of a micro-batch, in tokens over all context ranks.

    If the tokens per context rank are not divisible by `divisor`, a last entry of pure padding is added.
    """
    ranks = parallel_state.get_context_parallel_world_size()
    multiple = 2 * ranks if ranks > 1 else 1
    lengths = [-(-length // multiple) * multiple for length in packed.cu_seqlens.diff().tolist()]
    missing = -(sum(lengths) // ranks) % divisor if lengths else 2 * divisor
    if missing:
        lengths.append((missing + divisor * (ranks > 1 and missing % 2)) * ranks)
    return lengths


def _context_split(edges: Tensor, ranks: int) -> tuple[Tensor | None, Tensor | None]:
    """Return the row indices of this context rank's tokens [n], and the position of each token when gathered [P]."""
    if ranks == 1:
        return None, None
    sizes = edges.diff()
    offset = torch.arange(int(edges[-1]), device=edges.device) - edges[:-1].repeat_interleave(sizes)
    piece = offset // (sizes // (2 * ranks)).repeat_interleave(sizes)
    order = torch.minimum(piece, 2 * ranks - 1 - piece).argsort(stable=True)
    size, rank = len(order) // ranks, parallel_state.get_context_parallel_rank()
    return order[rank * size : (rank + 1) * size], order.argsort()


class _GatherFromContextRanks(torch.autograd.Function):
    """Concatenation of the tensors of all context ranks.

    All ranks compute the same loss from it, so backward returns the local slice of the gradient without a sum.
    """

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
