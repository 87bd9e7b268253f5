"""Watchdog that detects stalls of episodes and of the trainer, and reports the stuck stage."""

from __future__ import annotations

import asyncio
import threading
import traceback
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from rl_contracts.errors import RLError, StalledError
from rl_contracts.runtime.aio import stack_of_thread
from rl_contracts.runtime.logging import get_logger

if TYPE_CHECKING:
    from rl_contracts.runtime.clock import Clock
    from rl_workflows.rollout.episode import Episodes

log = get_logger("workflows")

STATS_TIMEOUT = 10.0
"""Seconds to wait for the metrics of the servers."""

TRAINER_TIMEOUT = 6 * 3600.0
"""Seconds between two calls of the runtime after which the trainer counts as stuck. Longer than any training step with
its saves, because a false alarm ends the run. Hanging collectives and weight updates have shorter timeouts."""

CHECKS_PER_TIMEOUT = 8
"""Number of checks within each timeout."""

STACKS_SHOWN = 8
"""Maximum number of further tasks whose stacks are logged in a stall."""

FRAME_ATTRIBUTES = (("cr_frame", "cr_await"), ("gi_frame", "gi_yieldfrom"), ("ag_frame", "ag_await"))
"""Attributes with the frame and the awaited object of coroutines, generators and asynchronous generators."""


