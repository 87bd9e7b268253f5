"""The KV cache: a fixed number of slots, each with room for one sequence."""

from __future__ import annotations

import torch
from transformers import Cache
from transformers.cache_utils import CacheLayerMixin

from rl_inference.server.attention import SlotSpan

BLOCK = 32
"""Lengths looked at by attention are multiples of this: few shapes, and aligned for fused kernels."""


def padded_length(tokens: int) -> int:
    """`tokens` rounded up to a whole number of blocks."""
    return -(-tokens // BLOCK) * BLOCK


class SlotLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]
    """Keys and values of one layer, each [slots, heads, capacity, head dim]. All layers, sliding ones too,
    keep every position; windows are a matter of masks."""

    is_sliding = False

    def __init__(self, slots: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.slots = slots
        self.capacity = 0
        self.span: SlotSpan | None = None

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Take heads, sizes, dtype and device from the first keys and values."""
        self.keys = self._room(key_states)
        self.values = self._room(value_states)
        self.is_initialized = True

    def _room(self, states: torch.Tensor) -> torch.Tensor:
        # zeros, not garbage: attention multiplies masked values by 0, and 0 * nan is nan
        return states.new_zeros(self.slots, states.shape[1], self.capacity, states.shape[3])

    def reserve(self, capacity: int) -> None:
        """Make room for sequences of `capacity` tokens; keeps what is there."""
        kept = self.capacity
        self.capacity = capacity
        if self.keys is None or self.values is None:
            return
        old_keys, old_values = self.keys, self.values
        self.keys, self.values = self._room(old_keys), self._room(old_values)
        self.keys[:, :, :kept] = old_keys
        self.values[:, :, :kept] = old_values

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the span's tokens at their positions; return what attention looks at.

        Args:
            key_states, value_states: [rows, heads, tokens, head dim].
        """
        span = self.span
        if span is None or not span.cached:
            return key_states, value_states
        if self.keys is None or self.values is None:
            self.lazy_initialization(key_states, value_states)
        assert self.keys is not None
        assert self.values is not None
        rows, heads, tokens, _ = key_states.shape
        if span.fresh:
            self.keys[span.first : span.first + rows, :, :tokens] = key_states
            self.values[span.first : span.first + rows, :, :tokens] = value_states
            return key_states, value_states
        if span.write_index is None:
            row = torch.arange(span.first, span.first + rows, device=key_states.device).view(-1, 1, 1)
            head = torch.arange(heads, device=key_states.device).view(1, -1, 1)
            span.write_index = ((row * heads + head) * self.capacity + span.positions[:, None, :]).view(-1)
        for store, states in ((self.keys, key_states), (self.values, value_states)):
            store.view(-1, store.shape[3]).index_copy_(0, span.write_index, states.reshape(-1, store.shape[3]))
        here = slice(span.first, span.first + rows)
        return self.keys[here, :, : span.length], self.values[here, :, : span.length]

    def copy_rows(self, sources: torch.Tensor, targets: torch.Tensor, length: int) -> None:
        """Copy the first `length` positions of some slots onto others."""
        for store in (self.keys, self.values):
            if store is not None:
                store[targets, :, :length] = store[sources, :, :length]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Never used for a mask (the attention function makes its own); the sizes of the current span."""
        return (self.span.length if self.span else query_length), 0

    def get_seq_length(self) -> int:
        """Unknown as one number, since slots differ; positions are always given explicitly."""
        return 0

    def get_max_length(self) -> int:
        """Tokens for which a slot has room now."""
        return self.capacity


class SlotCache(Cache):
    """All layers' slots. `use` says which of them the next forward pass works on."""

    def __init__(self, layers: int, slots: int, context_length: int) -> None:
        self.slots = slots
        self.context_length = context_length
        self._slot_layers = [SlotLayer(slots) for _ in range(layers)]
        super().__init__(layers=list(self._slot_layers))

    def use(self, span: SlotSpan) -> None:
        """Direct the next forward pass to `span`, growing the slots (by doubling) where it needs more
        room."""
        have = self._slot_layers[0].capacity
        if span.cached and span.length > have:
            wanted = min(max(span.length, 2 * have, 8 * BLOCK), padded_length(self.context_length))
            for layer in self._slot_layers:
                layer.reserve(wanted)
        for layer in self._slot_layers:
            layer.span = span

    def copy_rows(self, sources: list[int], targets: list[int], length: int) -> None:
        """Copy the first `length` positions of slots `sources[i]` onto slots `targets[i]`, in all layers."""
        if not sources:
            return
        keys = self._slot_layers[0].keys
        device = keys.device if keys is not None else None
        source, target = torch.tensor(sources, device=device), torch.tensor(targets, device=device)
        for layer in self._slot_layers:
            layer.copy_rows(source, target, length)
