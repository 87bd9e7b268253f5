"""Property tests of packing and balancing: sequences fit, none is lost, bounds hold."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl_contracts.batch.packing import balance, even_ranges, pack_first_fit
from rl_contracts.batch.parallel import ParallelContext
from rl_contracts.batch.trajectory import Trajectory, stack
from rl_contracts.data import FinetuneSpec, MicroBatchConfig
from rl_contracts.errors import DataError
from rl_contracts.models.micro_batches import plan

sizes = st.lists(st.integers(1, 20), max_size=30)


@given(sizes, st.integers(20, 60), st.integers(0, 12))
def test_pack_first_fit_bins_fit_and_have_each_sequence_once(lengths: list[int], capacity: int, at_least: int) -> None:
    bins = pack_first_fit(lengths, capacity, at_least)

    assert sorted(sequence for b in bins for sequence in b) == list(range(len(lengths)))
    assert all(sum(lengths[sequence] for sequence in b) <= capacity for b in bins)
    assert all(b == sorted(b) for b in bins)
    assert len(bins) >= at_least


@given(sizes, st.integers(20, 60))
def test_pack_first_fit_has_at_most_one_half_empty_bin(lengths: list[int], capacity: int) -> None:
    """First-fit decreasing leaves at most one bin half empty, so it needs at most 2 * total / capacity + 1 bins."""
    bins = pack_first_fit(lengths, capacity, at_least=0)

    assert sum(2 * sum(lengths[sequence] for sequence in b) <= capacity for b in bins) <= 1
    assert len(bins) <= 2 * sum(lengths) / capacity + 1
    assert all(bins)


@given(st.lists(sizes, min_size=2, max_size=4), st.integers(20, 60))
def test_pack_first_fit_with_largest_count_gives_ranks_equal_counts(ranks: list[list[int]], capacity: int) -> None:
    largest_count = max(len(pack_first_fit(lengths, capacity)) for lengths in ranks)

    for lengths in ranks:
        bins = pack_first_fit(lengths, capacity, at_least=largest_count)
        assert len(bins) == largest_count
        assert sum(map(bool, bins)) == min(largest_count, len(lengths))


def test_pack_first_fit_known_case_and_no_sequences() -> None:
    assert pack_first_fit([4, 8, 1, 4, 2, 1], capacity=10) == [[1, 4], [0, 2, 3, 5]]
    assert pack_first_fit([], capacity=10, at_least=0) == []
    assert pack_first_fit([], capacity=10, at_least=2) == [[], []]
    assert pack_first_fit([5, 4], capacity=5, at_least=4) == [[0], [1], [], []]


def test_pack_first_fit_sequence_longer_than_bin_raises_data_error() -> None:
    with pytest.raises(DataError, match=r"1 has 11 tokens.* 10\..*micro_batch\.max_tokens"):
        pack_first_fit([3, 11], capacity=10)


@pytest.mark.parametrize(
    ("deterministic", "multiple", "expected"),
    [
        (False, 1, [[0, 2], [1]]),  # 6 + 4 and 5 tokens
        (False, 3, [[0], [1], [2]]),
        (True, 1, [[0], [1], [2]]),
        (True, 2, [[], [0], [1], [2]]),
        (True, 7, [[], [], [], [], [0], [1], [2]]),
    ],
)
def test_plan_packs_sequences_only_if_not_deterministic(
    deterministic: bool, multiple: int, expected: list[list[int]]
) -> None:
    batch = stack([_sequence(length) for length in (4, 5, 6)])
    spec = FinetuneSpec("", 1, micro_batch=MicroBatchConfig(max_tokens=10), deterministic=deterministic)

    assert sorted(plan(batch, spec, ParallelContext(), multiple)) == expected


@pytest.mark.parametrize("deterministic", [False, True])
def test_plan_no_sequences_gives_one_empty_micro_batch(deterministic: bool) -> None:
    spec = FinetuneSpec("", 1, micro_batch=MicroBatchConfig(max_tokens=10), deterministic=deterministic)

    assert plan(stack([_sequence(1)])[:0], spec, ParallelContext()) == [[]]


def _sequence(length: int) -> Trajectory:
    ids = np.ones(length, np.int64)
    return Trajectory(ids, ids > 0, ids.astype(np.float32), ids.astype(np.int32))


@given(sizes, st.integers(1, 6))
def test_balance_has_each_item_once_within_greedy_bound(weights: list[int], parts: int) -> None:
    result = balance(weights, parts)

    loads = [sum(weights[i] for i in part) for part in result]
    assert len(result) == parts
    assert sorted(i for part in result for i in part) == list(range(len(weights)))
    assert max(loads) - min(loads) <= max(weights, default=0)
    assert result == balance(list(weights), parts)


@pytest.mark.parametrize(
    ("weights", "expected"),
    [
        ([4, 5, 6, 7, 8], [[1, 2], [0, 3], [4]]),
        ([8, 5, 4, 1, 8], [[0, 3], [1, 2], [4]]),
        ([1, 2, 1, 1, 2], [[3, 4], [1], [0, 2]]),
    ],
)
def test_balance_three_parts_merges_most_uneven_splits_first(weights: list[int], expected: list[list[int]]) -> None:
    assert balance(weights, 3) == expected


@given(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.integers(1, 3))
def test_balance_heaviest_part_is_within_four_thirds_of_optimum(weights: list[int], parts: int) -> None:
    optimum = min(
        max(sum(w for w, s in zip(weights, choice, strict=True) if s == part) for part in range(parts))
        for choice in product(range(parts), repeat=len(weights))
    )

    heaviest = max(sum(weights[i] for i in part) for part in balance(weights, parts))

    assert heaviest <= optimum * (4 / 3 - 1 / (3 * parts)) + 1e-9


@given(st.integers(0, 100), st.integers(1, 12))
def test_even_ranges_cover_all_in_order_with_near_equal_sizes(total: int, parts: int) -> None:
    ranges = even_ranges(total, parts)

    assert [i for part in ranges for i in part] == list(range(total))
    assert len(ranges) == parts
    assert max(map(len, ranges)) - min(map(len, ranges)) <= 1
