"""Tiny models of the causal families of transformers, for tests of engines and servers.

They have features of real checkpoints: sliding windows shorter than a test sequence, RoPE that changes at a length,
dropout.
"""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

VOCABULARY = 61
WINDOW = 5
"""Length of a sliding window in tokens."""
ORIGINAL_LENGTH = 8
"""Number of positions with the original frequencies, for RoPE types that change at a length (longrope, dynamic)."""

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
"""Sizes by the names that most families use."""

_SMALLER: tuple[tuple[str, int], ...] = (
    (r"(head_dim|kv_channels|d_kv|d_head|qk_\w+_dim|v_head_dim|index_head_dim|swa_\w*head_dim)", 8),
    (r"\w*lora_rank", 8),
    (r"(n_routed_experts|num_experts|num_local_experts|moe_num_experts|ffn_num_experts)", 4),
    (r"(num_experts_per_tok|num_experts_per_token|top_k_experts|moe_topk|moe_top_k|moe_k)", 2),
    (r"(n_group|topk_group|num_expert_group|n_shared_experts|moe_num_shared_experts|num_shared_experts)", 1),
    (r"(first_k_dense_replace|num_dense_layers|moe_layer_start_index)", 1),
    (r"\w*(moe|expert)\w*_intermediate_size|n_inner|mlp_hidden_size", 16),
    (r"\w*ffn_dim|ffn_hidden_size|d_ff", 48),
    (r"max_position_embeddings|n_positions|n_ctx|max_seq_len|max_target_positions", 64),
    (r"(en|de)coder_layers|num_(en|de)coder_layers|n_layers?|depth", 2),
    (r"(en|de)coder_attention_heads|num_(en|de)coder_attention_heads|n_heads?", 4),
    (r"d_model|n_embd|embedding_size|dim_model|emb_dim|word_embed_proj_dim", 32),
    (r"(mamba|linear)_\w*head_dim|mamba_d_(head|state)|(ssm_)?state_size|linear_(key|value)_head_dim", 8),
    (r"rotary_dim", 4),
    (r"mamba_n_heads|linear_num_(key|value)_heads", 4),
    (r"(sliding_window|attention_window_size|window_size|attention_chunk_size)", WINDOW),
)
"""Sizes by patterns of setting names; each applies to the settings that a configuration has."""

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
    "gemma2": {"query_pre_attn_scalar": 8, "attn_logit_softcapping": 1.5, "final_logit_softcapping": 4.0},
    "gemma3_text": {"query_pre_attn_scalar": 8, "layer_types": ["sliding_attention", "full_attention"]},
    "deepseek_v2": {"n_routed_experts": 4, "num_experts_per_tok": 2, "first_k_dense_replace": 1},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "topk_group": 1, "n_group": 1},
    "cohere_compass_text": {"layer_types": ["sliding_attention", "full_attention"]},
    "xmod": {"default_language": "en_XX"},
    "falcon_h1": {"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_n_groups": 1},
    "longcat_flash": {
        "num_hidden_layers": 2,
        "num_layers": 2,
        "zero_expert_num": 1,
        "qk_head_dim": 16,
        "expert_ffn_hidden_size": 16,
    },
    "reformer": {
        "attn_layers": ["local", "lsh"],
        "axial_pos_shape": [8, 8],
        "axial_pos_embds_dim": [16, 16],
        "attention_head_size": 8,
        "feed_forward_size": 48,
        "num_buckets": 4,
        "local_attn_chunk_length": 8,
        "lsh_attn_chunk_length": 8,
        "is_decoder": True,
    },
    "roc_bert": {"shape_vocab_size": 61, "shape_embed_dim": 8, "pronunciation_embed_dim": 8},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 1e4},
        "ffn_config": {"ffn_hidden_size": 48, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "gemma3n_text": {
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_kv_shared_layers": 2,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": VOCABULARY,
        "laurel_rank": 4,
        "activation_sparsity_pattern": [0.0] * 4,
        "intermediate_size": [48] * 4,
    },
    "gemma4_text": {
        "global_head_dim": 8,
        "layer_types": ["sliding_attention", "full_attention"],
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": VOCABULARY,
        "num_kv_shared_layers": 0,
    },
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "num_layers": 2},
    "granitemoehybrid": {"mamba_n_heads": 8, "mamba_d_head": 8, "layer_types": ["mamba", "attention"]},
    "hunyuan_v1_dense": {"head_dim": 8},
    "hunyuan_v1_moe": {"head_dim": 8},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "mamba2": {"num_heads": 8, "head_dim": 8, "n_groups": 1},
    "ministral": {"head_dim": 8},
    "modernbert-decoder": {
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "cls_token_id": 1,
        "sep_token_id": 2,
    },
    "prophetnet": {"num_hidden_layers": None},
    "zamba": {"layers_block_type": ["mamba", "hybrid"], "layer_types": ["mamba", "hybrid"]},
    "zamba2": {"layer_types": ["mamba", "hybrid"], "mamba_headdim": 8, "n_mamba_heads": 8},
    "zaya": {"num_experts_per_tok": 1},
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
"""Settings that a family needs in addition to, or instead of, the sizes above."""
_SUBMODEL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
"""Settings of the submodels of a composite model."""


VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "deepseek_v3, yarn rope": (
        "deepseek_v3",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e4,
                "factor": 40.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "original_max_position_embeddings": ORIGINAL_LENGTH,
            }
        },
    ),
    "gemma3_text, linear rope": (
        "gemma3_text",
        {
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            }
        },
    ),
    "llama, dynamic rope": (
        "llama",
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}, "max_position_embeddings": 8},
    ),
    "llama, linear rope": (
        "llama",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}},
    ),
    "llama, llama3 rope": (
        "llama",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 1e4,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": ORIGINAL_LENGTH,
            }
        },
    ),
    "llama4_text, full attention": (
        "llama4_text",
        {"layer_types": ["full_attention"] * 2, "no_rope_layers": [1, 0], "floor_scale": 4},
    ),
    "ministral3, short": (
        "ministral3",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e4,
                "factor": 4.0,
                "original_max_position_embeddings": ORIGINAL_LENGTH,
                "llama_4_scaling_beta": 0.1,
            }
        },
    ),
    "phi3, default rope": ("phi3", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}),
    "phi3, window": (
        "phi3",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}, "sliding_window": WINDOW},
    ),
    "phimoe, longrope": (
        "phimoe",
        {**_LONGROPE, "rope_parameters": {**_LONGROPE["rope_parameters"], "short_mscale": 1.24, "long_mscale": 1.24}},
    ),
    "phimoe, window": ("phimoe", {"sliding_window": WINDOW}),
    "qwen3, heads of 6": ("qwen3", {"head_dim": 6}),
    "qwen3, yarn rope": (
        "qwen3",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e4,
                "factor": 4.0,
                "original_max_position_embeddings": ORIGINAL_LENGTH,
            }
        },
    ),
    "qwen3, tied embeddings": ("qwen3", {"tie_word_embeddings": True}),
    "qwen3_moe, window": (
        "qwen3_moe",
        {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1},
    ),
    "starcoder2, window": ("starcoder2", {"sliding_window": WINDOW}),
}
"""Further configurations of published checkpoints, by a short description: the family and the settings."""


def tiny_config(model_type: str, **settings: Any) -> Any:
    """Return the transformers configuration of a tiny model of a family, which is built in milliseconds.

    Args:
        model_type: family, as transformers names it.
        settings: further settings of the configuration.

    Raises:
        Exception: of any type, if these rules cannot shrink the family.
    """
    from transformers import CONFIG_MAPPING

    return _tiny_config_of(CONFIG_MAPPING[model_type], _OWN.get(model_type, {}) | settings)


def _tiny_config_of(kind: Any, own: dict[str, Any]) -> Any:
    """Return a configuration of class `kind` with the sizes above, applied to each submodel separately."""
    try:
        defaults = kind().to_dict()
    except Exception:  # noqa: BLE001 - some classes have no default configuration
        defaults = {}
    smaller: dict[str, Any] = {
        name: size
        for name, value in defaults.items()
        for pattern, size in _SMALLER
        if re.fullmatch(pattern, name) and isinstance(value, int) and not isinstance(value, bool)
    }
    if defaults.get("is_decoder") is False:  # an encoder that can also be a decoder
        smaller |= {"is_decoder": True, "pad_token_id": 1}
    if "kv_lora_rank" in defaults:  # latent attention (MLA) has as many key heads as query heads
        smaller["num_key_value_heads"] = SIZES["num_attention_heads"]
    for name, submodel in kind.sub_configs.items():
        if name not in own and hasattr(submodel, "model_type") and submodel.model_type:
            smaller[name] = _tiny_config_of(submodel, _SUBMODEL | _OWN.get(submodel.model_type, {}))
    settings = SIZES | smaller | own
    return kind(**{name: value for name, value in settings.items() if value is not None or name.endswith("_id")})


def make_family(
    directory: Path | str,
    model_type: str,
    seed: int = 0,
    spread: float | None = 0.2,
    largest: int = 50_000_000,
    **settings: Any,
) -> Path:
    """Save a tiny random model of a family.

    Args:
        directory: directory to write.
        model_type: family, as transformers names it.
        seed: seed of the weights.
        spread: standard deviation of the weights, large enough that every module affects the output; None keeps the
            initialization of transformers.
        largest: maximum number of parameters.
        settings: further settings of the configuration.

    Raises:
        ValueError: the smallest configuration has more parameters than `largest`.
        Exception: see `tiny_config`.
    """
    import torch
    from transformers import AutoModelForCausalLM

    config = tiny_config(model_type, **settings)
    with torch.device("meta"):
        size = sum(p.numel() for p in AutoModelForCausalLM.from_config(copy.deepcopy(config)).parameters())
    if size > largest:
        raise ValueError(f"{model_type}: the smallest configuration has {size} parameters (allowed: {largest}).")
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    if spread is not None:
        with torch.no_grad():
            for parameter in model.parameters():
                noise = torch.randn_like(parameter)
                parameter.copy_(noise * spread) if parameter.ndim > 1 else parameter.add_(noise * 0.1)
    model.save_pretrained(directory)
    return Path(directory)
