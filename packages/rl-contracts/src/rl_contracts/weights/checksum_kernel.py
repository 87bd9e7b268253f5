"""Checksum loops compiled by numba. They run at the speed of a copy: one pass over memory, eight words at a time."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

_CONSTANT = np.uint64(0x1E3779B97F4A7C15)
_ONE, _TWO, _SHIFT = np.uint64(1), np.uint64(2), np.uint64(31)


@njit(nogil=True, cache=True)  # type: ignore[untyped-decorator]
def _sum_words(words: Any, first: Any, exponents: Any, units: Any) -> Any:
    """Return the checksum of uint64 words and all carries out of the exponents (see `sum_words`).

    The module `checksums` defines the checksum. The first word has index `first` (uint64).
    """
    total, carried = np.uint64(0), np.uint64(0)
    for i in range(words.shape[0]):
        word = words[i]
        carried |= (word & exponents) + units
        total += ((word ^ (word >> _SHIFT)) + _CONSTANT) * (_TWO * (first + np.uint64(i)) + _ONE)
    return total, carried


@njit(nogil=True, cache=True)  # type: ignore[untyped-decorator]
def _copy_words(target: Any, source: Any, first: Any, exponents: Any, units: Any) -> Any:
    """Copy uint64 words and return the same as `_sum_words`."""
    total, carried = np.uint64(0), np.uint64(0)
    for i in range(source.shape[0]):
        word = source[i]
        target[i] = word
        carried |= (word & exponents) + units
        total += ((word ^ (word >> _SHIFT)) + _CONSTANT) * (_TWO * (first + np.uint64(i)) + _ONE)
    return total, carried


_EXPONENTS = {
    "torch.float64": (0x7FF << 52, 64),
    "torch.float32": (0xFF << 23, 32),
    "torch.bfloat16": (0xFF << 7, 16),
    "torch.float16": (0x1F << 10, 16),
}
"""Exponent bits, which are all set only in nan and infinity, and width in bits of a number of each dtype."""


def _lanes(dtype: str) -> tuple[Any, Any, int]:
    """Return masks for the numbers in a word: exponent bits, lowest bit of each exponent, and sign bits.

    All masks are zero for a dtype that is not checked.
    """
    exponent, width = _EXPONENTS.get(dtype, (0, 64))
    all_lanes = (2**64 - 1) // (2**width - 1)
    sign = all_lanes << (width - 1) if exponent else 0
    return np.uint64(exponent * all_lanes), np.uint64((exponent & -exponent) * all_lanes), sign


_LANES = {dtype: _lanes(dtype) for dtype in ("", *_EXPONENTS)}


def sum_words(words: Any, first: int, dtype: str = "") -> tuple[int, bool]:
    """Return the checksum of int64 words, [n], and whether the numbers of that dtype in them are finite.

    Adding one to an exponent carries into the sign bit exactly if all exponent bits are set, as in nan and infinity.
    """
    exponents, units, signs = _LANES.get(dtype, _LANES[""])
    total, carried = _sum_words(words.view(np.uint64), np.uint64(first), exponents, units)
    return int(total), not int(carried) & signs


def copy_words(target: Any, source: Any, first: int, dtype: str = "") -> tuple[int, bool]:
    """Copy int64 words, [n], into `target`, [n], and return the same as `sum_words`."""
    exponents, units, signs = _LANES.get(dtype, _LANES[""])
    arguments = target.view(np.uint64), source.view(np.uint64), np.uint64(first), exponents, units
    total, carried = _copy_words(*arguments)
    return int(total), not int(carried) & signs
