"""Deciding which rows go together: micro-batches that fit, parts that balance. Index arithmetic only."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from itertools import pairwise
from operator import itemgetter

from rl_contracts.errors import DataError


def unit_indices(labels: Sequence[int]) -> list[list[int]]:
    """Rows that must stay together: row indices of each label, ascending; labels in the order of their first row."""
    found: dict[int, list[int]] = {}
    for row, label in enumerate(labels):
        found.setdefault(label, []).append(row)
    return list(found.values())


def expand(parts: Sequence[Sequence[int]], units: Sequence[Sequence[int]]) -> list[list[int]]:
    """Parts of units as parts of their rows, ascending."""
    return [sorted(row for unit in part for row in units[unit]) for part in parts]


def pack_first_fit(lengths: Sequence[int], capacity: int, at_least: int = 1) -> list[list[int]]:
    """First-fit decreasing bin packing of rows into micro-batches of at most `capacity` tokens.

    Data-parallel ranks must run equally many micro-batches: each packs alone, they agree on the largest count, and
    pack again with it as `at_least`; rows are then spread by splitting the fullest bins, and bins that no row can
    fill stay empty.

    Args:
        lengths: tokens of each row.
        capacity: tokens that fit into one bin.
        at_least: number of bins to return at least.

    Returns:
        row indices of each bin, ascending within a bin.

    Raises:
        DataError: a row is longer than a bin.
    """
    bins: list[list[int]] = []
    room: list[int] = []
    for row in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        if lengths[row] > capacity:
            raise DataError(
                f"row {row} has {lengths[row]} tokens, but a micro-batch holds {capacity}. "
                "Raise micro_batch.max_tokens, or shorten prompts or generation.max_new_tokens."
            )
        index = next((i for i, free in enumerate(room) if lengths[row] <= free), len(bins))
        if index == len(bins):
            bins.append([])
            room.append(capacity)
        bins[index].append(row)
        room[index] -= lengths[row]
    while len(bins) < at_least:
        fullest = max(range(len(bins)), key=lambda i: len(bins[i]), default=None)
        if fullest is None or len(bins[fullest]) < 2:
            bins.append([])
            continue
        rows = bins.pop(fullest)
        bins += [[rows[i] for i in half] for half in balance([lengths[row] for row in rows], 2)]
    return [sorted(b) for b in bins]


def balance(weights: Sequence[int], parts: int) -> list[list[int]]:
    """Split items into `parts` lists of nearly equal weight.

    The largest differencing method (Karmarkar and Karp, 1982) for any number of parts: the two partial splits that
    are most uneven are laid against each other, the heaviest part of one on the lightest of the other, until one split
    is left. The heaviest part is at most 4/3 of the optimum, and mostly within a few tokens of it. Deterministic, so
    every rank computes the same split.

    Returns:
        item indices of each part, ascending; parts may be empty.
    """
    if parts == 1:
        return [list(range(len(weights)))]
    # (- how uneven, number that breaks ties, piles from heavy to light without empty ones)
    heap = [(-weight, item, [(weight, [item])]) for item, weight in enumerate(weights)]
    heapq.heapify(heap)
    for number in range(len(weights), 2 * len(weights) - 1):
        one, other = heapq.heappop(heap)[2], heapq.heappop(heap)[2][::-1]
        shared = max(len(one) + len(other) - parts, 0)  # places in which both have a pile
        both = zip(one[len(one) - shared :], other[:shared], strict=True)
        piles = one[: len(one) - shared] + [(a[0] + b[0], a[1] + b[1]) for a, b in both] + other[shared:]
        piles.sort(key=itemgetter(0), reverse=True)
        lightest = piles[-1][0] if len(piles) == parts else 0
        heapq.heappush(heap, (lightest - piles[0][0], number, piles))
    found = [sorted(items) for _, items in heap[0][2]] if heap else []
    return found + [[] for _ in range(parts - len(found))]


def even_ranges(total: int, parts: int) -> list[range]:
    """Cut 0..total into consecutive ranges whose sizes differ by at most one."""
    edges = [total * part // parts for part in range(parts + 1)]
    return [range(a, b) for a, b in pairwise(edges)]
