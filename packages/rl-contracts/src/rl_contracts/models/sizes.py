"""Sizes of a language model from its configuration, for memory estimates without loading the model."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True)
class ModelSizes:
    """Shapes and sizes of a language model."""

    shapes: Mapping[str, tuple[int, ...]]
    """Shape of each parameter by name; a parameter shared by two modules counts once."""
    layers: int
    hidden: int
    intermediate: int
    """Width of a layer's MLP."""
    heads: int
    key_heads: int
    head_size: int
    vocabulary: int
    frozen: frozenset[str] = frozenset()
    """Names of the parameters that are not trained."""
    experts_per_token: int = 0
    """Experts of an MoE layer that process each token; 0 without experts."""

    @cached_property
    def parameters(self) -> int:
        """Number of parameters."""
        return sum(math.prod(shape) for shape in self.shapes.values())

    @cached_property
    def active_parameters(self) -> float:
        """Number of parameters that each token uses: of an MoE layer, the experts that process it."""

        def used(name: str, shape: tuple[int, ...]) -> float:
            has_experts = self.experts_per_token and "experts" in name and len(shape) == 3
            return self.experts_per_token / shape[0] if has_experts else 1.0

        return sum(math.prod(shape) * used(name, shape) for name, shape in self.shapes.items())

    @cached_property
    def largest_layer(self) -> int:
        """Number of parameters in the largest decoder layer."""
        sizes: dict[str, int] = {}
        for name, shape in self.shapes.items():
            if (layer := layer_of(name)) is not None:
                sizes[layer] = sizes.get(layer, 0) + math.prod(shape)
        return max(sizes.values(), default=0)

    @cached_property
    def outside(self) -> int:
        """Number of parameters outside of the decoder layers: embedding, final norm, `lm_head`."""
        return sum(math.prod(shape) for name, shape in self.shapes.items() if layer_of(name) is None)

    @property
    def cache_per_token(self) -> int:
        """Number of key and value entries of one token over all layers."""
        return 2 * self.layers * self.key_heads * self.head_size


@cache
def layer_of(name: str) -> str | None:
    """Return the number of the decoder layer that holds a parameter, or None if no layer does."""
    return next((after for part, after in pairwise(name.split(".")) if part == "layers"), None)


def sizes_of(model: nn.Module, config: Any) -> ModelSizes:
    """Return the sizes of a model, which may be on the meta device.

    Args:
        config: the model's transformers configuration.
    """
    text = config.get_text_config()
    heads = text.num_attention_heads
    widths = getattr(text, "intermediate_size", None) or 4 * text.hidden_size
    return ModelSizes(
        shapes={name: tuple(parameter.shape) for name, parameter in model.named_parameters()},
        layers=text.num_hidden_layers,
        hidden=text.hidden_size,
        intermediate=max(widths) if isinstance(widths, list) else widths,
        heads=heads,
        key_heads=getattr(text, "num_key_value_heads", None) or heads,
        head_size=getattr(text, "head_dim", None) or text.hidden_size // heads,
        vocabulary=text.vocab_size,
        experts_per_token=getattr(text, "num_experts_per_tok", None) or 0,
        frozen=frozenset(name for name, parameter in model.named_parameters() if not parameter.requires_grad),
    )
