"""Layouts of megatron-core's parameters: their Hugging Face tensors, and their split over ranks.

A layout knows the Hugging Face shapes, creates the shard of a rank, and reassembles the Hugging Face tensors from the
shards of all ranks. Both directions only copy values; their results share no memory with their inputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["FusedQKV", "Layout", "Replicated", "Split"]

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Replicated:
    """Layout of parameters that every rank holds: norms, a scalar head."""

    shape: Shape

    def shapes(self) -> tuple[Shape, ...]:
        return (self.shape,)

    def shard(self, tensors: Sequence[Tensor], rank: int, size: int) -> Tensor:
        return _copy(tensors[0])

    def unshard(self, shards: Sequence[Tensor]) -> tuple[Tensor, ...]:
        return (_copy(shards[0]),)


@dataclass(frozen=True, slots=True)
class Split:
    """Layout of one or several matrices of one shape, each split evenly along a dimension.

    A rank concatenates its slices of the matrices. With gate and up projections, a rank thus multiplies matching slices
    of both. The concatenated shards of all ranks are therefore not the gate projection followed by the up projection.
    """

    shape: Shape
    """Shape of each matrix."""
    dim: int = 0
    """Dimension along which the matrices are split: 0 by rows, 1 by columns (projections to the residual stream)."""
    count: int = 1
    """Number of matrices: 2 for gate and up."""
    padded: int | None = None
    """Size along the dimension with zero padding (the vocabulary); None: no padding."""

    def shapes(self) -> tuple[Shape, ...]:
        return (self.shape,) * self.count

    def shard(self, tensors: Sequence[Tensor], rank: int, size: int) -> Tensor:
        width = (self.padded or self.shape[self.dim]) // size
        parts = [tensor.detach().movedim(self.dim, 0)[rank * width : (rank + 1) * width] for tensor in tensors]
        return torch.cat([F.pad(part, (0, 0, 0, width - len(part))).movedim(0, self.dim) for part in parts], self.dim)

    def unshard(self, shards: Sequence[Tensor]) -> tuple[Tensor, ...]:
        parts = zip(*(shard.chunk(self.count, self.dim) for shard in shards), strict=True)
        return tuple(torch.cat(part, self.dim).narrow(self.dim, 0, self.shape[self.dim]) for part in parts)


@dataclass(frozen=True, slots=True)
class FusedQKV:
    """Layout of q, k and v as one matrix, interleaved by query group, then split by rows.

    q has the shape [heads*d, ...], k and v have [groups*d, ...]. The rows of a group are its query heads, its key head
    and its value head: q1 q2 k1 v1 | q3 q4 k2 v2 | ... So a rank with whole groups holds all rows that its attention
    uses. With more ranks than groups the rows are still split evenly, and megatron-core gathers the outputs of a group
    before it uses them.
    """

    heads: int
    groups: int
    head_dim: int
    trailing: Shape
    """Shape after the rows: (hidden,) for a weight, () for a bias."""

    def shapes(self) -> tuple[Shape, ...]:
        q = (self.heads * self.head_dim, *self.trailing)
        kv = (self.groups * self.head_dim, *self.trailing)
        return (q, kv, kv)

    def shard(self, tensors: Sequence[Tensor], rank: int, size: int) -> Tensor:
        grouped = [tensor.reshape(self.groups, -1, *self.trailing) for tensor in tensors]
        fused = torch.cat(grouped, dim=1).flatten(0, 1)
        rows = fused.shape[0] // size
        return _copy(fused[rank * rows : (rank + 1) * rows])

    def unshard(self, shards: Sequence[Tensor]) -> tuple[Tensor, ...]:
        fused = torch.cat(list(shards)).reshape(self.groups, -1, *self.trailing)
        widths = [self.heads // self.groups * self.head_dim, self.head_dim, self.head_dim]
        return tuple(_copy(part).flatten(0, 1) for part in fused.split(widths, dim=1))


Layout = Replicated | Split | FusedQKV
"""Mapping between one parameter of megatron-core and its Hugging Face tensors.

`shapes` returns the shapes of the Hugging Face tensors. `shard` creates from them the shard of `rank` among `size`
tensor-parallel ranks. `unshard` reassembles them from the shards of all ranks in rank order.
"""


def shard_shape(layout: Layout, size: int) -> Shape:
    """Return the shape of the shard on each of `size` ranks."""
    tensors = [torch.empty(shape, device="meta") for shape in layout.shapes()]
    return tuple(layout.shard(tensors, 0, size).shape)


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors with at least one dimension are bitwise equal, NaN included."""
    return (
        one.dtype == other.dtype
        and one.shape == other.shape
        and torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))
    )


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().clone(memory_format=torch.contiguous_format)
