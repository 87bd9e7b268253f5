"""Useful floating-point operations of a model's step."""

from __future__ import annotations

from typing import Any

from rl_contracts.training.usage import dense_step_flops
from rl_engines_fsdp.model.packed import PackedModel


def matrix_parameters(model: PackedModel, frozen: bool = True) -> int:
    """Parameters by which each token is multiplied: all matrices, the input embedding only where it is the head too.

    Adapters count too. None of this holds for mixtures of experts, of which a token meets a few only.

    Args:
        frozen: count those too that are not trained.
    """
    inner: Any = model.model
    table, head = inner.get_input_embeddings().weight, inner.get_output_embeddings()
    looked_up = head is None or head.weight is not table
    counted = (p for p in model.parameters() if p.ndim == 2 and not (looked_up and p is table))
    return sum(p.numel() for p in counted if frozen or p.requires_grad)


def step_flops(model: PackedModel, tokens: int, squared_lengths: int) -> float | None:
    """Useful floating-point operations of a training step; see `dense_step_flops`.

    Args:
        tokens: over all ranks.
        squared_lengths: sum of the squares of the rows' lengths, over all ranks.

    Returns:
        None for a mixture of experts.
    """
    config = model.model.config.get_text_config()
    if any(p.ndim == 3 for p in model.parameters()) or getattr(config, "num_experts", None):
        return None
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    attention = config.num_hidden_layers * config.num_attention_heads * size
    trained = matrix_parameters(model, frozen=False)
    return dense_step_flops(matrix_parameters(model), trained, attention, tokens, squared_lengths)
