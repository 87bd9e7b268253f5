"""The null engine's time: what counts is the time during which it generates, and which version served when."""

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
"""Seconds below which two moments are the same, against rounding."""


class Timeline:
    """Generation time: the clock's, less the pauses. Requests only remember when they began; versions are looked up
    when they end, so a commit costs nothing per outstanding request. One timer serves them all, so that neither does a
    pause, and an outstanding request is a future in a heap."""

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
        """Seconds of generation time since the beginning."""
        return self._passed if self._paused_by else self._passed + self._clock.now() - self._since

    def pause(self, reason: str) -> None:
        """Stop generation time until every reason to pause is gone."""
        if not self._paused_by:
            self._passed = self.generated_until_now()
            self._stop_timer()
        self._paused_by.add(reason)

    def resume(self, reason: str) -> None:
        """Take one reason to pause away; does nothing if it is not there."""
        if reason not in self._paused_by:
            return
        self._paused_by.remove(reason)
        if not self._paused_by:
            self._since = self._clock.now()
            self._start_timer()

    def after(self, seconds: float) -> asyncio.Future[None]:
        """A future that is done after `seconds` of generation time."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if seconds <= _RESOLUTION:
            future.set_result(None)
            return future
        heapq.heappush(self._waiting, (self.generated_until_now() + seconds, next(self._order), future))
        no_timer = self._timer is None or self._timer.done()  # it may have ended with another event loop
        if (no_timer or self._waiting[0][2] is future) and not self._paused_by:
            self._stop_timer()
            self._start_timer()
        return future

    def close(self) -> None:
        """Wake nobody any more."""
        self._stop_timer()
        self._waiting.clear()

    def _start_timer(self) -> None:
        if self._waiting:
            # in a context of its own: it belongs to no caller
            tick = asyncio.get_running_loop().create_task(self._tick(), name="null-engine-timer", context=Context())
            self._timer = tick

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    async def _tick(self) -> None:
        """Wake everybody at the right time, until nobody waits."""
        try:
            while self._waiting:
                end, _, future = self._waiting[0]
                remaining = end - self.generated_until_now()
                if remaining > _RESOLUTION and not future.done():
                    await self._clock.sleep(remaining)
                    continue
                heapq.heappop(self._waiting)
                if not future.done():  # its request was cancelled
                    future.set_result(None)
        except Exception as error:  # noqa: BLE001 - what the clock raises belongs to those who wait for it
            waiting, self._waiting = self._waiting, []
            for _, _, future in waiting:
                if not future.done():
                    future.set_exception(error)
        finally:
            if self._timer is asyncio.current_task():  # and not stopped, or replaced
                self._timer = None

    def commit(self, version: int, recompute: bool) -> None:
        """Serve `version` from now on; `recompute` if unfinished answers begin again from their prefix."""
        self.version = version
        now = self.generated_until_now()
        self._commit_times.append(now)
        self._commit_versions.append(version)
        if recompute:
            self._recompute_times.append(now)

    def versions_between(self, first: float, step: float, number: int) -> list[int]:
        """The version that served at each of `number` moments of generation time, of which the first is `first`; at a
        commit's own moment still the old one."""
        commits, versions = self._commit_times, self._commit_versions
        if commits[-1] < first - _RESOLUTION:
            return [versions[-1]] * number
        return [versions[bisect_left(commits, first + i * step - _RESOLUTION) - 1] for i in range(number)]

    def recomputes_between(self, began: float, ended: float) -> int:
        """How often an answer that took from `began` to `ended` was begun again from its prefix."""
        if not self._recompute_times:
            return 0
        return sum(began + _RESOLUTION < t < ended - _RESOLUTION for t in self._recompute_times)

    def set_busy(self, busy: bool) -> None:
        """Tell whether anything generates."""
        if busy and self._busy_since is None:
            self._busy_since = self.generated_until_now()
        elif not busy and self._busy_since is not None:
            self._busy += self.generated_until_now() - self._busy_since
            self._busy_since = None

    def busy_seconds(self) -> float:
        """Generation time with at least one running request."""
        now = self.generated_until_now()
        return self._busy + (0.0 if self._busy_since is None else now - self._busy_since)


class Slots:
    """Places for running requests, given in the order of asking; they can be shut to let the running ones end."""

    def __init__(self, limit: int) -> None:
        self.running = 0
        self._limit = limit
        self._shut = False
        self._queue: deque[asyncio.Future[None]] = deque()
        self._empty: asyncio.Future[None] | None = None

    async def acquire(self) -> None:
        """Wait for a place and take it."""
        if self._free() and not self._queue:
            self.running += 1
            return
        place: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._queue.append(place)
        try:
            await place
        except asyncio.CancelledError:
            if not place.cancelled():  # the place was given at the moment of the cancellation
                self.release()
            raise

    def release(self) -> None:
        """Give a place back."""
        self.running -= 1
        if self._queue:
            self._admit()
        if not self.running and self._empty is not None and not self._empty.done():
            self._empty.set_result(None)

    async def drain(self) -> None:
        """Give no place any more, and return when nothing runs. `reopen` undoes it."""
        self._shut = True
        if self.running:
            self._empty = asyncio.get_running_loop().create_future()
            await self._empty

    def reopen(self) -> None:
        """Give places again."""
        self._shut, self._empty = False, None
        self._admit()

    def _free(self) -> bool:
        return not self._shut and (not self._limit or self.running < self._limit)

    def _admit(self) -> None:
        while self._queue and self._free():
            place = self._queue.popleft()
            if not place.done():
                self.running += 1
                place.set_result(None)
