"""How big an embedded model is and how it is warmed up. All of it is part of the key under which it is cached."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a tiny Qwen3 model."""

    hidden_size: int = 64
    """Width of the residual stream."""
    layers: int = 2
    """Number of decoder layers."""
    heads: int = 4
    """Attention heads; keys and values have as many."""
    head_dim: int = 16
    """Width of a head."""
    intermediate_size: int = 256
    """Width of the feed-forward layers."""
    max_length: int = 256
    """Longest row of prompt and answer, in tokens."""


@dataclass(frozen=True)
class WarmUp:
    """The short supervised training on lessons. The defaults take about 25 s of one core."""

    steps: int = 500
    """Optimizer steps."""
    batch_size: int = 64
    """Lessons per step."""
    problems: int = 16384
    """Distinct problems of the training split that the lessons are about."""
    lr: float = 3e-3
    """Peak learning rate of AdamW; it falls to 0 along half a cosine."""
    lr_rise: int = 20
    """Steps over which the rate rises from 0."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Decay of AdamW's moments; there is no weight decay."""
    max_grad_norm: float = 1.0
    """Global norm to which gradients are clipped."""


@dataclass(frozen=True)
class EmbeddedRecipe:
    """The model of the generated word problems."""

    levels: tuple[int, ...] = (2,)
    """Levels of the problems in its lessons."""
    shape: ModelShape = ModelShape()
    """Sizes of the model."""
    warm_up: WarmUp | None = field(default_factory=WarmUp)
    """Its supervised training; none leaves it random."""


@dataclass(frozen=True)
class ScratchRecipe:
    """A random model for given texts."""

    vocab_size: int = 2048
    """Tokens of the byte-level BPE tokenizer at most."""
    shape: ModelShape = ModelShape(
        hidden_size=128, layers=2, heads=4, head_dim=32, intermediate_size=384, max_length=1024
    )
    """Sizes of the model."""
