"""Redistribution of sequences between ranks, which are threads of one process group here."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from tensordict import TensorDict
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from rl_contracts.batch.image_entries import images_of, set_images
from rl_contracts.batch.parallel import ParallelContext
from rl_contracts.batch.redistribution import redistribute, shard_batch
from rl_contracts.batch.trajectory import UNIT_KEY, Trajectory, concatenate, empty, stack
from rl_contracts.errors import EngineError
from rl_contracts.images import Image
from rl_contracts.models.micro_batches import check_same_rows

torch_threads = pytest.importorskip("torch.testing._internal.distributed.multi_threaded_pg")

SEQUENCE_LENGTH = 200
"""Upper bound of the number of tokens of a sequence."""


class PeakMemory(TorchDispatchMode):
    """Peak number of bytes of all live tensors of this thread."""

    def __init__(self) -> None:
        super().__init__()
        self.current = self.peak = 0
        self._storages: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for value in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(value, torch.Tensor) and value.untyped_storage()._cdata not in self._storages:
                storage = value.untyped_storage()
                self._storages.add(storage._cdata)
                self.current += storage.nbytes()
                weakref.finalize(storage, self._release, storage._cdata, storage.nbytes())
        self.peak = max(self.peak, self.current)
        return result

    def _release(self, name: int, size: int) -> None:
        self._storages.discard(name)
        self.current -= size


def run_on_threads(world: int, replica: int, work: Callable[[ParallelContext], Any]) -> list[Any]:
    """Run `work` on `world` ranks, which are threads of one process group, and return its results.

    Each replica has `replica` ranks.
    """
    torch_threads._install_threaded_pg()
    torch._C._distributed_c10d._set_thread_isolation_mode(True)
    store, results, errors = dist.HashStore(), {}, []

    def rank_main(rank: int) -> None:
        try:
            dist.init_process_group(backend="threaded", rank=rank, world_size=world, store=store)
            context = ParallelContext(
                rank, world, rank // replica, world // replica, rank % replica == 0, host_group=dist.group.WORLD
            )
            results[rank] = work(context)
        except BaseException as error:
            errors.append(error)
            torch_threads.ProcessLocalGroup.exception_handle(error)

    try:
        threads = [threading.Thread(target=rank_main, args=(rank,)) for rank in range(world)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        torch._C._distributed_c10d._set_thread_isolation_mode(False)
        torch_threads.ProcessLocalGroup.reset()
        torch_threads._uninstall_threaded_pg()
    if errors:
        raise errors[0]
    return [results[rank] for rank in range(world)]


def make_sequences(rank: int, count: int, seed: int = 0) -> TensorDict:
    random = np.random.default_rng(seed * 1000 + rank)
    lengths = random.integers(SEQUENCE_LENGTH // 2, SEQUENCE_LENGTH, count).tolist()
    batch = stack(
        [
            Trajectory(
                random.integers(0, 999, length),
                random.random(length) < 0.5,
                random.standard_normal(length).astype(np.float32),
                random.integers(0, 9, length, np.int32),
                reward=float(random.random()),
                group_id=int(random.integers(0, 30)),
                episode_id=1000 * rank + index,
            )
            for index, length in enumerate(lengths)
        ]
    )
    batch["states"] = torch.as_tensor(random.standard_normal((*batch["input_ids"].shape, 3))).bfloat16()
    batch["states"][~batch["attention_mask"]] = 0
    return batch


def check_equal(actual: TensorDict, expected: TensorDict) -> None:
    assert set(actual.keys()) == set(expected.keys())
    for name in expected.keys():  # noqa: SIM118 - a TensorDict iterates over rows
        torch.testing.assert_close(actual[name], expected[name], rtol=0, atol=0)


@pytest.mark.parametrize(("world", "replica"), [(2, 1), (6, 2), (8, 8), (12, 3)])
def test_redistribute_from_dp_leaders_equals_shard_of_whole_batch(world: int, replica: int) -> None:
    batches = {rank: make_sequences(rank, 3 + rank % 4) for rank in range(0, world, replica)}
    whole = concatenate(list(batches.values()))

    results = run_on_threads(world, replica, lambda p: redistribute(batches.get(p.rank, empty()), p, 2))

    for rank, result in enumerate(results):
        context = ParallelContext(dp_rank=rank // replica, dp_size=world // replica)
        check_equal(result, shard_batch(whole, context, 2))


def test_redistribute_from_one_rank_only_or_no_rank() -> None:
    batch = make_sequences(0, 5)
    results = run_on_threads(4, 1, lambda p: redistribute(batch if p.rank == 2 else empty(), p, 3))
    empty_results = run_on_threads(3, 1, lambda p: redistribute(empty(), p))

    assert sorted(episode for result in results for episode in result["episode_ids"].tolist()) == [0, 1, 2, 3, 4]
    assert [result["input_ids"].shape for result in empty_results] == [(0, 1)] * 3
    assert all("minibatch" in result for result in empty_results)


def test_redistribute_ranks_of_replica_carry_equal_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each sequence reaches one rank of its replica first. The other ranks copy it from there."""
    exchange, counts = ParallelContext.exchange, dict[int, list[int]]()

    def count_rows(self: ParallelContext, rows: torch.Tensor, sent: list[int], received: list[int]) -> torch.Tensor:
        counts.setdefault(self.rank, []).append(sum(received))
        return exchange(self, rows, sent, received)

    monkeypatch.setattr(ParallelContext, "exchange", count_rows)
    run_on_threads(6, 3, lambda p: redistribute(make_sequences(p.rank, 9) if p.is_dp_leader else empty(), p, 2))

    carried = [min(counts[rank]) for rank in range(6)]  # sequences received before the copies
    assert sum(carried) == 18
    assert max(carried[:3]) - min(carried[:3]) <= 1
    assert max(carried[3:]) - min(carried[3:]) <= 1


