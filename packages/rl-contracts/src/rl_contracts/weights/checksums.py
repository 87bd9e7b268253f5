"""Position-sensitive checksums of parameters.

The bytes of a tensor are read as 64-bit words w_i (the last one filled up with zero bytes). Its sum is

    sum_i (u_i + C) * (2 i + 1)   modulo 2^64,   u_i = w_i xor (w_i >> 31), a shift that brings in zeros

Every word has an odd, hence invertible, factor of its own and u is a bijection: changing one word always changes the
sum, and the constant C makes zeros count. Exchanging words i and j changes it unless 2 (i - j) (u_i - u_j) is a
multiple of 2^64, which the shift prevents where words differ in high bits only: without it, x and -x in the upper
halves of two words, one sign bit apart, could change places unseen. A shard that begins at word `offset` adds its own
part; sums compose by (wrap-around) addition.

On a CPU a compiled loop sums while it copies. On other devices i = r K + c says that the row sums and the column sums
of the u_i laid out as a matrix of K columns are enough: two reductions and no multiplication per word.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import torch

from rl_contracts.errors import WeightUpdateError

_COLUMNS = 4096
_CHUNK_WORDS = 16 * _COLUMNS
"""Words that are copied and summed at once: half a MiB, which stays in a core's second-level cache in between."""
_SHARED_WORDS = 2**19
"""From so many words for each of two threads on (4 MiB), the start of a thread pays."""
_UNTHREADED = 32000
"""Elements that torch casts without starting threads."""
_CONSTANT = 0x1E3779B97F4A7C15
_SHIFT = 31
_DEVICE_ROWS = 2**13
"""Rows of so many words that a device folds at once: 256 MiB, three times that while it lasts."""


class Checksum(NamedTuple):
    """What one pass over a tensor tells."""

    value: int
    """Its checksum, in [0, 2^64)."""
    finite: bool
    """Whether there is neither nan nor infinity in it. Only dtypes of 16 bits and more are looked at."""


def checksum(tensor: torch.Tensor, offset_bytes: int = 0) -> int:
    """Checksum of a contiguous tensor, an integer in [0, 2^64): the `value` of `checksum_of`, with its arguments."""
    return checksum_of(tensor, offset_bytes).value


def checksum_of(tensor: torch.Tensor, offset_bytes: int = 0) -> Checksum:
    """Checksum of a contiguous tensor, and whether it is finite.

    Args:
        tensor: any dtype, on any device. One synchronisation per call.
        offset_bytes: where its first byte lies in the full parameter; a multiple of 8.

    Raises:
        WeightUpdateError: the tensor is not contiguous, or the offset is not a multiple of 8.
    """
    if not tensor.is_contiguous():
        raise WeightUpdateError(f"checksum: expected a contiguous tensor, found strides {tensor.stride()}.")
    if offset_bytes % 8:
        raise WeightUpdateError(f"checksum: expected an offset that is a multiple of 8 bytes, found {offset_bytes}.")
    words, first = _words(tensor.detach()), offset_bytes // 8
    if words.device.type != "cpu":
        return _device_sum(tensor.detach(), words, first)
    from rl_contracts.weights import checksum_kernel as kernel

    host, dtype = words.numpy(), str(tensor.dtype)
    return _in_shares(len(host), lambda start, stop: kernel.sum_words(host[start:stop], first + start, dtype))


def copy_with_checksum(target: torch.Tensor, source: torch.Tensor) -> int:
    """The `value` of `copy_summed`, with its arguments."""
    return copy_summed(target, source).value


