"""What a Hugging Face config says of a Llama, Qwen2, Qwen3, Qwen3-MoE or Mixtral model, read once and checked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from rl_contracts.errors import ModelError
from rl_engines_megatron.mixture import MIXTURES, Mixture

FAMILIES = ("llama", "qwen2", "qwen3", *MIXTURES)
"""Values of `model_type` that are supported."""


@dataclass(frozen=True, slots=True)
class Architecture:
    """Sizes and switches of one decoder. Linear layers have no bias but, where `qkv_bias` is set, q, k and v."""

    family: str
    """One of `FAMILIES`."""
    layers: int
    """Decoder layers."""
    hidden: int
    """Width of the residual stream."""
    intermediate: int
    """Width of the gated MLP, of the gate and of the up projection each; not that of experts."""
    heads: int
    """Query heads."""
    groups: int
    """Key-value heads; `heads / groups` query heads share one (megatron-core: query groups)."""
    head_dim: int
    """Width of one head; `heads * head_dim` may differ from `hidden`."""
    vocab: int
    """Rows of the embedding, before any padding."""
    tied: bool
    """Whether the output layer is the embedding."""
    qkv_bias: bool
    """Whether the q, k and v projections have a bias (Qwen2)."""
    qk_norm: bool
    """Whether each query and key head is normalised (Qwen3, Qwen3-MoE)."""
    norm_eps: float
    """Epsilon of every RMSNorm."""
    max_positions: int
    """Longest sequence in tokens."""
    attention_dropout: float
    """Dropout probability of the attention weights."""
    rope: Mapping[str, Any]
    """`rope_parameters` as transformers standardises them, `rope_type` and `rope_theta` among them."""
    mixture: Mixture | None
    """Of the layers that have experts in place of an MLP; None of a dense model."""

    @classmethod
    def from_hugging_face(cls, config: Any) -> Architecture:
        """Read a transformers config (any object with its attributes will do).

        Raises:
            ModelError: another family, a missing attribute, or a variant of a family that megatron-core's GPT
                model would compute differently.
        """
        family = _read(config, "model_type")
        if family not in FAMILIES:
            raise ModelError(
                f"megatron: model_type {family!r} is not supported; supported are {', '.join(FAMILIES)}. "
                "Use another train engine, fsdp for example, for this model."
            )
        _refuse_variants(config)
        heads, hidden = _size(config, "num_attention_heads"), _size(config, "hidden_size")
        groups = _size(config, "num_key_value_heads", default=heads)
        if heads % groups:
            raise ModelError(f"megatron: num_attention_heads {heads} is no multiple of num_key_value_heads {groups}.")
        if getattr(config, "head_dim", None) is None and hidden % heads:
            raise ModelError(f"megatron: head_dim is not set and {heads} heads do not divide hidden_size {hidden}.")
        return cls(
            family=family,
            layers=_size(config, "num_hidden_layers"),
            hidden=hidden,
            intermediate=_size(config, "intermediate_size"),
            heads=heads,
            groups=groups,
            head_dim=_size(config, "head_dim", default=hidden // heads),
            vocab=_size(config, "vocab_size"),
            tied=bool(_read(config, "tie_word_embeddings")),
            qkv_bias=family == "qwen2",
            qk_norm=family in ("qwen3", "qwen3_moe"),
            norm_eps=float(_read(config, "rms_norm_eps")),
            max_positions=_size(config, "max_position_embeddings"),
            attention_dropout=float(getattr(config, "attention_dropout", None) or 0.0),
            rope=_rope(config),
            mixture=Mixture.from_hugging_face(config),
        )


def _read(config: Any, name: str) -> Any:
    try:
        return getattr(config, name)
    except AttributeError as error:
        raise ModelError(
            f"megatron: the config ({type(config).__name__}) has no {name}; pass a transformers config."
        ) from error


def _size(config: Any, name: str, default: int | None = None) -> int:
    value = _read(config, name) if default is None else getattr(config, name, None)
    value = default if value is None else value
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ModelError(f"megatron: {name}: expected a whole number of at least 1, found {value!r}.")
    return value


def _refuse_variants(config: Any) -> None:
    """Raise for settings of a supported family that would give other numbers than transformers."""
    for name in ("attention_bias", "mlp_bias"):
        # Qwen2's bias of q, k and v is part of its family; these would put one on the output projections too
        if getattr(config, name, False):
            raise ModelError(f"megatron: {name}=True is not supported; use a model without it or another engine.")
    if getattr(config, "quantization_config", None):
        raise ModelError(
            "megatron: quantization_config (fp8 and others) is not supported; use weights of 16 or 32 bits."
        )
    activation = _read(config, "hidden_act")
    if activation != "silu":
        raise ModelError(f"megatron: hidden_act: expected 'silu', found {activation!r}.")
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    if kinds != {"full_attention"}:
        raise ModelError(f"megatron: layer_types: only full_attention is supported, found {', '.join(sorted(kinds))}.")


def _rope(config: Any) -> Mapping[str, Any]:
    rope = _read(config, "rope_parameters")
    if not isinstance(rope, Mapping) or "rope_theta" not in rope:
        raise ModelError(
            f"megatron: rope_parameters: expected a mapping with rope_theta, found {rope!r}; "
            "load the config with transformers 5, which fills it in."
        )
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise ModelError(
            f"megatron: partial_rotary_factor: expected 1, found {rope['partial_rotary_factor']!r}; "
            "rotary embeddings of a part of each head are not supported."
        )
    return MappingProxyType({"rope_type": "default", **rope})
