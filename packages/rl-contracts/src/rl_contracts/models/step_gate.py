"""Abandon a running step between two micro-batches, at the same one on every rank."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from rl_contracts.errors import EngineError, StalledError, StopRequestedError

if TYPE_CHECKING:
    from rl_contracts.batch.parallel import ParallelContext

POLL_SECONDS = 0.05
"""Seconds between two polls for the numbers of other ranks."""


class StepGate:
    """Gate that the training thread passes before each micro-batch of a step.

    A rank that left a step alone would block the others in their next collective. Every rank begins the same
    micro-batches in the same order, so a rank's position is the number of micro-batches that it has begun. To abandon a
    step, a thread of each rank closes the rank's gate and publishes this number. Ranks that are behind continue to the
    largest number, where all ranks leave the step.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._open, self._running = True, False
        self._begun, self._last = 0, math.inf

    @contextmanager
    def step(self) -> Iterator[None]:
        """Run a step that can be abandoned. If it is abandoned, restore torch's random states.

        Raises:
            StopRequestedError: on every rank, if the step was abandoned.
        """
        cuda = torch.cuda.is_initialized()
        random = torch.get_rng_state(), torch.cuda.get_rng_state() if cuda else None
        self._running = True
        try:
            yield
        except StopRequestedError:
            torch.set_rng_state(random[0])
            if random[1] is not None:
                torch.cuda.set_rng_state(random[1])
            raise
        finally:
            self._running = False

    def begin_micro_batch(self) -> None:
        """Pass the gate; outside of a step this does nothing.

        Raises:
            StopRequestedError: the step is abandoned here.
        """
        if not self._running:
            return
        with self._changed:
            self._changed.wait_for(lambda: self._open)
            if self._begun >= self._last:
                raise StopRequestedError("the running step was abandoned between two micro-batches")
            self._begun += 1

    def abandon(self, largest: Callable[[int], int]) -> None:
        """Abandon the running step, or the next one. The training thread must not call this.

        Args:
            largest: takes the number of micro-batches that this rank has begun, and returns the largest such number of
                all ranks; see `largest_of_ranks`. If it raises, the step continues.
        """
        with self._changed:
            self._open, begun = False, self._begun
        last = math.inf
        try:
            last = largest(begun)
        finally:
            with self._changed:
                self._open, self._last = True, last
                self._changed.notify_all()


STEP = StepGate()
"""Gate of this process, because a stop request addresses a process. `micro_batches.packed` passes it."""


def largest_of_ranks(number: int, parallel: ParallelContext, seconds: float) -> int:
    """Return the largest number of all ranks, without a collective.

    Another thread of a rank may therefore wait in a collective meanwhile. Call this once per process, because its keys
    stay in the store.

    Raises:
        StalledError: a rank published no number within `seconds`.
        EngineError: the ranks have no common store.
    """
    if parallel.world_size == 1:
        return number
    if parallel.store is None:
        raise EngineError("the ranks have no common store, because another library created their process group.")
    deadline = time.monotonic() + seconds
    keys = [f"step_gate/{rank}" for rank in range(parallel.world_size)]
    parallel.store.set(keys[parallel.rank], str(number))
    while not parallel.store.check(keys):
        if time.monotonic() > deadline:
            raise StalledError(f"not every rank reported its current micro-batch within {seconds:g} s.")
        time.sleep(POLL_SECONDS)
    return max(int(parallel.store.get(key)) for key in keys)
