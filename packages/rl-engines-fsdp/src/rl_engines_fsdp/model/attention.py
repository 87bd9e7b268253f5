"""Attention over packed sequences: each sequence attends only to itself, and there is no padding.

`register` registers it in transformers under the name `rl_packed`. Any model that gets its kernel from the attention
interface then uses it without patches. The boundaries of the sequences are passed as the keyword argument `packed`.
Models that drop keyword arguments use the boundaries of the last call of `packed_rows`.
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
"""Value of `attn_implementation` for the model."""

LARGEST_HEAD = 256
"""Largest head size that the variable-length kernel of torch supports."""
UNSUPPORTED = ("position_bias",)
"""Keyword arguments that change the result and are not implemented here (learned biases)."""


@dataclass(frozen=True, slots=True)
class Segments:
    """Boundaries of packed sequences."""

    lengths: tuple[int, ...]
    """Tokens per sequence."""
    cu_seqlens: Tensor
    """Start of each sequence and the end of the last, int32 [S + 1], on the device of the model."""
    context: Any = None
    """Process group of the ranks that store consecutive, equal chunks of the tokens; None: this rank stores all."""
    images: Tensor | None = None
    """Number of the image of each token, -1 for text, int64 [N]; tokens of an image attend to each other in both
    directions. None: attention is causal."""

    def row_of_token(self) -> Tensor:
        """Return the index of the sequence of each token, int64 [N], on the same device."""
        indices = torch.arange(len(self.lengths), device=self.cu_seqlens.device)
        return indices.repeat_interleave(self.cu_seqlens.diff(), output_size=sum(self.lengths))


_last: Segments | None = None


def packed_rows(packed: Segments) -> Segments:
    """Set the sequence boundaries for the next forward pass and its backward, and return them."""
    global _last
    _last = packed
    return packed


def register() -> None:
    """Register `attn_implementation="rl_packed"` in transformers. Safe to call twice."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, packed_attention)  # no mask is registered, so transformers builds none


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
    """Compute causal attention within each sequence, with the signature of transformers' attention interface.

    With context parallelism, N counts this rank's tokens, and attention covers the tokens of all context ranks.

    Args:
        query: [1, heads, N, D].
        key, value: [1, key/value heads, N, D], fewer heads with grouped-query attention; `value` may have a smaller D.
        scaling: factor of the scores; None: D ** -0.5.
        sliding_window: number of tokens that a token attends to, itself included; None: all previous tokens.
        softcap: limit of the scores, applied smoothly with tanh.
        s_aux: [heads], attention sinks: learned scores that are only part of the softmax denominator.

    Returns:
        the output [1, N, heads, D], and None for the attention weights.

    Raises:
        ModelError: the model requires a feature that is not supported.
    """
    _reject_unsupported(module, attention_mask, dropout, is_causal, kwargs)
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
    """Compute attention of all sequences: [1, heads, N, D] to [1, N, heads, D]."""
    is_plain = softcap is None and sinks is None and query.dtype != torch.float32 and packed.images is None
    if is_plain and value.shape[-1] <= query.shape[-1] <= LARGEST_HEAD and query.is_cuda and _varlen() is not None:
        return _varlen_attention(query, key, value, packed, scale, window)
    sizes = list(packed.lengths)
    images = [None] * len(sizes) if packed.images is None else packed.images.split(sizes)
    parts = zip(*(torch.split(t, sizes, dim=2) for t in (query, key, value)), images, strict=True)
    pieces = [_one_segment(q, k, v, scale, window, softcap, sinks, i).transpose(1, 2) for q, k, v, i in parts]
    return torch.cat(pieces, dim=1).contiguous()  # same layout as transformers' kernels


def _reject_unsupported(
    module: nn.Module,
    attention_mask: Tensor | None,
    dropout: float,
    is_causal: bool | None,
    kwargs: dict[str, Any],
) -> None:
    name = type(module).__name__
    is_causal_layer = getattr(module, "is_causal", True) if is_causal is None else is_causal
    unsupported = [key for key in UNSUPPORTED if kwargs.get(key) is not None]
    unsupported += ["an attention mask"] if attention_mask is not None else []
    unsupported += [f"dropout {dropout}"] if dropout else []
    unsupported += ["non-causal attention"] if not is_causal_layer else []
    if unsupported:
        raise ModelError(
            f"{name}: packed attention supports causal attention with grouped queries, sliding windows and soft caps; "
            f"this model also needs {', '.join(unsupported)}."
        )


def _one_segment(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
    images: Tensor | None = None,
) -> Tensor:
    """Compute attention of one sequence: [1, heads, L, D]."""
    length = q.shape[2]
    visible = length if window is None else min(window, length)
    grouped = q.shape[1] != k.shape[1]
    if visible == length and softcap is None and sinks is None and images is None:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=grouped)
    mask = _band(length, visible, q.device)
    if images is not None:
        mask |= (images[:, None] == images) & (images >= 0)
    if softcap is not None or sinks is not None:
        return _explicit(q, k, v, scale, mask, softcap, sinks)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=grouped)


