"""The asynchronous side of one data-parallel head. Everything here runs on one event loop and never blocks it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from rl_contracts.errors import RLError, boundary_of
from rl_contracts.logging import get_logger
from rl_contracts.metrics import Figures
from rl_workflows.episode import Progress
from rl_workflows.executor import FinishedGroup, WorkflowExecutor, prompt_id_of
from rl_workflows.runner import AsyncTaskRunner
from rl_workflows.saving import groups_from_state, groups_to_state
from rl_workflows.source import PromptSource, Row
from rl_workflows.staleness import StalenessManager
from rl_workflows.waiting import within
from rl_workflows.watchdog import STATS_TIMEOUT, Watchdog

if TYPE_CHECKING:
    from rl_contracts.clock import Clock
    from rl_contracts.inference import InferenceEngine
    from rl_contracts.workflow import RolloutWorkflow
    from rl_workflows.config import RolloutConfig
    from rl_workflows.filters import ShouldAccept

log = get_logger("workflows")

ADMISSIONS_PER_TURN = 64
"""Groups that start in one turn of the loop, so that answers are taken in between."""


class RolloutHead:
    """Admits prompts, runs their groups, keeps the accepted ones and hands out batches.

    Args:
        engine: what episodes generate with.
        workflow: what happens in an episode.
        prompts: data rows, finite or endless.
        manager: admission.
        config: settings of the runtime.
        clock: all time.
        should_accept: filter of complete groups.
    """

    def __init__(
        self,
        engine: InferenceEngine,
        workflow: RolloutWorkflow,
        prompts: Iterable[Row],
        manager: StalenessManager,
        config: RolloutConfig,
        clock: Clock,
        should_accept: ShouldAccept | None = None,
    ) -> None:
        self.engine, self.manager, self.clock = engine, manager, clock
        self.source = PromptSource(prompts)
        self.progress = Progress(clock)
        limit = (manager.max_concurrent or (config.max_staleness + 1) * manager.batch_size) * config.group_size
        self.runner = AsyncTaskRunner(limit, self.fail)
        self.executor = WorkflowExecutor(
            workflow, engine, config, self.runner, self.progress, clock, self._group_ended, should_accept
        )
        self.watchdog = Watchdog(
            self.progress, engine, clock, config.stall_timeout, self.executor.oldest, manager.describe
        )
        self.accepted: dict[int, FinishedGroup] = {}
        self.figures = Figures()
        for ending in ("accepted", "rejected", "failed"):
            self._count(ending, 0)
        self._count_age(0, groups=0)
        self.started = False
        self._paused = False
        self._pump_is_due = False
        self._error: BaseException | None = None
        self._changed: asyncio.Future[None] | None = None
        self._asking: asyncio.Task[dict[str, float]] | None = None
        self._last_servers: dict[str, float] = {}

    def start(self) -> None:
        """Begin to admit prompts. Further calls do nothing."""
        if not self.started:
            self.started = True
            self._pump()

    def fail(self, error: BaseException) -> None:
        """Something in the background died: whoever waits, now or later, gets the error."""
        if self._error is None:
            self._error = error
        self._notify()

    @property
    def closed(self) -> bool:
        """Whether no further group will be admitted."""
        return self.source.exhausted

    async def begin_wait(self) -> None:
        """Somebody begins to wait for a batch: from now on, nothing moving counts as a stall."""
        self.start()
        self.watchdog.start(self.fail)

    async def fill(self, timeout: float | None = None) -> int | None:
        """Wait until a batch may leave.

        Args:
            timeout: seconds to wait at most, of real time.

        Returns:
            the groups that it would have, 0 at the end of the data; None if the time passed first.

        Raises:
            RLError: something in the background failed, with its cause; or nothing moved for too long.
        """
        deadline = None if timeout is None else asyncio.get_running_loop().time() + timeout
        while True:
            self._raise_error()
            if self.manager.ready(self.closed):
                self.watchdog.stop()
                return min(self.manager.accepted, self.manager.batch_size)
            if not await self._wait_for_change(deadline):
                return None

    async def take(self) -> list[FinishedGroup]:
        """The groups of the batch that `fill` found ready, oldest first."""
        tickets = self.manager.take_batch(self.closed)
        for ticket in tickets:
            self._count_age(self.manager.version - ticket.start)
        return [self.accepted.pop(ticket.group_id) for ticket in tickets]

    async def end_step(self, version: int) -> None:
        """Free the places of the batch and admit more."""
        self.manager.end_step(version)
        self._pump()

    async def set_paused(self, paused: bool) -> None:
        """Stop or go on admitting."""
        self._paused = paused
        self._pump()

    async def stats(self, of_servers: bool = True) -> Figures:
        """Counters since the last call, what episodes recorded, and the servers' own.

        A busy server takes its time to answer, and a training loop asks at every step. So only the first call waits for
        the servers; each further one gives what they said to the call before, and asks them again meanwhile.
        """
        self.figures.add("groups/outstanding", self.manager.outstanding, kind="sum")
        failed = self.executor.failed_episodes
        for boundary, count in failed.items():
            self.figures.add(f"episodes/failed/{boundary}", count, kind="sum")
        failed.clear()
        self.figures.add("tokens/generated", self.progress.tokens, kind="sum")
        self.progress.tokens = 0
        figures = self.figures.take()
        if of_servers and (self._asking is None or self._asking.done()):
            before, self._asking = self._asking, asyncio.create_task(self._ask_servers())
            self._last_servers = await (before or self._asking)
        for name, value in self._last_servers.items():
            figures.add(f"server/{name}", value)
        return figures

    async def _ask_servers(self) -> dict[str, float]:
        try:
            return await within(self.clock, STATS_TIMEOUT, self.engine.stats())
        except (RLError, TimeoutError, OSError) as error:
            log.warning("the servers give no figures: %s", error)
            return {}

    async def state_dict(self) -> dict[str, Any]:
        """Admission, prompts in flight, accepted groups, and the position in the data."""
        manager = self.manager.state_dict()
        groups = [self.accepted[group_id] for _, group_id in manager["accepted"]]
        return {
            "manager": manager,
            "source": self.source.state_dict(),
            "in_flight": [row for _, row in self.executor.in_flight()],
            **groups_to_state(groups),
        }

    async def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict`, before `begin_wait`.

        Raises:
            RLError: prompts were admitted already.
        """
        refused = {ticket.group_id for ticket in self.manager.load_state_dict(state["manager"])}
        groups = groups_from_state(state)
        self.accepted = {g.ticket.group_id: g for g in groups if g.ticket.group_id not in refused}
        self.source.load_state_dict(state["source"])
        again = [group.row for group in groups if group.ticket.group_id in refused]
        self.source.requeue_first([*again, *state["in_flight"]])

    async def close(self) -> None:
        """Cancel all episodes."""
        self.watchdog.stop()
        self.fail(RLError("the rollout runtime was destroyed"))
        if self._asking is not None:
            self._asking.cancel()
        await self.runner.close()

    def _pump(self) -> None:
        """Admit while there are places and prompts, a slice per turn of the loop."""
        self._pump_is_due = False
        if self._paused or not self.started or self._error is not None:
            return
        try:
            for _ in range(min(self.manager.capacity, ADMISSIONS_PER_TURN)):
                row = self.source.take()
                if row is None:
                    self._notify()
                    return
                prompt_id_of(row)  # refused before it has a place
                self.executor.submit(self.manager.admit(), row)
        except Exception as error:  # noqa: BLE001 - the data iterator is foreign code; next_batch raises what it raised
            self.fail(error)
            return
        if self.manager.capacity:
            self._pump_soon()

    def _pump_soon(self) -> None:
        if not self._pump_is_due:
            self._pump_is_due = True
            asyncio.get_running_loop().call_soon(self._pump)

    def _count(self, ending: str, groups: int = 1) -> None:
        self.figures.add(f"groups/{ending}", groups, kind="sum")

    def _count_age(self, versions: int, groups: int = 1) -> None:
        self.figures.add("groups/staleness_mean", versions, groups)
        self.figures.add("groups/staleness_max", versions, groups, kind="max")

    def _group_ended(self, group: FinishedGroup) -> None:
        if group.error is not None:
            self.manager.fail(group.ticket)
            self._count("failed")
            self._count(f"failed/{boundary_of(group.error)}")
        elif group.rejected is not None:
            self.manager.reject(group.ticket)
            self._count("rejected")
            self._count(f"rejected/{group.rejected}")
        else:
            self.manager.accept(group.ticket)
            self.accepted[group.ticket.group_id] = group
            self._count("accepted")
        self.figures.merge(group.figures)
        if self._changed is not None and self.manager.ready(self.closed):
            self._notify()
        self._pump_soon()

    def _notify(self) -> None:
        if self._changed is not None and not self._changed.done():
            self._changed.set_result(None)

    async def _wait_for_change(self, deadline: float | None) -> bool:
        """Until `_notify`; False if the deadline, in seconds of the loop, came first."""
        loop = asyncio.get_running_loop()
        self._changed = loop.create_future()
        try:
            if deadline is None:
                await self._changed
                return True
            done, _ = await asyncio.wait({self._changed}, timeout=max(deadline - loop.time(), 0))
            return bool(done)
        finally:
            self._changed = None

    def _raise_error(self) -> None:
        error = self._error
        if error is None:
            return
        if isinstance(error, RLError):
            raise error
        raise RLError(f"the rollout runtime failed: {type(error).__name__}: {error}") from error
