"""Splitting the matrices of decoder layers over ranks, by the plan that the model's family has in transformers.

Column by column, then row by row (Shoeybi et al. 2019, Megatron-LM, section 3): each rank computes its heads and its
part of the hidden units of an MLP, and a sum over ranks makes the layer's output whole. Parameters become DTensors, so
that checkpoints and publishing see whole ones; the computation runs on plain local tensors.
"""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

from rl_contracts.batch.parallel import ParallelContext
from rl_contracts.errors import ModelError
from rl_contracts.models.cpu_matmul import linear
from rl_engines_fsdp.model.packed import PackedModel
from rl_engines_fsdp.ranks.collectives import copy_to, sum_over
from rl_engines_fsdp.ranks.sharding import local, mesh_of

COLUMNS, ROWS, PARTIAL = "colwise", "rowwise", "replicated_with_grad_allreduce"
"""The styles of transformers' plans that are known here. The last: a module whose parameters all ranks hold, but which
sees each rank's heads only, so that its gradients are sums over ranks."""
TOLERANCE = 0.05
"""How far, relative to its norm, a gradient that should be the same on all tensor ranks may be from their mean."""


def split_matrices(model: Any, mesh: DeviceMesh) -> list[str]:
    """Split the matrices of a transformers model in place; it may be on the meta device.

    Args:
        model: whose class or configuration has a plan.
        mesh: the tensor ranks.

    Returns:
        names of the parameters whose gradients must be summed over tensor ranks.

    Raises:
        ModelError: there is no plan, it has a style that is not known here, or something does not divide over the
            ranks.
    """
    group: Any = mesh.get_group()
    partial_gradients: list[str] = []
    for name, module, style in planned_modules(model):
        if style == PARTIAL:
            partial_gradients += [f"{name}.{p}" for p, _ in module.named_parameters()]
            continue
        columns = style == COLUMNS
        _split(module, "weight", 0 if columns else 1, mesh, name)
        if columns and module.bias is not None:
            _split(module, "bias", 0, mesh, name)
        module.forward = partial(_columns if columns else _rows, module, group)
    return partial_gradients


def planned_modules(model: Any) -> list[tuple[str, Any, str]]:
    """Name, module and style of each module that the model's plan speaks of, but for embeddings and head.

    Those lie over all ranks, see `TokenSplit`.

    Raises:
        ModelError: there is no plan, or it has a style that is not known here.
    """
    plan = getattr(model, "tp_plan", None) or {}
    outside = (model.get_input_embeddings(), model.get_output_embeddings())
    planned = {
        name: (found, plan[_wildcard(name)])
        for name, found in [*model.named_modules(), *model.named_parameters()]  # of fused experts, single parameters
        if _wildcard(name) in plan and not any(found is module for module in outside)
    }
    for name, (module, style) in planned.items():
        splits = style in (COLUMNS, ROWS) and isinstance(module, nn.Linear)
        if not (splits or (style == PARTIAL and isinstance(module, nn.Module))):
            raise ModelError(
                f"{type(model).__name__}: its tensor-parallel plan has {style!r} for {name}; supported are {COLUMNS} "
                f"and {ROWS} of linear layers, and {PARTIAL}. Use data and context parallelism for it (d and c)."
            )
    if not any(style in (COLUMNS, ROWS) for _, style in planned.values()):
        raise ModelError(
            f"{type(model).__name__}: expected a tensor-parallel plan, but transformers has none for this model. "
            "Use data and context parallelism for it (d and c of the allocation)."
        )
    return [(name, module, style) for name, (module, style) in planned.items()]


def _wildcard(name: str) -> str:
    """`layers.3.mlp` as plans write it: `layers.*.mlp`."""
    return re.sub(r"\.\d+(?=\.|$)", ".*", name)


