"""From an admitted prompt to a finished group: fan out into episodes, collect the members, decide what the group is."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rl_contracts.errors import DataError, RLError, boundary_of
from rl_contracts.logging import get_logger
from rl_contracts.metrics import Figures, collect
from rl_workflows.budget import FailureBudget
from rl_workflows.episode import EpisodeEngine, Progress
from rl_workflows.runner import AsyncTaskRunner, Job
from rl_workflows.workflow_context import EpisodeContext, set_current_episode

if TYPE_CHECKING:
    from rl_contracts.clock import Clock
    from rl_contracts.config import GenerationConfig
    from rl_contracts.inference import InferenceEngine
    from rl_contracts.trajectory import Trajectory
    from rl_contracts.workflow import RolloutWorkflow
    from rl_workflows.config import RolloutConfig
    from rl_workflows.filters import ShouldAccept
    from rl_workflows.staleness import Ticket

log = get_logger("workflows")


@dataclass(slots=True)
class FinishedGroup:
    """What became of one admission. Exactly one of accepted, rejected and failed."""

    ticket: Ticket
    row: dict[str, Any]
    """The data row."""
    rows: list[Trajectory]
    """Of all members that succeeded, in order of (episode, row of the episode)."""
    rejected: str | None = None
    """Why it was rejected: `workflow` (too many members were) or `filter`."""
    error: BaseException | None = None
    """Why it failed."""
    figures: Figures = field(default_factory=Figures)
    """What its episodes recorded, also those that failed."""


class _Group:
    """A group that runs."""

    __slots__ = (
        "cache",
        "contexts",
        "epoch",
        "error",
        "figures",
        "jobs",
        "left",
        "members",
        "prompt_id",
        "rejected",
        "row",
        "ticket",
    )

    def __init__(self, ticket: Ticket, row: dict[str, Any], size: int) -> None:
        self.ticket, self.row, self.left = ticket, row, size
        self.prompt_id, self.epoch = prompt_id_of(row), int(row.get("epoch", 0))
        self.jobs: list[Job] = []
        self.contexts: dict[int, EpisodeContext] = {}
        self.members: list[tuple[int, list[Trajectory]]] = []
        self.rejected = 0
        self.error: BaseException | None = None
        self.cache: dict[str, Any] = {}
        self.figures = Figures()


class WorkflowExecutor:
    """Runs groups on the running loop and reports each once.

    Args:
        workflow: says what happens in an episode.
        engine: what the episodes generate with.
        config: group size, what a missing member means, budget.
        runner: runs the episodes.
        progress: touched whenever something moves.
        clock: of the runtime.
        on_group: told of each finished group.
        should_accept: filters of complete groups; all must agree.
    """

    def __init__(
        self,
        workflow: RolloutWorkflow,
        engine: InferenceEngine,
        config: RolloutConfig,
        runner: AsyncTaskRunner,
        progress: Progress,
        clock: Clock,
        on_group: Callable[[FinishedGroup], None],
        should_accept: ShouldAccept | None = None,
    ) -> None:
        self._workflow, self._engine, self._config = workflow, engine, config
        self._runner, self._progress, self._clock = runner, progress, clock
        self._on_group, self._should_accept = on_group, should_accept
        self._needed = config.needed
        self._groups: dict[int, _Group] = {}
        self.budget = FailureBudget(config.failure_budget, config.failure_min_groups, config.max_rejected_in_row)
        self.failed_episodes: Counter[str] = Counter()

    def submit(self, ticket: Ticket, row: dict[str, Any]) -> None:
        """Start the episodes of a group."""
        group = _Group(ticket, row, self._config.group_size)
        self._groups[ticket.group_id] = group
        group.jobs = [self._runner.submit(self._episode, group, sample) for sample in range(self._config.group_size)]

    def in_flight(self) -> list[tuple[Ticket, dict[str, Any]]]:
        """Tickets and rows of the groups that run, in order of admission."""
        return [(group.ticket, group.row) for group in self._groups.values()]

    def oldest(self) -> EpisodeContext | None:
        """An episode of the group that has run longest; None if nothing runs."""
        for group in self._groups.values():
            for context in group.contexts.values():
                return context
        return None

    async def _episode(self, group: _Group, sample: int) -> None:
        group_id = group.ticket.group_id
        context = EpisodeContext(group.prompt_id, group_id, sample, group.epoch, group.cache, self._clock)
        group.contexts[sample] = context
        set_current_episode(context)
        handle = EpisodeEngine(self._engine, context, self._progress, self._config.seed)
        rows, error = None, None
        try:  # as `run_episode`, but without a second coroutine, of which there would be one per outstanding episode
            with collect(group.figures):
                rows = stamped(await self._workflow.arun_episode(handle, own_copy(group.row)), context)
        except asyncio.CancelledError as killed:
            if self._runner.closed or group_id not in self._groups:
                raise
            raise _killed(context) from killed  # nobody would report this episode: its group would never end
        except Exception as caught:  # noqa: BLE001 - the boundary of user code, see `run_episode`
            error = caught
        group.contexts.pop(sample, None)
        if group_id in self._groups:
            self._member_ended(group, sample, rows, error)
        del group, error  # the error's traceback holds this frame, which would hold the error

    def _member_ended(
        self, group: _Group, sample: int, rows: list[Trajectory] | None, error: BaseException | None
    ) -> None:
        group.left -= 1
        if error is not None:
            self.failed_episodes[boundary_of(error)] += 1
            self.budget.episode_failed(error)
            group.error = group.error or error
        elif rows is None:
            group.rejected += 1
        else:
            group.members.append((sample, rows))
        possible = len(group.members) + group.left
        if group.left and possible >= self._needed:
            return
        self._finish(group)

    def _finish(self, group: _Group) -> None:
        """Report the group, and end members whose answers can no longer matter."""
        del self._groups[group.ticket.group_id]
        if group.left:
            current = asyncio.current_task()
            for job in group.jobs:
                if job.task is not current:
                    self._runner.cancel(job)
        group.jobs = []  # a cancelled task holds its frame, which holds the group
        result = self._judge(group)
        self._progress.touch()
        self._on_group(result)
        if result.error is not None:
            log.warning("group %d failed (%s): %s", group.ticket.group_id, boundary_of(result.error), result.error)
            self.budget.failed(result.error)
        elif result.rejected is not None:
            self.budget.rejected()
        else:
            self.budget.accepted()

    def _judge(self, group: _Group) -> FinishedGroup:
        group.members.sort(key=_sample_of)
        rows = [row for _, rows in group.members for row in rows]
        result = FinishedGroup(group.ticket, group.row, rows, figures=group.figures)
        if len(group.members) < self._needed:
            result.error = group.error
            result.rejected = "workflow" if group.error is None else None
        else:
            result.rejected, result.error = self._filter(result.rows)
        return result

    def _filter(self, rows: list[Trajectory]) -> tuple[str | None, Exception | None]:
        """Why a complete group is rejected, or the error of the filter."""
        try:
            return (None if self._should_accept is None or self._should_accept(rows) else "filter"), None
        except Exception as error:  # noqa: BLE001 - user code: the group fails with it and the budget counts it
            return None, error


def _killed(context: EpisodeContext) -> RLError:
    return RLError(
        f"the task of an episode (prompt {context.prompt_id}, group {context.group_id}, sample {context.sample}) was "
        "cancelled, but not by the runtime. Something in the workflow cancels the task that it runs in, or all tasks "
        "of the loop."
    )


def _sample_of(member: tuple[int, list[Trajectory]]) -> int:
    return member[0]


def prompt_id_of(row: dict[str, Any]) -> int:
    """The row's `prompt_id`.

    Raises:
        DataError: it has none, or one that is not an integer.
    """
    value = row.get("prompt_id")
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    raise DataError(f"data row: expected an integer `prompt_id`, found {value!r}; its keys are {sorted(row)}.")


async def run_episode(
    workflow: RolloutWorkflow,
    engine: InferenceEngine,
    row: dict[str, Any],
    context: EpisodeContext,
    progress: Progress,
    seed: int,
    label: str = "train",
    generation: GenerationConfig | None = None,
) -> tuple[list[Trajectory] | None, BaseException | None]:
    """Run one episode and stamp its rows.

    Returns:
        (rows, None), (None, None) if the workflow rejected it, or (None, the error) if it failed.
    """
    set_current_episode(context)
    handle = EpisodeEngine(engine, context, progress, seed, label, generation)
    try:
        return stamped(await workflow.arun_episode(handle, own_copy(row)), context), None
    except Exception as error:  # noqa: BLE001 - the boundary of user code: recorded, counted, held against the budget
        return None, error


def own_copy(row: dict[str, Any]) -> dict[str, Any]:
    """A copy for one episode, lists and dictionaries in it copied as well: members must not see each other's edits, and
    a prompt that is saved while it runs must be as it came. Arrays, tensors and images are shared."""
    return {key: _copied(value) for key, value in row.items()}


def _copied(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _copied(entry) for key, entry in value.items()}
    return [_copied(entry) for entry in value] if isinstance(value, list) else value


def stamped(rows: list[Trajectory] | None, context: EpisodeContext) -> list[Trajectory] | None:
    """What a workflow returned, each row with the ids of its episode.

    Raises:
        DataError: it is an empty list.
        TypeError, ValueError: a reward is no number.
    """
    if rows is None:
        return None
    if not rows:
        raise DataError("arun_episode returned no trajectory; return None to reject an episode.")
    for trajectory in rows:
        trajectory.reward = float(trajectory.reward)
        trajectory.prompt_id = context.prompt_id
        trajectory.group_id = context.group_id
        trajectory.episode_id = context.sample
    return rows
