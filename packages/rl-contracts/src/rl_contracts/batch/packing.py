"""Group the sequences of a batch: into micro-batches that fit, or into parts of balanced weight.

The functions work on indices and lengths only.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from itertools import pairwise
from operator import itemgetter

from rl_contracts.errors import DataError


def unit_indices(labels: Sequence[int]) -> list[list[int]]:
    """Return the sequence indices of each unit: sequences with the same label, which must stay together.

    Indices ascend within a unit. Units are in the order of their first sequence.
    """
    indices_by_label: dict[int, list[int]] = {}
    for index, label in enumerate(labels):
        indices_by_label.setdefault(label, []).append(index)
    return list(indices_by_label.values())


def expand(parts: Sequence[Sequence[int]], units: Sequence[Sequence[int]]) -> list[list[int]]:
    """Convert lists of unit indices to lists of sequence indices, ascending."""
    return [sorted(sequence for unit in part for sequence in units[unit]) for part in parts]


def pack_first_fit(lengths: Sequence[int], capacity: int, at_least: int = 1) -> list[list[int]]:
    """Pack sequences into micro-batches of at most `capacity` tokens, by first-fit decreasing bin packing.

    All data-parallel ranks must run the same number of micro-batches. Each rank packs its own sequences, the ranks
    agree on the largest count, and each packs again with that count as `at_least`. The second pass splits the bins with
    the most sequences. Some bins are empty if there are fewer sequences than bins.

    Args:
        lengths: number of tokens of each sequence.
        capacity: maximum number of tokens per bin.
        at_least: minimum number of bins to return.

    Returns:
        sequence indices of each bin, ascending within a bin.

    Raises:
        DataError: a sequence is longer than a bin.
    """
    bins: list[list[int]] = []
    free_tokens: list[int] = []
    for sequence in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        if lengths[sequence] > capacity:
            raise DataError(
                f"sequence or preference pair {sequence} has {lengths[sequence]} tokens, but a micro-batch holds "
                f"{capacity}. Raise micro_batch.max_tokens, shorten prompts, or lower generation.max_new_tokens."
            )
        index = next((i for i, free in enumerate(free_tokens) if lengths[sequence] <= free), len(bins))
        if index == len(bins):
            bins.append([])
            free_tokens.append(capacity)
        bins[index].append(sequence)
        free_tokens[index] -= lengths[sequence]
    while len(bins) < at_least:
        fullest = max(range(len(bins)), key=lambda i: len(bins[i]), default=None)
        if fullest is None or len(bins[fullest]) < 2:
            bins.append([])
            continue
        members = bins.pop(fullest)
        bins += [[members[i] for i in half] for half in balance([lengths[sequence] for sequence in members], 2)]
    return [sorted(b) for b in bins]


def balance(weights: Sequence[int], parts: int) -> list[list[int]]:
    """Split items into `parts` lists of nearly equal weight.

    Uses the largest differencing method (Karmarkar and Karp, 1982) for any number of parts. It repeatedly merges the
    two most uneven partial splits: the heaviest part of one with the lightest part of the other, and so on. It stops
    when one split remains. The heaviest part weighs at most 4/3 of the optimum, and usually only a few tokens more than
    it. The result is deterministic, so all ranks compute the same split.

    Returns:
        item indices of each part, ascending; parts may be empty.
    """
    if parts == 1:
        return [list(range(len(weights)))]
    # (negated unevenness, number that breaks ties, non-empty piles in descending weight)
    heap = [(-weight, item, [(weight, [item])]) for item, weight in enumerate(weights)]
    heapq.heapify(heap)
    for number in range(len(weights), 2 * len(weights) - 1):
        first, second = heapq.heappop(heap)[2], heapq.heappop(heap)[2][::-1]
        shared = max(len(first) + len(second) - parts, 0)  # positions where both have a pile
        merged = zip(first[len(first) - shared :], second[:shared], strict=True)
        piles = first[: len(first) - shared] + [(a[0] + b[0], a[1] + b[1]) for a, b in merged] + second[shared:]
        piles.sort(key=itemgetter(0), reverse=True)
        lightest = piles[-1][0] if len(piles) == parts else 0
        heapq.heappush(heap, (lightest - piles[0][0], number, piles))
    filled = [sorted(items) for _, items in heap[0][2]] if heap else []
    return filled + [[] for _ in range(parts - len(filled))]


def even_ranges(total: int, parts: int) -> list[range]:
    """Split 0..total into consecutive ranges whose sizes differ by at most one."""
    edges = [total * part // parts for part in range(parts + 1)]
    return [range(a, b) for a, b in pairwise(edges)]
