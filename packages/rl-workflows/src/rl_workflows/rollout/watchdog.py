"""Ending a wait in which nothing moves, with the name of what is stuck."""

from __future__ import annotations

import asyncio
import threading
import traceback
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from math import inf
from typing import TYPE_CHECKING, Any

from rl_contracts.errors import RLError, StalledError
from rl_contracts.runtime.aio import stack_of_thread
from rl_contracts.runtime.logging import get_logger

if TYPE_CHECKING:
    from rl_contracts.runtime.clock import Clock
    from rl_workflows.rollout.episode import Episodes

log = get_logger("workflows")

STATS_TIMEOUT = 10.0
"""Seconds that the servers have to say whether they still generate."""

CHECKS = 8
"""Looks within a limit."""

STACKS_SHOWN = 8
"""Further tasks whose stacks are logged when nothing moves."""

AWAITED = (("cr_frame", "cr_await"), ("gi_frame", "gi_yieldfrom"), ("ag_frame", "ag_await"))
"""Where coroutines, generators and asynchronous generators keep their frame, and what they wait for."""


class Watchdog:
    """One task on the loop. While somebody waits for episodes, something must move; while nobody does, the trainer must
    come back before long: admission bounds what piles up meanwhile, this bounds the time.

    Args:
        episodes: what runs, and when something last moved.
        describe: one line on what is waited for.
        on_stall: told once, with the error.
        stall_timeout: clock seconds without progress after which a wait ends.
        trainer_timeout: clock seconds after which a trainer that is elsewhere counts as stuck.
        on_stuck_trainer: told that instead; the trainer's own thread cannot be told anything.
    """

    def __init__(
        self,
        episodes: Episodes,
        describe: Callable[[], str],
        on_stall: Callable[[BaseException], None],
        stall_timeout: float,
        trainer_timeout: float = inf,
        on_stuck_trainer: Callable[[StalledError], None] | None = None,
    ) -> None:
        self._episodes, self._describe, self._clock = episodes, describe, episodes.clock
        self._stall_timeout, self._trainer_timeout = stall_timeout, trainer_timeout
        self._on_stall, self._on_stuck_trainer = on_stall, on_stuck_trainer or on_stall
        self.waited_for = False
        """Whether somebody waits for episodes."""
        self._visits, self._thread = 0, ""
        self._trainer_left = self._clock.now()
        self._served_tokens: float | None = None
        self._task: asyncio.Task[None] | None = None

    def begin_wait(self) -> None:
        """Somebody waits for episodes from now on."""
        self.waited_for = True
        self._served_tokens = None
        self._episodes.touch()
        if self._task is None:
            self._task = asyncio.create_task(self._run_checks(), name="rollout-watch")
            self._task.add_done_callback(self._died)

    def end_wait(self) -> None:
        """Nobody waits any more."""
        self.waited_for = False
        self._trainer_left = self._clock.now()

    @contextmanager
    def trainer_call(self) -> Iterator[None]:
        """The trainer, in this thread, is inside of a call of the runtime. One thread at a time."""
        self._thread = threading.current_thread().name
        self._visits += 1
        try:
            yield
        finally:
            self._trainer_left = self._clock.now()
            self._visits -= 1

    def stop(self) -> None:
        """Watch no longer."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()

    def _died(self, task: asyncio.Task[None]) -> None:
        if task is not self._task:
            return  # it was stopped
        if task.cancelled():
            self._on_stall(RLError("the watch of the rollouts was cancelled, but not by the runtime; nothing watches."))
        elif (error := task.exception()) is not None:
            self._on_stall(error)

    async def _run_checks(self) -> None:
        """Until the first alarm."""
        while True:
            await self._sleep(min(self._stall_timeout, self._trainer_timeout) / CHECKS)
            away = self._clock.now() - self._trainer_left
            if self.waited_for:
                idle = self._clock.now() - self._episodes.last_moved
                if idle < self._stall_timeout / CHECKS:
                    continue
                if await self._servers_moved():
                    self._episodes.touch()
                elif idle >= self._stall_timeout:
                    self._on_stall(StalledError(self._nothing_moved(idle)))
                    return
            elif away >= self._trainer_timeout and not self._visits:
                self._on_stuck_trainer(self._trainer_is_idle(away))
                return

    async def _sleep(self, seconds: float) -> None:
        """Sleep; if the loop was blocked meanwhile, nobody could move, and that is no stall of theirs."""
        begin = self._clock.now()
        await self._clock.sleep(seconds)
        late = self._clock.now() - begin - seconds
        if late > self._stall_timeout / CHECKS:
            log.warning("the event loop was blocked for about %.1f s; is a plain reward function slow?", late)
            self._episodes.touch()

    async def _servers_moved(self) -> bool:
        """Whether the servers generated since this was last asked: a long answer is no stall."""
        stats = await server_metrics(self._episodes)
        if not stats:
            return False
        before, self._served_tokens = self._served_tokens, float(stats.get("generated_tokens", 0.0))
        return before is not None and self._served_tokens > before

    def _nothing_moved(self, idle: float) -> str:
        oldest, task = next(iter(self._episodes.running.items()), (None, None))
        tasks = dict.fromkeys([*self._episodes.running.values(), *asyncio.all_tasks()])  # episodes first
        others = [other for other in tasks if other not in (task, asyncio.current_task())]
        log.error(
            "nothing moved for %.1f s; stacks of some of %d tasks:\n%s",
            idle,
            len(others),
            "\n".join(map(stack_of_task, others[:STACKS_SHOWN])),
        )
        if oldest is None:
            stuck = "stuck stage: admission; no episode runs. Is the runtime paused?"
        else:
            stuck = f"stuck stage: {oldest.stage}, for {self._clock.now() - oldest.since:.1f} s, of {oldest}"
        return (
            f"nothing was generated, accepted, rejected or failed for {idle:.1f} s (rollout.stall_timeout="
            f"{self._stall_timeout:g}). {stuck}. {self._describe()}."
        ) + ("" if task is None else f" It waits here:\n{stack_of_task(task)}")

    def _trainer_is_idle(self, away: float) -> StalledError:
        error = StalledError(
            f"stuck stage: trainer. It has not taken a batch for {away:.1f} s (rollout.trainer_timeout="
            f"{self._trainer_timeout:g}). {self._describe()}. Its thread {self._thread!r} is here:\n"
            f"{stack_of_thread(self._thread)}"
        )
        log.error("%s", error)
        return error


async def server_metrics(episodes: Episodes) -> dict[str, float]:
    """What the engine's servers say of themselves; nothing, with a warning, where they do not answer."""
    try:
        return await run_with_timeout(episodes.clock, STATS_TIMEOUT, episodes.engine.stats())
    except (RLError, TimeoutError, OSError) as error:
        log.warning("the servers give no figures: %s", error)
        return {}


async def run_with_timeout[T](clock: Clock, seconds: float, coroutine: Coroutine[Any, Any, T]) -> T:
    """The coroutine's result, if it has one before `seconds` of the clock have passed.

    Raises:
        TimeoutError: it has none; it is cancelled.
    """
    task = asyncio.ensure_future(coroutine)
    timer = asyncio.ensure_future(clock.sleep(seconds))
    try:
        await asyncio.wait((task, timer), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise TimeoutError
    finally:
        for running in (task, timer):
            running.cancel()


def stack_of_task(task: asyncio.Task[Any]) -> str:
    """The task's name and its whole chain of awaits, outermost first (asyncio itself shows only the outermost)."""
    summary = traceback.StackSummary()
    waits: Any = task.get_coro()
    while waits is not None:
        kinds = [names for names in AWAITED if hasattr(waits, names[0])]
        frame, waits = (getattr(waits, name) for name in kinds[0]) if kinds else (None, None)
        if frame is not None:
            summary.append(traceback.FrameSummary(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name))
    return f"task {task.get_name()}:\n{''.join(summary.format())}"
