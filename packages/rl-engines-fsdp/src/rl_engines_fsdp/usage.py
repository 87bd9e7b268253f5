"""Useful floating-point operations of a model's step."""

from __future__ import annotations

from typing import Any

import torch

from rl_contracts.models import usage
from rl_engines_fsdp.model.packed import PackedModel


def device_memory(device: torch.device) -> float | None:
    """Bytes of memory of a GPU; None of a CPU."""
    return float(torch.cuda.get_device_properties(device).total_memory) if device.type == "cuda" else None


def matrix_parameters(model: PackedModel, frozen: bool = True) -> int | None:
    """Parameters by which each token is multiplied: all matrices, the input embedding only where it is the head too,
    and of experts as many as a token is sent to. Adapters count too.

    Args:
        frozen: count those too that are not trained.

    Returns:
        None where it is not known how many experts a token meets.
    """
    inner: Any = model.model
    config = inner.config.get_text_config()
    table, head = inner.get_input_embeddings().weight, inner.get_output_embeddings()
    looked_up = head is None or head.weight is not table
    counted, chosen, stacked = 0, getattr(config, "num_experts_per_tok", None), False
    for name, parameter in model.named_parameters():
        if (looked_up and parameter is table) or not (frozen or parameter.requires_grad):
            continue
        if parameter.ndim == 2:
            counted += parameter.numel()
        elif parameter.ndim == 3:
            if "experts" not in name or chosen is None:
                return None
            counted, stacked = counted + parameter.numel() // parameter.shape[0] * chosen, True
    return counted if stacked or not getattr(config, "num_experts", None) else None


def step_flops(model: PackedModel, tokens: int, pairs: int) -> float | None:
    """Useful floating-point operations of a training step; see `rl_contracts.models.usage.step_flops`.

    Args:
        tokens: over all ranks.
        pairs: see `rl_contracts.models.usage.attended_pairs`, over all ranks.
    """
    config = model.model.config.get_text_config()
    matrices, trained = matrix_parameters(model), matrix_parameters(model, frozen=False)
    if matrices is None or trained is None:
        return None
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return usage.step_flops(matrices, trained, config.num_attention_heads * size, tokens, pairs)
