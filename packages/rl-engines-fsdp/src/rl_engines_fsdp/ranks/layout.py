"""A data x context x tensor layout of ranks: its device meshes, and how the tokens of a packed row lie over a replica.

Ranks are numbered with tensor fastest, then context, then data, so that the ranks that talk most lie on one host.

Context ranks hold consecutive parts of the row through the whole decoder. Tensor ranks hold the same tokens there, but
only a part of each matrix; the vocabulary projection, which is not split over them, is shared out by tokens: each
tensor rank does its part of its context rank's tokens. So before the head every rank of a replica has tokens of its
own, in the order of ranks, and after it log-probs are gathered from all of them: losses see whole rows.

Gradients of the head's inputs are scaled by the tensor size T on their way down, because the parameters outside the
decoder layers are sharded, and their gradients averaged, over tensor ranks too (see `sharding.shard`): each tensor rank
has only its tokens' part of the head's gradient, and the mean of T times the parts is their sum. Below the head the
factor is taken out again (`collectives.take_part`).
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
    """The groups over which tokens are split; all None: one rank holds them all."""

    context: Any = None
    """Ranks with consecutive parts of a row; None with one."""
    tensor: Any = None
    """Ranks with the same tokens and parts of the matrices; None with one."""
    replica: Any = None
    """Both together, tensor ranks of a context rank side by side; None with one."""

    def inputs(self, input_ids: Tensor, position_ids: Tensor, segments: Segments) -> tuple[Tensor, Tensor, Segments]:
        """This rank's part of what the decoder reads.

        A row that does not divide evenly is padded by a sequence of its own, which no token of the row sees.

        Args:
            input_ids, position_ids: int64 [N].
            segments: where the sequences lie.

        Returns:
            int64 [n] twice, and the segments of the padded row with the context group.
        """
        if self.replica is None:
            return input_ids, position_ids, segments
        missing = -len(input_ids) % self._ranks
        if missing:
            padding = torch.arange(missing, device=input_ids.device)
            input_ids, position_ids = torch.cat([input_ids, 0 * padding]), torch.cat([position_ids, padding])
            edges = torch.cat([segments.cu_seqlens, segments.cu_seqlens[-1:] + missing])
            segments = Segments((*segments.lengths, missing), edges)
        packed = Segments(segments.lengths, segments.cu_seqlens, self.context)
        return self.part(input_ids), self.part(position_ids), packed

    def part(self, values: Tensor) -> Tensor:
        """Of one value per token of the padded row, those of this rank's tokens: [N] to [n]."""
        return values if self.context is None else own_part(values, self.context)

    def each(self, hidden: Tensor) -> Tensor:
        """The states that this rank's head reads, [m, H], of those that its decoder made, [n, H]."""
        return hidden if self.tensor is None else take_part(hidden, self.tensor)

    def before_next(self, hidden: Tensor) -> Tensor:
        """The same for what each state says of the next token; the row's last state may be left out."""
        return hidden[:-1] if self.replica is None else self.each(hidden)

    def next_of(self, values: Tensor, fill: float = 0) -> Tensor:
        """Entries of the tokens that follow the states of `before_next`: [N] to [m], `fill` behind the row's end."""
        if self.replica is None:
            return values[1:]
        ends = values.new_full((1 + -len(values) % self._ranks,), fill)
        return own_part(torch.cat([values[1:], ends]), self.replica)

    def whole(self, values: Tensor, count: int) -> Tensor:
        """What all ranks' heads said, in the order of tokens: [m] to the first `count`, the same on every rank."""
        if self.replica is None:
            return values
        weight = 1.0 if self.tensor is None else float(dist.get_world_size(self.tensor))
        return gather(values, self.replica, weight)[:count]

    @property
    def _ranks(self) -> int:
        return dist.get_world_size(self.replica)


@dataclass(frozen=True, slots=True)
class Meshes:
    """One layout of all ranks."""

    whole: DeviceMesh
    """All ranks in one dimension: over them lie the parameters outside the decoder layers."""
    layers: DeviceMesh
    """Data and context ranks in one dimension: over them lie the parameters of the decoder layers."""
    tensor: DeviceMesh | None
    """Ranks over which the matrices of the decoder layers are split first; None with one."""
    split: TokenSplit
    """The groups over which tokens are split."""


def make_meshes(device: str, strategy: ParallelStrategy) -> Meshes:
    """Make the process groups of a layout (collective over all ranks).

    Args:
        device: its type, `cpu` or `cuda`.
        strategy: sizes; data * context * tensor ranks must be there.
    """
    data, context, tensor = strategy.data, strategy.context, strategy.tensor
    whole = init_device_mesh(device, (strategy.world_size,), mesh_dim_names=("all",))
    if context * tensor == 1:
        return Meshes(whole, whole, None, TokenSplit())
    grid = init_device_mesh(device, (data, context, tensor), mesh_dim_names=("data", "context", "tensor"))
    contexts: Any = grid.get_group("context") if context > 1 else None
    if tensor == 1:
        return Meshes(whole, whole, None, TokenSplit(context=contexts, replica=contexts))
    # FSDP wants its mesh and that of the tensor ranks cut from one
    matrices = init_device_mesh(device, (data * context, tensor), mesh_dim_names=("shard", "tensor"))
    tensors: Any = matrices.get_group("tensor")
    replicas: Any = tensors
    if context > 1:
        replicas = init_device_mesh(device, (data, context * tensor), mesh_dim_names=("data", "replica")).get_group(
            "replica"
        )
    return Meshes(whole, matrices["shard"], matrices["tensor"], TokenSplit(contexts, tensors, replicas))