def _split(module: nn.Module, name: str, dim: int, mesh: DeviceMesh, where: str) -> None:
    parameter = getattr(module, name)
    if parameter.shape[dim] % mesh.size():
        raise ModelError(
            f"tensor parallelism over {mesh.size()} ranks: {where}.{name} has shape {list(parameter.shape)}, whose "
            f"dimension {dim} does not divide by {mesh.size()}. Use another tensor size."
        )
    piece = distribute_tensor(parameter.detach(), mesh, [Shard(dim)], src_data_rank=None)
    module.register_parameter(name, nn.Parameter(piece, parameter.requires_grad))


def _columns(layer: nn.Linear, group: ProcessGroup, x: Tensor) -> Tensor:
    """The rank's part of the outputs of a linear layer, from whole inputs."""
    bias = None if layer.bias is None else local(layer.bias)
    return linear(copy_to(x, group), local(layer.weight), bias)


def _rows(layer: nn.Linear, group: ProcessGroup, x: Tensor) -> Tensor:
    """The whole outputs of a linear layer, from the rank's part of the inputs."""
    out = sum_over(linear(x, local(layer.weight)), group)
    return out if layer.bias is None else out + local(layer.bias)


class TensorGradients:
    """Makes those gradients whole after the backward passes of a step.

    Of parameters that see each rank's heads only, such as norms of queries and keys, the gradients are sums over tensor
    ranks. All others come out the same on every rank. Whether they do is checked in the first step, because a plan that
    forgets one of the first kind would train it wrongly and say nothing.

    Args:
        model: sharded.
        tensor: the tensor ranks.
        layers: the ranks over which the parameters of the decoder layers lie.
        partial: names of the parameters of the first kind.
    """

    def __init__(self, model: PackedModel, tensor: DeviceMesh, layers: DeviceMesh, partial: list[str]) -> None:
        own = dict(model.own_parameters())
        self._group: Any = tensor.get_group()
        self._partial = [p for name, p in own.items() if name in partial]
        self._alike = {name: p for name, p in own.items() if name not in partial and mesh_of(p) == layers}
        self._checked = False

    @torch.no_grad()
    def finish(self, parallel: ParallelContext) -> None:
        """Sum what is partial, in place, and check the rest if that was not done before (collective).

        Raises:
            EngineError: a gradient differs between tensor ranks that should not, on every rank.
        """
        shards = [local(p.grad) for p in self._partial if p.grad is not None]
        for shard, total in zip(shards, _summed(shards, self._group), strict=True):
            shard.copy_(total)
        if not self._checked:
            with parallel.agree_on_errors("the first step with tensor parallelism"):
                self._check_alike()
            # all zero, as below a head that starts at zero: nothing is known yet
            nonzero = any(bool(local(p.grad).any()) for p in self._alike.values() if p.grad is not None)
            self._checked = any(parallel.gather_json(nonzero))

    def _check_alike(self) -> None:
        named = {name: local(p.grad) for name, p in self._alike.items() if p.grad is not None}
        ranks = dist.get_world_size(self._group)
        for (name, mine), total in zip(named.items(), _summed(list(named.values()), self._group), strict=True):
            mean = total / ranks
            distance, norm = (mine - mean).norm().item(), mean.norm().item()
            if distance > TOLERANCE * norm:
                raise ModelError(
                    f"the gradient of {name} is {distance:.3g} from its mean over tensor ranks, whose norm is "
                    f"{norm:.3g}: the parameter sees part of the heads, and the model's plan in transformers does not "
                    "say so. Use data and context parallelism for this model (d and c)."
                )


def _summed(shards: list[Tensor], group: Any) -> list[Tensor]:
    """Sums over ranks of tensors that every rank has in the same shapes; new tensors, one exchange."""
    if not shards:
        return []
    flat = torch.cat([shard.flatten() for shard in shards])
    dist.all_reduce(flat, group=group)
    parts = flat.split([shard.numel() for shard in shards])
    return [part.view_as(shard) for part, shard in zip(parts, shards, strict=True)]
