from itertools import chain

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl_contracts.errors import ConfigError
from rl_datasets import EpochOrder


@given(st.integers(1, 200), st.integers(1, 8), st.integers(-5, 5), st.integers(0, 5), st.booleans())
def test_order_over_all_shards_has_each_example_once_per_epoch(rows, num_shards, seed, epoch, shuffle):
    num_shards = min(num_shards, rows)
    shards = [EpochOrder(rows, seed, shuffle, num_shards, shard) for shard in range(num_shards)]

    indices = [shard.indices(epoch) for shard in shards]

    assert sorted(chain(*indices)) == list(range(rows))
    assert [len(shard_indices) for shard_indices in indices] == [shard.size for shard in shards]
    assert max(map(len, indices)) - min(map(len, indices)) <= 1


def test_order_depends_only_on_seed_and_epoch():
    order = EpochOrder(100, seed=3)

    assert order.indices(1) == EpochOrder(100, seed=3).indices(1)
    assert order.indices(1) != order.indices(2)
    assert order.indices(1) != EpochOrder(100, seed=4).indices(1)
    assert EpochOrder(4, shuffle=False).indices(7) == [0, 1, 2, 3]


def test_order_is_the_same_in_every_release():
    assert EpochOrder(8, seed=0).indices(0) == [0, 3, 7, 4, 1, 5, 2, 6]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"rows": 1, "num_shards": 2}, "data set: .* 2 shards, found 1"),
        ({"rows": 5, "num_shards": 0}, "num_shards"),
        ({"rows": 5, "num_shards": 2, "shard": 2}, "shard: expected 0 to 1, found 2"),
    ],
)
def test_order_rejects_invalid_arguments(arguments, message):
    with pytest.raises(ConfigError, match=message):
        EpochOrder(**arguments)
