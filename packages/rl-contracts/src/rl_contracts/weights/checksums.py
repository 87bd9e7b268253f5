"""Position-sensitive checksums of parameters.

The bytes of a tensor are read as 64-bit words w_i, the last one padded with zero bytes. The checksum is

    sum_i (u_i + C) * (2 i + 1)   modulo 2^64,   u_i = w_i xor (w_i >> 31), a shift that inserts zeros

Every word has a different factor that is odd and hence invertible, and u is a bijection. Changing one word therefore
always changes the sum. The constant C makes zeros count. Swapping words i and j changes the sum unless
2 (i - j) (u_i - u_j) is a multiple of 2^64. The shift prevents this for words that differ only in high bits. Without
it, a swap of x and -x in the upper halves of two words, which differ in one sign bit, could pass unnoticed. A shard
that begins at word `offset` has its own sum; sums of shards are added modulo 2^64.

On a CPU, a compiled loop sums while it copies. On other devices, the u_i form a matrix of K columns. As i = r K + c,
its row sums and column sums determine the checksum: two reductions and no multiplication per word.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import torch

from rl_contracts.errors import WeightUpdateError

_COLUMNS = 4096
_CHUNK_WORDS = 16 * _COLUMNS
"""Words that are copied and then summed at once: 0.5 MiB, which stays in a core's second-level cache."""
_SHARED_WORDS = 2**19
"""Minimum number of words per thread (4 MiB) for which a second thread pays off."""
_UNTHREADED = 32000
"""Number of elements that torch casts without starting threads."""
_CONSTANT = 0x1E3779B97F4A7C15
_SHIFT = 31
_DEVICE_ROWS = 2**13
"""Rows of `_COLUMNS` words that a device reduces at once: 256 MiB, and three times that temporarily."""


class Checksum(NamedTuple):
    """Result of one pass over a tensor."""

    value: int
    """Checksum, in [0, 2^64)."""
    finite: bool
    """True if the tensor has neither nan nor infinity. Only dtypes of 16 bits and more are checked."""


def checksum(tensor: torch.Tensor, offset_bytes: int = 0) -> int:
    """Return the checksum of a contiguous tensor, an integer in [0, 2^64); see `checksum_of` for the arguments."""
    return checksum_of(tensor, offset_bytes).value


def checksum_of(tensor: torch.Tensor, offset_bytes: int = 0) -> Checksum:
    """Return the checksum of a contiguous tensor, and whether the tensor is finite.

    Args:
        tensor: any dtype, on any device. Each call synchronizes with the device once.
        offset_bytes: offset of its first byte in the full parameter; a multiple of 8.

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
    return _sum_in_threads(len(host), lambda start, stop: kernel.sum_words(host[start:stop], first + start, dtype))


def copy_with_checksum(target: torch.Tensor, source: torch.Tensor) -> int:
    """Copy as `copy_summed` does, and return only the checksum value."""
    return copy_summed(target, source).value


def copy_summed(target: torch.Tensor, source: torch.Tensor) -> Checksum:
    """Copy into a contiguous tensor, casting to its dtype, and return the checksum of the result.

    On the CPU, copying and summing run in chunks that stay in the cache, so the sum needs no further pass over memory.

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
    flat, flat_source, dtype = target.view(-1), source.view(-1), str(target.dtype)
    whole = size - size % 8
    per_word = 8 // flat.itemsize
    same = flat.dtype == flat_source.dtype and flat_source.data_ptr() % 8 == 0

    def copy(start: int, stop: int) -> tuple[int, bool]:
        """Copy and sum the words [start, stop)."""
        total, finite = 0, True
        for first in range(start, stop, _CHUNK_WORDS):
            piece = slice(first * per_word, min(first + _CHUNK_WORDS, stop) * per_word)
            words = flat[piece].view(torch.int64).numpy()
            if same:
                chunk_sum, chunk_finite = kernel.copy_words(
                    words, flat_source[piece].view(torch.int64).numpy(), first, dtype
                )
            else:
                for at in range(piece.start, piece.stop, _UNTHREADED):
                    end = min(at + _UNTHREADED, piece.stop)
                    flat[at:end].copy_(flat_source[at:end])
                chunk_sum, chunk_finite = kernel.sum_words(words, first, dtype)
            total, finite = total + chunk_sum, finite and chunk_finite
        return total, finite

    words_sum = _sum_in_threads(whole // 8, copy)
    rest = slice(whole // flat.itemsize, None)
    return combine(words_sum, checksum_of(flat[rest].copy_(flat_source[rest]), whole))


def combine(one: tuple[int, bool], other: tuple[int, bool]) -> Checksum:
    """Return the checksum of two parts of a tensor together."""
    return Checksum((one[0] + other[0]) % 2**64, one[1] and other[1])


def _sum_in_threads(words: int, work: Callable[[int, int], tuple[int, bool]]) -> Checksum:
    """Run `work(start, stop)` over all words, on two threads if there are many, and combine the results.

    Half of the work runs on the calling thread. Unlike torch's operations, this function never waits at a barrier for
    threads that a model in this process keeps busy.
    """
    half = words // 2 // _CHUNK_WORDS * _CHUNK_WORDS
    if half < _SHARED_WORDS:
        return combine(work(0, words), (0, True))
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(work, half, words)
        return combine(work(0, half), other.result())


def _device_sum(tensor: torch.Tensor, words: torch.Tensor, first: int) -> Checksum:
    """Compute the result of `checksum_of` on a device, in blocks that are small compared to its memory."""
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
    # torch's shift of signed words inserts copies of the sign bit
    words = words ^ ((words >> _SHIFT) & (2 ** (64 - _SHIFT) - 1))
    row_factor = (torch.arange(rows, device=words.device) * columns + first) * 2 + 1
    column_factor = torch.arange(columns, device=words.device) * 2
    return (words.sum(1) * row_factor).sum() + (words.sum(0) * column_factor).sum()


def _words(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor's bytes as int64 words, [ceil(bytes / 8)]; a view where length and alignment allow."""
    raw = tensor.reshape(-1).view(torch.uint8)
    if raw.numel() % 8 or raw.data_ptr() % 8 or raw.storage_offset() % 8:
        raw = torch.nn.functional.pad(raw, (0, -raw.numel() % 8))  # copies even if no padding is needed
    return raw.view(torch.int64)
