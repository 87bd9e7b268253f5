"""The layouts of megatron-core's parameters: which Hugging Face tensors each is made of, and how ranks share it.

A layout knows the Hugging Face shapes, makes one rank's shard, and makes the Hugging Face tensors of all ranks' shards
again. Both directions only move numbers, and what they return shares no memory with what they were given.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

Shape = tuple[int, ...]


class Layout(Protocol):
    """How one parameter of megatron-core is made of Hugging Face tensors and split over tensor-parallel ranks."""

    def shapes(self) -> tuple[Shape, ...]:
        """Shapes of the Hugging Face tensors, in the order that `shard` takes them."""
        ...

    def shard(self, tensors: Sequence[Tensor], rank: int, size: int) -> Tensor:
        """What `rank` of `size` ranks holds."""
        ...

    def unshard(self, shards: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """The Hugging Face tensors, of the shards of all ranks in their order."""
        ...


@dataclass(frozen=True, slots=True)
class Replicated:
    """A vector [width] that every rank holds: the norms."""

    width: int

    def shapes(self) -> tuple[Shape, ...]:
        return ((self.width,),)

    def shard(self, tensors: Sequence[Tensor], rank: int, size: int) -> Tensor:
        return _copy(tensors[0])

    def unshard(self, shards: Sequence[Tensor]) -> tuple[Tensor, ...]:
        return (_copy(shards[0]),)


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """A matrix [vocab, hidden], padded with rows of zeros to [padded, hidden] and split by rows."""

    vocab: int
    padded: int
    hidden: int

    def shapes(self) -> tuple[Shape, ...]:
        return ((self.vocab, self.hidden),)

    def shard(self, tensors: Sequence[Tensor], rank: int, size: int) -> Tensor:
        rows = self.padded // size
        piece = tensors[0][rank * rows : (rank + 1) * rows]
        return torch.cat([piece, piece.new_zeros(rows - piece.shape[0], self.hidden)])

    def unshard(self, shards: Sequence[Tensor]) -> tuple[Tensor, ...]:
        return (torch.cat(list(shards))[: self.vocab],)


@dataclass(frozen=True, slots=True)
class SplitColumns:
    """A matrix [rows, columns] split by columns: the projections back to the residual stream (row-parallel layers)."""

    rows: int
    columns: int

    def shapes(self) -> tuple[Shape, ...]:
        return ((self.rows, self.columns),)

    def shard(self, tensors: Sequence[Tensor], rank: int, size: int) -> Tensor:
        columns = self.columns // size
        return _copy(tensors[0][:, rank * columns : (rank + 1) * columns])

    def unshard(self, shards: Sequence[Tensor]) -> tuple[Tensor, ...]:
        return (torch.cat(list(shards), dim=1),)


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
    columns: int | None
    """Width of a weight's input; None for a bias."""

    def _trailing(self) -> Shape:
        return () if self.columns is None else (self.columns,)

    def shapes(self) -> tuple[Shape, ...]:
        q = (self.heads * self.head_dim, *self._trailing())
        kv = (self.groups * self.head_dim, *self._trailing())
        return (q, kv, kv)

    def shard(self, tensors: Sequence[Tensor], rank: int, size: int) -> Tensor:
        grouped = [tensor.reshape(self.groups, -1, *self._trailing()) for tensor in tensors]
        fused = torch.cat(grouped, dim=1).flatten(0, 1)
        rows = fused.shape[0] // size
        return _copy(fused[rank * rows : (rank + 1) * rows])

    def unshard(self, shards: Sequence[Tensor]) -> tuple[Tensor, ...]:
        fused = torch.cat(list(shards)).reshape(self.groups, -1, *self._trailing())
        widths = [self.heads // self.groups * self.head_dim, self.head_dim, self.head_dim]
        return tuple(_copy(part).flatten(0, 1) for part in fused.split(widths, dim=1))


@dataclass(frozen=True, slots=True)
class FusedGateUp:
    """gate and up, each [intermediate, hidden]: both are split by rows, and each rank stacks its two parts.

    So the fused matrix is not the ranks' shards one below the other: a rank must be able to multiply its half of
    the gate with its half of the up projection.
    """

    intermediate: int
    hidden: int

    def shapes(self) -> tuple[Shape, ...]:
        return ((self.intermediate, self.hidden),) * 2

    def shard(self, tensors: Sequence[Tensor], rank: int, size: int) -> Tensor:
        rows = self.intermediate // size
        return torch.cat([tensor[rank * rows : (rank + 1) * rows] for tensor in tensors])

    def unshard(self, shards: Sequence[Tensor]) -> tuple[Tensor, ...]:
        halves = [shard.chunk(2) for shard in shards]
        return torch.cat([gate for gate, _ in halves]), torch.cat([up for _, up in halves])


def shard_shape(layout: Layout, size: int) -> Shape:
    """Shape of what each of `size` ranks holds."""
    tensors = [torch.empty(shape, device="meta") for shape in layout.shapes()]
    return tuple(layout.shard(tensors, 0, size).shape)


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors of one or more dimensions are equal to the bit, NaN included."""
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    return torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().clone(memory_format=torch.contiguous_format)
