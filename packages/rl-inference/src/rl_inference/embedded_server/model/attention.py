"""Attention of tokens to their own sequences: what a pass consists of, and the arithmetic.

A pass lays the tokens of many sequences end to end; a `TokenPass` says which token is whose. A model's own
peculiarities (sliding windows, soft caps, attention sinks, scaling) are arguments, so there is no code per model.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
import torch.nn.functional as F

_SCORES = 2**24
"""Scores of tokens to positions that are written out at once."""


@dataclass(frozen=True, slots=True)
class Segment:
    """Several tokens of one sequence, next to each other in a pass."""

    slot: int
    """Where the sequence lies in the cache."""
    start: int
    """Position of the first of them in the sequence; those before it are in the cache."""
    first: int
    """Index of the first of them in the pass."""
    count: int
    """How many."""


@dataclass
class TokenPass:
    """The tokens of one forward pass, [tokens], and where they belong."""

    slots: torch.Tensor
    """Slot of each token's sequence, int64 [tokens]."""
    positions: torch.Tensor
    """Position of each token in its sequence, int64 [tokens]."""
    longest: int
    """More than every position."""
    singles: int
    """The first `singles` tokens are the only ones of their sequences."""
    segments: tuple[Segment, ...] = ()
    """The other tokens, shorter segments first."""
    cached: bool = True
    """Whether keys and values are kept at all (scoring does not need them)."""
    wanted: torch.Tensor | None = None
    """Indices of the tokens whose logits are wanted, int64 [wanted]; None: all."""
    scratch: dict[tuple[str, int], torch.Tensor] = field(default_factory=dict)
    """What all layers compute alike: masks, places in the cache."""


class Scoring(NamedTuple):
    """How a layer turns queries and keys into weights."""

    scale: float
    window: int
    """Positions that are looked at; 0: all."""
    softcap: float | None
    """tanh cap of the scores, where the model has one."""
    sinks: torch.Tensor | None
    """[query heads]: a learned score that takes part in the softmax only, where the model has one."""

    @property
    def plain(self) -> bool:
        """Whether torch's fused attention can do it."""
        return self.softcap is None and self.sinks is None


def causal(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scoring: Scoring) -> torch.Tensor:
    """Attention of a whole sequence to itself, or of its last tokens to all of it.

    Args:
        query: [1, query heads, tokens, head dim]: the sequence's last `tokens`.
        key, value: [1, key heads, positions, head dim].

    Returns:
        [1, query heads, tokens, head dim].
    """
    tokens, positions = query.shape[2], key.shape[2]
    windowed = 0 < scoring.window < positions
    if scoring.plain and tokens == positions and not windowed:
        shared = query.shape[1] > key.shape[1]
        return F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scoring.scale, enable_gqa=shared)
    place = torch.arange(positions - tokens, positions, device=query.device)[:, None]
    at_once = max(_SCORES // (query.shape[1] * positions), 1)
    parts = [slice(start, start + at_once) for start in range(0, tokens, at_once)]
    masks = (visible(place[part], positions, scoring.window)[None, None] for part in parts)
    found = [masked(query[:, :, part], key, value, mask, scoring) for part, mask in zip(parts, masks, strict=True)]
    return torch.cat(found, 2) if len(found) > 1 else found[0]


def visible(place: torch.Tensor, length: int, window: int) -> torch.Tensor:
    """What tokens at `place` may look at: nothing later and, with a window, nothing `window` or more before.

    Args:
        place: int64 [..., 1].

    Returns:
        bool [..., length].
    """
    keys = torch.arange(length, device=place.device)
    return (keys <= place) & (keys > place - window) if window else keys <= place


def masked(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor, scoring: Scoring
) -> torch.Tensor:
    """Attention of tokens to what their mask shows.

    Query heads that share a key head are laid along the token dimension, so that keys and values are never repeated in
    memory.

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
    """The same written out, for what the fused kernels cannot do. Softmax in float32, as the models do it."""
    scores = torch.matmul(query, key.transpose(2, 3)) * scoring.scale
    if scoring.softcap is not None:
        scores = torch.tanh(scores / scoring.softcap) * scoring.softcap
    scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min).float()
    if sinks is not None:
        extra = sinks.reshape(1, sinks.shape[0], -1, 1).float().expand(scores.shape[0], -1, -1, -1)
        weights = torch.cat([scores, extra], dim=-1).softmax(-1)[..., :-1]
    else:
        weights = scores.softmax(-1)
    return torch.matmul(weights.to(value.dtype), value)
