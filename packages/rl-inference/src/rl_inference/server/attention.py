"""Attention over slots, plugged into transformers as an attention implementation.

transformers lets a registered function replace a model's attention and passes it the keyword arguments of
`model.forward`. That is all that continuous batching needs: the function below is told by a `SlotSpan` which
rows of the cache the batch occupies, and masks by position. A model's own peculiarities (sliding windows,
soft caps, attention sinks, scaling) arrive as arguments, so there is no code per model."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from transformers import AttentionInterface

IMPLEMENTATION = "rl_slots"
"""Name under which the function is registered."""


@dataclass
class SlotSpan:
    """Which cache rows one forward pass works on, and where its tokens stand in them.

    Row i of the batch, [rows, tokens], is slot `first + i`. A fresh span (prefill) begins at position 0 of
    empty slots, padded on the right; it attends to itself only. Any other span attends to its slots' first
    `length` positions."""

    first: int
    """First slot."""
    positions: torch.Tensor
    """Position of each token in its sequence, int64 [rows, tokens]."""
    length: int
    """Positions of the cache that are looked at; more than every position."""
    fresh: bool = False
    """Whether the slots are empty."""
    cached: bool = True
    """Whether keys and values are kept at all (scoring does not need them)."""
    last: torch.Tensor | None = None
    """Token of each row whose logits are wanted, int64 [rows]; None: all."""
    scored: bool = False
    """Whether logits are wanted of all tokens but the last, which predicts none that is given."""
    write_index: torch.Tensor | None = None
    """Scratch of the cache: flat cache rows that a decode step writes, int64 [rows * heads]."""
    masks: dict[int, torch.Tensor] = field(default_factory=dict)
    """Scratch: boolean mask by sliding window (0: none), [rows, 1, tokens, length]."""

    def mask(self, window: int) -> torch.Tensor:
        """What each token may look at: nothing later than itself and, with a window, nothing `window` or more
        before."""
        if window not in self.masks:
            place = self.positions[:, None, :, None]
            keys = torch.arange(self.length, device=place.device)
            allowed = keys <= place
            if window:
                allowed = allowed & (keys > place - window)
            self.masks[window] = allowed
        return self.masks[window]


def slot_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    span: SlotSpan | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of one layer.

    Query heads that share a key head are laid along the token dimension, so that keys and values are never
    repeated in memory.

    Args:
        query: [rows, query heads, tokens, head dim].
        key, value: [rows, key heads, positions, head dim]; the cache's views, or the tokens' own for a fresh
        span.
        softcap: tanh cap of the scores, where the model has one.
        s_aux: a learned score per head that takes part in the softmax only, where the model has one.

    Returns:
        [rows, tokens, query heads, head dim], and no weights.
    """
    if span is None:
        raise RuntimeError("this model was loaded for the slot server; pass `span` to forward")
    rows, heads, tokens, dim = query.shape
    shared = heads // key.shape[1]
    window = sliding_window if sliding_window is not None and sliding_window < key.shape[2] else 0
    plain = softcap is None and s_aux is None
    if plain and tokens > 1 and span.fresh and not window:
        output = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling, enable_gqa=shared > 1)
        return output.transpose(1, 2).contiguous(), None
    mask = span.mask(window)
    grouped = query.reshape(rows, key.shape[1], shared * tokens, dim)
    if tokens > 1 and shared > 1:
        mask = mask[:, :, None].expand(-1, -1, shared, -1, -1).reshape(rows, 1, shared * tokens, -1)
    if plain:
        output = F.scaled_dot_product_attention(grouped, key, value, attn_mask=mask, scale=scaling)
    else:
        sinks = None if s_aux is None else s_aux.view(key.shape[1], shared, 1).expand(-1, -1, tokens)
        output = _explicit(grouped, key, value, mask, scaling or dim**-0.5, softcap, sinks)
    return output.reshape(rows, heads, tokens, dim).transpose(1, 2).contiguous(), None


def _explicit(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor,
    scaling: float,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """The same written out, for what the fused kernels cannot do. Softmax in float32, as the models do it."""
    scores = torch.matmul(query, key.transpose(2, 3)) * scaling
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min).float()
    if sinks is not None:
        extra = sinks.reshape(1, sinks.shape[0], -1, 1).float().expand(scores.shape[0], -1, -1, -1)
        weights = torch.cat([scores, extra], dim=-1).softmax(-1)[..., :-1]
    else:
        weights = scores.softmax(-1)
    return torch.matmul(weights.to(value.dtype), value)


AttentionInterface.register(IMPLEMENTATION, slot_attention)
