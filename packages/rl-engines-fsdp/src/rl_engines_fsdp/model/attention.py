"""Attention over a packed row: each sequence attends to itself only, and padding does not exist.

`register` puts it into transformers under the name `rl_packed`, so that any model that asks the attention interface for
its kernel runs it unpatched. Where the sequences begin comes with the call, as the keyword argument `packed`; models
that do not hand their keyword arguments on take what `packed_rows` was told last.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from rl_contracts.errors import ModelError
from rl_contracts.models.attention_windows import layer_window
from rl_engines_fsdp.ranks.collectives import exchange

NAME = "rl_packed"
"""What the model's `attn_implementation` is called."""

LARGEST_HEAD = 256
"""Numbers of a head, above which torch's variable-length kernel computes none."""
UNSUPPORTED = ("position_bias",)
"""Keyword arguments that change the result in a way that is not implemented here (learned biases)."""


@dataclass(frozen=True, slots=True)
class Segments:
    """Where the sequences of a packed row lie."""

    lengths: tuple[int, ...]
    """Tokens of each."""
    cu_seqlens: Tensor
    """int32 [S + 1] where each begins, and the end; on the model's device."""
    context: Any = None
    """Process group of the ranks that hold consecutive, equal parts of the row; None: this rank holds all of it."""

    def row_of_token(self) -> Tensor:
        """int64 [N] which sequence each token of the row belongs to, on its device."""
        rows = torch.arange(len(self.lengths), device=self.cu_seqlens.device)
        return rows.repeat_interleave(self.cu_seqlens.diff(), output_size=sum(self.lengths))


_last: Segments | None = None


def packed_rows(packed: Segments) -> Segments:
    """Tell where the sequences of the forward pass that begins now lie, and of its backward."""
    global _last
    _last = packed
    return packed


def register() -> None:
    """Make `attn_implementation="rl_packed"` known to transformers. May be called again."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, packed_attention)  # and no mask: transformers builds none for it then


@torch.compiler.disable
def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    s_aux: Tensor | None = None,
    packed: Segments | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Causal attention within each segment; the signature is that of transformers' attention interface.

    Where the row lies on several ranks, N is this rank's part, and attention sees the whole row.

    Args:
        query: [1, heads, N, D].
        key, value: [1, key/value heads, N, D], fewer heads with grouped-query attention; of `value` D may be smaller.
        scaling: factor on the scores; None: D ** -0.5.
        sliding_window: a token sees this many tokens, itself included; None: all before it.
        softcap: scores are capped smoothly to this size.
        s_aux: [heads], attention sinks: a learned score that takes part in the softmax only.

    Returns:
        [1, N, heads, D], and None for the weights.

    Raises:
        ModelError: the model asks for something that is not supported.
    """
    _refuse_unsupported(module, attention_mask, dropout, is_causal, kwargs)
    packed = packed or _last
    assert packed is not None
    sliding_window = layer_window(module, sliding_window)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if packed.context is None:
        return _all_segments(query, key, value, packed, scale, sliding_window, softcap, s_aux), None
    query, key, value = to_heads(query, key, value, packed.context)
    if s_aux is not None:
        s_aux = s_aux.chunk(dist.get_world_size(packed.context))[dist.get_rank(packed.context)]
    out = _all_segments(query, key, value, packed, scale, sliding_window, softcap, s_aux)
    return to_tokens(out, packed.context), None


