"""Attention over packed rows, in place of megatron-core's own.

That knows neither packed rows nor context parallelism without TransformerEngine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor


@dataclass
class Segments(PackedSeqParams):
    """Where the sequences of a packed row lie, also for megatron-core's rotary embedding."""

    lengths: tuple[int, ...] = ()
    """Tokens of each sequence, with its padding; over all context ranks."""
    places: Tensor | None = None
    """[P] where in what is gathered from the context ranks each token of the row lies; None with one rank."""


class PackedAttention(MegatronModule):
    """Causal attention within each segment.

    Context ranks hold two pieces of each sequence, piece r and piece 2R-1-r of 2R, so that all have equal work; keys
    and values are gathered from all, the queries stay.

    Args:
        softmax_scale: factor on the scores; None: `D ** -0.5`.
        window: how many tokens one sees, itself included; None: all before it.
        cap: soft cap of the scores.
    """

    def __init__(
        self,
        config: TransformerConfig,
        softmax_scale: float | None = None,
        window: int | None = None,
        cap: float | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(config=config)
        self.scale, self.window, self.cap = softmax_scale, window, cap
        self.cp = kwargs["pg_collection"].cp

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, *_: Any, packed_seq_params: Segments, **__: Any
    ) -> Tensor:
        """Of queries [n, heads, D] and keys and values [n, groups, D]: [n, heads, D]."""
        segments = packed_seq_params
        if segments.places is None:
            parts = zip(*(x.split(segments.lengths) for x in (query, key, value)), strict=True)
            return torch.cat([self._attend(q, k, v, 0) for q, k, v in parts])
        # gradients come back summed over the ranks that used them
        key, value = (gather_from_sequence_parallel_region(x, group=self.cp)[segments.places] for x in (key, value))
        return torch.cat(self._pieces(query, key, value, segments.lengths))

    def _pieces(self, query: Tensor, key: Tensor, value: Tensor, lengths: tuple[int, ...]) -> list[Tensor]:
        """This rank's two pieces of each sequence, of all keys and values in the order of the row."""
        ranks, rank, outputs = self.cp.size(), self.cp.rank(), []
        queries = iter(query.split([length // (2 * ranks) for length in lengths for _ in range(2)]))
        for k, v in zip(key.split(lengths), value.split(lengths), strict=True):
            size = len(k) // (2 * ranks)
            outputs += [self._attend(next(queries), k, v, piece * size) for piece in (rank, 2 * ranks - 1 - rank)]
        return outputs

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, first: int) -> Tensor:
        """Of consecutive queries of one sequence, the first of which is token number `first`, and all its keys and
        values. With a window in blocks of its length, so that no mask is longer than two of them."""
        outputs = []
        for block in query.split(self.window or len(query)):
            end = first + len(block)
            begin = 0 if self.window is None else max(0, first - self.window + 1)
            mask = None
            if begin < first:
                mask = torch.ones(len(block), end - begin, dtype=torch.bool, device=query.device).tril(first - begin)
                mask = mask if self.window is None else mask.triu(first - begin - self.window + 1)
            outputs.append(self._scores(block, key[begin:end], value[begin:end], mask))
            first = end
        return torch.cat(outputs)

    def _scores(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        """Of queries that see what `mask` says, [queries, keys]; None: causal."""
        q, k, v = (x.transpose(0, 1)[None] for x in (query, key, value))
        grouped = query.shape[1] != key.shape[1]
        if self.cap is not None:
            return _capped(q, k, v, mask, self.scale, self.cap)[0].transpose(0, 1)
        out = F.scaled_dot_product_attention(
            q, k, v, mask, is_causal=mask is None, scale=self.scale, enable_gqa=grouped
        )
        return out[0].transpose(0, 1)


def _capped(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float | None, cap: float) -> Tensor:
    """Attention with soft-capped scores, which no fused kernel has: [1, heads, n, D] of grouped keys and values."""
    if mask is None:
        mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril()
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = q @ k.transpose(2, 3) * (scale or q.shape[-1] ** -0.5)
    scores = (cap * (scores / cap).tanh()).masked_fill(~mask, -torch.inf)
    return scores.softmax(-1, dtype=torch.float32).to(q.dtype) @ v
