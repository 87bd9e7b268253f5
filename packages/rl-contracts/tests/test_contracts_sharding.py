import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_contracts.batch.parallel import ParallelContext
from rl_contracts.batch.redistribution import global_order, shard_batch
from rl_contracts.batch.trajectory import Trajectory, concatenate, lengths, stack


def _batch(sizes: list[int], seed: int):
    order = np.random.default_rng(seed).permutation(len(sizes))
    return stack(
        [
            Trajectory(
                np.full(sizes[i], i),
                np.ones(sizes[i], bool),
                np.zeros(sizes[i], np.float32),
                np.zeros(sizes[i], np.int32),
                group_id=int(i) // 3,
                episode_id=int(i),
            )
            for i in order
        ]
    )


@given(st.lists(st.integers(1, 30), min_size=4, max_size=24), st.integers(1, 4), st.integers(1, 3), st.integers(0, 9))
@settings(deadline=None, max_examples=40)
def test_shard_batch_any_split_keeps_each_sequence_in_its_minibatch(sizes, replicas, minibatches, seed):
    batch = _batch(sizes, seed)
    whole = shard_batch(batch, ParallelContext(), minibatches)
    expected = dict(zip(whole["episode_ids"].tolist(), whole["minibatch"].tolist(), strict=True))
    shards = [shard_batch(batch, ParallelContext(dp_rank=r, dp_size=replicas), minibatches) for r in range(replicas)]
    joined = concatenate(shards)
    actual = list(zip(joined["episode_ids"].tolist(), joined["minibatch"].tolist(), strict=True))
    assert sorted(actual) == sorted(expected.items())


def test_shard_batch_sorts_by_minibatch_on_every_replica():
    batch = _batch([4] * 18, 0)
    for rank in range(3):
        shard = shard_batch(batch, ParallelContext(dp_rank=rank, dp_size=3), 3)
        assert shard["minibatch"].tolist() == [0, 0, 1, 1, 2, 2]


def test_global_order_shuffled_batch_sorts_by_group_then_episode():
    batch = _batch([2, 3, 4, 5, 6], seed=1)
    ordered = batch[global_order(batch)]
    assert torch.equal(ordered["episode_ids"], torch.arange(5))


def test_global_order_sequences_of_one_episode_keep_their_order():
    batch = _batch([2, 3, 4, 5], seed=1)
    batch = batch[lengths(batch).argsort(descending=True)]
    batch["group_ids"], batch["episode_ids"] = torch.zeros(4, dtype=torch.int64), torch.tensor([1, 0, 1, 0])
    assert global_order(batch).tolist() == [1, 3, 0, 2]


def test_shard_batch_fewer_sequences_than_minibatches_leaves_some_empty():
    shard = shard_batch(_batch([2, 2], 0), ParallelContext(), 3)
    assert shard["minibatch"].tolist() == [1, 2]
