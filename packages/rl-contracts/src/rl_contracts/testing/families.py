"""Tiny models of the causal families of transformers, on which engines and servers are tried.

They have what real checkpoints ship: windows that a row of a few tokens meets, rope that switches at a length, dropout.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

VOCABULARY = 61
WINDOW = 5
"""Tokens that a sliding window reaches."""
ORIGINAL_LENGTH = 8
"""Positions up to which rope that switches (longrope, dynamic) has its first frequencies."""

SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
"""By the names that most families have."""

_SMALLER: tuple[tuple[str, int], ...] = (
    (r"(head_dim|kv_channels|d_kv|d_head|qk_\w+_dim|v_head_dim|index_head_dim|swa_\w*head_dim)", 8),
    (r"\w*lora_rank", 8),
    (r"(n_routed_experts|num_experts|num_local_experts|moe_num_experts|ffn_num_experts)", 4),
    (r"(num_experts_per_tok|top_k_experts|moe_topk|moe_top_k|moe_k)", 2),
    (r"(n_group|topk_group|num_expert_group|n_shared_experts|moe_num_shared_experts|num_shared_experts)", 1),
    (r"(first_k_dense_replace|num_dense_layers|moe_layer_start_index)", 1),
    (r"\w*(moe|expert)\w*_intermediate_size|n_inner|mlp_hidden_size", 16),
    (r"\w*ffn_dim|ffn_hidden_size|d_ff", 48),
    (r"max_position_embeddings|n_positions|n_ctx|max_seq_len", 64),
    (r"(sliding_window|attention_window_size|window_size|attention_chunk_size)", WINDOW),
)
"""Sizes by the names under which configurations have them, where they have one."""

_LONGROPE: dict[str, Any] = {
    "rope_parameters": {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "short_factor": [1.0, 1.2, 1.4, 1.6],
        "long_factor": [2.0, 3.0, 5.0, 9.0],
        "original_max_position_embeddings": ORIGINAL_LENGTH,
    },
    "original_max_position_embeddings": ORIGINAL_LENGTH,
}

_OWN: dict[str, dict[str, Any]] = {
    "afmoe": {"layer_types": ["sliding_attention", "full_attention"]},
    "bamba": {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "attn_layer_indices": [1]},
    "cwm": {"bos_token_id": 1, "eos_token_id": 2, "layer_types": ["sliding_attention", "full_attention"]},
    "deepseek_v3": {"num_key_value_heads": 4},
    "gemma2": {"query_pre_attn_scalar": 8, "attn_logit_softcapping": 1.5, "final_logit_softcapping": 4.0},
    "gemma3_text": {"query_pre_attn_scalar": 8, "layer_types": ["sliding_attention", "full_attention"]},
    "gemma3n_text": {
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_kv_shared_layers": 2,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": VOCABULARY,
        "laurel_rank": 4,
        "activation_sparsity_pattern": 0.0,
        "intermediate_size": [48] * 4,
    },
    "gemma4_text": {
        "global_head_dim": 8,
        "layer_types": ["sliding_attention", "full_attention"],
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": VOCABULARY,
        "num_kv_shared_layers": 0,
    },
    "granite": {"logits_scaling": 3.0, "attention_multiplier": 0.3},
    "cohere": {"logit_scale": 0.25},
    "llama": {"attention_dropout": 0.1},
    "mixtral": {"router_jitter_noise": 0.1},
    "mistral": {"sliding_window": WINDOW},
    "opt": {"layerdrop": 0.3, "word_embed_proj_dim": 32},
    "phi3": _LONGROPE,
    "qwen2": {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1},
    "qwen2_moe": {
        "shared_expert_intermediate_size": 16,
        "use_sliding_window": True,
        "sliding_window": WINDOW,
        "max_window_layers": 1,
    },
    "qwen3": {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1},
    "starcoder2": {"residual_dropout": 0.1, "embedding_dropout": 0.1, "attention_dropout": 0.1},
}
"""What a family needs beside, or instead of, the above."""


def tiny_config(model_type: str, **settings: Any) -> Any:
    """transformers' configuration of a family by its `model_type`, so small that it is made in milliseconds.

    Raises:
        Exception: of any kind, where the family cannot be made so small by these rules.
    """
    from transformers import CONFIG_MAPPING

    kind: Any = CONFIG_MAPPING[model_type]
    own = _OWN.get(model_type, {}) | settings
    try:
        defaults = kind().to_dict()
    except Exception:  # noqa: BLE001 - some have no defaults of their own
        defaults = {}
    smaller = {
        name: size
        for name, value in defaults.items()
        for pattern, size in _SMALLER
        if re.fullmatch(pattern, name) and isinstance(value, int) and not isinstance(value, bool)
    }
    return kind(**(SIZES | smaller | own))


def make_family(
    directory: Path | str, model_type: str, seed: int = 0, spread: float | None = 0.2, **settings: Any
) -> Path:
    """Save a random model of a family.

    Args:
        spread: standard deviation of the weights, large enough that every part of the model matters; None: as
            transformers initialises it.
    """
    import torch
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(tiny_config(model_type, **settings), dtype=torch.float32)
    if spread is not None:
        with torch.no_grad():
            for parameter in model.parameters():
                noise = torch.randn_like(parameter)
                parameter.copy_(noise * spread) if parameter.ndim > 1 else parameter.add_(noise * 0.1)
    model.save_pretrained(directory)
    return Path(directory)
