"""A step is abandoned at the same micro-batch on every rank, regardless of their positions."""

from __future__ import annotations

import random
import threading
import time
from contextlib import suppress

import pytest
import torch

from rl_contracts.batch.parallel import ParallelContext
from rl_contracts.errors import EngineError, StalledError, StopRequestedError
from rl_contracts.models.step_gate import StepGate, largest_of_ranks

RANKS = 3
MICRO_BATCHES = 200


class Rank(threading.Thread):
    """Rank with a collective in each micro-batch. If one rank alone abandons the step, the barrier breaks."""

    def __init__(self, barrier: threading.Barrier, delay: float) -> None:
        super().__init__(daemon=True)
        self.gate, self.barrier, self.delay = StepGate(), barrier, delay
        self.begun, self.stopped = 0, False

    def run(self) -> None:
        try:
            with self.gate.step():
                for _ in range(MICRO_BATCHES):
                    self.gate.begin_micro_batch()
                    self.begun += 1
                    time.sleep(self.delay)
                    self.barrier.wait(20)
        except StopRequestedError:
            self.stopped = True


@pytest.mark.parametrize("seed", range(3))
def test_gate_closed_at_random_moments_all_ranks_leave_together(seed: int) -> None:
    rng, barrier = random.Random(seed), threading.Barrier(RANKS)
    ranks = [Rank(barrier, rng.uniform(0, 0.002)) for _ in range(RANKS)]
    counts, all_counted = list[int](), threading.Barrier(RANKS)

    def largest(begun: int) -> int:
        counts.append(begun)
        all_counted.wait(20)
        return max(counts)

    def abandon_later(rank: Rank, seconds: float) -> None:
        time.sleep(seconds)
        rank.gate.abandon(largest)

    threads = [threading.Thread(target=abandon_later, args=(rank, rng.uniform(0, 0.02))) for rank in ranks]
    for thread in (*ranks, *threads):
        thread.start()
    for thread in (*ranks, *threads):
        thread.join(30)

    assert [rank.stopped for rank in ranks] == [True] * RANKS
    assert {rank.begun for rank in ranks} == {max(counts)}


def test_gate_abandon_without_all_ranks_lets_step_continue() -> None:
    def silent(_: int) -> int:
        raise StalledError("injected")

    gate = StepGate()
    with pytest.raises(StalledError):
        gate.abandon(silent)
    with gate.step():
        gate.begin_micro_batch()


def test_gate_abandon_between_steps_stops_next_step() -> None:
    gate = StepGate()
    gate.abandon(lambda begun: begun)
    gate.begin_micro_batch()
    with pytest.raises(StopRequestedError), gate.step():
        gate.begin_micro_batch()


def test_gate_abandoned_step_restores_random_state() -> None:
    gate, before = StepGate(), torch.get_rng_state()
    gate.abandon(lambda begun: begun)
    with suppress(StopRequestedError), gate.step():
        torch.rand(3)
        gate.begin_micro_batch()
    assert torch.equal(torch.get_rng_state(), before)


def test_largest_of_ranks_requires_all_ranks_and_store() -> None:
    store = torch.distributed.HashStore()
    two = [ParallelContext(rank=rank, world_size=2, store=store) for rank in range(2)]
    with pytest.raises(StalledError):
        largest_of_ranks(7, two[0], 0.0)
    assert largest_of_ranks(5, two[1], 5.0) == 7
    assert largest_of_ranks(3, ParallelContext(), 0.0) == 3
    with pytest.raises(EngineError):
        largest_of_ranks(3, ParallelContext(world_size=2), 0.0)
