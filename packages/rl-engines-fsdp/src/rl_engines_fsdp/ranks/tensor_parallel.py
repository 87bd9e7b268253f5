"""Splitting the matrices of decoder layers over ranks, by the plan that the model's family has in transformers.

Column by column, then row by row (Shoeybi et al. 2019, Megatron-LM, section 3): each rank computes its heads and its
part of the hidden units of an MLP, and a sum over ranks makes the layer's output whole. Parameters become DTensors, so
that checkpoints and publishing see whole ones; the computation runs on plain local tensors.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

from rl_contracts.errors import ModelError
from rl_contracts.linear import linear
from rl_engines_fsdp.ranks.collectives import copy_to, sum_over
from rl_engines_fsdp.ranks.sharding import local

COLUMNS, ROWS, PARTIAL = "colwise", "rowwise", "replicated_with_grad_allreduce"
"""The styles of transformers' plans that are known here. The last: a module whose parameters all ranks hold, but which
sees each rank's heads only, so that its gradients are sums over ranks."""


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
    for name, found, style in planned_modules(model):
        module: Any = found
        if style == PARTIAL:
            partial_gradients += [f"{name}.{p}" for p, _ in module.named_parameters()]
            continue
        columns = style == COLUMNS
        _split(module, "weight", 0 if columns else 1, mesh, name)
        if columns and module.bias is not None:
            _split(module, "bias", 0, mesh, name)
        module.forward = partial(_columns if columns else _rows, module, group)
    return partial_gradients


def planned_modules(model: Any) -> list[tuple[str, nn.Module, str]]:
    """Name, module and style of each module that the model's plan speaks of, but for embeddings and head.

    Those lie over all ranks, see `TokenSplit`.

    Raises:
        ModelError: there is no plan, or it has a style that is not known here.
    """
    plan = getattr(model, "tp_plan", None) or {}
    outside = (model.get_input_embeddings(), model.get_output_embeddings())
    planned = {name: (module, plan[_wildcard(name)]) for name, module in _modules_and_parameters(model, plan, outside)}
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


def _modules_and_parameters(model: Any, plan: dict[str, str], outside: tuple[Any, ...]) -> Iterator[tuple[str, Any]]:
    """What a plan may name: mostly modules, but single parameters where experts are fused."""
    for name, found in [*model.named_modules(), *model.named_parameters()]:
        if _wildcard(name) in plan and not any(found is module for module in outside):
            yield name, found


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
    whole = parameter.detach()
    piece = distribute_tensor(whole, mesh, [Shard(dim)], src_data_rank=None)
    module.register_parameter(name, nn.Parameter(piece, parameter.requires_grad))


def _columns(layer: nn.Linear, group: ProcessGroup, x: Tensor) -> Tensor:
    """The rank's part of the outputs of a linear layer, from whole inputs."""
    bias = None if layer.bias is None else local(layer.bias)
    return linear(copy_to(x, group), local(layer.weight), bias)


def _rows(layer: nn.Linear, group: ProcessGroup, x: Tensor) -> Tensor:
    """The whole outputs of a linear layer, from the rank's part of the inputs."""
    out = sum_over(linear(x, local(layer.weight)), group)
    return out if layer.bias is None else out + local(layer.bias)
