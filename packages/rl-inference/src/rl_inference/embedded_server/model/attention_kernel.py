"""Attention of single tokens over the KV cache on a CPU, compiled by numba.

A decode step has one query per sequence, and sequences of all lengths. The fused kernels of torch would compute tiles
of several queries, and pad all sequences to one length. This kernel reads exactly the keys of each sequence.

Keys are stored transposed, [head dim, positions]. A query's scores are then a weighted sum of contiguous rows of keys,
and no SIMD register has to be summed over its lanes.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import config, njit, prange, set_num_threads

_F = np.float32
_LOG2E = _F(1.4426950408889634)
_LN2_HIGH = _F(0.693359375)
_LN2_LOW = _F(-2.12194440e-4)
_LOWEST = _F(-87.0)
"""Lower bound of the exponents: below it exp is practically 0, and the exponent would overflow its bits."""


@njit(fastmath=True, nogil=True, cache=True, error_model="numpy", inline="always")
def _exponentials(scores: Any, bits: Any, count: int, top: Any) -> Any:  # pragma: no cover - compiled
    """Replace scores by exp(score - top), in two loops that vectorize, and return their sum.

    exp(x) = 2^k exp(r) with r in [-ln 2 / 2, ln 2 / 2] and a polynomial of degree 7 for exp(r), Cody and Waite
    (1980). The coefficients come from expf of the Cephes library (error below 2e-7).
    """
    powers = bits.view(np.float32)
    for j in range(count):
        x = max(scores[j] - top, _LOWEST)
        k = np.floor(x * _LOG2E + _F(0.5))
        r = x - k * _LN2_HIGH - k * _LN2_LOW
        p = _F(1.9875691500e-4) * r + _F(1.3981999507e-3)
        p = p * r + _F(8.3334519073e-3)
        p = p * r + _F(4.1665795894e-2)
        p = p * r + _F(1.6666665459e-1)
        p = p * r + _F(5.0000001201e-1)
        scores[j] = p * r * r + r + _F(1.0)
        bits[j] = (np.int32(k) + np.int32(127)) << np.int32(23)
    total = _F(0.0)
    for j in range(count):
        weight = scores[j] * powers[j]
        scores[j] = weight
        total += weight
    return total


@njit(fastmath=True, nogil=True, cache=True, error_model="numpy", inline="always")
def _score(scores: Any, query: Any, keys: Any, low: int, count: int, scale: Any) -> None:  # pragma: no cover
    """Set scores[j] = scale * query . keys[:, low + j], four rows of keys at a time."""
    whole = query.shape[0] // 4 * 4
    for d in range(0, whole, 4):
        a, b, c, e = query[d] * scale, query[d + 1] * scale, query[d + 2] * scale, query[d + 3] * scale
        k0, k1 = keys[d, low : low + count], keys[d + 1, low : low + count]
        k2, k3 = keys[d + 2, low : low + count], keys[d + 3, low : low + count]
        if d == 0:
            for j in range(count):
                scores[j] = a * k0[j] + b * k1[j] + c * k2[j] + e * k3[j]
        else:
            for j in range(count):
                scores[j] += a * k0[j] + b * k1[j] + c * k2[j] + e * k3[j]
    for d in range(whole, query.shape[0]):
        a, k0 = query[d] * scale, keys[d, low : low + count]
        for j in range(count):
            scores[j] = a * k0[j] if d == 0 else scores[j] + a * k0[j]


@njit(fastmath=True, nogil=True, cache=True, error_model="numpy", inline="always")
def _mix(out: Any, weights: Any, values: Any, low: int, count: int, factor: Any) -> None:  # pragma: no cover
    """Add factor * sum_j weights[j] values[low + j] to out, four positions at a time."""
    width = out.shape[0]
    j = 0
    while j + 4 <= count:
        a, b, c, e = weights[j] * factor, weights[j + 1] * factor, weights[j + 2] * factor, weights[j + 3] * factor
        v0, v1, v2, v3 = values[low + j], values[low + j + 1], values[low + j + 2], values[low + j + 3]
        for d in range(width):
            out[d] += a * v0[d] + b * v1[d] + c * v2[d] + e * v3[d]
        j += 4
    while j < count:
        a, v0 = weights[j] * factor, values[low + j]
        for d in range(width):
            out[d] += a * v0[d]
        j += 1


@njit(nogil=True, cache=True)
def write(keys: Any, values: Any, new_keys: Any, new_values: Any, rows: Any) -> None:
    """Store the key and value of each token in the cache.

    Args:
        keys: float32 [pages, heads, head dim, positions of a page].
        values: float32 [pages, heads, positions of a page, head dim].
        new_keys, new_values: [tokens, heads, head dim].
        rows: page index times positions of a page, plus the position in the page, int64 [tokens].
    """
    size = keys.shape[3]
    for i in range(rows.shape[0]):
        page, offset = rows[i] // size, rows[i] % size
        for h in range(new_keys.shape[1]):
            for d in range(new_keys.shape[2]):
                keys[page, h, d, offset] = new_keys[i, h, d]
            for d in range(new_values.shape[2]):
                values[page, h, offset, d] = new_values[i, h, d]


def _attend(
    query: Any,
    keys: Any,
    values: Any,
    table: Any,
    slots: Any,
    positions: Any,
    out: Any,
    scale: Any,
    window: int,
    softcap: Any,
    sinks: Any,
) -> None:
    """Compute the attention of each token over positions 0 to its own position in its slot.

    Args:
        query: float32 [tokens, query heads, head dim].
        keys, values: as in `write`.
        table: pages of each slot in the order of its positions, int64 [slots, pages].
        slots, positions: int64 [tokens].
        out: float32 [tokens, query heads, head dim], overwritten with the result.
        window: number of visible positions, 0 for all.
        softcap: limit of the scores by tanh, 0 for none.
        sinks: float32 [query heads], a score per head that only adds to the softmax denominator; empty for none.
    """
    heads, size = keys.shape[1], keys.shape[3]
    shared = query.shape[1] // heads
    for i in prange(query.shape[0]):
        slot, end = slots[i], positions[i] + 1
        low = max(0, end - window) if window > 0 else 0
        count = end - low
        scores, bits = np.empty(count, np.float32), np.empty(count, np.int32)
        for q in range(query.shape[1]):
            h = q // shared
            for p in range(low // size, (end - 1) // size + 1):
                first, last = max(low, p * size), min(end, (p + 1) * size)
                page_scores = scores[first - low : last - low]
                _score(page_scores, query[i, q], keys[table[slot, p], h], first - p * size, last - first, scale)
            if softcap > 0:
                for j in range(count):
                    scores[j] = np.tanh(scores[j] / softcap) * softcap
            top = scores[0]
            for j in range(count):
                top = max(top, scores[j])
            if sinks.shape[0] > 0:
                top = max(top, sinks[q])
            total = _exponentials(scores, bits, count, top)
            if sinks.shape[0] > 0:
                total += np.exp(sinks[q] - top)
            for d in range(out.shape[2]):
                out[i, q, d] = _F(0.0)
            for p in range(low // size, (end - 1) // size + 1):
                first, last = max(low, p * size), min(end, (p + 1) * size)
                page_scores = scores[first - low : last - low]
                _mix(out[i, q], page_scores, values[table[slot, p], h], first - p * size, last - first, _F(1.0) / total)


_attend_serial: Any = njit(fastmath=True, nogil=True, cache=True, error_model="numpy")(_attend)
_attend_parallel: Any = njit(fastmath=True, nogil=True, cache=True, error_model="numpy", parallel=True)(_attend)


def attend(threads: int, *arguments: Any) -> None:
    """Call `_attend` with these arguments, on up to `threads` threads."""
    threads = min(threads, config.NUMBA_NUM_THREADS)  # type: ignore[attr-defined]
    if threads == 1:
        _attend_serial(*arguments)
    else:
        set_num_threads(threads)
        _attend_parallel(*arguments)
