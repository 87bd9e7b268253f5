"""Position-sensitive checksums of parameters, and the comparison of the two sides' receipts.

The bytes of a tensor are read as signed 64-bit words w_i (the last one filled up with zero bytes). Its sum is

    sum_i (w_i + C) * (2 i + 1)   modulo 2^64

Every word has an odd, hence invertible, factor of its own: changing one word always changes the sum, and the constant C
makes zeros count. Exchanging words i and j changes it unless 2 (i - j) (w_i - w_j) is a multiple of 2^64. With
i = r K + c the sum needs only the row sums and column sums of the words laid out as a matrix of K columns, so it costs
two reductions and no multiplication per word: about two reads of memory. A shard that begins at word `offset` adds its
own part; sums compose by (wrap-around) addition.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rl_contracts.data import WeightReceipt
from rl_contracts.errors import WeightUpdateError

if TYPE_CHECKING:
    import torch

_COLUMNS = 4096
_CONSTANT = 0x1E3779B97F4A7C15


def checksum(tensor: torch.Tensor, offset_bytes: int = 0) -> int:
    """Checksum of a contiguous tensor, an integer in [0, 2^64).

    Args:
        tensor: any dtype, on any device. One synchronisation per call.
        offset_bytes: where its first byte lies in the full parameter; a multiple of 8.

    Raises:
        WeightUpdateError: the tensor is not contiguous, or the offset is not a multiple of 8.
    """
    import torch

    if not tensor.is_contiguous():
        raise WeightUpdateError(f"checksum: expected a contiguous tensor, found strides {tensor.stride()}.")
    if offset_bytes % 8:
        raise WeightUpdateError(f"checksum: expected an offset that is a multiple of 8 bytes, found {offset_bytes}.")
    words = _words(tensor.detach())
    count, first = words.numel(), offset_bytes // 8
    whole = count - count % _COLUMNS
    total = torch.zeros((), dtype=torch.int64, device=words.device)
    for part, start in ((words[:whole].view(-1, _COLUMNS), first), (words[whole:].view(1, -1), first + whole)):
        rows, columns = part.shape
        if rows and columns:
            row_factor = (torch.arange(rows, device=words.device) * columns + start) * 2 + 1
            column_factor = torch.arange(columns, device=words.device) * 2
            total += (part.sum(1) * row_factor).sum() + (part.sum(0) * column_factor).sum()
    constant = _CONSTANT * ((first + count) ** 2 - first**2)
    return (int(total) + constant) % 2**64


def _words(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's bytes as int64 words, [ceil(bytes / 8)]; a view where length and alignment allow."""
    import torch

    raw = tensor.reshape(-1).view(torch.uint8)
    if raw.numel() % 8 or raw.data_ptr() % 8 or raw.storage_offset() % 8:
        padded = raw.new_zeros(-(-raw.numel() // 8) * 8)
        padded[: raw.numel()] = raw
        raw = padded
    return raw.view(torch.int64)


def verify_receipt(expected: WeightReceipt, found: WeightReceipt, route: str) -> None:
    """Compare what a server holds with what the trainer sent.

    Raises:
        WeightUpdateError: names route, version, server and the first wrong parameter.
    """
    where = f"route {route}, version {expected.version}, {found.holder}"
    if found.version != expected.version:
        raise WeightUpdateError(
            f"{where}: the receipt is for version {found.version}; the server holds other weights than were sent."
        )
    for name, value in expected.checksums.items():
        if name not in found.checksums:
            raise WeightUpdateError(
                f"{where}: parameter {name!r} was sent but not received "
                f"({len(found.checksums)} of {len(expected.checksums)} arrived). "
                "Check the parameter names of the server's model."
            )
        if found.checksums[name] != value:
            raise WeightUpdateError(
                f"{where}: parameter {name!r} differs: sent checksum {value}, held {found.checksums[name]}. "
                "The transfer, the cast to the served dtype or the server's copy is wrong; "
                "the update was not committed."
            )
    extra = sorted(set(found.checksums) - set(expected.checksums))
    if extra:
        raise WeightUpdateError(f"{where}: the server also loaded {extra[:3]}, which the trainer did not send.")
