"""One episode before anything starts, so that a mistake in a workflow or a reward is told at once."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import rl_trainers
from rl_apps.run.app import Run
from rl_apps.run.components import Components
from rl_apps.settings.config import GRPOConfig
from rl_apps.settings.data import Rows, first_rows, load_rows
from rl_contracts import registry
from rl_contracts.config import require
from rl_contracts.errors import ConfigError, DataError, ModelError, RewardError, defined_at, raised_at
from rl_contracts.reward import RESERVED_KEYS
from rl_contracts.runtime.clock import SystemClock
from rl_contracts.workflow import AgentWorkflow, RolloutWorkflow
from rl_trainers.algorithms.config import LossConfig

if TYPE_CHECKING:
    from rl_contracts.batch.trajectory import Trajectory
    from rl_contracts.reward_worker import AsyncRewardWrapper

ROWS = 8
"""Tried one after the other until one is not refused as a row."""

GOLDS_AT_ONCE = 256
"""Gold answers that wait for the reward at the same time."""

SECONDS = 60.0
"""For the workflow's part of an episode, behind the time that a reward may take."""


def _split(run: Run[Any], form: str) -> str:
    """The split whose rows are answered; where training has other data, that of the evaluation."""
    return "train" if form == "rl" or not run.config.evaluation.rows else "test"


def run_trial_episode(run: Run[Any], form: str) -> None:
    """Run the workflow and the reward of a run on a row of its data, with the row's own `answer` in place of a model's.

    Args:
        form: in which the command reads its data. Where that is not for rollouts, the rows of evaluations are.

    Raises:
        ConfigError: one of them failed; says what happened, and in which line of the user's.
        ModelError: the tokenizer cannot be read.
    """
    settings, error = run.config.rollout, None
    rows = load_rows(run.config.data, _split(run, form), "rl", run.config.seed)
    try:
        with Components(run) as parts:
            workflow = parts.workflow(parts.reward())
            workflow.max_length = None  # rows that are too long are not the code's, and told of when all are measured
            for row in first_rows(rows, ROWS):
                error = _episode(parts, workflow, row)
                if not isinstance(error, DataError):  # not this row's: the code's, or none
                    break
    except (ConfigError, DataError, ModelError):  # of a setting or the model's files: a sentence of its own
        raise
    except Exception as failure:  # noqa: BLE001 - the user's code, as it was made: told below
        error = failure
    if error is not None:
        made = registry.load("rl.workflows", settings.workflow)
        if isinstance(error, RewardError):  # which says where already
            place, page = "", "reward"
        else:
            place = raised_at(error) or defined_at(getattr(made, "arun_episode", made))
            page = "agent" if isinstance(made, type) and issubclass(made, AgentWorkflow) else "workflow"
        raise ConfigError(
            f"rollout.workflow={settings.workflow} with rollout.reward={settings.reward} failed on a row of the data, "
            f"tried with a made-up answer: {type(error).__name__}: {str(error).splitlines()[0].rstrip('.')}{place}. "
            f"docs/howto/{page}.md shows how it is called; rollout.rehearsal=false leaves this trial out."
        ) from error


def check_golds(run: Run[Any], form: str) -> list[str]:
    """Score the gold answer of every row as if the model had written it, with a reward that `scores_gold`.

    Args:
        form: in which the command reads its data, as for `run_trial_episode`.

    Returns:
        how many score 1, in a sentence; nothing with another reward.

    Raises:
        ConfigError: more of them do not than `rollout.failure_budget` allows.
    """
    settings = run.config.rollout
    if not getattr(registry.load("rl.rewards", settings.reward), "scores_gold", False):
        return []
    rows = load_rows(run.config.data, _split(run, form), "rl", run.config.seed)
    with Components(run) as parts:
        wrong = parts.loop.run(_wrong_golds(parts.reward(), rows), settings.reward_timeout * (1 + len(rows)))
    found = f"{len(rows) - len(wrong)} of {len(rows)} gold answers score 1 with rollout.reward={settings.reward}"
    if wrong:
        number, why = next(iter(wrong.items()))
        found += f"; row {rows[number].get('prompt_id', number)} does not: {why}"
    if len(wrong) > settings.failure_budget * len(rows):
        raise ConfigError(
            f"{found}. Expected all but {settings.failure_budget:.0%} (rollout.failure_budget) to do so: correct the "
            "answers, or take another reward."
        )
    return [found]


