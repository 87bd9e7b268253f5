"""Architecture of a decoder, read from a Hugging Face config and validated."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from rl_contracts.errors import ModelError
from rl_contracts.models.attention_windows import KINDS
from rl_engines_megatron.model.families import Family, family_of
from rl_engines_megatron.model.moe import MoESpec

ROPE_TYPES = ("default", "linear", "llama3")
LLAMA3_ROPE = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""Constants of Llama 3's rotary scaling that are fixed in megatron-core; only the factor is configurable."""


@dataclass(frozen=True, slots=True)
class Architecture:
    """Sizes and options of a decoder. Linear layers have no bias, except q, k and v in some families."""

    model_type: str
    """Name of the family."""
    family: Family
    """Properties of the family."""
    layers: int
    """Decoder layers."""
    hidden: int
    """Width of the residual stream."""
    intermediate: int
    """Width of the gate and of the up projection of the MLP, each; experts have their own width."""
    heads: int
    """Query heads."""
    groups: int
    """Key-value heads; `heads / groups` query heads share one (megatron-core: query groups)."""
    head_dim: int
    """Width of one head; `heads * head_dim` may differ from `hidden`."""
    vocab: int
    """Vocabulary size: rows of the embedding before padding."""
    tied: bool
    """True if the output layer shares the weights of the embedding."""
    norm_eps: float
    """Epsilon of every RMSNorm."""
    max_positions: int
    """Longest sequence in tokens."""
    attention_dropout: float
    """Dropout probability of the attention weights."""
    rope: Mapping[str, Any]
    """Rotary parameters in the form of transformers, including `rope_type` and `rope_theta`."""
    window_rope: Mapping[str, Any] | None
    """Rotary parameters of layers with a sliding window, or None if all layers share `rope`."""
    windows: tuple[int | None, ...]
    """Sliding window of each layer in tokens, including the current one; None: full causal attention."""
    score_scale: float | None
    """Factor on the attention scores; None: `head_dim ** -0.5`."""
    score_cap: float | None
    """Soft cap of the attention scores, or None."""
    logit_cap: float | None
    """Soft cap of the logits, or None."""
    moe: MoESpec | None
    """Experts of the MoE layers, or None for a dense model."""

    @classmethod
    def from_hugging_face(cls, config: Any) -> Architecture:
        """Create an architecture from a transformers config, or from any object with its attributes.

        Raises:
            ModelError: an unsupported family, a missing attribute, or a variant that this engine would compute
                differently from transformers.
        """
        model_type = _read(config, "model_type")
        family = family_of(model_type)
        _reject_variants(config, family)
        heads, hidden = _size(config, "num_attention_heads"), _size(config, "hidden_size")
        groups = _size(config, "num_key_value_heads", default=heads)
        if heads % groups:
            raise ModelError(
                f"megatron: num_attention_heads={heads} must be a multiple of num_key_value_heads={groups}."
            )
        if getattr(config, "head_dim", None) is None and hidden % heads:
            raise ModelError(
                f"megatron: head_dim is not set, and hidden_size={hidden} is not divisible by {heads} heads."
            )
        layers, scalar = _size(config, "num_hidden_layers"), getattr(config, "query_pre_attn_scalar", None)
        rope, window_rope = _rope_parameters(config)
        return cls(
            model_type=model_type,
            family=family,
            layers=layers,
            hidden=hidden,
            intermediate=_size(config, "intermediate_size"),
            heads=heads,
            groups=groups,
            head_dim=_size(config, "head_dim", default=hidden // heads),
            vocab=_size(config, "vocab_size"),
            tied=bool(_read(config, "tie_word_embeddings")),
            norm_eps=float(_read(config, "rms_norm_eps")),
            max_positions=_size(config, "max_position_embeddings"),
            attention_dropout=float(getattr(config, "attention_dropout", None) or 0.0),
            rope=rope,
            window_rope=window_rope,
            windows=_layer_windows(config, family, layers),
            score_scale=scalar and scalar**-0.5,
            score_cap=getattr(config, "attn_logit_softcapping", None) if family.capped_scores else None,
            logit_cap=getattr(config, "final_logit_softcapping", None),
            moe=MoESpec.from_hugging_face(config),
        )

    def matrix_parameters(self, head: str) -> int:
        """Return the number of matrix parameters that each token is multiplied by.

        The embedding counts only as the output layer. In an MoE layer, only the experts chosen for one token count.

        Args:
            head: `lm`, or the name of a scalar head.
        """
        attention = 2 * self.hidden * self.head_dim * (self.heads + self.groups)
        dense, sparse = self.layers, 0
        if self.moe is not None:
            dense -= len(self.moe.layers)
            sparse = len(self.moe.layers) * (self.moe.experts + 3 * self.moe.chosen * self.moe.width)
        layers = self.layers * attention + self.hidden * (3 * dense * self.intermediate + sparse)
        return layers + self.hidden * (self.vocab if head == "lm" else 1)

    def step_flops(self, head: str, tokens: int, pairs: int) -> float:
        """Return the useful floating-point operations of a training step.

        See `rl_contracts.models.usage.step_flops`.
        """
        from rl_contracts.models.usage import step_flops

        matrices = self.matrix_parameters(head)
        return step_flops(matrices, matrices, self.heads * self.head_dim, tokens, pairs)


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


def _reject_variants(config: Any, family: Family) -> None:
    """Raise `ModelError` for model options that this engine would compute differently than transformers."""
    for name in ("attention_bias", "mlp_bias", "use_bidirectional_attention"):
        # the bias of q, k and v in Qwen2 is a property of its family; these options also add one to output projections
        if getattr(config, name, False):
            raise ModelError(f"megatron: {name}=True is not supported; use a model without it, or another engine.")
    if getattr(config, "quantization_config", None):
        raise ModelError(
            "megatron: quantization_config (fp8 and others) is not supported; use 16-bit or 32-bit weights."
        )
    name = "hidden_activation" if hasattr(config, "hidden_activation") else "hidden_act"
    activation = _read(config, name)
    if activation != family.activation:
        raise ModelError(f"megatron: {name}: expected {family.activation!r}, found {activation!r}.")


def _layer_windows(config: Any, family: Family, layers: int) -> tuple[int | None, ...]:
    """Return the sliding window of each layer."""
    window = getattr(config, "sliding_window", None)
    if family.one_window:
        return (window,) * layers
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * layers
    if len(kinds) != layers or set(kinds) - KINDS or ("sliding_attention" in kinds and window is None):
        raise ModelError(
            f"megatron: layer_types: expected full_attention or sliding_attention for each of the {layers} layers, "
            "and a sliding_window for the latter; "
            f"found {', '.join(sorted(set(kinds)))} for {len(kinds)} layers and sliding_window={window}."
        )
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _rope_parameters(config: Any) -> tuple[Mapping[str, Any], Mapping[str, Any] | None]:
    """Return the rotary parameters of layers with full attention, and of layers with a window if they differ."""
    rope = _read(config, "rope_parameters")
    if isinstance(rope, Mapping) and rope.keys() == KINDS:
        return _checked_rope(rope["full_attention"]), _checked_rope(rope["sliding_attention"])
    return _checked_rope(rope), None


def _checked_rope(rope: Any) -> Mapping[str, Any]:
    if not isinstance(rope, Mapping) or "rope_theta" not in rope:
        raise ModelError(
            f"megatron: rope_parameters: expected a mapping with rope_theta, found {rope!r}; "
            "load the config with transformers 5, which adds it."
        )
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise ModelError(
            f"megatron: partial_rotary_factor: expected 1, found {rope['partial_rotary_factor']!r}; "
            "rotary embeddings of a fraction of each head are not supported."
        )
    kind, constants = rope.get("rope_type", "default"), {name: rope.get(name) for name in LLAMA3_ROPE}
    if kind not in ROPE_TYPES:
        raise ModelError(f"megatron: rope_type {kind!r} is not supported; supported are {', '.join(ROPE_TYPES)}.")
    if kind == "llama3" and constants != LLAMA3_ROPE:
        raise ModelError(
            f"megatron: llama3 rotary scaling: megatron-core supports only {LLAMA3_ROPE}, found {constants}; "
            "use a model with these values, or another engine."
        )
    if kind != "default" and not isinstance(rope.get("factor"), int | float):
        raise ModelError(
            f"megatron: rope_parameters of type {kind!r}: expected a factor, found {rope.get('factor')!r}."
        )
    return MappingProxyType({"rope_type": "default", **rope})
