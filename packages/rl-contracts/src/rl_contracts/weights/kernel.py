"""Checksums at the speed of a copy, compiled by numba: one pass over memory, eight words at a time."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

_CONSTANT = np.uint64(0x1E3779B97F4A7C15)
_ONE, _TWO, _SHIFT = np.uint64(1), np.uint64(2), np.uint64(31)


@njit(nogil=True, cache=True)  # type: ignore[untyped-decorator]
def _sum_words(words: Any, first: Any) -> Any:
    """The checksum (see the module of that name) of uint64 words, the first of which has index `first` (uint64)."""
    total = np.uint64(0)
    for i in range(words.shape[0]):
        word = words[i]
        total += ((word ^ (word >> _SHIFT)) + _CONSTANT) * (_TWO * (first + np.uint64(i)) + _ONE)
    return total


@njit(nogil=True, cache=True)  # type: ignore[untyped-decorator]
def _copy_words(target: Any, source: Any, first: Any) -> Any:
    """Copy uint64 words and return their sum, as `_sum_words` has it."""
    total = np.uint64(0)
    for i in range(source.shape[0]):
        word = source[i]
        target[i] = word
        total += ((word ^ (word >> _SHIFT)) + _CONSTANT) * (_TWO * (first + np.uint64(i)) + _ONE)
    return total


def sum_words(words: Any, first: int) -> int:
    """`_sum_words` of int64 words, [n]."""
    return int(_sum_words(words.view(np.uint64), np.uint64(first)))


def copy_words(target: Any, source: Any, first: int) -> int:
    """`_copy_words` of int64 words, [n] each."""
    return int(_copy_words(target.view(np.uint64), source.view(np.uint64), np.uint64(first)))
