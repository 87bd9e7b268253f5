"""The layouts of megatron-core's parameters: which Hugging Face tensors each is made of, and how ranks share it.

A layout knows the Hugging Face shapes, makes one rank's shard, and makes the Hugging Face tensors of all ranks' shards
again. Both directions only move numbers, and what they return shares no memory with what they were given.
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
    """What every rank holds: the norms, a scalar head."""

    shape: Shape

    def shapes(self) -> tuple[Shape, ...]:
        return (self.shape,)

    def shard(self, tensors: Sequence[Tensor], rank: int, size: int) -> Tensor:
        return _copy(tensors[0])

    def unshard(self, shards: Sequence[Tensor]) -> tuple[Tensor, ...]:
        return (_copy(shards[0]),)


@dataclass(frozen=True, slots=True)
class Split:
    """Matrices of one shape, each split evenly along a dimension; a rank puts its parts of them one behind the other.

    So a fused matrix of gate and up is not the ranks' shards one below the other: a rank must be able to multiply its
    half of the gate with its half of the up projection.
    """

    shape: Shape
    """Of each."""
    dim: int = 0
    """Along which they are split: 0 by rows, 1 by columns (the projections back to the residual stream)."""
    count: int = 1
    """How many there are: 2 for gate and up."""
    padded: int | None = None
    """Size along the dimension with the zeros that fill it up (the vocabulary); None: none are added."""

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
    """q [heads*d, ...], k and v [groups*d, ...] as one, interleaved by query group, then split by rows.

    The rows of a group are its query heads, its key head and its value head: q1 q2 k1 v1 | q3 q4 k2 v2 | ... Hence a
    rank that holds whole groups holds everything that its attention needs; with more ranks than groups the rows are
    still split evenly, and megatron-core gathers a group's outputs before it uses them.
    """

    heads: int
    groups: int
    head_dim: int
    trailing: Shape
    """What follows the rows: (hidden,) of a weight, nothing of a bias."""

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
"""How one parameter of megatron-core is made of Hugging Face tensors and split over tensor-parallel ranks: `shapes` are
those of the Hugging Face tensors, `shard` makes of them what `rank` of `size` ranks holds, and `unshard` makes them of
the shards of all ranks, in their order."""


def shard_shape(layout: Layout, size: int) -> Shape:
    """Shape of what each of `size` ranks holds."""
    tensors = [torch.empty(shape, device="meta") for shape in layout.shapes()]
    return tuple(layout.shard(tensors, 0, size).shape)


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors of one or more dimensions are equal to the bit, NaN included."""
    return (
        one.dtype == other.dtype
        and one.shape == other.shape
        and torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))
    )


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().clone(memory_format=torch.contiguous_format)
