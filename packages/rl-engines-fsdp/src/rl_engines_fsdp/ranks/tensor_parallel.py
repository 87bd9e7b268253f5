"""Tensor parallelism: split the matrices of decoder layers over ranks, by the plan of the model in transformers.

Matrices are split by columns, then by rows (Shoeybi et al. 2019, Megatron-LM, section 3). Each rank computes its
attention heads and its part of the hidden units of an MLP, and the layer output is summed over ranks. Parameters become
DTensors, so that checkpoints and publishing can gather them. The computation uses plain local tensors.
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
"""Supported styles of transformers' plans.

In the last style, all ranks store all parameters of a module, but each rank applies it only to its own heads. Its
gradients must be summed over ranks.
"""
TOLERANCE = 0.05
"""Largest distance of a gradient from its mean over tensor ranks, relative to the norm of the mean.

It applies to gradients that should be equal on all tensor ranks.
"""


def split_matrices(model: Any, mesh: DeviceMesh) -> list[str]:
    """Split the matrices of a transformers model in place; it may be on the meta device.

    Args:
        model: transformers model with a tensor-parallel plan.
        mesh: mesh of the tensor ranks.

    Returns:
        names of the parameters whose gradients must be summed over tensor ranks.

    Raises:
        ModelError: there is no plan, it has an unsupported style, or a dimension to split is not divisible by the
            number of tensor ranks.
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
        module.forward = partial(_column_forward if columns else _row_forward, module, group)
    return partial_gradients


def planned_modules(model: Any) -> list[tuple[str, Any, str]]:
    """Return name, module and style of each module in the model's plan, except embeddings and head.

    Embeddings and head are sharded over all ranks instead; see `rl_engines_fsdp.ranks.layout`.

    Raises:
        ModelError: there is no plan, or it has an unsupported style.
    """
    plan = getattr(model, "tp_plan", None) or {}
    excluded = (model.get_input_embeddings(), model.get_output_embeddings())
    # plans name fused experts as parameters
    planned = {
        name: (module, plan[_wildcard(name)])
        for name, module in [*model.named_modules(), *model.named_parameters()]
        if _wildcard(name) in plan and not any(module is other for other in excluded)
    }
    for name, (module, style) in planned.items():
        is_split = style in (COLUMNS, ROWS) and isinstance(module, nn.Linear)
        if not (is_split or (style == PARTIAL and isinstance(module, nn.Module))):
            raise ModelError(
                f"{type(model).__name__}: the tensor-parallel plan in transformers has style {style!r} for {name}; "
                f"supported are {COLUMNS} and {ROWS} for linear layers, and {PARTIAL}. Use data and context "
                "parallelism (d and c)."
            )
    if not any(style in (COLUMNS, ROWS) for _, style in planned.values()):
        raise ModelError(
            f"{type(model).__name__}: transformers has no tensor-parallel plan for this model. Use data and context "
            "parallelism (d and c of the allocation)."
        )
    return [(name, module, style) for name, (module, style) in planned.items()]


def _wildcard(name: str) -> str:
    """Return the name as written in plans: `layers.3.mlp` becomes `layers.*.mlp`."""
    return re.sub(r"\.\d+(?=\.|$)", ".*", name)


def _split(module: nn.Module, name: str, dim: int, mesh: DeviceMesh, module_name: str) -> None:
    parameter = getattr(module, name)
    if parameter.shape[dim] % mesh.size():
        raise ModelError(
            f"{module_name}.{name}: dimension {dim} of shape {list(parameter.shape)} must be divisible by the "
            f"{mesh.size()} tensor ranks. Choose another t in the allocation."
        )
    piece = distribute_tensor(parameter.detach(), mesh, [Shard(dim)], src_data_rank=None)
    module.register_parameter(name, nn.Parameter(piece, parameter.requires_grad))


def _column_forward(layer: nn.Linear, group: ProcessGroup, x: Tensor) -> Tensor:
    """Compute this rank's part of the outputs of a linear layer from whole inputs."""
    bias = None if layer.bias is None else local(layer.bias)
    return linear(copy_to(x, group), local(layer.weight), bias)


def _row_forward(layer: nn.Linear, group: ProcessGroup, x: Tensor) -> Tensor:
    """Compute the whole outputs of a linear layer from this rank's part of the inputs."""
    out = sum_over(linear(x, local(layer.weight)), group)
    return out if layer.bias is None else out + local(layer.bias)


class TensorGradients:
    """Sum partial gradients over tensor ranks after the backward passes of a step.

    Some parameters are applied only to the heads of a rank, such as norms of queries and keys. Their gradients must be
    summed over tensor ranks. All other gradients must be equal on every tensor rank. The first step checks this,
    because a plan that omits a partial parameter would silently train it on incorrect gradients.

    Args:
        model: sharded model.
        tensor: mesh of the tensor ranks.
        layers: mesh over which the parameters of the decoder layers are sharded.
        partial: names of the parameters with partial gradients.
    """

    def __init__(self, model: PackedModel, tensor: DeviceMesh, layers: DeviceMesh, partial: list[str]) -> None:
        parameters = dict(model.own_parameters())
        self._group: Any = tensor.get_group()
        self._partial = [p for name, p in parameters.items() if name in partial]
        self._replicated = {name: p for name, p in parameters.items() if name not in partial and mesh_of(p) == layers}
        self._checked = False

    @torch.no_grad()
    def finish(self, parallel: ParallelContext) -> None:
        """Sum partial gradients in place, and in the first step check all others (collective).

        Raises:
            EngineError: a gradient that should be equal on all tensor ranks differs; raised on every rank.
        """
        shards = [local(p.grad) for p in self._partial if p.grad is not None]
        for shard, total in zip(shards, _summed(shards, self._group), strict=True):
            shard.copy_(total)
        if not self._checked:
            with parallel.agree_on_errors("the first step with tensor parallelism"):
                self._check_replicated()
            # all gradients are zero below a head that starts at zero, so check again in the next step
            nonzero = any(bool(local(p.grad).any()) for p in self._replicated.values() if p.grad is not None)
            self._checked = any(parallel.gather_json(nonzero))

    def _check_replicated(self) -> None:
        named = {name: local(p.grad) for name, p in self._replicated.items() if p.grad is not None}
        ranks = dist.get_world_size(self._group)
        for (name, gradient), total in zip(named.items(), _summed(list(named.values()), self._group), strict=True):
            mean = total / ranks
            distance, norm = (gradient - mean).norm().item(), mean.norm().item()
            if distance > TOLERANCE * norm:
                raise ModelError(
                    f"the gradient of {name} differs by {distance:.3g} from its mean over tensor ranks (norm "
                    f"{norm:.3g}): the tensor-parallel plan of this model in transformers is incomplete. Use data and "
                    "context parallelism (d and c)."
                )


def _summed(shards: list[Tensor], group: Any) -> list[Tensor]:
    """Return the sums of tensors over ranks as new tensors, with a single all-reduce."""
    if not shards:
        return []
    flat = torch.cat([shard.flatten() for shard in shards])
    dist.all_reduce(flat, group=group)
    sums = flat.split([shard.numel() for shard in shards])
    return [total.view_as(shard) for total, shard in zip(sums, shards, strict=True)]
