"""The KV cache: a fixed number of slots, each with room for one sequence.

Two layouts of a layer: `TorchLayer` works everywhere, `KernelLayer` is faster on a CPU in float32.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch

from rl_inference.server.attention import Scoring, Segment, TokenPass, causal, masked, visible

BLOCK = 32
"""Room and lengths looked at are multiples of this: few shapes, and aligned for fused kernels."""
KERNEL_SEGMENT = 64
"""Longest segment whose attention the single-token kernel computes; torch's tiles win beyond."""


def padded_length(tokens: int) -> int:
    """`tokens` rounded up to a whole number of blocks."""
    return -(-tokens // BLOCK) * BLOCK


class SlotLayer(ABC):
    """Keys and values of one layer, from the first pass on. All layers, sliding ones too, keep every position; windows
    are a matter of what is looked at."""

    keys: torch.Tensor
    values: torch.Tensor

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self.capacity = 0
        self._like: tuple[torch.Tensor, torch.Tensor] | None = None

    @abstractmethod
    def room(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Make empty `keys` and `values` of the present capacity.

        Args:
            keys, values: [1, heads, tokens, head dim], for heads, sizes, dtype and device.
        """

    @abstractmethod
    def part(self, slots: torch.Tensor | slice, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The first `length` positions of some slots in both stores; views for a slice."""

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, span: TokenPass, scoring: Scoring
    ) -> torch.Tensor:
        """Keep the pass's keys and values and compute its attention. The first pass tells heads, sizes, dtype and
        device.

        Args:
            query: [1, query heads, tokens, head dim].
            key, value: [1, key heads, tokens, head dim].

        Returns:
            [1, tokens, query heads, head dim].
        """
        if self._like is None:
            self._like = key[:, :, :0].clone(), value[:, :, :0].clone()
            self.room(*self._like)
        return self._attend(query, key, value, span, scoring)

    @abstractmethod
    def _attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, span: TokenPass, scoring: Scoring
    ) -> torch.Tensor: ...

    @abstractmethod
    def sequence(self, slot: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of a slot's first `length` positions, [1, key heads, length, head dim]."""

    def segment(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, segment: Segment, scoring: Scoring
    ) -> torch.Tensor:
        """Attention of one segment, whose keys and values are in the cache already: [1, query heads, count, dim]."""
        here = slice(segment.first, segment.first + segment.count)
        if segment.start == 0:
            return causal(query[:, :, here], key[:, :, here], value[:, :, here], scoring)
        keys, values = self.sequence(segment.slot, segment.start + segment.count)
        return causal(query[:, :, here], keys, values, scoring)

    def reserve(self, capacity: int) -> None:
        """Make room for sequences of `capacity` tokens; keeps what is there."""
        kept, self.capacity = self.capacity, capacity
        if self._like is None or not kept:
            return
        old = self.part(slice(None), kept)
        self.room(*self._like)
        for target, source in zip(self.part(slice(None), kept), old, strict=True):
            target.copy_(source)

    def copy_slots(self, sources: torch.Tensor, targets: torch.Tensor, length: int) -> None:
        """Copy the first `length` positions of slots `sources[i]` onto slots `targets[i]`, int64 [i] each."""
        everything = self.part(slice(None), length)
        for store, copied in zip(everything, self.part(sources, length), strict=True):
            store[targets] = copied


class TorchLayer(SlotLayer):
    """Keys and values [slots, heads, capacity, head dim], attended to by torch's fused kernels."""

    def room(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        # zeros, not garbage: attention multiplies masked values by 0, and 0 * nan is nan
        self.keys = keys.new_zeros(self.slots, keys.shape[1], self.capacity, keys.shape[3])
        self.values = values.new_zeros(self.slots, values.shape[1], self.capacity, values.shape[3])

    def part(self, slots: torch.Tensor | slice, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.keys[slots, :, :length], self.values[slots, :, :length]

    def sequence(self, slot: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.part(slice(slot, slot + 1), length)

    def _attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, span: TokenPass, scoring: Scoring
    ) -> torch.Tensor:
        self._write(key, value, span)
        parts = [self._singles(query, span, scoring)] if span.singles else []
        parts += [self.segment(query, key, value, segment, scoring).transpose(1, 2) for segment in span.segments]
        return torch.cat(parts, 1) if len(parts) > 1 else parts[0].contiguous()

    def _write(self, key: torch.Tensor, value: torch.Tensor, span: TokenPass) -> None:
        heads = key.shape[1]
        place = span.scratch.get(("place", heads))
        if place is None:
            head = torch.arange(heads, device=key.device)[:, None]
            place = ((span.slots * heads + head) * self.capacity + span.positions).view(-1)
            span.scratch["place", heads] = place
        for store, states in ((self.keys, key), (self.values, value)):
            store.view(-1, store.shape[3]).index_copy_(0, place, states.reshape(-1, store.shape[3]))

    def _singles(self, query: torch.Tensor, span: TokenPass, scoring: Scoring) -> torch.Tensor:
        """[1, singles, query heads, head dim]."""
        count, length = span.singles, min(padded_length(span.longest), self.capacity)
        keys, values = self.part(slice(0, count) if span.in_place else span.slots[:count], length)
        mask = span.scratch.get(("mask", scoring.window))
        if mask is None:
            mask = visible(span.positions[:count, None], length, scoring.window)[:, None, None]
            span.scratch["mask", scoring.window] = mask
        rows = query[0, :, :count].transpose(0, 1)[:, :, None]
        return masked(rows, keys, values, mask, scoring)[:, :, 0][None]


class KernelLayer(SlotLayer):
    """Keys [slots, heads, head dim, capacity], values [slots, heads, capacity, head dim], for `kernel`."""

    def room(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        self.keys = keys.new_zeros(self.slots, keys.shape[1], keys.shape[3], self.capacity)
        self.values = values.new_zeros(self.slots, values.shape[1], self.capacity, values.shape[3])
        self._arrays = (self.keys.numpy(), self.values.numpy())

    def part(self, slots: torch.Tensor | slice, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.keys[slots, :, :, :length], self.values[slots, :, :length]

    def sequence(self, slot: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = self.part(slice(slot, slot + 1), length)
        return keys.transpose(2, 3), values

    def _attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, span: TokenPass, scoring: Scoring
    ) -> torch.Tensor:
        import numpy as np

        from rl_inference.server import kernel

        queries = query[0].transpose(0, 1).contiguous()
        slots, positions = span.slots.numpy(), span.positions.numpy()
        new = (states[0].transpose(0, 1).contiguous().numpy() for states in (key, value))
        kernel.write(*self._arrays, *new, slots, positions)
        output = queries.new_empty(*queries.shape[:2], value.shape[3])
        tiled = [segment for segment in span.segments if segment.count > KERNEL_SEGMENT]
        count = tiled[0].first if tiled else queries.shape[0]
        sinks = output.new_empty(0) if scoring.sinks is None else scoring.sinks.float()
        kernel.attend(
            torch.get_num_threads(),
            queries.numpy()[:count],
            *self._arrays,
            slots[:count],
            positions[:count],
            output.numpy()[:count],
            np.float32(scoring.scale),
            scoring.window,
            np.float32(scoring.softcap or 0.0),
            sinks.numpy(),
        )
        for segment in tiled:
            part = self.segment(query, key, value, segment, scoring)
            output[segment.first : segment.first + segment.count] = part[0].transpose(0, 1)
        return output[None]


class SlotCache:
    """All layers' slots."""

    def __init__(self, layers: int, slots: int, context_length: int, layer: type[SlotLayer] = TorchLayer) -> None:
        self.context_length = context_length
        self.layers = [layer(slots) for _ in range(layers)]

    def reserve(self, span: TokenPass) -> None:
        """Make room for what a pass keeps, growing the slots by doubling."""
        have = self.layers[0].capacity
        if span.cached and span.longest > have:
            wanted = min(max(padded_length(span.longest), 2 * have, 8 * BLOCK), padded_length(self.context_length))
            for layer in self.layers:
                layer.reserve(wanted)

    def copy_slots(self, sources: torch.Tensor, targets: torch.Tensor, length: int) -> None:
        """Copy the first `length` positions of slots `sources[i]` onto slots `targets[i]`, in all layers."""
        for layer in self.layers:
            layer.copy_slots(sources, targets, length)
