"""Send sequences between ranks: one entry of the batch at a time, as bytes, without padding."""

from __future__ import annotations

import json
from collections.abc import Iterable
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load, save
from torch import Tensor

from rl_contracts.batch import image_entries
from rl_contracts.batch.image_entries import IMAGES_KEY, ImageRows, images_of, set_images
from rl_contracts.batch.trajectory import is_token_entry
from rl_contracts.errors import DataError

if TYPE_CHECKING:
    from tensordict import TensorDict

    from rl_contracts.batch.parallel import ParallelContext
    from rl_contracts.images import Image

REWARDS_KEY = "token_rewards"
"""Key of the rewards per token, float32 [B, T]. Only some workflows return them, so a rank may lack the key."""

Entries = dict[str, tuple[str, bool, list[int]]]
"""Entries to send, by name: dtype, whether the entry is per token, and the trailing shape.

A per-token entry is [B, T, ...], any other entry [B, ...]. Images are the entry `images`.
"""
Hop = tuple[int, tuple[list[int], list[int]], tuple[list[int], list[int]]]
"""One exchange: the number of copies to send, the sent (sequences, tokens), the received (sequences, tokens).

The counts are lists with one number per rank.
"""


def agree_on_entries(batch: TensorDict, parallel: ParallelContext) -> tuple[Entries, TensorDict]:
    """Return the entries to send, and the local batch completed to have all of them (collective).

    Only `token_rewards` and `images` may be missing on a rank; `token_rewards` is filled with 0.

    Raises:
        EngineError: on all ranks, if the entries of a rank differ in name, dtype or shape.
    """
    rank_states = parallel.gather_json([len(batch), REWARDS_KEY in batch, IMAGES_KEY in batch])
    if len(batch) and REWARDS_KEY not in batch and any(size and has_rewards for size, has_rewards, _ in rank_states):
        batch = batch.clone(recurse=False)
        batch[REWARDS_KEY] = torch.zeros(batch["input_ids"].shape)
    reference_rank = next((rank for rank, (size, *_) in enumerate(rank_states) if size), 0)
    local_entries = _entries(batch)
    entries = json.loads(
        parallel.gather_bytes(json.dumps(local_entries).encode() if parallel.rank == reference_rank else b"")[
            reference_rank
        ]
    )
    with parallel.agree_on_errors("exchanging sequences between ranks"):
        mismatched = sorted(
            name for name in local_entries.keys() | entries if local_entries.get(name) != entries.get(name)
        )
        if len(batch) and mismatched:
            raise DataError(
                f"batch: the entries {mismatched} of this rank and of rank {reference_rank} differ: missing, or of "
                f"another dtype or shape. A workflow must return the same entries for all sequences."
            )
    if any(has_images for *_, has_images in rank_states):
        entries[IMAGES_KEY] = ("", False, [])
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
    """Send sequences of a batch between ranks (collective), and pad the received ones to the longest.

    Args:
        batch: batch of this rank.
        index: int64 indices of the sequences to send, in sending order.
        entries: entries to send, see `agree_on_entries`.
        hops: exchanges to run one after the other.
        lengths: int64 [R] number of tokens of each sequence received in the last exchange.
        parallel: ranks to exchange with.
    """
    from tensordict import TensorDict

    sent_mask = batch["attention_mask"][index]
    mask = torch.arange(max(lengths.tolist(), default=1)) < lengths[:, None]
    result = {"attention_mask": mask}
    tensor_entries = {name: entry for name, entry in entries.items() if name != IMAGES_KEY}
    for name, (dtype_name, is_token, shape) in tensor_entries.items():
        dtype = getattr(torch, dtype_name)
        value = batch[name][index] if len(index) else torch.zeros(0, dtype=dtype)
        value = value[sent_mask] if is_token and len(index) else value
        payload = value.contiguous().view(-1).view(torch.uint8).view(-1, dtype.itemsize * torch.Size(shape).numel())
        for copies, sent, received in hops:
            payload = parallel.exchange(payload.repeat(copies, 1), sent[is_token], received[is_token])
        value = payload.view(-1).view(dtype).view(len(payload), *shape)
        if is_token:
            padded = value.new_full((*mask.shape, *shape), -1 if name == "versions" else 0)
            padded[mask] = value
        result[name] = padded if is_token else value
    received_batch = TensorDict(result, batch_size=[len(lengths)])
    if IMAGES_KEY in entries:
        rows: ImageRows = [images_of(batch)[i] for i in index.tolist()]
        for copies, (sent_rows, _), _ in hops:
            rows = _exchange_images([*rows] * copies, sent_rows, parallel)
        set_images(received_batch, rows)
    return received_batch


def _exchange_images(rows: ImageRows, sent: list[int], parallel: ParallelContext) -> list[tuple[Image, ...]]:
    """Send each rank the images of its sequences, each image once; return those received, in order of source rank."""
    parts = [
        save(image_entries.to_tensors(rows[stop - count : stop]))
        for count, stop in zip(sent, accumulate(sent), strict=True)
    ]
    sizes = torch.tensor([len(part) for part in parts])
    ones = [1] * len(parts)
    received_sizes = parallel.exchange(sizes, ones, ones).tolist()
    data = torch.frombuffer(bytearray(b"".join(parts)), dtype=torch.uint8)
    received = parallel.exchange(data, sizes.tolist(), received_sizes).split(received_sizes)
    return [row for part in received for row in image_entries.from_tensors(load(part.numpy().tobytes()))]
