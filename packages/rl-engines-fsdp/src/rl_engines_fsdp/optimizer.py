"""Optimizers by name, setting their learning rate, and clipping by the global gradient norm."""

from __future__ import annotations

import inspect
from functools import partial
from typing import Any

import torch
from torch import Tensor

from rl_contracts import registry
from rl_contracts.config import OptimizerConfig
from rl_contracts.errors import ConfigError
from rl_engines_fsdp.model.packed import PackedModel
from rl_engines_fsdp.ranks.sharding import decoder_layers, local, mesh_of


def make_optimizer(model: PackedModel, config: OptimizerConfig) -> torch.optim.Optimizer:
    """Create the optimizer that the settings name, for all trained parameters.

    The constructor of the optimizer gets parameter groups, and `lr`, `betas`, `eps` and `weight_decay` if it has these
    parameters. It must have a parameter for each entry of `options`. Vectors (biases and norms) have no weight decay.
    The matrices of the decoder layers are in groups with `matrices: True`.

    Raises:
        ConfigError: no optimizer of that name is installed, or it does not accept one of the options.
    """
    factory = registry.load(config.group, config.name)
    accepted = inspect.signature(factory).parameters
    unknown = sorted(config.options.keys() - accepted.keys())
    if unknown:
        raise ConfigError(
            f"optimizer.name={config.name!r} does not accept the options {unknown}; it accepts {sorted(accepted)}. "
            "Remove them, or choose another optimizer.name."
        )
    betas = (config.beta1, config.beta2)
    common = {"lr": config.lr, "betas": betas, "eps": config.eps, "weight_decay": config.weight_decay}
    optimizer: torch.optim.Optimizer = factory(
        _groups(model, config.weight_decay), **{n: v for n, v in common.items() if n in accepted} | config.options
    )
    return optimizer


def _groups(model: PackedModel, weight_decay: float) -> list[dict[str, Any]]:
    layers = {p for layer in decoder_layers(model) for p in layer.parameters()}
    groups: dict[Any, dict[str, Any]] = {}
    for name, parameter in model.own_parameters():
        if parameter.requires_grad:
            decays = parameter.ndim >= 2 and not name.endswith("bias")
            matrix = decays and parameter in layers and (parameter.ndim == 2 or "experts" in name)
            # torch updates a group in one call, for which all parameters must be on one device mesh
            group = {"params": [], "weight_decay": weight_decay if decays else 0.0, "matrices": matrix}
            groups.setdefault((not decays, matrix, mesh_of(parameter)), group)["params"].append(parameter)
    return [groups[key] for key in sorted(groups, key=lambda key: key[:2])]  # stable sort: groups with decay first


adamw = partial(torch.optim.AdamW, fused=True)
"""AdamW with a fused kernel."""


def set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Set the learning rate of all parameter groups."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate


@torch.no_grad()
def make_state(optimizer: torch.optim.Optimizer) -> None:
    """Create the state of an optimizer that took no step yet, with arbitrary values (collective).

    It takes a step with a learning rate of zero and zero gradients, which changes no parameter.
    """
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    set_rate(optimizer, 0.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def squared_norm(gradients: list[Tensor], ranks: int = 1) -> Tensor:
    """Return this rank's contribution to the sum of squares of all gradients, a float32 scalar.

    Args:
        gradients: gradients, each sharded over its mesh. If the mesh has fewer than all ranks, copies exist on other
            ranks, so the contribution is weighted by the mesh size over `ranks`.
        ranks: number of all ranks.
    """
    norms = torch.stack(torch._foreach_norm([local(gradient) for gradient in gradients]))
    meshes = [mesh_of(gradient) for gradient in gradients]
    weights = [1.0 if mesh is None else mesh.size() / ranks for mesh in meshes]
    return (norms.square() * torch.tensor(weights).to(norms.device, non_blocking=True)).sum()


def clip(gradients: list[Tensor], norm: float, max_norm: float) -> None:
    """Scale gradients in place so that their global norm `norm` becomes at most `max_norm`; 0 disables clipping."""
    if max_norm and norm > max_norm:
        torch._foreach_mul_([local(gradient) for gradient in gradients], max_norm / norm)
