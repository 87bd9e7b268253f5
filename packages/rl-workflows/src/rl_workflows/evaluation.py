"""Answering held-out rows through the same servers, apart from all training counters."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rl_contracts.errors import InferenceError, RLError
from rl_contracts.logging import get_logger
from rl_contracts.metrics import Figures, collect
from rl_workflows.budget import FailureBudget
from rl_workflows.episode import Progress
from rl_workflows.executor import run_episode
from rl_workflows.runner import AsyncTaskRunner
from rl_workflows.waiting import within
from rl_workflows.watchdog import Watchdog
from rl_workflows.workflow_context import EpisodeContext

if TYPE_CHECKING:
    from rl_contracts.clock import Clock
    from rl_contracts.config import GenerationConfig
    from rl_contracts.inference import InferenceEngine
    from rl_contracts.trajectory import Trajectory
    from rl_contracts.workflow import RolloutWorkflow
    from rl_workflows.config import RolloutConfig

log = get_logger("workflows")

CLOSE_SECONDS = 10.0
"""Time that episodes have to end once they are cancelled."""


class Evaluator:
    """One evaluation.

    An episode that fails or is rejected has no reward and is left out, with a warning; it is held against the same
    failure budget as in training, so that an accuracy never speaks of a few rows only.

    Args:
        engine: what episodes generate with.
        workflow: what happens in an episode.
        config: concurrency, budget, seed and the watchdog's limit.
        clock: all time.
        generation: replaces the workflow's own sampling.
    """

    def __init__(
        self,
        engine: InferenceEngine,
        workflow: RolloutWorkflow,
        config: RolloutConfig,
        clock: Clock,
        generation: GenerationConfig,
    ) -> None:
        self._engine, self._workflow, self._config = engine, workflow, config
        self._clock, self._generation = clock, generation
        self._progress = Progress(clock)
        self._runner = AsyncTaskRunner(config.eval_concurrent, self._fail)
        self._running: dict[EpisodeContext, None] = {}
        self._left = 0
        self._failed = 0
        self._done: asyncio.Future[None] | None = None
        self.figures = Figures()
        """What the episodes recorded."""

    async def run(self, rows: Sequence[dict[str, Any]], first: int, n: int, version: int) -> list[Trajectory]:
        """Answer each row `n` times.

        Args:
            rows: the rows.
            first: index of the first of them among the rows of all heads.
            n: answers per row.
            version: version that is committed at least.

        Returns:
            the trajectories, in order of (row, sample).

        Raises:
            InferenceError: the tokens do not all carry one committed version.
            RLError: too many episodes failed, or nothing moved for too long.
        """
        if not rows:
            return []
        self._done = asyncio.get_running_loop().create_future()
        answers: list[list[Trajectory]] = [[] for _ in range(len(rows) * n)]
        self._left = len(answers)
        enough = min(self._config.failure_min_groups, len(answers))
        self._budget = FailureBudget(self._config.failure_budget, enough, self._config.max_rejected_in_row)
        for number, row in enumerate(rows):
            cache: dict[str, Any] = {}
            for sample in range(n):
                context = _context(row, first + number, sample, cache, self._clock)
                self._runner.submit(self._episode, row, context, answers[number * n + sample])
        watchdog = Watchdog(
            self._progress, self._engine, self._clock, self._config.stall_timeout, self._oldest, self._describe
        )
        watchdog.start(self._fail)
        try:
            await self._done
        finally:
            watchdog.stop()
            await self._end_episodes()
        self._budget.check()
        if self._failed:
            log.warning("evaluation: %d of %d episodes have no reward and are left out", self._failed, len(answers))
        result = [trajectory for answer in answers for trajectory in answer]
        _require_one_version(result, version)
        return result

    async def _episode(self, row: dict[str, Any], context: EpisodeContext, out: list[Trajectory]) -> None:
        self._running[context] = None
        with collect(self.figures):
            rows, error = await run_episode(
                self._workflow, self._engine, row, context, self._progress, self._config.seed, "eval", self._generation
            )
        del self._running[context]
        self._progress.touch()
        if rows is None:
            self._failed += 1
            self._budget.failed(error or _rejection(context))
        else:
            self._budget.accepted()
            out.extend(rows)
            for trajectory in rows:
                trajectory.temperature = self._generation.temperature or 1.0
        self._left -= 1
        if not self._left and self._done is not None and not self._done.done():
            self._done.set_result(None)

    async def _end_episodes(self) -> None:
        try:
            await within(self._clock, CLOSE_SECONDS, self._runner.close())
        except TimeoutError:
            log.error("evaluation: %d episodes ignore their cancellation and are left behind", self._runner.running)

    def _fail(self, error: BaseException) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_exception(error)

    def _oldest(self) -> EpisodeContext | None:
        return next(iter(self._running), None)

    def _describe(self) -> str:
        return f"evaluation: {self._left} episodes left, {len(self._running)} running"


def _context(row: dict[str, Any], index: int, sample: int, cache: dict[str, Any], clock: Clock) -> EpisodeContext:
    """Evaluation rows need no `prompt_id`: their index stands in. Epoch -1 keeps their seeds apart from training."""
    return EpisodeContext(int(row.get("prompt_id", index)), index, sample, -1, cache, clock)


def _rejection(context: EpisodeContext) -> RLError:
    return RLError(
        f"the workflow returned None for row {context.group_id} (prompt {context.prompt_id}): a held-out row needs a "
        "reward, or the accuracy would speak of the others alone."
    )


def _require_one_version(answers: list[Trajectory], version: int) -> None:
    import numpy as np

    stamped = [row.versions[row.versions >= 0] for row in answers]
    found = np.unique(np.concatenate(stamped)) if stamped else np.empty(0)
    if len(found) > 1 or (len(found) and found[0] < version):
        raise InferenceError(
            f"evaluation: expected all tokens at one committed version (at least {version}), found the versions "
            f"{found.tolist()}. Were weights published during the evaluation, or does a server miss an update?"
        )
