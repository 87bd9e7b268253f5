"""Useful floating-point operations (FLOPs) of a training step."""

from __future__ import annotations

from typing import Any

import torch

from rl_contracts.models import usage
from rl_engines_fsdp.model.packed import PackedModel


def device_memory(device: torch.device) -> float | None:
    """Return the memory of a GPU in bytes, or None for a CPU."""
    return float(torch.cuda.get_device_properties(device).total_memory) if device.type == "cuda" else None


def matrix_parameters(model: PackedModel, frozen: bool = True) -> int | None:
    """Return the number of matrix parameters that each token is multiplied by.

    All matrices count, adapters included. The input embedding counts only if it is also the output head. In an MoE
    layer, only the experts chosen for one token count.

    Args:
        frozen: whether to count frozen parameters too.

    Returns:
        the number, or None if the number of experts per token is unknown.
    """
    inner: Any = model.model
    config = inner.config.get_text_config()
    table, head = inner.get_input_embeddings().weight, inner.get_output_embeddings()
    is_lookup_only = head is None or head.weight is not table
    total, experts_per_token, has_experts = 0, getattr(config, "num_experts_per_tok", None), False
    for name, parameter in model.named_parameters():
        if (is_lookup_only and parameter is table) or not (frozen or parameter.requires_grad):
            continue
        if parameter.ndim == 2:
            total += parameter.numel()
        elif parameter.ndim == 3:
            if "experts" not in name or experts_per_token is None:
                return None
            total, has_experts = total + parameter.numel() // parameter.shape[0] * experts_per_token, True
    return total if has_experts or not getattr(config, "num_experts", None) else None


def step_flops(model: PackedModel, tokens: int, pairs: int) -> float | None:
    """Return the useful FLOPs of a training step; see `rl_contracts.models.usage.step_flops`.

    Args:
        tokens: number of tokens over all ranks.
        pairs: `rl_contracts.models.usage.attended_pairs` over all ranks.

    Returns:
        the FLOPs, or None if `matrix_parameters` returns None.
    """
    config = model.model.config.get_text_config()
    matrices, trained = matrix_parameters(model), matrix_parameters(model, frozen=False)
    if matrices is None or trained is None:
        return None
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return usage.step_flops(matrices, trained, config.num_attention_heads * size, tokens, pairs)
