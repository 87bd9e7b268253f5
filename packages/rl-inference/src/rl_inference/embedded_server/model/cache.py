"""KV cache in pages. The sequences in the slots get pages as they grow.

A layer has one of two layouts: `TorchLayer` works on all devices, `KernelLayer` is faster on a CPU in float32.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch

from rl_inference.embedded_server.model.attention import Scoring, Segment, TokenPass, causal, masked, visible
from rl_inference.embedded_server.model.pages import BLOCK, PAGE, PageTable, pages_of

KERNEL_SEGMENT = 64
"""Length of the longest segment computed by the single-token kernel; for longer ones torch's tiles are faster."""
_CHECK_POSITIONS = 4 * PAGE
"""Number of positions of slot 0 before `SlotCache.allocate`, for the numerical check of a model at load time."""


def padded_length(tokens: int) -> int:
    """Return `tokens` rounded up to whole blocks. Fused kernels then get aligned tensors of few shapes."""
    return -(-tokens // BLOCK) * BLOCK


class SlotLayer(ABC):
    """Keys and values of one layer, allocated at the first pass.

    All layers, including those with a sliding window, store every position. A window only masks positions.
    """

    keys: torch.Tensor
    values: torch.Tensor

    def __init__(self, pages: PageTable) -> None:
        self.pages = pages
        self._like: tuple[torch.Tensor, torch.Tensor] | None = None

    @property
    def used(self) -> bool:
        """True if the layer has run a pass."""
        return self._like is not None

    @property
    def token_bytes(self) -> int:
        """Bytes per position, from the shapes of the first pass; 0 before it."""
        return sum(states.shape[1] * states.shape[3] * states.element_size() for states in self._like or ())

    def allocate(self) -> None:
        """Allocate empty storage for all pages."""
        if self._like is not None:
            self._allocate(*self._like)

    @abstractmethod
    def _allocate(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Allocate empty storage for all pages.

        Args:
            keys, values: [1, heads, 0, head dim], examples of heads, sizes, dtype and device.
        """

    @abstractmethod
    def reset_pages(self, pages: torch.Tensor) -> None:
        """Prepare pages, int64 [pages], for a new sequence."""

    @abstractmethod
    def copy_page(self, source: int, target: int) -> None:
        """Copy the content of a page to another page."""

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, span: TokenPass, scoring: Scoring
    ) -> torch.Tensor:
        """Store the keys and values of the pass and compute its attention.

        The first pass determines heads, sizes, dtype and device.

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
        if rows is None:  # indices into storage with consecutive pages
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
        """Return keys and values of a slot's first `length` positions, [1, key heads, length, head dim]."""

    def segment(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, segment: Segment, scoring: Scoring
    ) -> torch.Tensor:
        """Compute the attention of one segment whose keys and values are already in the cache.

        Returns:
            [1, query heads, count, head dim].
        """
        tokens = slice(segment.first, segment.first + segment.count)
        if segment.start == 0:
            return causal(query[:, :, tokens], key[:, :, tokens], value[:, :, tokens], scoring)
        keys, values = self.sequence(segment.slot, segment.start + segment.count)
        return causal(query[:, :, tokens], keys, values, scoring)


class TorchLayer(SlotLayer):
    """Keys and values [heads, pages, PAGE, head dim], processed by torch's fused kernels."""

    def _allocate(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        def allocate(like: torch.Tensor) -> torch.Tensor:
            storage = like.new_empty(like.shape[1], self.pages.count, PAGE, like.shape[3])
            storage[:, 0] = 0
            return storage

        self.keys, self.values = allocate(keys), allocate(values)

    def reset_pages(self, pages: torch.Tensor) -> None:
        # Zeros replace the old content: attention multiplies masked values by 0, and 0 * NaN is NaN.
        for store in (self.keys, self.values):
            store[:, pages] = 0

    def copy_page(self, source: int, target: int) -> None:
        for store in (self.keys, self.values):
            store[:, target] = store[:, source]

    def _gather_pages(self, pages: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values of pages, int64 [rows, pages], as [rows, heads, positions, head dim]."""
        rows = pages.shape[0]
        gathered = (store.index_select(1, pages.view(-1)) for store in (self.keys, self.values))
        keys, values = (states.view(states.shape[0], rows, -1, states.shape[3]).transpose(0, 1) for states in gathered)
        return keys, values

    def sequence(self, slot: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = self._gather_pages(self.pages.table[slot : slot + 1, : pages_of(length)])
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
        outputs = [self._singles(query, span, scoring)] if span.singles else []
        outputs += [self.segment(query, key, value, segment, scoring).transpose(1, 2) for segment in span.segments]
        return torch.cat(outputs, 1) if len(outputs) > 1 else outputs[0].contiguous()

    def _write(self, key: torch.Tensor, value: torch.Tensor, span: TokenPass, rows: torch.Tensor) -> None:
        heads = key.shape[1]
        indices = span.scratch.get(("place", heads))
        if indices is None:
            head_index = torch.arange(heads, device=key.device)[:, None]
            indices = (head_index * (self.pages.count * PAGE) + rows).view(-1)
            span.scratch["place", heads] = indices
        for store, states in ((self.keys, key), (self.values, value)):
            store.view(-1, store.shape[3]).index_copy_(0, indices, states.reshape(-1, store.shape[3]))

    def _singles(self, query: torch.Tensor, span: TokenPass, scoring: Scoring) -> torch.Tensor:
        """Compute the attention of the single tokens, [1, singles, query heads, head dim]."""
        count, length = span.singles, padded_length(span.longest)
        pages = span.scratch.get(("pages", 0))
        if pages is None:
            span.scratch["pages", 0] = pages = self.pages.table[span.slots[:count], : pages_of(length)]
        keys, values = self._gather_pages(pages)
        mask = span.scratch.get(("mask", scoring.window))
        if mask is None:
            mask = visible(span.positions[:count, None], length, scoring.window)[:, None, None]
            span.scratch["mask", scoring.window] = mask
        rows = query[0, :, :count].transpose(0, 1)[:, :, None]
        return masked(rows, keys[:, :, :length], values[:, :, :length], mask, scoring)[:, :, 0][None]


class KernelLayer(SlotLayer):
    """Keys [pages, heads, head dim, PAGE] and values [pages, heads, PAGE, head dim], for `attention_kernel`."""

    def _allocate(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        self.keys = keys.new_empty(self.pages.count, keys.shape[1], keys.shape[3], PAGE)
        self.values = values.new_empty(self.pages.count, values.shape[1], PAGE, values.shape[3])
        self._arrays = (self.keys.numpy(), self.values.numpy())
        self._table = self.pages.table.numpy()

    def reset_pages(self, pages: torch.Tensor) -> None:
        """Do nothing: each token reads only positions that were written."""

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
            attended = self.segment(query, key, value, segment, scoring)
            output[segment.first : segment.first + segment.count] = attended[0].transpose(0, 1)
        return output[None]


class SlotCache:
    """Pages of all layers, and the slots that own them: one per completion, and a last one for scores."""

    def __init__(
        self,
        layers: int,
        slots: int,
        context_length: int,
        layer: type[SlotLayer] = TorchLayer,
        device: torch.device | str = "cpu",
    ) -> None:
        self.slots = slots
        self.pages = PageTable(slots + 1, max(context_length, _CHECK_POSITIONS), torch.device(device))
        self.pages.reset(1 + pages_of(_CHECK_POSITIONS))
        self.pages.assign(0, list(range(1, self.pages.count)))
        self.layers = [layer(self.pages) for _ in range(layers)]

    @property
    def tokens(self) -> int:
        """Number of tokens that the pages can hold."""
        return (self.pages.count - 1) * PAGE

    @property
    def token_bytes(self) -> int:
        """Bytes per token in all layers, from the shapes of the first pass."""
        return sum(layer.token_bytes for layer in self.layers)

    def allocate(self, tokens: int) -> None:
        """Allocate storage for `tokens` tokens in total; the previous content is lost."""
        self.pages.reset(1 + pages_of(tokens))
        for layer in self.layers:
            layer.allocate()

    def grow(self, slot: int, tokens: int) -> bool:
        """Allocate pages for `tokens` positions in a slot; return False without any change if too few are free."""
        slot_pages, free = self.pages.of[slot], self.pages.free
        missing = pages_of(tokens) - len(slot_pages)
        if missing > len(free):
            return False
        if missing > 0:
            new_pages = [free.pop() for _ in range(missing)]
            self.pages.assign(slot, slot_pages + new_pages)
            for layer in self.layers:
                layer.reset_pages(torch.tensor(new_pages, device=self.pages.table.device))
        return True

    def copy(self, source: int, slot: int, length: int) -> None:
        """Replace the content of a slot by the first `length` positions of another slot, or of itself.

        Whole pages are shared. A last partial page is copied, which needs a free page.
        """
        pages, remainder = self.pages.of[source][: pages_of(length)], length % PAGE
        if remainder:
            shared_page, pages[-1] = pages[-1], self.pages.free.pop()
            for layer in self.layers:
                layer.copy_page(shared_page, pages[-1])
        self.pages.assign(slot, pages)
