"""Rows on their way between ranks: entry by entry, as bytes, without padding."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rl_contracts.batch.trajectory import is_token_entry
from rl_contracts.errors import DataError

if TYPE_CHECKING:
    from tensordict import TensorDict

    from rl_contracts.batch.parallel import ParallelContext

REWARDS_KEY = "token_rewards"
"""float32 [B, T], which only some workflows give."""

Entries = dict[str, tuple[str, bool, list[int]]]
"""Of each entry that travels its dtype, whether it is [B, T, ...] and not [B, ...], and the shape that follows."""
Hop = tuple[int, tuple[list[int], list[int]], tuple[list[int], list[int]]]
"""How often the rows that a rank holds are sent; and of what it sends to, and gets from, each rank: rows, tokens."""


def agree_on_entries(batch: TensorDict, parallel: ParallelContext) -> tuple[Entries, TensorDict]:
    """The entries that travel, and this rank's rows with all of them (collective)."""
    given = parallel.gather_json([len(batch), REWARDS_KEY in batch])
    if len(batch) and REWARDS_KEY not in batch and any(rows and rewards for rows, rewards in given):
        batch = batch.clone(recurse=False)
        batch[REWARDS_KEY] = torch.zeros(batch["input_ids"].shape)
    speaker = next((rank for rank, (rows, _) in enumerate(given) if rows), 0)
    local_entries = _entries(batch)
    entries = json.loads(
        parallel.gather_bytes(json.dumps(local_entries).encode() if parallel.rank == speaker else b"")[speaker]
    )
    with parallel.agree_on_errors("exchanging rows between ranks"):
        different = sorted(
            name for name in local_entries.keys() | entries if local_entries.get(name) != entries.get(name)
        )
        if len(batch) and different:
            raise DataError(
                f"batch: its entries {different} are missing, or of another type or shape, on this rank or on rank "
                f"{speaker}. A workflow must give the same entries for every row."
            )
    return entries, batch


def _entries(batch: TensorDict) -> dict[str, Any]:
    width = batch["input_ids"].shape[1]
    tensors = {str(k): v for k, v in batch.items() if isinstance(v, Tensor) and k != "attention_mask"}
    flags = {name: is_token_entry(value, width) for name, value in tensors.items()}
    return {
        name: [str(value.dtype).removeprefix("torch."), flags[name], list(value.shape[1 + flags[name] :])]
        for name, value in tensors.items()
    }


def send_sequences(
    batch: TensorDict, index: Tensor, entries: Entries, hops: Iterable[Hop], lengths: Tensor, parallel: ParallelContext
) -> TensorDict:
    """Send rows of a batch from rank to rank (collective), and pad those that arrive to the longest.

    Args:
        index: int64, of the rows that leave, in the order in which they are sent.
        hops: one after the other.
        lengths: int64 [R] tokens of the rows that arrive last.
    """
    from tensordict import TensorDict

    leaving = batch["attention_mask"][index]
    mask = torch.arange(max(lengths.tolist(), default=1)) < lengths[:, None]
    result = {"attention_mask": mask}
    for name, (kind, of_tokens, shape) in entries.items():
        dtype = getattr(torch, kind)
        value = batch[name][index] if len(index) else torch.zeros(0, dtype=dtype)
        value = value[leaving] if of_tokens and len(index) else value
        raw = value.contiguous().view(-1).view(torch.uint8).view(-1, dtype.itemsize * torch.Size(shape).numel())
        for copies, sent, received in hops:
            raw = parallel.exchange(raw.repeat(copies, 1), sent[of_tokens], received[of_tokens])
        value = raw.view(-1).view(dtype).view(len(raw), *shape)
        if of_tokens:
            padded = value.new_full((*mask.shape, *shape), -1 if name == "versions" else 0)
            padded[mask] = value
        result[name] = padded if of_tokens else value
    return TensorDict(result, batch_size=[len(lengths)])
