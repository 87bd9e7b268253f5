"""Tiny model configs and their Hugging Face weights, without transformers."""

from types import SimpleNamespace

import torch
from torch import Tensor

MIXTURES = ("qwen3_moe", "mixtral")


def toy_config(family: str = "qwen3", **changes: object) -> SimpleNamespace:
    """Return a config with the attributes that `from_hugging_face` reads: 4 layers, 8 heads in 4 groups."""
    fields: dict[str, object] = {
        "model_type": family,
        "num_hidden_layers": 4,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 4,
        "vocab_size": 29,
        "tie_word_embeddings": False,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 64,
        "hidden_act": "silu",
        "attention_dropout": 0.0,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    }
    if family in MIXTURES:
        fields |= {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12}
    if family.startswith("gemma"):
        fields["hidden_activation"] = "gelu_pytorch_tanh"
    return SimpleNamespace(**(fields | changes))


def toy_shapes(config: SimpleNamespace) -> dict[str, tuple[int, ...]]:
    """Return names and shapes of the model's parameters, as transformers declares them."""
    hidden, d = config.hidden_size, config.head_dim
    q, kv = config.num_attention_heads * d, config.num_key_value_heads * d
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config.vocab_size, hidden)}
    for layer in range(config.num_hidden_layers):
        shapes_of_layer: dict[str, tuple[int, ...]] = {
            "input_layernorm.weight": (hidden,),
            "post_attention_layernorm.weight": (hidden,),
            "self_attn.q_proj.weight": (q, hidden),
            "self_attn.k_proj.weight": (kv, hidden),
            "self_attn.v_proj.weight": (kv, hidden),
            "self_attn.o_proj.weight": (hidden, q),
            **_feed_forward(config, layer),
        }
        if config.model_type == "qwen2":
            shapes_of_layer |= {
                "self_attn.q_proj.bias": (q,),
                "self_attn.k_proj.bias": (kv,),
                "self_attn.v_proj.bias": (kv,),
            }
        if config.model_type.startswith("gemma"):
            shapes_of_layer |= {
                "pre_feedforward_layernorm.weight": (hidden,),
                "post_feedforward_layernorm.weight": (hidden,),
            }
        if config.model_type.startswith("qwen3") or config.model_type == "gemma3_text":
            shapes_of_layer |= {"self_attn.q_norm.weight": (d,), "self_attn.k_norm.weight": (d,)}
        shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in shapes_of_layer.items()}
    shapes["model.norm.weight"] = (hidden,)
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    return shapes


def _feed_forward(config: SimpleNamespace, layer: int) -> dict[str, tuple[int, ...]]:
    hidden, ffn = config.hidden_size, config.intermediate_size
    experts = {f"experts.{n}." for n in range(4)}
    if config.model_type == "mixtral":
        matrices = {"w1": (ffn, hidden), "w3": (ffn, hidden), "w2": (hidden, ffn)}
        expert_shapes = {
            f"block_sparse_moe.{e}{name}.weight": shape for e in sorted(experts) for name, shape in matrices.items()
        }
        return {"block_sparse_moe.gate.weight": (4, hidden)} | expert_shapes
    if config.model_type == "qwen3_moe" and layer not in getattr(config, "mlp_only_layers", ()):
        ffn, router = config.moe_intermediate_size, {"mlp.gate.weight": (4, hidden)}
    else:
        experts, router = {""}, {}
    matrices = {"gate_proj": (ffn, hidden), "up_proj": (ffn, hidden), "down_proj": (hidden, ffn)}
    return router | {f"mlp.{e}{name}.weight": shape for e in sorted(experts) for name, shape in matrices.items()}


def toy_state(config: SimpleNamespace, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Return weights in which each value is unique, so that misplaced values are detected (in float32 and float64)."""
    state, first = {}, 1
    for name, shape in toy_shapes(config).items():
        count = torch.Size(shape).numel()
        state[name] = torch.arange(first, first + count).reshape(shape).to(dtype)
        first += count
    return state