def test_redistribute_units_stay_together() -> None:
    def pairs(rank: int) -> TensorDict:
        batch = make_sequences(rank, 6)
        batch[UNIT_KEY] = torch.arange(6) // 2 + 10 * rank
        return batch

    results = run_on_threads(3, 1, lambda p: redistribute(pairs(p.rank), p, 2))

    for result in results:
        _, counts = torch.unique(torch.stack([result[UNIT_KEY], result["minibatch"]]), dim=1, return_counts=True)
        assert counts.tolist() == [2] * len(counts)
    assert sum(len(result) for result in results) == 18


def test_redistribute_missing_token_rewards_become_zero() -> None:
    def batch_of(rank: int) -> TensorDict:
        batch = make_sequences(rank, 4)
        if rank == 1:
            batch["token_rewards"] = torch.ones(batch["input_ids"].shape)
        return batch

    results = run_on_threads(2, 1, lambda p: redistribute(batch_of(p.rank), p))

    for result in results:
        has_rewards = (result["episode_ids"] >= 1000)[:, None] & result["attention_mask"]
        assert torch.equal(result["token_rewards"], has_rewards.float())


@pytest.mark.parametrize(("world", "replica"), [(3, 1), (6, 2)])
def test_redistribute_images_stay_with_their_sequences(world: int, replica: int) -> None:
    def images(episode: int) -> tuple[Image, ...]:
        """Return no, one or two images; only sequences of the second leader have images."""
        return (
            tuple(Image(b"%d" % index, 1, 1) for index in range(episode % 1000 % 3))
            if episode // 1000 == replica
            else ()
        )

    def batch_of(parallel: ParallelContext) -> TensorDict:
        if not parallel.is_dp_leader:
            return empty()
        batch = make_sequences(parallel.rank, 5)
        set_images(batch, [images(episode) for episode in batch["episode_ids"].tolist()])
        return batch

    results = run_on_threads(world, replica, lambda p: redistribute(batch_of(p), p, 2))

    for result in results:
        assert images_of(result) == [images(episode) for episode in result["episode_ids"].tolist()]
    received = [row for result in results[::replica] for row in images_of(result) if row]
    assert sorted(map(len, received)) == [1, 1, 2]


