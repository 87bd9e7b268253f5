"""Units, such as preference pairs: their sequences stay together wherever a batch is split."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from rl_contracts.batch.packing import expand, unit_indices
from rl_contracts.batch.parallel import ParallelContext
from rl_contracts.batch.redistribution import MINIBATCH_KEY, shard_batch
from rl_contracts.batch.trajectory import UNIT_KEY, lengths, pack, select, validate
from rl_contracts.errors import DataError
from rl_contracts.testing import make_batch

labels = st.lists(st.integers(0, 9), min_size=1, max_size=30)


@given(labels)
def test_unit_indices_have_each_sequence_once_with_its_label(sequence_labels: list[int]) -> None:
    result = unit_indices(sequence_labels)

    assert sorted(sequence for unit in result for sequence in unit) == list(range(len(sequence_labels)))
    assert all(len({sequence_labels[sequence] for sequence in unit}) == 1 for unit in result)
    assert len(result) == len(set(sequence_labels))
    assert [min(unit) for unit in result] == sorted(min(unit) for unit in result)


def test_expand_returns_the_sequences_of_each_part() -> None:
    assert expand([[1], [], [0, 2]], [[4, 0], [1], [2, 3]]) == [[1], [], [0, 2, 3, 4]]


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 12), st.integers(1, 3), st.integers(1, 3), st.integers(0, 9))
@example(pairs=2, replicas=1, minibatches=3, seed=0)  # fewer units than minibatches
def test_shard_batch_never_splits_a_unit(pairs: int, replicas: int, minibatches: int, seed: int) -> None:
    batch = make_batch(2 * pairs, seed=seed)
    batch[UNIT_KEY] = torch.arange(2 * pairs)[torch.randperm(2 * pairs)] // 2
    seen: list[tuple[int, int]] = []
    for rank in range(replicas):
        shard = shard_batch(batch, ParallelContext(dp_rank=rank, dp_size=replicas, world_size=replicas), minibatches)
        counts = Counter(zip(shard[UNIT_KEY].tolist(), shard[MINIBATCH_KEY].tolist(), strict=True))
        assert set(counts.values()) <= {2}
        seen += counts
    assert sorted(unit for unit, _ in seen) == list(range(pairs))


def test_packed_unit_sums_add_by_label_in_any_order() -> None:
    batch = make_batch(4)
    batch[UNIT_KEY] = torch.tensor([70, 8, 70, 8])

    packed = pack(batch)

    assert packed.num_units == 2
    assert packed.unit_sums(torch.tensor([1.0, 20.0, 3.0, 40.0])).tolist() == [60.0, 4.0]
    assert pack(select(batch, [0, 2])).unit_sums(torch.tensor([1.0, 3.0])).tolist() == [4.0]


def test_packed_without_units_each_sequence_is_a_unit() -> None:
    packed = pack(make_batch(3))

    assert packed.num_units == 3
    assert packed.unit_sums(torch.tensor([1.0, 2.0, 3.0])).tolist() == [1.0, 2.0, 3.0]


def test_packed_last_tokens_are_those_of_the_sequences() -> None:
    batch = make_batch(3)
    packed = pack(batch)

    last_tokens = packed.last_tokens(packed["input_ids"])

    assert last_tokens.tolist() == [int(ids[n - 1]) for ids, n in zip(batch["input_ids"], lengths(batch), strict=True)]


def test_validate_unit_labels_of_wrong_dtype_raise_data_error() -> None:
    batch = make_batch(2)
    batch[UNIT_KEY] = torch.tensor([0.0, 1.0])

    with pytest.raises(DataError, match="unit_ids"):
        validate(batch, generated=False)
