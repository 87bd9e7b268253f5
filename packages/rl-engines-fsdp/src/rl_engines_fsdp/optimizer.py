"""AdamW, its learning-rate schedule, and clipping by the global gradient norm."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from rl_contracts.config import OptimizerConfig
from rl_engines_fsdp.sharding import local


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
    share = 1 - progress if config.schedule == "linear" else (1 + math.cos(math.pi * progress)) / 2
    return config.lr * (config.min_lr_ratio + (1 - config.min_lr_ratio) * share)


def make_optimizer(named: Iterable[tuple[str, nn.Parameter]], config: OptimizerConfig) -> torch.optim.AdamW:
    """AdamW with decoupled weight decay on matrices only: vectors are biases and norms."""
    trained = [(name, parameter) for name, parameter in named if parameter.requires_grad]
    decayed = [p for name, p in trained if _decays(name, p)]
    others = [p for name, p in trained if not _decays(name, p)]
    groups = [
        {"params": params, "weight_decay": decay}
        for params, decay in ((decayed, config.weight_decay), (others, 0.0))
        if params
    ]
    return torch.optim.AdamW(groups, lr=config.lr, betas=(config.beta1, config.beta2), eps=config.eps, fused=True)


def _decays(name: str, parameter: nn.Parameter) -> bool:
    return parameter.ndim >= 2 and not name.endswith("bias")


def squared_norm(gradients: list[Tensor]) -> Tensor:
    """Sum of the squares of this rank's gradient shards, a float32 scalar."""
    norms = torch._foreach_norm([local(gradient) for gradient in gradients])
    return torch.stack(norms).square().sum()


def clip(gradients: list[Tensor], norm: float, max_norm: float) -> None:
    """Scale gradients so that their global norm, which is `norm`, is at most `max_norm`; 0 does nothing."""
    if max_norm and norm > max_norm:
        torch._foreach_mul_([local(gradient) for gradient in gradients], max_norm / norm)