def test_shard_balances_image_patches_like_tokens() -> None:
    rows = [Trajectory(np.zeros(size, int), np.ones(size, bool), np.zeros(size), np.zeros(size)) for size in [50] * 4]
    batch = stack(rows)
    set_images(batch, [(Image(b"large", 14 * 15, 14 * 10),), (), (), ()])  # 150 patches

    shards = [shard_batch(batch, ParallelContext(dp_rank=rank, dp_size=2)) for rank in range(2)]

    assert sorted(len(shard) for shard in shards) == [1, 3]


@pytest.mark.parametrize("has_other_dtype", [False, True], ids=["missing", "dtype"])
def test_redistribute_different_entries_raise_on_all_ranks(has_other_dtype: bool) -> None:
    def work(parallel: ParallelContext) -> str:
        batch = make_sequences(parallel.rank, 2)
        if parallel.rank == 1:
            batch["own_score"] = torch.zeros(2)
        elif has_other_dtype:
            batch["own_score"] = torch.zeros(2, dtype=torch.int32)
        try:
            redistribute(batch, parallel)
        except EngineError as error:
            return str(error)
        return ""

    assert all("rank 1" in text and "own_score" in text for text in run_on_threads(3, 1, work))


@pytest.mark.parametrize(("changed_rank", "count"), [(None, 3), (1, 3), (1, 2), (4, 4)])
def test_check_same_rows_names_rank_that_differs_in_replica(changed_rank: int | None, count: int) -> None:
    def work(parallel: ParallelContext) -> str:
        batch = make_sequences(parallel.dp_rank, count if parallel.rank == changed_rank else 3)
        if parallel.rank == changed_rank:
            batch["input_ids"][0, 0] += 1
        try:
            check_same_rows(batch, parallel)
        except EngineError as error:
            return str(error)
        return ""

    texts = run_on_threads(6, 3, work)  # replicas of ranks 0 to 2 and 3 to 5

    if changed_rank is None:
        assert texts == [""] * 6
    else:
        first = changed_rank - 1
        assert all(f"ranks {first} to {first + 2}" in text for text in texts)
        assert all(f"{first} and {changed_rank} have different" in text for text in texts)


@pytest.mark.slow
@pytest.mark.parametrize("replica", [pytest.param(1, marks=pytest.mark.nightly), 4])
def test_redistribute_64_ranks_needs_no_more_per_rank_than_8(replica: int, monkeypatch: pytest.MonkeyPatch) -> None:
    moved = threading.local()

    def count_bytes(name: str, size: Callable[..., int]) -> None:
        original = getattr(dist, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            moved.bytes += size(*args)
            with _disable_current_modes():  # one thread copies the data of all ranks
                return original(*args, **kwargs)

        monkeypatch.setattr(f"rl_contracts.batch.parallel.dist.{name}", call)

    count_bytes("all_to_all_single", lambda out, source, *_: out.nbytes + source.nbytes)
    count_bytes("all_gather", lambda out, source: sum(part.nbytes for part in out) + source.nbytes)
    count_bytes("broadcast", lambda tensor: tensor.nbytes)
    count_bytes("all_reduce", lambda tensor, **_: tensor.nbytes)

    def work(parallel: ParallelContext) -> tuple[int, int]:
        batch = make_sequences(parallel.rank, 4 * replica) if parallel.is_dp_leader else empty()
        moved.bytes = 0
        with PeakMemory() as memory:
            redistribute(batch, parallel, 2)
        return moved.bytes, memory.peak

    few, many = (run_on_threads(world, replica, work) for world in (8, 64))

    keys = 24 * 4 * 64  # 24 bytes per sequence
    worst = [[max(rank[index] for rank in ranks) for index in range(2)] for ranks in (few, many)]
    (moved_few, memory_few), (moved_many, memory_many) = worst
    assert moved_many - moved_few <= keys + 64 * 64, "more traffic than the keys and a few dozen bytes per rank"
    assert memory_many - memory_few <= 16 * keys, "more memory than the keys and the tensors computed from them"
