"""A step is abandoned at the same micro-batch on every rank, wherever each of them is."""

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
    """A rank with a collective in each micro-batch, so that one that leaves alone breaks the barrier of the others."""

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


@pytest.mark.parametrize("seed", range(5))
def test_gate_closed_at_random_moments_all_ranks_leave_together(seed: int) -> None:
    chance, barrier = random.Random(seed), threading.Barrier(RANKS)
    ranks = [Rank(barrier, chance.uniform(0, 0.002)) for _ in range(RANKS)]
    started, meeting = list[int](), threading.Barrier(RANKS)

    def largest(begun: int) -> int:
        started.append(begun)
        meeting.wait(20)
        return max(started)

    def ask(rank: Rank, after: float) -> None:
        time.sleep(after)
        rank.gate.abandon(largest)

    threads = [threading.Thread(target=ask, args=(rank, chance.uniform(0, 0.02))) for rank in ranks]
    for thread in (*ranks, *threads):
        thread.start()
    for thread in (*ranks, *threads):
        thread.join(30)

    assert [rank.stopped for rank in ranks] == [True] * RANKS
    assert {rank.begun for rank in ranks} == {max(started)}


def test_gate_without_an_answer_lets_the_step_continue() -> None:
    def silent(_: int) -> int:
        raise StalledError("planted")

    gate = StepGate()
    with pytest.raises(StalledError):
        gate.abandon(silent)
    with gate.step():
        gate.begin_micro_batch()


def test_gate_outside_of_a_step_stops_nothing() -> None:
    gate = StepGate()
    gate.abandon(lambda begun: begun)
    gate.begin_micro_batch()
    with pytest.raises(StopRequestedError), gate.step():
        gate.begin_micro_batch()


def test_gate_abandoned_step_puts_the_random_state_back() -> None:
    gate, before = StepGate(), torch.get_rng_state()
    gate.abandon(lambda begun: begun)
    with suppress(StopRequestedError), gate.step():
        torch.rand(3)
        gate.begin_micro_batch()
    assert torch.equal(torch.get_rng_state(), before)


def test_largest_of_ranks_needs_all_of_them_and_a_store() -> None:
    store = torch.distributed.HashStore()
    two = [ParallelContext(rank=rank, world_size=2, store=store) for rank in range(2)]
    with pytest.raises(StalledError):
        largest_of_ranks(7, two[0], 0.0)
    assert largest_of_ranks(5, two[1], 5.0) == 7
    assert largest_of_ranks(3, ParallelContext(), 0.0) == 3
    with pytest.raises(EngineError):
        largest_of_ranks(3, ParallelContext(world_size=2), 0.0)
