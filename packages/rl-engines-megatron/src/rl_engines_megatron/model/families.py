"""Model families: how the decoder of each differs from Llama. Does not import torch.

Other packages can register a `Family` in the entry-point group `rl.megatron_families`, under the `model_type` of its
models.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

from rl_contracts import registry
from rl_contracts.errors import ModelError

__all__ = ["FAMILIES", "Family", "family_of"]

GROUP = "rl.megatron_families"
"""Entry-point group of additional families."""


@dataclass(frozen=True)
class Family:
    """Properties of a family of decoders.

    All families have RMSNorm, rotary embeddings, grouped-query attention, and gated MLPs or experts (`moe.py`).
    """

    qkv_bias: bool = False
    """True if the q, k and v projections have a bias."""
    qk_norm: bool = False
    """True if each query and key head is normalized."""
    post_norms: bool = False
    """True if the outputs of attention and MLP are also normalized, before the residual connection."""
    unit_norms: bool = False
    """True if norms multiply by 1 + weight, in float32."""
    scaled_embeddings: bool = False
    """True if embeddings are multiplied by the square root of the hidden size."""
    activation: Literal["silu", "gelu_pytorch_tanh"] = "silu"
    """Activation function of the gate."""
    capped_scores: bool = False
    """True if attention scores are capped to `attn_logit_softcapping`."""
    one_window: bool = False
    """True if all layers use `sliding_window`; otherwise only the `sliding_attention` layers of `layer_types` do."""
    layer_parameters: Callable[..., Iterator[Any]] | None = None
    """Function that yields the parameters of a dense layer, with the arguments of `naming.layer_parameters`. None uses
    `naming.layer_parameters`."""


_GEMMA3 = Family(qk_norm=True, post_norms=True, unit_norms=True, scaled_embeddings=True, activation="gelu_pytorch_tanh")
FAMILIES = {
    "llama": Family(),
    "mistral": Family(one_window=True),
    "qwen2": Family(qkv_bias=True),
    "qwen3": Family(qk_norm=True),
    "qwen3_moe": Family(qk_norm=True),
    "mixtral": Family(),
    "gemma2": replace(_GEMMA3, qk_norm=False, capped_scores=True),
    "gemma3_text": _GEMMA3,
}
"""Families by `model_type`."""


def family_of(model_type: str) -> Family:
    """Return the family of a `model_type`.

    Raises:
        ModelError: the family is unknown, or the registered object is not a `Family`.
    """
    registered = registry.available(GROUP)
    family = registry.load(GROUP, model_type) if model_type in registered else FAMILIES.get(model_type)
    if not isinstance(family, Family):
        raise ModelError(
            f"megatron: model_type {model_type!r} is not supported; supported are "
            f"{', '.join(sorted({*FAMILIES, *registered}))}. Use another train engine, for example fsdp, "
            f"or register a Family for it in the entry-point group {GROUP}."
        )
    return family
