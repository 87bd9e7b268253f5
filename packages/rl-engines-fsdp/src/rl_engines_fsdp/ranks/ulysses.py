"""Attention over rows whose tokens lie on several ranks: each rank gives its tokens away and gets heads instead.

DeepSpeed Ulysses (Jacobs et al. 2023, section 3): before attention an all-to-all turns "all heads of my tokens" into
"my heads of all tokens", after it another turns them back. Attention itself is that of one rank with fewer heads, so
every kernel, window and soft cap works as it is.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from rl_contracts.errors import ModelError
from rl_engines_fsdp.ranks.collectives import exchange


def to_heads(query: Tensor, key: Tensor, value: Tensor, group: ProcessGroup) -> tuple[Tensor, Tensor, Tensor]:
    """From this rank's tokens with all heads to all tokens with this rank's heads, in one exchange.

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
