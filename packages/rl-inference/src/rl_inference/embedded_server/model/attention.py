"""Attention of tokens to their own sequences: the description of a pass, and the computation.

A pass concatenates the tokens of many sequences; a `TokenPass` says to which sequence each token belongs. Features
of a model (sliding windows, soft caps, attention sinks, scaling) are arguments, so there is no code per model.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F

if TYPE_CHECKING:
    from rl_inference.embedded_server.model.vision import ImagePass

_MAX_SCORES = 2**24
"""Maximum number of attention scores computed explicitly at once."""


@dataclass(frozen=True, slots=True)
class Segment:
    """Consecutive tokens of one sequence in a pass."""

    slot: int
    """Slot of the sequence in the KV cache."""
    start: int
    """Position of the segment's first token in the sequence; earlier positions are in the KV cache."""
    first: int
    """Index of the segment's first token in the pass."""
    count: int
    """Number of tokens."""


@dataclass
class TokenPass:
    """Tokens of one forward pass, [tokens], and the sequences that they belong to."""

    slots: torch.Tensor
    """Slot of each token's sequence, int64 [tokens]."""
    positions: torch.Tensor
    """Position of each token in its sequence, int64 [tokens]."""
    longest: int
    """Exclusive upper bound of the positions."""
    singles: int
    """Number of leading tokens that are the only token of their sequence."""
    segments: tuple[Segment, ...] = ()
    """Segments of the other tokens, shorter segments first."""
    cached: bool = True
    """Store keys and values (scoring in one pass does not need them)."""
    logit_indices: torch.Tensor | None = None
    """Indices of the tokens whose logits are computed, int64 [wanted]; None: all."""
    images: ImagePass | None = None
    """Rotary positions and images of the tokens, or None for a model of texts."""
    scratch: dict[tuple[str, int], torch.Tensor] = field(default_factory=dict)
    """Values shared by all layers: masks and positions in the cache."""


class Scoring(NamedTuple):
    """Attention settings of a layer: how it turns queries and keys into weights."""

    scale: float
    window: int
    """Number of visible positions; 0: all."""
    softcap: float | None
    """Limit c of the scores, c * tanh(score / c), or None."""
    sinks: torch.Tensor | None
    """Learned score per query head that only adds to the softmax denominator, [query heads], or None."""

    @property
    def plain(self) -> bool:
        """True if torch's fused attention supports these settings."""
        return self.softcap is None and self.sinks is None


def causal(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scoring: Scoring) -> torch.Tensor:
    """Compute the attention of a whole sequence to itself, or of its last tokens to all of it.

    Args:
        query: [1, query heads, tokens, head dim], the last `tokens` of the sequence.
        key, value: [1, key heads, positions, head dim].

    Returns:
        [1, query heads, tokens, head dim].
    """
    tokens, positions = query.shape[2], key.shape[2]
    windowed = 0 < scoring.window < positions
    if scoring.plain and tokens == positions and not windowed:
        shared = query.shape[1] > key.shape[1]
        return F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scoring.scale, enable_gqa=shared)
    query_positions = torch.arange(positions - tokens, positions, device=query.device)[:, None]
    chunk_size = max(_MAX_SCORES // (query.shape[1] * positions), 1)
    chunks = [slice(start, start + chunk_size) for start in range(0, tokens, chunk_size)]
    masks = (visible(query_positions[chunk], positions, scoring.window)[None, None] for chunk in chunks)
    outputs = [masked(query[:, :, chunk], key, value, mask, scoring) for chunk, mask in zip(chunks, masks, strict=True)]
    return torch.cat(outputs, 2) if len(outputs) > 1 else outputs[0]


def visible(query_positions: torch.Tensor, length: int, window: int) -> torch.Tensor:
    """Return the mask of visible positions: those up to the query and, with a window, only the last `window` of them.

    Args:
        query_positions: int64 [..., 1].

    Returns:
        bool [..., length].
    """
    keys = torch.arange(length, device=query_positions.device)
    return (keys <= query_positions) & (keys > query_positions - window) if window else keys <= query_positions


def masked(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor, scoring: Scoring
) -> torch.Tensor:
    """Compute the attention of tokens to the positions in their mask.

    Query heads that share a key head are folded into the token dimension, so that keys and values are never repeated
    in memory.

    Args:
        query: [rows, query heads, tokens, head dim].
        key, value: [rows, key heads, positions, head dim].
        mask: bool [rows, 1, tokens, positions].

    Returns:
        [rows, query heads, tokens, head dim].
    """
    rows, heads, tokens, dim = query.shape
    key_heads = key.shape[1]
    shared = heads // key_heads
    grouped = query.reshape(rows, key_heads, shared * tokens, dim)
    if tokens > 1 and shared > 1:
        mask = mask[:, :, None].expand(-1, -1, shared, -1, -1).reshape(rows, 1, shared * tokens, -1)
    if scoring.plain:
        output = F.scaled_dot_product_attention(grouped, key, value, attn_mask=mask, scale=scoring.scale)
    else:
        sinks = scoring.sinks
        if sinks is not None:
            sinks = sinks.view(key_heads, shared, 1).expand(-1, -1, tokens)
        output = _explicit(grouped, key, value, mask, scoring, sinks)
    return output.reshape(rows, heads, tokens, value.shape[3])


def _explicit(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor,
    scoring: Scoring,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Compute the attention of `masked` without fused kernels, which do not support soft caps and sinks.

    The softmax is in float32, as in the models of transformers.
    """
    scores = torch.matmul(query, key.transpose(2, 3)) * scoring.scale
    if scoring.softcap is not None:
        scores = torch.tanh(scores / scoring.softcap) * scoring.softcap
    scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min).float()
    if sinks is not None:
        sink_scores = sinks.reshape(1, sinks.shape[0], -1, 1).float().expand(scores.shape[0], -1, -1, -1)
        weights = torch.cat([scores, sink_scores], dim=-1).softmax(-1)[..., :-1]
    else:
        weights = scores.softmax(-1)
    return torch.matmul(weights.to(value.dtype), value)
