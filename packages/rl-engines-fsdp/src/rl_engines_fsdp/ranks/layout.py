"""Layout of data x context x tensor ranks: device meshes, and the split of packed tokens over a replica.

Ranks are numbered with tensor fastest, then context, then data, so that the ranks that communicate most are on one
host.

In the decoder, each context rank has a consecutive chunk of the tokens. Tensor ranks have the same tokens there, but
only a part of each matrix. The vocabulary projection is not split over tensor ranks; instead, each tensor rank runs it
for a part of the tokens of its context rank. So at the head, every rank of a replica has different tokens, in the order
of ranks. The log-probs are then gathered from all ranks, so that losses get whole sequences.

Parameters outside the decoder layers are sharded over tensor ranks too, and their gradients are averaged over tensor
ranks (see `sharding.shard`). At the head, a tensor rank only has the gradient of the tokens assigned to it. Each of the
T tensor ranks therefore multiplies this gradient by T, so that the mean over tensor ranks is the sum over all tokens.
Below the head, `collectives.take_part` divides by T again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from rl_contracts.allocation import ParallelStrategy
from rl_engines_fsdp.model.attention import Segments
from rl_engines_fsdp.ranks.collectives import gather, own_part, take_part


@dataclass(frozen=True, slots=True)
class TokenSplit:
    """Process groups over which tokens are split; all None if one rank has all tokens."""

    context: Any = None
    """Group of the ranks with consecutive chunks of the tokens; None for a single rank."""
    tensor: Any = None
    """Group of the ranks with the same tokens and different parts of the matrices; None for a single rank."""
    replica: Any = None
    """Group of all ranks of the replica, ordered by context rank, then tensor rank; None for a single rank."""

    def inputs(self, input_ids: Tensor, position_ids: Tensor, segments: Segments) -> tuple[Tensor, Tensor, Segments]:
        """Return this rank's part of the decoder inputs; see `padded` for the arguments.

        Returns:
            ids and positions, int64 [n], and the boundaries after padding, with the context group.
        """
        input_ids, position_ids, segments = self.padded(input_ids, position_ids, segments)
        return self.part(input_ids), self.part(position_ids), segments

    def padded(self, input_ids: Tensor, position_ids: Tensor, segments: Segments) -> tuple[Tensor, Tensor, Segments]:
        """Append a sequence of padding, which no other token attends to, if N is not divisible by the number of ranks.

        Args:
            input_ids: int64 [N].
            position_ids: int64 [..., N].
            segments: boundaries of the sequences.

        Returns:
            ids, positions, and the boundaries after padding, with the context group.
        """
        if self.replica is None:
            return input_ids, position_ids, segments
        num_padding = -len(input_ids) % self._ranks
        images = segments.images
        if num_padding:
            padding = torch.arange(num_padding, device=input_ids.device)
            input_ids = torch.cat([input_ids, 0 * padding])
            position_ids = torch.cat([position_ids, padding.expand(*position_ids.shape[:-1], -1)], -1)
            images = None if images is None else torch.cat([images, 0 * padding - 1])
            edges = torch.cat([segments.cu_seqlens, segments.cu_seqlens[-1:] + num_padding])
            segments = Segments((*segments.lengths, num_padding), edges)
        return input_ids, position_ids, Segments(segments.lengths, segments.cu_seqlens, self.context, images)

    def part(self, values: Tensor) -> Tensor:
        """Select the values of this rank's tokens from the values of all tokens, including padding: [N] to [n]."""
        return values if self.context is None else own_part(values, self.context)

    def each(self, hidden: Tensor) -> Tensor:
        """Select the states for which this rank runs the head, [m, H], from its decoder's hidden states, [n, H]."""
        return hidden if self.tensor is None else take_part(hidden, self.tensor)

    def before_next(self, hidden: Tensor) -> Tensor:
        """Select the states that predict a next token. Without a split, omit the last state of the micro-batch."""
        return hidden[:-1] if self.replica is None else self.each(hidden)

    def next_of(self, values: Tensor, fill: float = 0) -> Tensor:
        """Select values of the tokens after the states of `before_next`: [N] to [m], padded with `fill` at the end."""
        if self.replica is None:
            return values[1:]
        ends = values.new_full((1 + -len(values) % self._ranks,), fill)
        return own_part(torch.cat([values[1:], ends]), self.replica)

    def whole(self, values: Tensor, count: int) -> Tensor:
        """Gather the head outputs of all ranks in token order: [m] to the first `count`, equal on every rank."""
        if self.replica is None:
            return values
        weight = 1.0 if self.tensor is None else float(dist.get_world_size(self.tensor))
        return gather(values, self.replica, weight)[:count]

    @property
    def _ranks(self) -> int:
        return dist.get_world_size(self.replica)


@dataclass(frozen=True, slots=True)
class Meshes:
    """Device meshes of a parallel layout."""

    whole: DeviceMesh
    """All ranks in one dimension, for the parameters outside of the decoder layers."""
    layers: DeviceMesh
    """Data and context ranks in one dimension, for the parameters of the decoder layers."""
    tensor: DeviceMesh | None
    """Tensor ranks, over which the matrices of the decoder layers are split first; None for a single rank."""
    split: TokenSplit
    """Process groups over which tokens are split."""


def make_meshes(device: str, strategy: ParallelStrategy) -> Meshes:
    """Create the process groups of a layout (collective over all ranks).

    Args:
        device: device type, `cpu` or `cuda`.
        strategy: sizes; their product must be the number of ranks.
    """
    data, context, tensor = strategy.data, strategy.context, strategy.tensor
    whole = init_device_mesh(device, (strategy.world_size,), mesh_dim_names=("all",))
    if context * tensor == 1:
        return Meshes(whole, whole, None, TokenSplit())
    grid = init_device_mesh(device, (data, context, tensor), mesh_dim_names=("data", "context", "tensor"))
    context_group: Any = grid.get_group("context") if context > 1 else None
    if tensor == 1:
        return Meshes(whole, whole, None, TokenSplit(context=context_group, replica=context_group))
    # FSDP requires its mesh and the tensor mesh to be slices of one mesh
    matrices = init_device_mesh(device, (data * context, tensor), mesh_dim_names=("shard", "tensor"))
    tensor_group: Any = matrices.get_group("tensor")
    replica_group: Any = tensor_group
    if context > 1:
        replica_group = init_device_mesh(
            device, (data, context * tensor), mesh_dim_names=("data", "replica")
        ).get_group("replica")
    return Meshes(whole, matrices["shard"], matrices["tensor"], TokenSplit(context_group, tensor_group, replica_group))
