"""Rows that stay together: the two answers of a preference pair, wherever a batch is cut."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from rl_contracts.batch.packing import expand, unit_indices
from rl_contracts.batch.parallel import ParallelContext
from rl_contracts.batch.redistribution import MINIBATCH_KEY, shard_batch
from rl_contracts.batch.trajectory import UNIT_KEY, lengths, pack, select, units, validate
from rl_contracts.errors import DataError
from rl_contracts.testing import make_batch

labels = st.lists(st.integers(0, 9), min_size=1, max_size=30)


@given(labels)
def test_units_of_hold_every_row_once_with_its_label(found: list[int]) -> None:
    result = unit_indices(found)

    assert sorted(row for unit in result for row in unit) == list(range(len(found)))
    assert all(len({found[row] for row in unit}) == 1 for unit in result)
    assert len(result) == len(set(found))
    assert [min(unit) for unit in result] == sorted(min(unit) for unit in result)


def test_expand_gives_the_rows_of_each_share() -> None:
    assert expand([[1], [], [0, 2]], [[4, 0], [1], [2, 3]]) == [[1], [], [0, 2, 3, 4]]


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 12), st.integers(1, 3), st.integers(1, 3), st.integers(0, 9))
@example(pairs=2, replicas=1, minibatches=3, seed=0)  # fewer units than minibatches, as at the end of the data
def test_share_never_parts_a_unit(pairs: int, replicas: int, minibatches: int, seed: int) -> None:
    batch = make_batch(2 * pairs, seed=seed)
    batch[UNIT_KEY] = torch.arange(2 * pairs)[torch.randperm(2 * pairs)] // 2
    seen: list[tuple[int, int]] = []
    for rank in range(replicas):
        mine = shard_batch(batch, ParallelContext(dp_rank=rank, dp_size=replicas, world_size=replicas), minibatches)
        counted = Counter(zip(mine[UNIT_KEY].tolist(), mine[MINIBATCH_KEY].tolist(), strict=True))
        assert set(counted.values()) <= {2}
        seen += counted
    assert sorted(unit for unit, _ in seen) == list(range(pairs))


def test_packed_units_are_summed_by_label_wherever_their_rows_lie() -> None:
    batch = make_batch(4)
    batch[UNIT_KEY] = torch.tensor([70, 8, 70, 8])

    packed = pack(batch)

    assert packed.num_units == 2
    assert packed.unit_sums(torch.tensor([1.0, 20.0, 3.0, 40.0])).tolist() == [60.0, 4.0]
    assert pack(select(batch, [0, 2])).unit_sums(torch.tensor([1.0, 3.0])).tolist() == [4.0]


def test_packed_without_units_each_row_is_one() -> None:
    packed = pack(make_batch(3))

    assert packed.num_units == 3
    assert packed.unit_sums(torch.tensor([1.0, 2.0, 3.0])).tolist() == [1.0, 2.0, 3.0]


def test_packed_last_tokens_are_those_of_the_rows() -> None:
    batch = make_batch(3)
    packed = pack(batch)

    found = packed.last_tokens(packed["input_ids"])

    assert found.tolist() == [int(row[n - 1]) for row, n in zip(batch["input_ids"], lengths(batch), strict=True)]


def test_units_without_labels_are_the_rows() -> None:
    assert units(make_batch(3)) == [[0], [1], [2]]


def test_validate_unit_labels_of_another_type_are_refused() -> None:
    batch = make_batch(2)
    batch[UNIT_KEY] = torch.tensor([0.0, 1.0])

    with pytest.raises(DataError, match="unit_ids"):
        validate(batch, generated=False)
