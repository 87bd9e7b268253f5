"""Asynchronous scheduler of one data-parallel leader. It runs on one event loop and never blocks it."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Sequence
from contextvars import copy_context
from typing import TYPE_CHECKING, Any

from rl_contracts.errors import NoServersError, RLError, StalledError, boundary_of, causes
from rl_contracts.runtime.logging import get_logger
from rl_contracts.runtime.metrics import Metrics
from rl_contracts.runtime.run_files import report_progress
from rl_workflows.rollout.episode import Episodes
from rl_workflows.rollout.failure_budget import FailureBudget
from rl_workflows.rollout.groups import FinishedGroup, ShouldAccept, prompt_id_of, run_group
from rl_workflows.rollout.prompt_source import Example, PromptSource
from rl_workflows.rollout.resharding import reshard_groups
from rl_workflows.rollout.staleness import StalenessManager, Ticket
from rl_workflows.rollout.watchdog import Watchdog, server_metrics

if TYPE_CHECKING:
    from rl_contracts.batch.trajectory import Trajectory
    from rl_contracts.inference import InferenceEngine
    from rl_contracts.runtime.clock import Clock
    from rl_contracts.workflow import RolloutWorkflow
    from rl_workflows.rollout.config import RolloutConfig

log = get_logger("workflows")

MAX_ADMISSIONS_PER_TURN = 64
"""Maximum number of groups to start in one iteration of the event loop, so that completions are processed in
between."""

METRICS_CHUNK = 1024
"""Number of finished trajectories whose metrics are computed in one call. For a single group, the NumPy calls would
take longer than the rest of its processing."""


OnCompletions = Callable[[int, Sequence["Trajectory"], str | None], None]
"""Callback `(step, trajectories, reason)`. For a batch, `step` trains on it and `reason` is None. For a rejected or
failed group, `step` belongs to the next batch and `reason` states why the group is not trained on. The callback
runs on the event loop and must be quick."""


class RolloutScheduler:
    """Scheduler that admits prompts, runs their groups, stores accepted groups and returns batches.

    Args:
        engine: inference engine of all episodes.
        workflow: workflow that each episode runs.
        prompts: examples, finite or endless.
        manager: admission.
        config: settings of the runtime.
        clock: clock for all times.
        should_accept: filter of complete groups.
        on_completions: called with each batch and with groups that are not trained on; see `OnCompletions`.
        on_stuck_trainer: called if the trainer makes no call for `TRAINER_TIMEOUT` of `rl_workflows.rollout.watchdog`;
            the next wait raises the same error. None: the trainer is not checked.
        seed: seed from which each sampling seed is derived, together with prompt, epoch and sample.
    """

    def __init__(
        self,
        engine: InferenceEngine,
        workflow: RolloutWorkflow,
        prompts: Iterable[Example],
        manager: StalenessManager,
        config: RolloutConfig,
        clock: Clock,
        should_accept: ShouldAccept | None = None,
        on_completions: OnCompletions | None = None,
        on_stuck_trainer: Callable[[StalledError], None] | None = None,
        seed: int = 0,
    ) -> None:
        self.engine, self.manager, self.clock, self.config = engine, manager, clock, config
        self.source = PromptSource(prompts)
        self.episodes = Episodes(workflow, engine, clock, seed)
        self.budget = FailureBudget(config)
        self.watchdog = Watchdog(
            self.episodes,
            manager.describe,
            self.fail,
            config.stall_timeout,
            None if on_stuck_trainer is None else self._trainer_is_stuck,
        )
        self.running: dict[int, tuple[Example, asyncio.Task[FinishedGroup]]] = {}
        self.accepted: dict[int, FinishedGroup] = {}
        self.outcomes: list[dict[str, Any]] = []
        """Outcomes of prompts that were not yet returned; see `RolloutRuntime.outcomes`."""
        self._finished: list[Trajectory] = []
        self._taken: list[FinishedGroup] = []
        self._ids: deque[int] = deque()
        """Ids of the groups that a stopped run had in flight. They are reused for the first admissions."""
        self.metrics = Metrics()
        for outcome in ("accepted", "rejected", "failed", "left_over"):
            self._count(outcome, 0)
        self._count_staleness([])
        self._should_accept, self._on_completions, self._on_stuck_trainer = (
            should_accept,
            on_completions,
            on_stuck_trainer,
        )
        self._started = self._paused = self._admission_is_scheduled = False
        self._error: RLError | None = None
        self._changed = asyncio.Event()
        self._stats_task: asyncio.Task[dict[str, float]] | None = None
        self._server_metrics: dict[str, float] = {}
        self._context = copy_context()  # shared by all callbacks

    def fail(self, error: BaseException) -> None:
        """Store the error of a background task; every current and later wait raises it."""
        if self._error is None and isinstance(error, RLError):
            self._error = error
        elif self._error is None:
            self._error = RLError(f"the rollout runtime failed: {type(error).__name__}: {error}")
            self._error.__cause__ = error
        self._changed.set()

    async def begin_wait(self) -> None:
        """Begin waiting for a batch: admit prompts, and let the watchdog detect stalls."""
        self.watchdog.begin_wait()
        if not self._started:
            self._started = True
            self._admit_groups()

    async def fill(self, timeout: float | None = None) -> int | None:
        """Wait until a batch is ready.

        Args:
            timeout: maximum time to wait, in seconds of real time.

        Returns:
            the number of groups of the batch, 0 at the end of the data; None if the timeout passed first.

        Raises:
            RLError: a background task failed (the error is its cause), or there was no progress for `stall_timeout`.
        """
        try:
            async with asyncio.timeout(timeout):
                while self._error is None and not self.manager.ready(self.source.exhausted):
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            return None
        if self._error is not None:
            raise self._error
        self.watchdog.end_wait()
        return min(self.manager.accepted, self.manager.batch_size)

    async def take(self) -> list[FinishedGroup]:
        """Return the groups of the batch that `fill` found ready, oldest first."""
        tickets = self.manager.take_batch(self.source.exhausted)
        self._count_staleness([self.manager.version - ticket.start for ticket in tickets])
        groups = self._taken = [self.accepted.pop(ticket.group_id) for ticket in tickets]
        self.outcomes += [_outcome(group.prompt, group.ticket.group_id, "trained") for group in groups]
        self._notify(self.manager.steps, [trajectory for group in groups for trajectory in group.trajectories])
        return groups

    async def return_batch(self) -> None:
        """Undo `take`. The last batch cannot be returned after `finish`.

        Raises:
            RLError: no batch was taken, or it was the last.
        """
        groups, self._taken = self._taken, []
        self.manager.return_batch([group.ticket for group in groups])
        self.accepted |= {group.ticket.group_id: group for group in groups}
        self.outcomes = [
            outcome
            for outcome in self.outcomes
            if not (outcome["outcome"] == "trained" and outcome["group_id"] in self.accepted)
        ]

    async def end_step(self, version: int) -> None:
        """Free the slots of the batch and admit more groups."""
        self._taken = []
        self.manager.end_step(version)
        self._admit_groups()

    async def finish(self) -> None:
        """End the run after the batch that was taken, because the data of a leader is exhausted.

        The remaining groups and prompts are counted and dropped.
        """
        prompts = {group_id: group.prompt for group_id, group in self.accepted.items()}
        prompts |= {group_id: prompt for group_id, (prompt, _) in self.running.items()}
        left_over: list[tuple[Example, int | None]] = [(prompt, group_id) for group_id, prompt in prompts.items()]
        left_over += [(prompt, None) for prompt in self.source.drop_rest()]
        self._count("left_over", len(left_over))
        if left_over:
            log.warning(
                "the data of a replica is exhausted, so the run ends: %d prompts of this replica are left over",
                len(left_over),
            )
        self.outcomes += [
            _outcome(prompt, group_id, "left_over", "the data of a replica was exhausted")
            for prompt, group_id in left_over
        ]
        for _, task in self.running.values():
            task.remove_done_callback(self._group_ended)
            task.cancel()
        for group in self.accepted.values():
            self._notify(self.manager.steps, group.trajectories, "left over")
        self.manager.drop_rest()
        self._taken = []  # the batch cannot be returned after the rest was dropped
        self.running.clear()
        self.accepted.clear()

    async def take_outcomes(self) -> list[dict[str, Any]]:
        """Return the outcomes of prompts since the last call."""
        outcomes, self.outcomes = self.outcomes, []
        return outcomes

    async def set_paused(self, paused: bool) -> None:
        """Stop or resume admission."""
        self._paused = paused
        self._admit_groups()

    async def stats(self, of_servers: bool = True) -> Metrics:
        """Return counters since the last call, metrics that episodes recorded, and metrics of the servers.

        Busy servers respond slowly, and the training loop calls this at every step. Only the first call waits for the
        servers. Each later call returns their latest replies and sends a new request if none is pending.
        """
        self._add_finished_metrics()
        self.metrics.add("groups/outstanding", self.manager.outstanding, kind="sum")
        self.metrics.add("tokens/generated", self.episodes.tokens, kind="sum")
        self.episodes.tokens = 0
        metrics = self.metrics.drain()
        if of_servers and (self._stats_task is None or self._stats_task.done()):
            previous, self._stats_task = self._stats_task, asyncio.create_task(server_metrics(self.episodes))
            self._server_metrics = await (previous or self._stats_task)
        for name, value in self._server_metrics.items():
            metrics.add(f"server/{name}", value)
        return metrics

    async def state_dict(self) -> dict[str, Any]:
        """Return the state of admission, the prompts in flight, the position in the data, and the accepted groups.

        Accepted groups no longer change. The caller converts them to tensors, so that the conversion does not block the
        event loop.
        """
        manager = self.manager.state_dict()
        return {
            "manager": manager,
            "source": self.source.state_dict(),
            "budget": self.budget.state_dict(),
            "in_flight": [prompt for prompt, _ in self.running.values()],
            "in_flight_ids": [*self.running],
            "groups": [self.accepted[group_id] for _, group_id in manager["accepted"]],
            "outcomes": list(self.outcomes),
        }

    async def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state of `state_dict`. Call this before `begin_wait`.

        Raises:
            RLError: prompts were admitted already.
        """
        requeued = self._load(state)
        self.source.load_state_dict(state["source"])
        self.source.requeue_first(requeued)

    async def load_states(self, states: Sequence[dict[str, Any]], leader: int, leaders: int) -> None:
        """Restore the state of one of `leaders` leaders from the states of all leaders of a run, in order.

        Call this before `begin_wait`. If the number of leaders is unchanged, it restores the state with index `leader`;
        otherwise see `rl_workflows.rollout.resharding`.

        Raises:
            RLError: prompts were admitted already.
            ConfigError: the data cannot be divided among the new number of leaders.
        """
        if len(states) == leaders:
            await self.load_state_dict(states[leader])
            return
        requeued = self._load(reshard_groups(states, leader, leaders))
        self.source.load_states([state["source"] for state in states])
        self.source.requeue_first(requeued)

    def _load(self, state: dict[str, Any]) -> list[Example]:
        """Restore all but the position in the data, and return the prompts to admit again first."""
        too_old = {ticket.group_id for ticket in self.manager.load_state_dict(state["manager"])}
        groups: list[FinishedGroup] = state["groups"]
        self.accepted = {g.ticket.group_id: g for g in groups if g.ticket.group_id not in too_old}
        self.budget.load_state_dict(state.get("budget", {}))
        self.outcomes = list(state.get("outcomes", ()))
        if "in_flight_ids" in state:  # reuse the ids: sequences of a batch are ordered by them
            self._ids.extend([*sorted(too_old), *state["in_flight_ids"]])
        prompts = {group.ticket.group_id: group.prompt for group in groups}
        return [*(prompts[group_id] for group_id in sorted(too_old)), *state["in_flight"]]

    async def close(self) -> None:
        """Cancel all episodes and wait until they have ended."""
        self.watchdog.stop()
        self.fail(RLError("the rollout runtime was destroyed"))
        if self._stats_task is not None:
            self._stats_task.cancel()
        groups = [group for _, group in self.running.values()]
        tasks: list[asyncio.Task[Any]] = [*self.episodes.running.values(), *groups]
        for group in groups:
            group.cancel()
        if tasks:
            await asyncio.wait(tasks)  # not gather, which does not return when the caller's timeout passes

    def _admit_groups(self) -> None:
        """Admit groups while slots and prompts are available, a limited number per iteration of the event loop."""
        self._admission_is_scheduled = False
        if self._paused or not self._started or self._error is not None:
            return
        try:
            for _ in range(min(self.manager.capacity, MAX_ADMISSIONS_PER_TURN)):
                prompt = self.source.next_example()
                if prompt is None:
                    self._changed.set()
                    return
                prompt_id_of(prompt)  # raises before the prompt is admitted
                ticket = self.manager.admit(self._ids.popleft() if self._ids else None)
                group = asyncio.create_task(self._run(prompt, ticket))
                self.running[ticket.group_id] = (prompt, group)
                group.add_done_callback(self._group_ended, context=self._context)
        except Exception as error:  # noqa: BLE001 - the data iterator is user code; next_batch raises its error
            self.fail(error)
            return
        if self.manager.capacity:
            self._schedule_admission()

    def _run(self, prompt: Example, ticket: Ticket) -> Coroutine[Any, Any, FinishedGroup]:
        """Return the coroutine that runs an admitted group. Simulations replace this method."""
        size, needed = self.config.group_size, self.config.needed
        return run_group(self.episodes, prompt, ticket, size, needed, self._should_accept)

    def _schedule_admission(self) -> None:
        if not self._admission_is_scheduled:
            self._admission_is_scheduled = True
            asyncio.get_running_loop().call_soon(self._admit_groups, context=self._context)

    def _group_ended(self, task: asyncio.Task[FinishedGroup]) -> None:
        try:
            group = task.result()
            if group.error is not None and (no_servers_error := _find_no_servers_error(group.failures)):
                raise no_servers_error  # other prompts would fail, too; this one stays in flight
            del self.running[group.ticket.group_id]
            self._record_group(group)
        except asyncio.CancelledError:
            self.fail(RLError("the task of a group was cancelled, but not by the runtime; check the workflow."))
        except Exception as error:  # noqa: BLE001 - next_batch raises this error
            self.fail(error)

    def _record_group(self, group: FinishedGroup) -> None:
        """Record the outcome of a group in admission, metrics and failure budget, and schedule further admissions.

        Raises:
            RLError: too many groups failed or were rejected.
        """
        self.episodes.record_progress()
        self.metrics.merge(group.metrics)
        self._finished += group.trajectories
        if len(self._finished) >= METRICS_CHUNK:
            self._add_finished_metrics()
        for failure in group.failures:
            self.metrics.add(f"episodes/failed/{boundary_of(failure)}", 1, kind="sum")
        group.failures.clear()  # they reference the frames of their episodes
        group_id = group.ticket.group_id
        if group.error is not None:
            boundary = boundary_of(group.error)
            self.manager.fail(group.ticket)
            self._count("failed")
            self._count(f"failed/{boundary}")
            prompt, reason = group.prompt["prompt_id"], str(group.error).partition("\n")[0]
            log.warning("prompt %d (group %d) failed (%s): %s", prompt, group_id, boundary, group.error)
            self.outcomes.append(_outcome(group.prompt, group_id, "failed", f"{boundary}: {reason}"))
            self._notify(self.manager.steps + 1, group.trajectories, f"failed ({boundary}): {group.error}")
            self.budget.failed(group.error)
        elif group.rejected is not None:
            self.manager.reject(group.ticket)
            self._count("rejected")
            self._count(f"rejected/{group.rejected}")
            self.outcomes.append(_outcome(group.prompt, group_id, "rejected", group.rejected))
            self._notify(self.manager.steps + 1, group.trajectories, group.rejected)
            self.budget.rejected()
        else:
            self.manager.accept(group.ticket)
            self.accepted[group_id] = group
            self._count("accepted")
            self.budget.accepted()
        if self.watchdog.waited_for:
            report_progress(self.manager.accepted, self.manager.batch_size)
            if self.manager.ready(self.source.exhausted):
                self._changed.set()
        self._schedule_admission()

    def _notify(self, step: int, trajectories: Sequence[Trajectory], reason: str | None = None) -> None:
        if self._on_completions is not None and trajectories:
            self._on_completions(step, trajectories, reason)

    def _count(self, outcome: str, groups: int = 1) -> None:
        self.metrics.add(f"groups/{outcome}", groups, kind="sum")

    def _add_finished_metrics(self) -> None:
        """Add the completions of finished groups to the metrics, including groups that are not trained on."""
        import numpy as np

        trajectories, self._finished = self._finished, []
        count = len(trajectories)
        if count:
            length = np.count_nonzero(np.concatenate([t.versions for t in trajectories]) >= 0)
            self.metrics.add("finished/reward_mean", sum(t.reward for t in trajectories) / count, count)
            self.metrics.add("finished/length_mean", length / count, count)
            self.metrics.add("finished/truncated_fraction", sum(t.truncated for t in trajectories) / count, count)

    def _count_staleness(self, versions: Sequence[int]) -> None:
        groups = len(versions)
        self.metrics.add("groups/staleness_mean", sum(versions) / max(groups, 1), groups)
        self.metrics.add("groups/staleness_max", max(versions, default=0), groups, kind="max")

    def _trainer_is_stuck(self, error: StalledError) -> None:
        self.fail(error)
        if self._on_stuck_trainer is not None:
            self._on_stuck_trainer(error)


def _find_no_servers_error(failures: Iterable[BaseException]) -> NoServersError | None:
    """Return the first `NoServersError` among the errors and their causes, or None."""
    return next((cause for error in failures for cause in causes(error) if isinstance(cause, NoServersError)), None)


def _outcome(prompt: Example, group_id: int | None, outcome: str, reason: str | None = None) -> dict[str, Any]:
    """Return the outcome of a prompt in the format of `RolloutRuntime.outcomes`."""
    epoch = int(prompt.get("epoch", 0))
    return {
        "prompt_id": prompt["prompt_id"],
        "epoch": epoch,
        "group_id": group_id,
        "outcome": outcome,
        "reason": reason,
    }