def copy_summed(target: torch.Tensor, source: torch.Tensor) -> Checksum:
    """Copy into a contiguous tensor, casting to its dtype; the sum of what it holds then.

    On the CPU both happen in pieces that stay in the cache in between, so the sum costs no further pass over memory.

    Args:
        target: contiguous; written.
        source: of the same shape; any dtype, device and strides.
    """
    from rl_contracts.weights import checksum_kernel as kernel

    source = source.detach()
    plain = target.is_contiguous() and source.is_contiguous() and target.device == source.device == torch.device("cpu")
    size = target.numel() * target.itemsize
    if not plain or target.data_ptr() % 8 or target.itemsize > 8:
        return checksum_of(target.copy_(source))
    flat, given, dtype = target.view(-1), source.view(-1), str(target.dtype)
    whole = size - size % 8
    per_word = 8 // flat.itemsize
    same = flat.dtype == given.dtype and given.data_ptr() % 8 == 0

    def copy(start: int, stop: int) -> tuple[int, bool]:
        """Words [start, stop)."""
        total, finite = 0, True
        for first in range(start, stop, _CHUNK_WORDS):
            piece = slice(first * per_word, min(first + _CHUNK_WORDS, stop) * per_word)
            words = flat[piece].view(torch.int64).numpy()
            if same:
                part, good = kernel.copy_words(words, given[piece].view(torch.int64).numpy(), first, dtype)
            else:
                for at in range(piece.start, piece.stop, _UNTHREADED):
                    end = min(at + _UNTHREADED, piece.stop)
                    flat[at:end].copy_(given[at:end])
                part, good = kernel.sum_words(words, first, dtype)
            total, finite = total + part, finite and good
        return total, finite

    begun = _in_shares(whole // 8, copy)
    rest = slice(whole // flat.itemsize, None)
    return combine(begun, checksum_of(flat[rest].copy_(given[rest]), whole))


def combine(one: tuple[int, bool], other: tuple[int, bool]) -> Checksum:
    """Of two parts of a tensor put together."""
    return Checksum((one[0] + other[0]) % 2**64, one[1] and other[1])


def _in_shares(words: int, work: Callable[[int, int], tuple[int, bool]]) -> Checksum:
    """`work(start, stop)` of all words, put together, by two threads where there is much to do.

    The work runs on the thread that calls it: it never waits at a barrier for threads that a model beside it keeps
    busy, as torch's operations would."""
    half = words // 2 // _CHUNK_WORDS * _CHUNK_WORDS
    if half < _SHARED_WORDS:
        return combine(work(0, words), (0, True))
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(work, half, words)
        return combine(work(0, half), other.result())


def _device_sum(tensor: torch.Tensor, words: torch.Tensor, first: int) -> Checksum:
    """The same on a device, in passes as large as its memory allows without a thought."""
    whole = words.numel() // _COLUMNS * _COLUMNS
    blocks = words[:whole].view(-1, _COLUMNS).split(_DEVICE_ROWS)
    total, at = torch.zeros((), dtype=torch.int64, device=words.device), first
    for block in (*blocks, words[whole:].view(1, -1)):
        if block.numel():
            total += _device_block(block, at)
            at += block.numel()
    finite = torch.ones_like(total)
    if tensor.is_floating_point() and tensor.itemsize > 1 and tensor.numel():
        finite = torch.stack(tensor.aminmax()).isfinite().all().long()
    value, good = torch.stack((total, finite)).tolist()
    return Checksum((value + _CONSTANT * (at**2 - first**2)) % 2**64, bool(good))


def _device_block(words: torch.Tensor, first: int) -> torch.Tensor:
    rows, columns = words.shape
    # torch's shift of signed words brings in copies of the sign
    words = words ^ ((words >> _SHIFT) & (2 ** (64 - _SHIFT) - 1))
    row_factor = (torch.arange(rows, device=words.device) * columns + first) * 2 + 1
    column_factor = torch.arange(columns, device=words.device) * 2
    return (words.sum(1) * row_factor).sum() + (words.sum(0) * column_factor).sum()


def _words(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's bytes as int64 words, [ceil(bytes / 8)]; a view where length and alignment allow."""
    raw = tensor.reshape(-1).view(torch.uint8)
    if raw.numel() % 8 or raw.data_ptr() % 8 or raw.storage_offset() % 8:
        raw = torch.nn.functional.pad(raw, (0, -raw.numel() % 8))  # a copy also where nothing is missing
    return raw.view(torch.int64)