class Watchdog:
    """Task on the event loop that detects stalls.

    While the trainer waits for episodes, the watchdog requires progress of the episodes. At other times, it requires a
    call from the trainer within `TRAINER_TIMEOUT`. It then requires no progress, because all admitted groups may have
    ended.

    Args:
        episodes: running episodes, and the time of the last progress.
        describe: returns one line on the state of admission or evaluation, for error messages.
        on_stall: called once, with the error.
        stall_timeout: clock seconds without progress after which a wait ends.
        on_stuck_trainer: called with the error if the trainer is stuck, instead of `on_stall`. An error cannot be
            raised in the trainer's thread. None: the trainer is not checked.
    """

    def __init__(
        self,
        episodes: Episodes,
        describe: Callable[[], str],
        on_stall: Callable[[BaseException], None],
        stall_timeout: float,
        on_stuck_trainer: Callable[[StalledError], None] | None = None,
    ) -> None:
        self._episodes, self._describe, self._clock = episodes, describe, episodes.clock
        self._stall_timeout = stall_timeout
        self._on_stall, self._on_stuck_trainer = on_stall, on_stuck_trainer
        self.waited_for = False
        """True if the trainer waits for episodes."""
        self._open_calls, self._thread = 0, ""
        self._last_call_end = self._clock.now()
        self._served_tokens: float | None = None
        self._task: asyncio.Task[None] | None = None

    def begin_wait(self) -> None:
        """Begin to check for progress, because the trainer waits for episodes."""
        self.waited_for = True
        self._served_tokens = None
        self._episodes.record_progress()
        if self._task is None:
            self._task = asyncio.create_task(self._run_checks(), name="rollout-watch")
            self._task.add_done_callback(self._on_task_done)

    def end_wait(self) -> None:
        """End the checks for progress, because the trainer no longer waits."""
        self.waited_for = False
        self._last_call_end = self._clock.now()

    @contextmanager
    def trainer_call(self) -> Iterator[None]:
        """Mark that the trainer is in a call of the runtime, in this thread. Only one thread may do so at a time."""
        self._thread = threading.current_thread().name
        self._open_calls += 1
        try:
            yield
        finally:
            self._last_call_end = self._clock.now()
            self._open_calls -= 1

    def stop(self) -> None:
        """Stop the watchdog."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()

    def _on_task_done(self, task: asyncio.Task[None]) -> None:
        if task is not self._task:
            return  # the watchdog was stopped
        if task.cancelled():
            self._on_stall(RLError("the rollout watchdog was cancelled, but not by the runtime."))
        elif (error := task.exception()) is not None:
            self._on_stall(error)

    async def _run_checks(self) -> None:
        """Check periodically, until the first alarm."""
        while True:
            timeout = self._stall_timeout
            if self._on_stuck_trainer is not None:
                timeout = min(timeout, TRAINER_TIMEOUT)
            await self._sleep(timeout / CHECKS_PER_TIMEOUT)
            absent = self._clock.now() - self._last_call_end
            if self.waited_for:
                idle = self._clock.now() - self._episodes.last_moved
                if idle < self._stall_timeout / CHECKS_PER_TIMEOUT:
                    continue
                if await self._servers_progressed():
                    self._episodes.record_progress()
                elif idle >= self._stall_timeout:
                    self._on_stall(StalledError(self._stall_message(idle)))
                    return
            elif self._on_stuck_trainer is not None and absent >= TRAINER_TIMEOUT and not self._open_calls:
                self._on_stuck_trainer(self._stuck_trainer_error(absent))
                return

    async def _sleep(self, seconds: float) -> None:
        """Sleep, and count a blocked event loop as progress, because no episode can proceed while it is blocked."""
        start = self._clock.now()
        await self._clock.sleep(seconds)
        delay = self._clock.now() - start - seconds
        if delay > self._stall_timeout / CHECKS_PER_TIMEOUT:
            log.warning(
                "the event loop was blocked for about %.1f s; a workflow or reward function may compute on it", delay
            )
            self._episodes.record_progress()

    async def _servers_progressed(self) -> bool:
        """Return whether the servers generated tokens since the last check. A long completion is not a stall."""
        stats = await server_metrics(self._episodes)
        if not stats:
            return False
        previous, self._served_tokens = self._served_tokens, float(stats.get("generated_tokens", 0.0))
        return previous is not None and self._served_tokens > previous

    def _stall_message(self, idle: float) -> str:
        oldest, task = next(iter(self._episodes.running.items()), (None, None))
        tasks = dict.fromkeys([*self._episodes.running.values(), *asyncio.all_tasks()])  # episodes first
        other_tasks = [other for other in tasks if other not in (task, asyncio.current_task())]
        log.error(
            "no progress for %.1f s; stacks of some of %d tasks:\n%s",
            idle,
            len(other_tasks),
            "\n".join(map(stack_of_task, other_tasks[:STACKS_SHOWN])),
        )
        if oldest is None:
            stuck = "stuck stage: admission; no episode is running. Is the runtime paused?"
        else:
            stuck = f"stuck stage: {oldest.stage}, for {self._clock.now() - oldest.since:.1f} s, of {oldest}"
        return (
            f"nothing was generated, accepted, rejected or failed for {idle:.1f} s (rollout.stall_timeout="
            f"{self._stall_timeout:g}). {stuck}. {self._describe()}."
        ) + ("" if task is None else f" Stack of this episode:\n{stack_of_task(task)}")

    def _stuck_trainer_error(self, absent: float) -> StalledError:
        error = StalledError(
            f"stuck stage: trainer. It has not called the runtime for {absent:.1f} s (the limit is "
            f"{TRAINER_TIMEOUT:g} s). {self._describe()}. Stack of its thread {self._thread!r}:\n"
            f"{stack_of_thread(self._thread)}"
        )
        log.error("%s", error)
        return error


async def server_metrics(episodes: Episodes) -> dict[str, float]:
    """Return the metrics of the engine's servers, or an empty dictionary, with a warning, if they do not reply."""
    try:
        return await run_with_timeout(episodes.clock, STATS_TIMEOUT, episodes.engine.stats())
    except (RLError, TimeoutError, OSError) as error:
        log.warning("the servers did not report metrics: %s", error)
        return {}


async def run_with_timeout[T](clock: Clock, seconds: float, coroutine: Coroutine[Any, Any, T]) -> T:
    """Return the result of the coroutine, within `seconds` of the clock.

    Raises:
        TimeoutError: the coroutine did not finish in time and was cancelled.
    """
    task = asyncio.ensure_future(coroutine)
    timer = asyncio.ensure_future(clock.sleep(seconds))
    try:
        await asyncio.wait((task, timer), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise TimeoutError(f"no result within {seconds:g} s")
    finally:
        for running in (task, timer):
            running.cancel()


def stack_of_task(task: asyncio.Task[Any]) -> str:
    """Return the task's name and its whole chain of awaits, outermost first.

    The traceback of asyncio shows only the outermost frame.
    """
    summary = traceback.StackSummary()
    awaitable: Any = task.get_coro()
    while awaitable is not None:
        matches = [names for names in FRAME_ATTRIBUTES if hasattr(awaitable, names[0])]
        frame, awaitable = (getattr(awaitable, name) for name in matches[0]) if matches else (None, None)
        if frame is not None:
            summary.append(traceback.FrameSummary(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name))
    return f"task {task.get_name()}:\n{''.join(summary.format())}"
