"""Rows on their way to the ranks that learn from them, with the ranks as threads of one process group."""

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

from rl_contracts.batch.parallel import ParallelContext
from rl_contracts.batch.redistribution import redistribute, shard_batch
from rl_contracts.batch.trajectory import UNIT_KEY, Trajectory, concatenate, empty, stack
from rl_contracts.errors import EngineError

torch_threads = pytest.importorskip("torch.testing._internal.distributed.multi_threaded_pg")

WORDS = 200
"""Tokens of a row, about."""


class Held(TorchDispatchMode):
    """Bytes of the tensors of this thread that live at the same time, at most."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for value in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(value, torch.Tensor) and value.untyped_storage()._cdata not in self._known:
                storage = value.untyped_storage()
                self._known.add(storage._cdata)
                self.now += storage.nbytes()
                weakref.finalize(storage, self._gone, storage._cdata, storage.nbytes())
        self.peak = max(self.peak, self.now)
        return result

    def _gone(self, name: int, size: int) -> None:
        self._known.discard(name)
        self.now -= size


def on_threads(world: int, replica: int, work: Callable[[ParallelContext], Any]) -> list[Any]:
    """What `work` returns on each of `world` ranks, threads of one process group; `replica` ranks hold one model."""
    torch_threads._install_threaded_pg()
    torch._C._distributed_c10d._set_thread_isolation_mode(True)
    store, found, errors = dist.HashStore(), {}, []

    def rank_main(rank: int) -> None:
        try:
            dist.init_process_group(backend="threaded", rank=rank, world_size=world, store=store)
            context = ParallelContext(
                rank, world, rank // replica, world // replica, rank % replica == 0, host_group=dist.group.WORLD
            )
            found[rank] = work(context)
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
    return [found[rank] for rank in range(world)]


def make(rank: int, rows: int, seed: int = 0) -> TensorDict:
    random = np.random.default_rng(seed * 1000 + rank)
    lengths = random.integers(WORDS // 2, WORDS, rows).tolist()
    batch = stack(
        [
            Trajectory(
                random.integers(0, 999, length),
                random.random(length) < 0.5,
                random.standard_normal(length).astype(np.float32),
                random.integers(0, 9, length, np.int32),
                reward=float(random.random()),
                group_id=int(random.integers(0, 30)),
                episode_id=1000 * rank + row,
            )
            for row, length in enumerate(lengths)
        ]
    )
    batch["states"] = torch.as_tensor(random.standard_normal((*batch["input_ids"].shape, 3))).bfloat16()
    batch["states"][~batch["attention_mask"]] = 0
    return batch


def check_equal(found: TensorDict, expected: TensorDict) -> None:
    assert set(found.keys()) == set(expected.keys())
    for name in expected.keys():  # noqa: SIM118 - a TensorDict iterates over rows
        torch.testing.assert_close(found[name], expected[name], rtol=0, atol=0)


@pytest.mark.parametrize(("world", "replica"), [(2, 1), (6, 2), (8, 8), (12, 3)])
def test_redistribute_rows_of_heads_arrive_as_if_every_rank_held_all(world: int, replica: int) -> None:
    given = {rank: make(rank, 3 + rank % 4) for rank in range(0, world, replica)}
    whole = concatenate(list(given.values()))

    found = on_threads(world, replica, lambda p: redistribute(given.get(p.rank, empty()), p, 2))

    for rank, mine in enumerate(found):
        context = ParallelContext(dp_rank=rank // replica, dp_size=world // replica)
        check_equal(mine, shard_batch(whole, context, 2))


def test_redistribute_rows_on_one_rank_only_and_none_at_all() -> None:
    batch = make(0, 5)
    found = on_threads(4, 1, lambda p: redistribute(batch if p.rank == 2 else empty(), p, 3))
    nothing = on_threads(3, 1, lambda p: redistribute(empty(), p))

    assert sorted(episode for part in found for episode in part["episode_ids"].tolist()) == [0, 1, 2, 3, 4]
    assert [len(part) for part in nothing] == [0, 0, 0]
    assert all("minibatch" in part for part in nothing)


def test_redistribute_units_stay_together() -> None:
    def pairs(rank: int) -> TensorDict:
        batch = make(rank, 6)
        batch[UNIT_KEY] = torch.arange(6) // 2 + 10 * rank
        return batch

    found = on_threads(3, 1, lambda p: redistribute(pairs(p.rank), p, 2))

    for part in found:
        _, counts = torch.unique(torch.stack([part[UNIT_KEY], part["minibatch"]]), dim=1, return_counts=True)
        assert counts.tolist() == [2] * len(counts)
    assert sum(len(part) for part in found) == 18


def test_redistribute_token_rewards_on_one_rank_only_are_zero_elsewhere() -> None:
    def rows(rank: int) -> TensorDict:
        batch = make(rank, 4)
        if rank == 1:
            batch["token_rewards"] = torch.ones(batch["input_ids"].shape)
        return batch

    found = on_threads(2, 1, lambda p: redistribute(rows(p.rank), p))

    for part in found:
        given = (part["episode_ids"] >= 1000)[:, None] & part["attention_mask"]
        assert torch.equal(part["token_rewards"], given.float())


def test_redistribute_entries_that_differ_are_refused_on_every_rank_with_their_names() -> None:
    def work(parallel: ParallelContext) -> str:
        batch = make(parallel.rank, 2)
        if parallel.rank == 1:
            batch["own_score"] = torch.zeros(2)
        try:
            redistribute(batch, parallel)
        except EngineError as error:
            return str(error)
        return ""

    assert all("rank 1" in text and "own_score" in text for text in on_threads(3, 1, work))


@pytest.mark.slow
@pytest.mark.parametrize("replica", [pytest.param(1, marks=pytest.mark.nightly), 4])
def test_redistribute_64_ranks_each_moves_and_holds_no_more_than_8_ranks_do(
    replica: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    moved = threading.local()

    def counted(name: str, size: Callable[..., int]) -> None:
        inner = getattr(dist, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            moved.bytes += size(*args)
            with _disable_current_modes():  # one thread copies for all
                return inner(*args, **kwargs)

        monkeypatch.setattr(f"rl_contracts.batch.parallel.dist.{name}", call)

    counted("all_to_all_single", lambda out, given, *_: out.nbytes + given.nbytes)
    counted("all_gather", lambda out, given: sum(part.nbytes for part in out) + given.nbytes)
    counted("broadcast", lambda tensor: tensor.nbytes)
    counted("all_reduce", lambda tensor, **_: tensor.nbytes)

    def work(parallel: ParallelContext) -> tuple[int, int]:
        batch = make(parallel.rank, 4 * replica) if parallel.is_dp_leader else empty()
        moved.bytes = 0
        with Held() as held:
            redistribute(batch, parallel, 2)
        return moved.bytes, held.peak

    few, many = (on_threads(world, replica, work) for world in (8, 64))

    keys = 16 * 4 * 64  # 16 bytes of every row
    worst = [[max(rank[index] for rank in ranks) for index in range(2)] for ranks in (few, many)]
    (moved_few, held_few), (moved_many, held_many) = worst
    assert moved_many - moved_few <= keys + 64 * 64, "beside the keys only some dozen bytes of a rank"
    assert held_many - held_few <= 16 * keys, "beside the keys only what is counted over them"
