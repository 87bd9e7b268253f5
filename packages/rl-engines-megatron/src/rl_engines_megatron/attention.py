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
    """

    def __init__(self, config: TransformerConfig, softmax_scale: float | None = None, **kwargs: Any) -> None:
        super().__init__(config=config)
        self.scale = softmax_scale
        self.cp = kwargs["pg_collection"].cp

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, *_: Any, packed_seq_params: Segments, **__: Any
    ) -> Tensor:
        """Of queries [n, heads, D] and keys and values [n, groups, D]: [n, heads, D]."""
        segments = packed_seq_params
        if segments.places is None:
            parts = zip(*(x.split(segments.lengths) for x in (query, key, value)), strict=True)
            return torch.cat([self._attend(q, k, v) for q, k, v in parts])
        # gradients come back summed over the ranks that used them
        key, value = (gather_from_sequence_parallel_region(x, group=self.cp)[segments.places] for x in (key, value))
        return torch.cat(self._pieces(query, key, value, segments.lengths))

    def _pieces(self, query: Tensor, key: Tensor, value: Tensor, lengths: tuple[int, ...]) -> list[Tensor]:
        """This rank's two pieces of each sequence, of all keys and values in the order of the row."""
        ranks, rank, outputs, begin = self.cp.size(), self.cp.rank(), [], 0
        queries = iter(query.split([length // (2 * ranks) for length in lengths for _ in range(2)]))
        for length in lengths:
            size = length // (2 * ranks)
            for piece in (rank, 2 * ranks - 1 - rank):
                seen = (piece + 1) * size
                mask = torch.ones(size, seen, dtype=torch.bool, device=query.device).tril(piece * size)
                reach = slice(begin, begin + seen)
                outputs.append(self._attend(next(queries), key[reach], value[reach], mask))
            begin += length
        return outputs

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None) -> Tensor:
        q, k, v = (x.transpose(0, 1)[None] for x in (query, key, value))
        grouped = query.shape[1] != key.shape[1]
        out = F.scaled_dot_product_attention(
            q, k, v, mask, is_causal=mask is None, scale=self.scale, enable_gqa=grouped
        )
        return out[0].transpose(0, 1)
