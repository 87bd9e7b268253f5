"""Attention over packed sequences, in place of megatron-core's attention.

Without TransformerEngine, megatron-core's attention supports neither packed sequences nor context parallelism.
"""

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
    """Boundaries of the sequences in a packed row, also for megatron-core's rotary embedding."""

    lengths: tuple[int, ...] = ()
    """Tokens of each sequence with its padding, over all context ranks."""
    places: Tensor | None = None
    """Position of each token of the row in the tensor gathered from the context ranks, [P]; None with one rank."""


class PackedAttention(MegatronModule):
    """Causal attention within each sequence.

    Each sequence has 2R pieces. Context rank r of R holds pieces r and 2R-1-r, so that all ranks do equal work. Keys
    and values are gathered from all ranks; queries stay local.

    Args:
        config: config of megatron-core.
        softmax_scale: factor on the scores; None: `D ** -0.5`.
        window: sliding window in tokens, including the current one; None: full causal attention.
        cap: soft cap of the scores, or None.
        kwargs: further arguments of megatron-core; only `pg_collection` is used.
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
        """Return the attention outputs of this rank's tokens, [tokens, query heads, D].

        Args:
            query: [tokens, query heads, D].
            key, value: [tokens, key-value heads, D], of the same tokens.
            packed_seq_params: boundaries of the sequences.
        """
        segments = packed_seq_params
        if segments.places is None:
            sequences = zip(*(x.split(segments.lengths) for x in (query, key, value)), strict=True)
            return torch.cat([self._attend(q, k, v, 0) for q, k, v in sequences])
        # backward sums the gradients over the context ranks
        key, value = (gather_from_sequence_parallel_region(x, group=self.cp)[segments.places] for x in (key, value))
        return torch.cat(self._attend_local_pieces(query, key, value, segments.lengths))

    def _attend_local_pieces(self, query: Tensor, key: Tensor, value: Tensor, lengths: tuple[int, ...]) -> list[Tensor]:
        """Return the outputs of this rank's two pieces of each sequence, given all keys and values in row order."""
        ranks, rank, outputs = self.cp.size(), self.cp.rank(), []
        queries = iter(query.split([length // (2 * ranks) for length in lengths for _ in range(2)]))
        for k, v in zip(key.split(lengths), value.split(lengths), strict=True):
            size = len(k) // (2 * ranks)
            outputs += [self._attend(next(queries), k, v, piece * size) for piece in (rank, 2 * ranks - 1 - rank)]
        return outputs

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, first: int) -> Tensor:
        """Return the outputs of consecutive queries of one sequence; the first query is token number `first`.

        Keys and values cover the whole sequence. With a window, queries are processed in blocks of its length,
        so that no mask spans more than two windows.
        """
        outputs = []
        for block in query.split(self.window or len(query)):
            end = first + len(block)
            begin = 0 if self.window is None else max(0, first - self.window + 1)
            mask = None
            if begin < first:
                mask = torch.ones(len(block), end - begin, dtype=torch.bool, device=query.device).tril(first - begin)
                mask = mask if self.window is None else mask.triu(first - begin - self.window + 1)
            outputs.append(self._attend_block(block, key[begin:end], value[begin:end], mask))
            first = end
        return torch.cat(outputs)

    def _attend_block(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        """Return the outputs of queries that attend where `mask` [queries, keys] is True; None: causal."""
        q, k, v = (x.transpose(0, 1)[None] for x in (query, key, value))
        grouped = query.shape[1] != key.shape[1]
        if self.cap is not None:
            return _capped_attention(q, k, v, mask, self.scale, self.cap)[0].transpose(0, 1)
        out = F.scaled_dot_product_attention(
            q, k, v, mask, is_causal=mask is None, scale=self.scale, enable_gqa=grouped
        )
        return out[0].transpose(0, 1)


def _capped_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float | None, cap: float) -> Tensor:
    """Return attention outputs with soft-capped scores, which no fused kernel supports.

    Queries, keys and values have the shape [1, heads, n, D]; keys and values may have fewer heads.
    """
    if mask is None:
        mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril()
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = q @ k.transpose(2, 3) * (scale or q.shape[-1] ** -0.5)
    scores = (cap * (scores / cap).tanh()).masked_fill(~mask, -torch.inf)
    return scores.softmax(-1, dtype=torch.float32).to(q.dtype) @ v
