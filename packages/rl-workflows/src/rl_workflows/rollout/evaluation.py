"""Evaluation on held-out examples. It uses the servers of the training run, but none of its counters."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from rl_contracts.errors import InferenceError, RLError
from rl_contracts.runtime.logging import get_logger
from rl_contracts.runtime.run_files import report_progress
from rl_workflows.rollout.failure_budget import FailureBudget
from rl_workflows.rollout.groups import FinishedGroup, run_group
from rl_workflows.rollout.staleness import Ticket
from rl_workflows.rollout.watchdog import Watchdog, run_with_timeout

if TYPE_CHECKING:
    from rl_workflows.rollout.config import RolloutConfig
    from rl_workflows.rollout.episode import Episodes

log = get_logger("workflows")

CONCURRENT_EPISODES = 256
"""Evaluation episodes that run at the same time on each data-parallel leader, enough to use the decode slots of several
servers."""
CLOSE_SECONDS = 10.0
"""Seconds to wait for cancelled episodes to end."""


async def evaluate_held_out(
    episodes: Episodes, examples: Sequence[dict[str, Any]], first: int, n: int, version: int, config: RolloutConfig
) -> list[FinishedGroup]:
    """Run `n` episodes per example and return one group per example, in order.

    An episode that fails or is rejected has no reward. It is left out with a warning, and callers that compute a mean
    count it as wrong. The failure budget applies as in training.

    Args:
        episodes: episodes of this evaluation; its `generation` has the sampling settings.
        examples: examples of this data-parallel leader.
        first: index of the leader's first example among the examples of all data-parallel leaders.
        n: completions per example.
        version: minimum version that the servers have committed.
        config: failure budget and stall timeout.

    Raises:
        InferenceError: the tokens carry several versions, or one older than `version`.
        RLError: too many episodes failed, or there was no progress for `stall_timeout`.
    """
    if not examples:
        return []
    budget = FailureBudget(config, total=len(examples) * n)
    finished: dict[int, FinishedGroup] = {}
    remaining = iter(enumerate(examples, first))

    async def run_examples() -> None:
        for index, row in remaining:
            finished[index] = await run_group(episodes, row, Ticket(version, index), n, needed=0)
            episodes.record_progress()
            report_progress(len(finished), len(examples))
            _check_failures(budget, finished[index], n)

    def describe() -> str:
        missing = len(examples) - len(finished)
        return f"evaluation: {missing} examples remaining, {len(episodes.running)} episodes running"

    workers = min(len(examples), max(CONCURRENT_EPISODES // n, 1))
    await _run_watched([asyncio.create_task(run_examples()) for _ in range(workers)], episodes, describe, config)
    budget.check()
    groups = [group for _, group in sorted(finished.items())]
    _finish(groups, episodes, version, n)
    return groups


async def _run_watched(
    tasks: list[asyncio.Task[None]], episodes: Episodes, describe: Callable[[], str], config: RolloutConfig
) -> None:
    """Wait for all tasks; the first error, or a stall, cancels the others and is raised."""
    stalled: list[BaseException] = []

    def on_stall(error: BaseException) -> None:
        stalled.append(error)
        for task in tasks:
            task.cancel()

    watchdog = Watchdog(episodes, describe, on_stall, config.stall_timeout)
    watchdog.begin_wait()
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
    finally:
        watchdog.stop()
        for task in tasks:
            task.cancel()
        await _await_cancelled(episodes)
    for error in [*stalled, *(task.exception() for task in done if not task.cancelled())]:
        if error is not None:
            raise error


def _check_failures(budget: FailureBudget, group: FinishedGroup, n: int) -> None:
    for error in group.failures:
        budget.failed(error)
    for _ in range(group.declined):
        budget.failed(
            RLError(
                f"the workflow returned None for held-out example {group.ticket.group_id} (its keys are "
                f"{sorted(group.prompt)}); expected a trajectory with a reward."
            )
        )
    for _ in range(n - len(group.failures) - group.declined):
        budget.accepted()


async def _await_cancelled(episodes: Episodes) -> None:
    """Wait for cancelled episodes, up to `CLOSE_SECONDS`."""
    tasks = list(episodes.running.values())
    try:
        if tasks:
            await run_with_timeout(episodes.clock, CLOSE_SECONDS, asyncio.wait(tasks))
    except TimeoutError:
        log.error(
            "evaluation: %d episodes did not end after their cancellation and were abandoned", len(episodes.running)
        )


def _finish(groups: list[FinishedGroup], episodes: Episodes, version: int, n: int) -> None:
    """Set the temperature of all trajectories and check that their tokens carry a single version."""
    import numpy as np

    assert episodes.generation is not None
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    for trajectory in trajectories:
        trajectory.temperature = episodes.generation.temperature or 1.0
    if missing := sum(len(group.failures) + group.declined for group in groups):
        log.warning("evaluation: %d of %d episodes have no reward and count as wrong", missing, len(groups) * n)
    token_versions = [trajectory.versions[trajectory.versions >= 0] for trajectory in trajectories]
    versions = np.unique(np.concatenate(token_versions)) if token_versions else np.empty(0)
    if len(versions) > 1 or (len(versions) and versions[0] < version):
        raise InferenceError(
            f"evaluation: expected all tokens at one committed version (at least {version}), found versions "
            f"{versions.tolist()}. Weights were published during the evaluation, or a server missed an update."
        )
