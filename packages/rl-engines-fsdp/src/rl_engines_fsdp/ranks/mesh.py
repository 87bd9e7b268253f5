"""The device mesh of a data x context x tensor layout, and the views of it that the parts of the engine need.

Ranks are numbered with tensor fastest, then context, then data, so that the ranks that talk most lie on one host.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from rl_contracts.allocation import ParallelStrategy
from rl_engines_fsdp.ranks.token_split import TokenSplit


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