def _all_segments(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    packed: Segments,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Attention of a whole row: [1, heads, N, D] to [1, N, heads, D]."""
    plain = softcap is None and sinks is None and query.dtype != torch.float32
    if plain and value.shape[-1] <= query.shape[-1] <= LARGEST_HEAD and query.is_cuda and _varlen() is not None:
        return _varlen_attention(query, key, value, packed, scale, window)
    pieces = [
        _one_segment(q, k, v, scale, window, softcap, sinks).transpose(1, 2)
        for q, k, v in zip(*(torch.split(t, list(packed.lengths), dim=2) for t in (query, key, value)), strict=True)
    ]
    return torch.cat(pieces, dim=1).contiguous()  # as transformers' own kernels leave it


def _refuse_unsupported(
    module: nn.Module,
    attention_mask: Tensor | None,
    dropout: float,
    is_causal: bool | None,
    kwargs: dict[str, Any],
) -> None:
    name = type(module).__name__
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    found = [key for key in UNSUPPORTED if kwargs.get(key) is not None]
    found += ["a mask of its own"] if attention_mask is not None else []
    found += [f"dropout {dropout}"] if dropout else []
    found += ["attention that is not causal"] if not causal else []
    if found:
        raise ModelError(
            f"{name}: packed attention supports causal attention with grouped queries, sliding windows and soft caps; "
            f"this model also needs {', '.join(found)}."
        )


def _one_segment(
    q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None, softcap: float | None, sinks: Tensor | None
) -> Tensor:
    """Attention of one sequence: [1, heads, L, D]."""
    length = q.shape[2]
    reach = length if window is None else min(window, length)
    if softcap is not None or sinks is not None:
        return _explicit(q, k, v, scale, _band(length, reach, q.device), softcap, sinks)
    grouped = q.shape[1] != k.shape[1]
    if reach == length:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=grouped)
    mask = _band(length, reach, q.device)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=grouped)


def _band(length: int, window: int, device: torch.device) -> Tensor:
    """bool [L, L]: whether token i sees token j, which is at most `window - 1` before it."""
    distance = torch.arange(length, device=device)[:, None] - torch.arange(length, device=device)
    return (distance >= 0) & (distance < window)


def _explicit(
    q: Tensor, k: Tensor, v: Tensor, scale: float, mask: Tensor, softcap: float | None, sinks: Tensor | None
) -> Tensor:
    """The same written out, for what the fused kernels cannot do."""
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
    scores = q @ k.transpose(2, 3) * scale
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    scores = scores.masked_fill(~mask, float("-inf"))
    if sinks is not None:
        extra = sinks.to(scores.dtype)[None, :, None, None].expand(*scores.shape[:-1], 1)
        scores = torch.cat([scores, extra], dim=-1)
    weights = scores.softmax(dim=-1, dtype=torch.float32)[..., : k.shape[2]]
    return weights.to(q.dtype) @ v


@cache
def _varlen() -> Any:
    """torch's variable-length attention, and whether it takes fewer key/value heads than query heads; None where this
    version has none that takes windows."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    known = inspect.signature(varlen_attn).parameters
    return (varlen_attn, "enable_gqa" in known) if {"scale", "window_size"} <= set(known) else None


def _varlen_attention(
    query: Tensor, key: Tensor, value: Tensor, packed: Segments, scale: float, window: int | None
) -> Tensor:
    """All segments in one kernel: [1, heads, N, D] to [1, N, heads, D]. Values may have smaller heads than queries
    (multi-head latent attention): they are padded with zeros, because the kernel has one head size."""
    q, k, v = (t[0].transpose(0, 1).contiguous() for t in (query, key, value))
    attend, takes_groups = _varlen()
    longest, grouped = max(packed.lengths), {}
    if (missing := q.shape[-1] - v.shape[-1]) > 0:
        v = F.pad(v, (0, missing))
    if (shared := q.shape[1] // k.shape[1]) > 1:
        if takes_groups:
            grouped = {"enable_gqa": True}
        else:  # torch 2.11
            k, v = (t.repeat_interleave(shared, dim=1) for t in (k, v))
    out: Tensor = attend(
        q,
        k,
        v,
        packed.cu_seqlens,
        packed.cu_seqlens,
        longest,
        longest,
        scale=scale,
        window_size=(-1 if window is None else window - 1, 0),
        **grouped,
    )
    return out[None, ..., : value.shape[-1]].contiguous()


def to_heads(query: Tensor, key: Tensor, value: Tensor, group: ProcessGroup) -> tuple[Tensor, Tensor, Tensor]:
    """From this rank's tokens with all heads to all tokens with this rank's heads, in one exchange: DeepSpeed Ulysses
    (Jacobs et al. 2023, section 3).

    Attention between this and `to_tokens` is that of one rank with fewer heads, so every kernel, window and soft cap
    works as it is.

    Args:
        query: [1, heads, n, D] of the n tokens of each of R ranks.
        key, value: [1, key/value heads, n, D]. Where there are fewer heads than ranks (or as many as do not divide),
            each is repeated as often as needed; its gradients are summed.

    Returns:
        [1, heads / R, R * n, D] and key and value with their share of heads.

    Raises:
        ModelError: the heads do not divide over the ranks.
    """
    ranks = dist.get_world_size(group)
    repeats = key_repeats(query.shape[1], key.shape[1], ranks)
    if repeats > 1:
        key, value = (t.repeat_interleave(repeats, dim=1) for t in (key, value))
    parts = [t[0].unflatten(0, (ranks, -1)) for t in (query, key, value)]  # [R, heads / R, n, D]
    received = exchange(torch.cat([part.flatten(1) for part in parts], dim=1), group)
    pieces = received.split([part[0].numel() for part in parts], dim=1)
    query, key, value = (_joined(piece, part.shape) for piece, part in zip(pieces, parts, strict=True))
    return query, key, value


def to_tokens(out: Tensor, group: ProcessGroup) -> Tensor:
    """From all tokens with this rank's heads, [1, R * n, heads / R, D], to this rank's tokens: [1, n, heads, D]."""
    received = exchange(out[0].unflatten(0, (dist.get_world_size(group), -1)), group)  # [R, n, heads / R, D]
    return received.transpose(0, 1).flatten(1, 2)[None]


def key_repeats(heads: int, key_heads: int, ranks: int) -> int:
    """How often each key head is repeated so that every rank gets those that its query heads look at.

    Raises:
        ModelError: the query heads do not divide over the ranks.
    """
    if heads % ranks:
        raise ModelError(
            f"context parallelism over {ranks} ranks: expected attention heads that divide by {ranks}, found {heads}. "
            "Use a context size that divides them (divided by the tensor size, where there is one)."
        )
    group = heads // key_heads
    return next(r for r in range(1, group + 1) if group % r == 0 and key_heads * r % ranks == 0)


def _joined(piece: Tensor, shape: Sequence[int]) -> Tensor:
    """What each rank sent, [R, heads * n * D], to [1, heads, R * n, D]."""
    return piece.view(*shape).transpose(0, 1).flatten(1, 2)[None]
