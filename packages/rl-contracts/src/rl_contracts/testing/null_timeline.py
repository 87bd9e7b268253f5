"""Generation time of the null engine, and the version served at each moment of it."""

from __future__ import annotations

import asyncio
import heapq
import math
from bisect import bisect_left
from collections import deque
from contextvars import Context
from itertools import count

from rl_contracts.runtime.clock import Clock

_RESOLUTION = 1e-9
"""Difference in seconds below which two moments are equal, to tolerate rounding."""


class Timeline:
    """Generation time: the time of the clock without the pauses.

    A request stores only when it began, and its versions are looked up when it ends. So a commit costs nothing per
    outstanding request. A pause costs nothing either: one timer serves all requests, each a future in a heap.
    """

    def __init__(self, clock: Clock, version: int) -> None:
        self.version = version
        self._clock = clock
        self._paused_by: set[str] = set()
        self._passed, self._since = 0.0, clock.now()
        self._commit_times: list[float] = [-math.inf]
        self._commit_versions: list[int] = [version]
        self._recompute_times: list[float] = []
        self._busy_since: float | None = None
        self._busy = 0.0
        self._waiting: list[tuple[float, int, asyncio.Future[None]]] = []
        self._order = count()
        self._timer: asyncio.Task[None] | None = None

    def generated_until_now(self) -> float:
        """Return the seconds of generation time since the beginning."""
        return self._passed if self._paused_by else self._passed + self._clock.now() - self._since

    def pause(self, reason: str) -> None:
        """Stop generation time until every reason to pause is removed."""
        if not self._paused_by:
            self._passed = self.generated_until_now()
            self._stop_timer()
        self._paused_by.add(reason)

    def resume(self, reason: str) -> None:
        """Remove one reason to pause. Does nothing if there is no such reason."""
        if reason not in self._paused_by:
            return
        self._paused_by.remove(reason)
        if not self._paused_by:
            self._since = self._clock.now()
            self._start_timer()

    def after(self, seconds: float) -> asyncio.Future[None]:
        """Return a future that is done after `seconds` of generation time."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if seconds <= _RESOLUTION:
            future.set_result(None)
            return future
        heapq.heappush(self._waiting, (self.generated_until_now() + seconds, next(self._order), future))
        no_timer = self._timer is None or self._timer.done()  # a timer ends with its event loop
        if (no_timer or self._waiting[0][2] is future) and not self._paused_by:
            self._stop_timer()
            self._start_timer()
        return future

    def close(self) -> None:
        """Stop the timer and drop the futures that are not done."""
        self._stop_timer()
        self._waiting.clear()

    def _start_timer(self) -> None:
        if self._waiting:
            # The empty context keeps the caller's context variables out of the shared timer.
            tick = asyncio.get_running_loop().create_task(self._tick(), name="null-engine-timer", context=Context())
            self._timer = tick

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    async def _tick(self) -> None:
        """Complete each future at its time, until none is left."""
        try:
            while self._waiting:
                end, _, future = self._waiting[0]
                remaining = end - self.generated_until_now()
                if remaining > _RESOLUTION and not future.done():
                    await self._clock.sleep(remaining)
                    continue
                heapq.heappop(self._waiting)
                if not future.done():  # done: its request was cancelled
                    future.set_result(None)
        except Exception as error:  # noqa: BLE001 - errors of the clock are passed to the waiting requests
            waiting, self._waiting = self._waiting, []
            for _, _, future in waiting:
                if not future.done():
                    future.set_exception(error)
        finally:
            if self._timer is asyncio.current_task():  # not stopped or replaced meanwhile
                self._timer = None

    def commit(self, version: int, recompute: bool) -> None:
        """Serve `version` from now on.

        Args:
            version: new version.
            recompute: whether unfinished completions are resubmitted with their prefix.
        """
        self.version = version
        now = self.generated_until_now()
        self._commit_times.append(now)
        self._commit_versions.append(version)
        if recompute:
            self._recompute_times.append(now)

    def versions_between(self, first: float, step: float, number: int) -> list[int]:
        """Return the version served at `number` moments of generation time, from `first` on, `step` seconds apart.

        At the moment of a commit this is still the old version.
        """
        commits, versions = self._commit_times, self._commit_versions
        if commits[-1] < first - _RESOLUTION:
            return [versions[-1]] * number
        return [versions[bisect_left(commits, first + i * step - _RESOLUTION) - 1] for i in range(number)]

    def recomputes_between(self, began: float, ended: float) -> int:
        """Return how often a completion generated from `began` to `ended` was resubmitted with its prefix."""
        if not self._recompute_times:
            return 0
        return sum(began + _RESOLUTION < t < ended - _RESOLUTION for t in self._recompute_times)

    def set_busy(self, busy: bool) -> None:
        """Set whether at least one request generates."""
        if busy and self._busy_since is None:
            self._busy_since = self.generated_until_now()
        elif not busy and self._busy_since is not None:
            self._busy += self.generated_until_now() - self._busy_since
            self._busy_since = None

    def busy_seconds(self) -> float:
        """Return the generation time with at least one running request, in seconds."""
        now = self.generated_until_now()
        return self._busy + (0.0 if self._busy_since is None else now - self._busy_since)


class Slots:
    """Slots for running requests, granted in order of arrival. No slot is granted between `drain` and `reopen`."""

    def __init__(self, limit: int) -> None:
        self.running = 0
        self._limit = limit
        self._is_closed = False
        self._queue: deque[asyncio.Future[None]] = deque()
        self._empty: asyncio.Future[None] | None = None

    async def acquire(self) -> None:
        """Wait for a slot and take it."""
        if self._has_free() and not self._queue:
            self.running += 1
            return
        slot: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._queue.append(slot)
        try:
            await slot
        except asyncio.CancelledError:
            if not slot.cancelled():  # the slot was granted at the moment of the cancellation
                self.release()
            raise

    def release(self) -> None:
        """Return a slot."""
        self.running -= 1
        if self._queue:
            self._admit()
        if not self.running and self._empty is not None and not self._empty.done():
            self._empty.set_result(None)

    async def drain(self) -> None:
        """Grant no further slots, and return when no request runs. `reopen` grants slots again."""
        self._is_closed = True
        if self.running:
            self._empty = asyncio.get_running_loop().create_future()
            await self._empty

    def reopen(self) -> None:
        """Grant slots again, after `drain`."""
        self._is_closed, self._empty = False, None
        self._admit()

    def _has_free(self) -> bool:
        return not self._is_closed and (not self._limit or self.running < self._limit)

    def _admit(self) -> None:
        while self._queue and self._has_free():
            slot = self._queue.popleft()
            if not slot.done():
                self.running += 1
                slot.set_result(None)
