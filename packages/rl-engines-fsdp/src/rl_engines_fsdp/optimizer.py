"""AdamW, its learning-rate schedule, and clipping by the global gradient norm."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from rl_contracts.config import OptimizerConfig
from rl_engines_fsdp.ranks.sharding import local, mesh_of


def learning_rate(config: OptimizerConfig, step: int, total_steps: int) -> float:
    """Rate of optimizer step `step`, counted from 0.

    Step `warmup_steps - 1` (or 0, without a warm-up) has the peak rate, step `total_steps - 1` has
    `min_lr_ratio` times it.
    """
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    if config.schedule == "constant":
        return config.lr
    peak, last = max(config.warmup_steps - 1, 0), total_steps - 1
    progress = min(max((step - peak) / max(last - peak, 1), 0.0), 1.0)
    decay = 1 - progress if config.schedule == "linear" else (1 + math.cos(math.pi * progress)) / 2
    return config.lr * (config.min_lr_ratio + (1 - config.min_lr_ratio) * decay)


def make_optimizer(named: Iterable[tuple[str, nn.Parameter]], config: OptimizerConfig) -> torch.optim.AdamW:
    """AdamW with decoupled weight decay on matrices only: vectors are biases and norms."""
    groups: dict[Any, dict[str, Any]] = {}
    for name, parameter in named:
        if parameter.requires_grad:
            # torch updates a group in one call, which wants all its parameters on one device mesh
            mesh, decays = mesh_of(parameter), parameter.ndim >= 2 and not name.endswith("bias")
            decay = config.weight_decay if decays else 0.0
            group = groups.setdefault((not decays, mesh), {"params": [], "weight_decay": decay})
            group["params"].append(parameter)
    ordered = [groups[key] for key in sorted(groups, key=lambda key: key[0])]  # stable: matrices first
    return torch.optim.AdamW(ordered, lr=config.lr, betas=(config.beta1, config.beta2), eps=config.eps, fused=True)


def squared_norm(gradients: list[Tensor], ranks: int = 1) -> Tensor:
    """This rank's part of the sum of the squares of all gradients, a float32 scalar.

    Args:
        gradients: sharded over their mesh; those whose mesh holds fewer than all ranks exist several times.
        ranks: in all.
    """
    norms = torch.stack(torch._foreach_norm([local(gradient) for gradient in gradients]))
    meshes = [mesh_of(gradient) for gradient in gradients]
    weights = [1.0 if mesh is None else mesh.size() / ranks for mesh in meshes]
    return (norms.square() * torch.tensor(weights).to(norms.device, non_blocking=True)).sum()


def clip(gradients: list[Tensor], norm: float, max_norm: float) -> None:
    """Scale gradients so that their global norm, which is `norm`, is at most `max_norm`; 0 does nothing."""
    if max_norm and norm > max_norm:
        torch._foreach_mul_([local(gradient) for gradient in gradients], max_norm / norm)
