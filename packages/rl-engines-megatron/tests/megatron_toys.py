"""Tiny model configs and their Hugging Face weights, without transformers."""

from pathlib import Path
from types import SimpleNamespace

import torch
from torch import Tensor

from rl_contracts.testing.models import make_tiny_tokenizer


def toy_config(family: str = "qwen3", **changes: object) -> SimpleNamespace:
    """What `from_hugging_face` reads of a transformers config: 4 layers, 8 heads in 4 groups."""
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
    return SimpleNamespace(**(fields | changes))


def toy_shapes(config: SimpleNamespace) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the model's parameters, as transformers' modules declare them."""
    hidden, ffn, d = config.hidden_size, config.intermediate_size, config.head_dim
    q, kv = config.num_attention_heads * d, config.num_key_value_heads * d
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config.vocab_size, hidden)}
    for layer in range(config.num_hidden_layers):
        one: dict[str, tuple[int, ...]] = {
            "input_layernorm.weight": (hidden,),
            "post_attention_layernorm.weight": (hidden,),
            "self_attn.q_proj.weight": (q, hidden),
            "self_attn.k_proj.weight": (kv, hidden),
            "self_attn.v_proj.weight": (kv, hidden),
            "self_attn.o_proj.weight": (hidden, q),
            "mlp.gate_proj.weight": (ffn, hidden),
            "mlp.up_proj.weight": (ffn, hidden),
            "mlp.down_proj.weight": (hidden, ffn),
        }
        if config.model_type == "qwen2":
            one |= {"self_attn.q_proj.bias": (q,), "self_attn.k_proj.bias": (kv,), "self_attn.v_proj.bias": (kv,)}
        if config.model_type == "qwen3":
            one |= {"self_attn.q_norm.weight": (d,), "self_attn.k_norm.weight": (d,)}
        shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in one.items()}
    shapes["model.norm.weight"] = (hidden,)
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    return shapes


def toy_state(config: SimpleNamespace, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Weights in which no number appears twice, so that one in a wrong place is seen (float32 and float64)."""
    state, first = {}, 1
    for name, shape in toy_shapes(config).items():
        count = torch.Size(shape).numel()
        state[name] = torch.arange(first, first + count).reshape(shape).to(dtype)
        first += count
    return state


def make_moe_model(directory: Path, experts: int = 4) -> Path:
    """Write a tiny Qwen3-MoE model of 2 layers with a tokenizer; its routers choose clearly."""
    from transformers import AutoModelForCausalLM, Qwen3MoeConfig

    config = Qwen3MoeConfig(
        vocab_size=259,
        hidden_size=64,
        moe_intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_experts=experts,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        max_position_embeddings=2048,
        initializer_range=0.15,
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(directory)
    make_tiny_tokenizer().save_pretrained(directory)
    return directory
