"""Ending a wait in which nothing moves, with the name of what is stuck."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING

from rl_contracts.errors import RLError, StalledError
from rl_contracts.logging import get_logger
from rl_workflows.stacks import episode_task, stack_of_task
from rl_workflows.waiting import within

if TYPE_CHECKING:
    from rl_contracts.clock import Clock
    from rl_contracts.inference import InferenceEngine
    from rl_workflows.episode import Progress
    from rl_workflows.workflow_context import EpisodeContext

log = get_logger("workflows")

STATS_TIMEOUT = 10.0
"""Seconds that the servers have to say whether they still generate."""

CHECKS = 4
"""Looks within the limit at whether the servers still generate, once nothing else moves."""

STACKS_SHOWN = 8
"""Further tasks whose stacks are logged when nothing moves."""


class Watchdog:
    """Watches while somebody waits.

    Args:
        progress: when something last moved.
        engine: asked whether servers still generate before the alarm is raised: a long answer is no stall.
        clock: all time.
        limit: clock seconds without progress after which the wait ends.
        oldest: the episode that has run longest, or None.
        describe: one line on the state of admission.
    """

    def __init__(
        self,
        progress: Progress,
        engine: InferenceEngine,
        clock: Clock,
        limit: float,
        oldest: Callable[[], EpisodeContext | None],
        describe: Callable[[], str],
    ) -> None:
        self._progress, self._engine, self._clock, self._limit = progress, engine, clock, limit
        self._oldest, self._describe = oldest, describe
        self._served_tokens: float | None = None
        self._task: asyncio.Task[None] | None = None

    def start(self, on_stall: Callable[[BaseException], None]) -> None:
        """Somebody waits from now on: call `on_stall` with the error if nothing moves for too long."""
        self._progress.touch()
        self._served_tokens = None
        if self._task is None:
            self._task = asyncio.create_task(self._watch(on_stall), name="rollout-watchdog")
            self._task.add_done_callback(lambda task: self._died(task, on_stall))

    def stop(self) -> None:
        """Nobody waits any more."""
        if self._task is not None:
            self._task.cancel()
            self._task = None

    def _died(self, task: asyncio.Task[None], on_stall: Callable[[BaseException], None]) -> None:
        if task is not self._task:
            return  # it was stopped
        if task.cancelled():
            on_stall(RLError("the watchdog of the rollouts was cancelled, but not by the runtime; nothing watches."))
        elif (error := task.exception()) is not None:
            on_stall(error)

    async def _watch(self, on_stall: Callable[[BaseException], None]) -> None:
        step = self._limit / CHECKS
        self._progress.touch()
        while True:
            idle = self._clock.now() - self._progress.last
            if idle < step:
                await self._sleep(step - idle)
                continue
            if await self._servers_moved():
                self._progress.touch()
            elif idle >= self._limit:
                on_stall(StalledError(self._diagnosis(idle)))
                return
            await self._sleep(step)

    async def _sleep(self, seconds: float) -> None:
        """Sleep; if the loop was blocked meanwhile, nobody could move, and that is no stall of theirs."""
        begin = self._clock.now()
        await self._clock.sleep(seconds)
        late = self._clock.now() - begin - seconds
        if late > self._limit / CHECKS:
            log.warning("the event loop was blocked for about %.1f s; is a plain reward function slow?", late)
            self._progress.touch()

    async def _servers_moved(self) -> bool:
        """Whether the servers generated since this was last asked."""
        try:
            stats = await within(self._clock, STATS_TIMEOUT, self._engine.stats())
        except (RLError, TimeoutError, OSError) as error:
            log.warning("watchdog: the servers do not answer: %s", error)
            return False
        before, self._served_tokens = self._served_tokens, float(stats.get("generated_tokens", 0.0))
        return before is not None and self._served_tokens > before

    def _diagnosis(self, idle: float) -> str:
        oldest = self._oldest()
        task = None if oldest is None else episode_task(oldest)
        others = [other for other in asyncio.all_tasks() if other not in (task, asyncio.current_task())]
        log.error(
            "nothing moved for %.1f s; stacks of some of %d tasks:\n%s",
            idle,
            len(others),
            "\n".join(map(stack_of_task, others[:STACKS_SHOWN])),
        )
        if oldest is None:
            stuck = "stuck stage: admission; no episode runs. Is the runtime paused?"
        else:
            stuck = (
                f"stuck stage: {oldest.stage}, for {self._clock.now() - oldest.since:.1f} s, of prompt "
                f"{oldest.prompt_id} (group {oldest.group_id}, sample {oldest.sample})"
            )
        return (
            f"nothing was generated, accepted, rejected or failed for {idle:.1f} s (rollout.stall_timeout="
            f"{self._limit:g}). {stuck}. {self._describe()}."
        ) + ("" if task is None else f" It waits here:\n{stack_of_task(task)}")