def _band(length: int, window: int, device: torch.device) -> Tensor:
    """Return a mask, bool [L, L]: whether token i attends to token j, at most `window - 1` tokens back."""
    distance = torch.arange(length, device=device)[:, None] - torch.arange(length, device=device)
    return (distance >= 0) & (distance < window)


def _explicit(
    q: Tensor, k: Tensor, v: Tensor, scale: float, mask: Tensor, softcap: float | None, sinks: Tensor | None
) -> Tensor:
    """Compute the attention of one sequence without fused kernels, which lack soft caps and sinks."""
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
    """Return torch's variable-length attention, and whether it supports fewer key/value heads than query heads.

    None if this version of torch has no such kernel with windows.
    """
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    parameters = inspect.signature(varlen_attn).parameters
    return (varlen_attn, "enable_gqa" in parameters) if {"scale", "window_size"} <= set(parameters) else None


def _varlen_attention(
    query: Tensor, key: Tensor, value: Tensor, packed: Segments, scale: float, window: int | None
) -> Tensor:
    """Compute attention of all sequences in one kernel: [1, heads, N, D] to [1, N, heads, D].

    Value heads may be smaller than query heads (multi-head latent attention). They are padded with zeros, because the
    kernel has one head size.
    """
    q, k, v = (t[0].transpose(0, 1).contiguous() for t in (query, key, value))
    attend, has_gqa = _varlen()
    longest, gqa_options = max(packed.lengths), {}
    if (padding := q.shape[-1] - v.shape[-1]) > 0:
        v = F.pad(v, (0, padding))
    if (repeats := q.shape[1] // k.shape[1]) > 1:
        if has_gqa:
            gqa_options = {"enable_gqa": True}
        else:  # torch 2.11
            k, v = (t.repeat_interleave(repeats, dim=1) for t in (k, v))
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
        **gqa_options,
    )
    return out[None, ..., : value.shape[-1]].contiguous()


def to_heads(query: Tensor, key: Tensor, value: Tensor, group: ProcessGroup) -> tuple[Tensor, Tensor, Tensor]:
    """Exchange this rank's tokens with all heads for all tokens with this rank's heads, in one all-to-all.

    This is DeepSpeed Ulysses (Jacobs et al. 2023, section 3). Attention between this and `to_tokens` runs as on
    one rank with fewer heads, so every kernel, window and soft cap works unchanged.

    Args:
        query: [1, heads, n, D], with n tokens on each of R ranks.
        key, value: [1, key/value heads, n, D]. If the number of heads is not divisible by R, each head is repeated as
            often as needed, and the gradients of its copies are summed.

    Returns:
        query [1, heads / R, R * n, D], and key and value with this rank's heads.

    Raises:
        ModelError: the query heads are not divisible by R.
    """
    ranks = dist.get_world_size(group)
    repeats = key_repeats(query.shape[1], key.shape[1], ranks)
    if repeats > 1:
        key, value = (t.repeat_interleave(repeats, dim=1) for t in (key, value))
    by_rank = [t[0].unflatten(0, (ranks, -1)) for t in (query, key, value)]  # [R, heads / R, n, D]
    received = exchange(torch.cat([tensor.flatten(1) for tensor in by_rank], dim=1), group)
    pieces = received.split([tensor[0].numel() for tensor in by_rank], dim=1)
    query, key, value = (_joined(piece, tensor.shape) for piece, tensor in zip(pieces, by_rank, strict=True))
    return query, key, value


def to_tokens(out: Tensor, group: ProcessGroup) -> Tensor:
    """Reverse `to_heads`, from all tokens with this rank's heads to this rank's tokens with all heads.

    Args:
        out: [1, R * n, heads / R, D].

    Returns:
        [1, n, heads, D].
    """
    received = exchange(out[0].unflatten(0, (dist.get_world_size(group), -1)), group)  # [R, n, heads / R, D]
    return received.transpose(0, 1).flatten(1, 2)[None]


def key_repeats(heads: int, key_heads: int, ranks: int) -> int:
    """Return how often to repeat each key head, so that each rank gets the key heads that its query heads attend to.

    Raises:
        ModelError: the query heads are not divisible by `ranks`.
    """
    if heads % ranks:
        raise ModelError(
            f"context parallelism: the {heads} attention heads on each tensor rank must be divisible by the {ranks} "
            f"context ranks. Set c in the allocation to a divisor of {heads}."
        )
    group = heads // key_heads
    return next(r for r in range(1, group + 1) if group % r == 0 and key_heads * r % ranks == 0)


def _joined(piece: Tensor, shape: Sequence[int]) -> Tensor:
    """Join the tensors received from each rank, [R, heads * n * D], to [1, heads, R * n, D]."""
    return piece.view(*shape).transpose(0, 1).flatten(1, 2)[None]
