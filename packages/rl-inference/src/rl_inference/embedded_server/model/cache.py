"""The KV cache: pages that the sequences in the slots get as they grow.

Two layouts of a layer: `TorchLayer` works everywhere, `KernelLayer` is faster on a CPU in float32.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch

from rl_inference.embedded_server.model.attention import Scoring, Segment, TokenPass, causal, masked, visible
from rl_inference.embedded_server.model.pages import BLOCK, PAGE, PageTable, pages_of

KERNEL_SEGMENT = 64
"""Longest segment whose attention the single-token kernel computes; torch's tiles win beyond."""
_TRIAL = 4 * PAGE
"""Positions of slot 0 before `SlotCache.allocate`, for a model's trial."""


def padded_length(tokens: int) -> int:
    """`tokens` rounded up to a whole number of blocks: few shapes, and aligned for fused kernels."""
    return -(-tokens // BLOCK) * BLOCK


class SlotLayer(ABC):
    """Keys and values of one layer, from the first pass on. All layers, sliding ones too, keep every position; windows
    are a matter of what is looked at."""

    keys: torch.Tensor
    values: torch.Tensor

    def __init__(self, pages: PageTable) -> None:
        self.pages = pages
        self._like: tuple[torch.Tensor, torch.Tensor] | None = None

    @property
    def used(self) -> bool:
        """Whether a pass has come to this layer."""
        return self._like is not None

    @property
    def token_bytes(self) -> int:
        """What a position takes, by the shapes of the first pass; 0 if there was none."""
        return sum(part.shape[1] * part.shape[3] * part.element_size() for part in self._like or ())

    def allocate(self) -> None:
        """Make empty stores of as many pages as there are."""
        if self._like is not None:
            self._allocate(*self._like)

    @abstractmethod
    def _allocate(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """The same.

        Args:
            keys, values: [1, heads, 0, head dim], for heads, sizes, dtype and device.
        """

    @abstractmethod
    def reset_pages(self, pages: torch.Tensor) -> None:
        """Make pages, int64 [pages], fit for a new sequence."""

    @abstractmethod
    def copy_page(self, source: int, target: int) -> None:
        """Copy what is in a page."""

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
            self.allocate()
            self.reset_pages(torch.arange(self.pages.count, device=key.device))
        rows = span.scratch.get(("rows", 0))
        if rows is None:  # of a store whose pages lie end to end
            rows = self.pages.table[span.slots, span.positions // PAGE] * PAGE + span.positions % PAGE
            span.scratch["rows", 0] = rows
        return self._attend(query, key, value, span, scoring, rows)

    @abstractmethod
    def _attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        span: TokenPass,
        scoring: Scoring,
        rows: torch.Tensor,
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


class TorchLayer(SlotLayer):
    """Keys and values [heads, pages, PAGE, head dim], attended to by torch's fused kernels."""

    def _allocate(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        def store(like: torch.Tensor) -> torch.Tensor:
            made = like.new_empty(like.shape[1], self.pages.count, PAGE, like.shape[3])
            made[:, 0] = 0
            return made

        self.keys, self.values = store(keys), store(values)

    def reset_pages(self, pages: torch.Tensor) -> None:
        # zeros, not what was there: attention multiplies masked values by 0, and 0 * nan is nan
        for store in (self.keys, self.values):
            store[:, pages] = 0

    def copy_page(self, source: int, target: int) -> None:
        for store in (self.keys, self.values):
            store[:, target] = store[:, source]

    def _laid(self, pages: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """What is in the pages of some rows, int64 [rows, pages], as [rows, heads, positions, head dim]."""
        rows = pages.shape[0]
        both = (store.index_select(1, pages.view(-1)) for store in (self.keys, self.values))
        keys, values = (part.view(part.shape[0], rows, -1, part.shape[3]).transpose(0, 1) for part in both)
        return keys, values

    def sequence(self, slot: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = self._laid(self.pages.table[slot : slot + 1, : pages_of(length)])
        return keys[:, :, :length], values[:, :, :length]

    def _attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        span: TokenPass,
        scoring: Scoring,
        rows: torch.Tensor,
    ) -> torch.Tensor:
        self._write(key, value, span, rows)
        parts = [self._singles(query, span, scoring)] if span.singles else []
        parts += [self.segment(query, key, value, segment, scoring).transpose(1, 2) for segment in span.segments]
        return torch.cat(parts, 1) if len(parts) > 1 else parts[0].contiguous()

    def _write(self, key: torch.Tensor, value: torch.Tensor, span: TokenPass, rows: torch.Tensor) -> None:
        heads = key.shape[1]
        place = span.scratch.get(("place", heads))
        if place is None:
            head = torch.arange(heads, device=key.device)[:, None]
            place = (head * (self.pages.count * PAGE) + rows).view(-1)
            span.scratch["place", heads] = place
        for store, states in ((self.keys, key), (self.values, value)):
            store.view(-1, store.shape[3]).index_copy_(0, place, states.reshape(-1, store.shape[3]))

    def _singles(self, query: torch.Tensor, span: TokenPass, scoring: Scoring) -> torch.Tensor:
        """[1, singles, query heads, head dim]."""
        count, length = span.singles, padded_length(span.longest)
        pages = span.scratch.get(("pages", 0))
        if pages is None:
            span.scratch["pages", 0] = pages = self.pages.table[span.slots[:count], : pages_of(length)]
        keys, values = self._laid(pages)
        mask = span.scratch.get(("mask", scoring.window))
        if mask is None:
            mask = visible(span.positions[:count, None], length, scoring.window)[:, None, None]
            span.scratch["mask", scoring.window] = mask
        rows = query[0, :, :count].transpose(0, 1)[:, :, None]
        return masked(rows, keys[:, :, :length], values[:, :, :length], mask, scoring)[:, :, 0][None]


class KernelLayer(SlotLayer):
    """Keys [pages, heads, head dim, PAGE], values [pages, heads, PAGE, head dim], for `kernel`."""

    def _allocate(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        self.keys = keys.new_empty(self.pages.count, keys.shape[1], keys.shape[3], PAGE)
        self.values = values.new_empty(self.pages.count, values.shape[1], PAGE, values.shape[3])
        self._arrays = (self.keys.numpy(), self.values.numpy())
        self._table = self.pages.table.numpy()

    def reset_pages(self, pages: torch.Tensor) -> None:
        """Nothing to do: each token reads its own positions alone."""

    def copy_page(self, source: int, target: int) -> None:
        for store in (self.keys, self.values):
            store[target] = store[source]

    def sequence(self, slot: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        pages = self.pages.table[slot, : pages_of(length)]
        keys = self.keys[pages].permute(1, 0, 3, 2).flatten(1, 2)
        return keys[None, :, :length], self.values[pages].transpose(0, 1).flatten(1, 2)[None, :, :length]

    def _attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        span: TokenPass,
        scoring: Scoring,
        rows: torch.Tensor,
    ) -> torch.Tensor:
        import numpy as np

        from rl_inference.embedded_server.model import attention_kernel

        queries = query[0].transpose(0, 1).contiguous()
        slots, positions = span.slots.numpy(), span.positions.numpy()
        new = (states[0].transpose(0, 1).contiguous().numpy() for states in (key, value))
        attention_kernel.write(*self._arrays, *new, rows.numpy())
        output = queries.new_empty(*queries.shape[:2], value.shape[3])
        tiled = [segment for segment in span.segments if segment.count > KERNEL_SEGMENT]
        count = tiled[0].first if tiled else queries.shape[0]
        sinks = output.new_empty(0) if scoring.sinks is None else scoring.sinks.float()
        attention_kernel.attend(
            torch.get_num_threads(),
            queries.numpy()[:count],
            *self._arrays,
            self._table,
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
    """All layers' pages, and the slots that they belong to: those of answers, and a last one for scores."""

    def __init__(
        self,
        layers: int,
        slots: int,
        context_length: int,
        layer: type[SlotLayer] = TorchLayer,
        device: torch.device | str = "cpu",
    ) -> None:
        self.slots = slots
        self.pages = PageTable(slots + 1, max(context_length, _TRIAL), torch.device(device))
        self.pages.reset(1 + pages_of(_TRIAL))
        self.pages.assign(0, list(range(1, self.pages.count)))
        self.layers = [layer(self.pages) for _ in range(layers)]

    @property
    def tokens(self) -> int:
        """How many the pages hold."""
        return (self.pages.count - 1) * PAGE

    @property
    def token_bytes(self) -> int:
        """What a token takes in all layers, by the shapes of the first pass."""
        return sum(layer.token_bytes for layer in self.layers)

    def allocate(self, tokens: int) -> None:
        """Have room for so many tokens in all; what was kept is lost."""
        self.pages.reset(1 + pages_of(tokens))
        for layer in self.layers:
            layer.allocate()

    def grow(self, slot: int, tokens: int) -> bool:
        """Make room for `tokens` positions in a slot; False, and nothing is done, if there are too few pages."""
        mine, free = self.pages.of[slot], self.pages.free
        lacking = pages_of(tokens) - len(mine)
        if lacking > len(free):
            return False
        if lacking > 0:
            new = [free.pop() for _ in range(lacking)]
            self.pages.assign(slot, mine + new)
            for layer in self.layers:
                layer.reset_pages(torch.tensor(new, device=self.pages.table.device))
        return True

    def copy(self, source: int, slot: int, length: int) -> None:
        """Have in a slot what is in the first `length` positions of another one, or of itself, and nothing else. Whole
        pages are shared; the last one is copied, to which a free one is needed."""
        pages, rest = self.pages.of[source][: pages_of(length)], length % PAGE
        if rest:
            copied, pages[-1] = pages[-1], self.pages.free.pop()
            for layer in self.layers:
                layer.copy_page(copied, pages[-1])
        self.pages.assign(slot, pages)
