"""Packing and balancing by property: everything fits, nothing is lost, bounds hold."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl_contracts.batch.packing import balance, even_ranges, pack_first_fit
from rl_contracts.errors import DataError

sizes = st.lists(st.integers(1, 20), max_size=30)


@given(sizes, st.integers(20, 60), st.integers(0, 12))
def test_pack_first_fit_bins_fit_and_hold_every_row_once(lengths: list[int], capacity: int, at_least: int) -> None:
    bins = pack_first_fit(lengths, capacity, at_least)

    assert sorted(row for b in bins for row in b) == list(range(len(lengths)))
    assert all(sum(lengths[row] for row in b) <= capacity for b in bins)
    assert all(b == sorted(b) for b in bins)
    assert len(bins) >= at_least


@given(sizes, st.integers(20, 60))
def test_pack_first_fit_is_within_the_bound_of_first_fit_decreasing(lengths: list[int], capacity: int) -> None:
    """At most one bin is half empty, so there are fewer than 2 * total / capacity + 1 bins."""
    bins = pack_first_fit(lengths, capacity, at_least=0)

    assert sum(2 * sum(lengths[row] for row in b) <= capacity for b in bins) <= 1
    assert len(bins) <= 2 * sum(lengths) / capacity + 1
    assert all(bins)


@given(st.lists(sizes, min_size=2, max_size=4), st.integers(20, 60))
def test_pack_first_fit_with_the_largest_count_gives_every_rank_as_many(ranks: list[list[int]], capacity: int) -> None:
    most = max(len(pack_first_fit(lengths, capacity)) for lengths in ranks)

    for lengths in ranks:
        bins = pack_first_fit(lengths, capacity, at_least=most)
        assert len(bins) == most
        assert sum(map(bool, bins)) == min(most, len(lengths))


def test_pack_first_fit_known_case_and_no_rows() -> None:
    assert pack_first_fit([4, 8, 1, 4, 2, 1], capacity=10) == [[1, 4], [0, 2, 3, 5]]
    assert pack_first_fit([], capacity=10, at_least=0) == []
    assert pack_first_fit([], capacity=10, at_least=2) == [[], []]


def test_pack_first_fit_row_longer_than_a_bin_raises_data_error_with_the_numbers() -> None:
    with pytest.raises(DataError, match=r"row 1 has 11 tokens, but a micro-batch holds 10.*micro_batch\.max_tokens"):
        pack_first_fit([3, 11], capacity=10)


@given(sizes, st.integers(1, 6))
def test_balance_holds_every_item_once_and_is_within_the_greedy_bound(weights: list[int], shares: int) -> None:
    result = balance(weights, shares)

    loads = [sum(weights[i] for i in share) for share in result]
    assert len(result) == shares
    assert sorted(i for share in result for i in share) == list(range(len(weights)))
    assert max(loads) - min(loads) <= max(weights, default=0)
    assert result == balance(list(weights), shares)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.integers(1, 3))
def test_balance_is_within_four_thirds_of_the_best_split(weights: list[int], shares: int) -> None:
    best = min(
        max(sum(w for w, s in zip(weights, choice, strict=True) if s == share) for share in range(shares))
        for choice in product(range(shares), repeat=len(weights))
    )

    worst = max(sum(weights[i] for i in share) for share in balance(weights, shares))

    assert worst <= best * (4 / 3 - 1 / (3 * shares)) + 1e-9


@given(st.integers(0, 100), st.integers(1, 12))
def test_cut_covers_everything_in_order_with_sizes_that_differ_by_one_at_most(total: int, parts: int) -> None:
    ranges = even_ranges(total, parts)

    assert [i for part in ranges for i in part] == list(range(total))
    assert len(ranges) == parts
    assert max(map(len, ranges)) - min(map(len, ranges)) <= 1