async def _wrong_golds(reward: AsyncRewardWrapper, rows: Rows) -> dict[int, str]:
    """Why rows do not score 1 with their own answer, by their numbers."""

    async def score(number: int) -> str:
        row = rows[number]
        answer = str(row.get("answer"))
        data = {name: value for name, value in row.items() if name not in RESERVED_KEYS}
        try:
            value = await reward(answer, answer, [], [], **data)
        except RewardError as error:
            return str(error).splitlines()[0]
        return "" if value == 1 else f"{answer[-60:]!r} scores {value:g}"

    found: dict[int, str] = {}
    for first in range(0, len(rows), GOLDS_AT_ONCE):
        numbers = range(first, min(first + GOLDS_AT_ONCE, len(rows)))
        found.update(zip(numbers, await asyncio.gather(*map(score, numbers)), strict=True))
    return {number: why for number, why in found.items() if why}


def try_policy_loss(config: LossConfig) -> None:
    """Call a policy loss of the user's own on made-up tokens; one that is installed has its tests.

    Raises:
        ConfigError: it failed; says what happened, and in which line.
    """
    if ":" not in config.kind:
        return
    loss = registry.load_component(config)
    try:
        rl_trainers.try_loss(loss)
    except ConfigError:
        raise
    except Exception as error:
        why = f"{type(error).__name__}: {str(error).splitlines()[0].rstrip('.')}{raised_at(error)}"
        raise ConfigError(
            f"algorithm.loss.kind={config.kind} failed on made-up tokens: {why}. docs/howto/loss.md shows how it is "
            "called."
        ) from error


def _episode(parts: Components, workflow: RolloutWorkflow, row: dict[str, Any]) -> BaseException | None:
    """Why an episode of a row failed; None where it did not."""
    from rl_contracts.testing import NullInferenceEngine, NullInferenceEngineConfig
    from rl_workflows import Ticket
    from rl_workflows.rollout.episode import Episodes
    from rl_workflows.rollout.groups import run_group

    config, tokenizer = parts.config, parts.tokenizer
    ids = tokenizer.encode(str(row.get("answer") or 42), add_special_tokens=False) or [0]
    engine = NullInferenceEngine(
        NullInferenceEngineConfig(vocab_size=len(tokenizer), seconds_per_token=0.0), answer=lambda _: ids
    )
    engine.initialize(["nowhere"])
    episodes = Episodes(workflow, engine, SystemClock(), config.seed)
    trial = run_group(episodes, row, Ticket(0, 0), 1, 1)
    group = parts.loop.run(trial, SECONDS + config.rollout.reward_timeout)
    if group.error is None and isinstance(config, GRPOConfig) and config.algorithm.advantage.kind == "gdpo":
        _require_parts(group.trajectories)
    return group.error or _unwritable(group.trajectories)


def _require_parts(rows: Sequence[Trajectory]) -> None:
    found = sorted({name for row in rows for name in row.reward_components})
    expected = "gdpo with rewards that are `rl_contracts.reward.CompositeReward`s, or another kind"
    require(bool(found), "algorithm.advantage.kind", expected, "gdpo with a plain number as reward")


def _unwritable(rows: Sequence[Trajectory]) -> TypeError | None:
    """Why the values for people of some rows cannot be stored, which would end the run after its first steps."""
    try:
        json.dumps([row.info for row in rows], ensure_ascii=False).encode()
    except (TypeError, ValueError) as error:
        return TypeError(f"`info` of a trajectory: expected values that JSON has, found others ({error})")
    return None
