"""A clock whose time advances only when no task can run."""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any

from rl_contracts.errors import ConfigError, StalledError


class SimulatedClock:
    """Simulated `rl_contracts.runtime.clock.Clock` for one asyncio event loop.

    Whenever every task of the loop waits, time jumps to the earliest wake-up time. All sleepers of that time wake, in
    the order in which they went to sleep. So a run of hours takes milliseconds and is deterministic.

    Simulated time also advances while a task waits for something outside the loop (a thread, a socket, a process).
    Wrap such a wait in `hold` to prevent that. The clock needs a loop of asyncio: uvloop does not expose its queue.
    """

    def __init__(self, start: float = 0.0) -> None:
        self._now = start
        self._order = count()
        self._sleepers: list[tuple[float, int, asyncio.Future[None]]] = []
        self._live = 0
        self._holds = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._checking = False
        self._stalled: asyncio.Future[str] | None = None

    def now(self) -> float:
        """Return the simulated time in seconds."""
        return self._now

    async def sleep(self, seconds: float) -> None:
        """Wait until `seconds` of simulated time have passed; 0 or less only yields to other tasks.

        Raises:
            ConfigError: the running loop is not one of asyncio's own, or other sleepers sleep on another loop.
        """
        if seconds <= 0:
            await asyncio.sleep(0)
            return
        loop = self._bind()
        waiter: asyncio.Future[None] = loop.create_future()
        heapq.heappush(self._sleepers, (self._now + seconds, next(self._order), waiter))
        self._live += 1
        self._check_soon()
        try:
            await waiter
        finally:
            if loop is self._loop:
                self._live -= 1
                self._prune_cancelled()

    def call_later(self, seconds: float, callback: Callable[[], None]) -> None:
        """Call `callback` after `seconds` of simulated time, without a task.

        Raises:
            ConfigError: see `sleep`.
        """
        waiter: asyncio.Future[None] = self._bind().create_future()

        def wake(_: asyncio.Future[None]) -> None:
            self._live -= 1
            callback()

        waiter.add_done_callback(wake)
        heapq.heappush(self._sleepers, (self._now + max(seconds, 0.0), next(self._order), waiter))
        self._live += 1
        self._check_soon()

    @property
    def sleepers(self) -> int:
        """Number of tasks and scheduled calls that wait for a simulated time."""
        return self._live

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Stop simulated time and deadlock detection in the block, for a wait on a thread, a socket or a process."""
        self._holds += 1
        try:
            yield
        finally:
            self._holds -= 1
            if not self._holds:
                self._check_soon()

    async def drive[T](self, main: Coroutine[Any, Any, T]) -> T:
        """Run `main` on the running loop and return its result.

        Raises:
            StalledError: `main` would wait forever, since no task sleeps or can run. The message names the
                waiting tasks.
        """
        loop = self._bind()
        stalled = self._stalled = loop.create_future()
        task = asyncio.ensure_future(main)
        task.add_done_callback(lambda _: self._check_soon())
        self._check_soon()
        try:
            await asyncio.wait({task, stalled}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._stalled = None
            if not task.done():
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
        if stalled.done():
            raise StalledError(stalled.result())
        return task.result()

    def run[T](self, main: Coroutine[Any, Any, T]) -> T:
        """Run `main` with `drive` on a new asyncio loop; the counterpart of `asyncio.run`."""
        with asyncio.Runner(loop_factory=asyncio.SelectorEventLoop) as runner:
            return runner.run(self.drive(main))

    def _bind(self) -> asyncio.AbstractEventLoop:
        loop = asyncio.get_running_loop()
        if loop is not self._loop:
            if self.sleepers and self._loop is not None and not self._loop.is_closed():
                raise ConfigError("SimulatedClock: used on two event loops at once; create one clock per loop.")
            if not hasattr(loop, "_ready"):
                raise ConfigError(
                    f"SimulatedClock: expected an event loop of asyncio, found {type(loop).__module__}."
                    f"{type(loop).__qualname__}. Run the simulation with asyncio.SelectorEventLoop."
                )
            self._loop, self._sleepers, self._live, self._checking = loop, [], 0, False
        return loop

    def _check_soon(self) -> None:
        if self._loop is not None and not self._checking and not self._loop.is_closed():
            self._checking = True
            self._loop.call_soon(self._check)

    def _check(self) -> None:
        """Advance time or report a deadlock if no task is ready; otherwise check again in the next turn of the loop."""
        self._checking = False
        if self._holds or self._loop is None:
            return
        idle = not self._loop._ready  # type: ignore[attr-defined]  # only the queue shows whether a task can run
        if not idle or self._wake_next():
            self._check_soon()
        elif self._stalled is not None and not self._stalled.done():
            self._stalled.set_result(self._describe_deadlock())

    def _wake_next(self) -> bool:
        """Advance time to the earliest wake-up time and wake its sleepers; return whether there was one."""
        woken = False
        while self._sleepers:
            when, _, waiter = self._sleepers[0]
            if waiter.done():
                heapq.heappop(self._sleepers)
            elif woken and when > self._now:
                break
            else:
                heapq.heappop(self._sleepers)
                self._now, woken = when, True
                waiter.set_result(None)
        return woken

    def _prune_cancelled(self) -> None:
        """Remove cancelled sleepers if the queue has more than 64 entries and most of them are cancelled."""
        if len(self._sleepers) > 64 and len(self._sleepers) > 2 * self._live:
            self._sleepers = [sleeper for sleeper in self._sleepers if not sleeper[2].done()]
            heapq.heapify(self._sleepers)

    def _describe_deadlock(self) -> str:
        tasks = sorted(_describe_task(task) for task in asyncio.all_tasks(self._loop) if not task.done())
        return (
            f"simulated time {self._now:g} s: deadlock: no task sleeps or can run, and {len(tasks)} tasks wait: "
            + "; ".join(tasks[:8])
            + (" ..." if len(tasks) > 8 else "")
            + ". If a task waits for a thread or a process, wrap the wait in clock.hold()."
        )


def _describe_task(task: asyncio.Task[Any]) -> str:
    frames = task.get_stack(limit=1)
    location = f" at {frames[0].f_code.co_qualname}:{frames[0].f_lineno}" if frames else ""
    return f"{task.get_name()}{location}"
