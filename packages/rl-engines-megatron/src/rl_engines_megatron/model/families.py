"""Families of decoders, as tables: what sets each apart from Llama's. Does not import torch.

A table that somebody else's package names in the entry-point group `rl.megatron_families` is found as well, by the
`model_type` of its models.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

from rl_contracts import registry
from rl_contracts.errors import ModelError

__all__ = ["FAMILIES", "Family", "family_of"]

GROUP = "rl.megatron_families"
"""The entry-point group of further tables."""


@dataclass(frozen=True)
class Family:
    """A family of decoders. All have RMSNorm, rotary embeddings, grouped queries and a gated MLP, or experts of them
    (`mixture.py`)."""

    qkv_bias: bool = False
    """Whether the q, k and v projections have a bias."""
    qk_norm: bool = False
    """Whether each query and key head is normalised."""
    post_norms: bool = False
    """Whether what attention and MLP give is normalised too before it is added."""
    unit_norms: bool = False
    """Whether norms multiply by 1 + weight, in float32."""
    scaled_embeddings: bool = False
    """Whether embeddings are multiplied by the root of the hidden size."""
    activation: Literal["silu", "gelu_pytorch_tanh"] = "silu"
    """Of the gate."""
    capped_scores: bool = False
    """Whether attention's scores are capped to `attn_logit_softcapping`."""
    one_window: bool = False
    """Whether every layer sees only the last `sliding_window` tokens; else those that `layer_types` says."""
    layer_parameters: Callable[..., Iterator[Any]] | None = None
    """What gives the parameters of a layer, called like `naming.layer_parameters`; None: that
    one. Layers with experts have none of it."""


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
"""By `model_type`."""


def family_of(model_type: str) -> Family:
    """The table of a family.

    Raises:
        ModelError: there is none, or it is no `Family`.
    """
    further = registry.available(GROUP)
    found = registry.load(GROUP, model_type) if model_type in further else FAMILIES.get(model_type)
    if not isinstance(found, Family):
        raise ModelError(
            f"megatron: model_type {model_type!r} is not supported; supported are "
            f"{', '.join(sorted({*FAMILIES, *further}))}. Use another train engine, fsdp for example, for this model, "
            f"or name a Family for it in the entry-point group {GROUP}."
        )
    return found
