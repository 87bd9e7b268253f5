"""Answering held-out rows through the same servers, apart from all training counters."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rl_contracts.errors import InferenceError, RLError
from rl_contracts.runtime.logging import get_logger
from rl_workflows.rollout.failure_budget import FailureBudget
from rl_workflows.rollout.groups import FinishedGroup, run_group
from rl_workflows.rollout.staleness import Ticket
from rl_workflows.rollout.watchdog import Watchdog, run_with_timeout

if TYPE_CHECKING:
    from rl_workflows.rollout.config import RolloutConfig
    from rl_workflows.rollout.episode import Episodes

log = get_logger("workflows")

CLOSE_SECONDS = 10.0
"""Time that episodes have to end once they are cancelled."""


async def evaluate_held_out(
    episodes: Episodes, rows: Sequence[dict[str, Any]], first: int, n: int, version: int, config: RolloutConfig
) -> list[FinishedGroup]:
    """Answer each row `n` times: one group per row, in order.

    An episode that fails or is rejected has no reward and is left out, with a warning: whoever takes a mean counts it
    as wrong. It is held against the same failure budget as in training.

    Args:
        episodes: how they are run; its `generation` is the evaluation's.
        rows: the rows.
        first: index of the first of them among the rows of all heads.
        n: answers per row.
        version: version that is committed at least.
        config: concurrency, budget and the watch's limit.

    Raises:
        InferenceError: the tokens do not all carry one committed version.
        RLError: too many episodes failed, or nothing moved for too long.
    """
    if not rows:
        return []
    budget = FailureBudget(config, total=len(rows) * n)
    finished: dict[int, FinishedGroup] = {}
    left = iter(enumerate(rows, first))
    stalled: list[BaseException] = []

    async def work() -> None:
        for index, row in left:
            finished[index] = await run_group(episodes, row, Ticket(version, index), n, needed=0)
            episodes.touch()
            _check_failures(budget, finished[index], n)

    def stop(error: BaseException) -> None:
        stalled.append(error)
        for task in tasks:
            task.cancel()

    tasks = [asyncio.create_task(work()) for _ in range(min(len(rows), max(config.eval_concurrent // n, 1)))]
    watch = Watchdog(
        episodes,
        lambda: f"evaluation: {len(rows) - len(finished)} rows left, {len(episodes.running)} episodes running",
        stop,
        config.stall_timeout,
    )
    watch.begin_wait()
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
    finally:
        watch.stop()
        for task in tasks:
            task.cancel()
        await _await_cancelled(episodes)
    for error in [*stalled, *(task.exception() for task in done if not task.cancelled())]:
        if error is not None:
            raise error
    budget.check()
    groups = [group for _, group in sorted(finished.items())]
    _finish(groups, episodes, version, n)
    return groups


def _check_failures(budget: FailureBudget, group: FinishedGroup, n: int) -> None:
    for error in group.failures:
        budget.failed(error)
    for _ in range(group.declined):
        budget.failed(
            RLError(
                f"the workflow returned None for row {group.ticket.group_id} (its keys are {sorted(group.prompt)}): a "
                "held-out row needs a reward."
            )
        )
    for _ in range(n - len(group.failures) - group.declined):
        budget.accepted()


async def _await_cancelled(episodes: Episodes) -> None:
    """Wait for episodes that were cancelled, though not for ever."""
    tasks = list(episodes.running.values())
    try:
        if tasks:
            await run_with_timeout(episodes.clock, CLOSE_SECONDS, asyncio.wait(tasks))
    except TimeoutError:
        log.error("evaluation: %d episodes ignore their cancellation and are left behind", len(episodes.running))


def _finish(groups: list[FinishedGroup], episodes: Episodes, version: int, n: int) -> None:
    """Say how the answers were sampled, and refuse those of several versions."""
    import numpy as np

    assert episodes.generation is not None
    answers = [trajectory for group in groups for trajectory in group.trajectories]
    for trajectory in answers:
        trajectory.temperature = episodes.generation.temperature or 1.0
    if lost := sum(len(group.failures) + group.declined for group in groups):
        log.warning("evaluation: %d of %d episodes have no reward and count as wrong", lost, len(groups) * n)
    stamped = [row.versions[row.versions >= 0] for row in answers]
    found = np.unique(np.concatenate(stamped)) if stamped else np.empty(0)
    if len(found) > 1 or (len(found) and found[0] < version):
        raise InferenceError(
            f"evaluation: expected all tokens at one committed version (at least {version}), found the versions "
            f"{found.tolist()}. Were weights published during the evaluation, or does a server miss an update?"
        )
