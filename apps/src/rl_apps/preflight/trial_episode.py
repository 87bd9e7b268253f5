"""Trial episode: run workflow and reward once before anything starts, to report mistakes in them immediately."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import rl_trainers
from rl_apps.run.app import Run
from rl_apps.run.components import Components
from rl_apps.settings.config import GRPOConfig
from rl_apps.settings.data import Rows, first_rows, load_rows
from rl_apps.settings.evaluation_sets import configs_of_sets, naming_set
from rl_contracts import registry
from rl_contracts.chat.rendering import tokenizer_of
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
"""Maximum number of examples to try, until the workflow accepts one."""

GOLDS_AT_ONCE = 256
"""Gold answers that are scored concurrently."""

SECONDS = 60.0
"""Time limit in seconds of the workflow in a trial episode, in addition to the time limit of the reward."""


def _split(run: Run[Any], form: str) -> str:
    """Return the split of the trial example: `test` if the training data is not in RL form and evaluation is on."""
    return "train" if form == "rl" or not run.config.evaluation.examples else "test"


def run_trial_episode(run: Run[Any], form: str, split: str = "") -> None:
    """Run workflow and reward of a run on an example of its data, with its own `answer` as the completion.

    Args:
        form: form in which the command reads its training data. If it is not `rl`, evaluation examples are used.
        split: split of the example, see `load_rows`. Empty: depends on the form.

    Raises:
        ConfigError: workflow or reward failed; with the error and the line of the user's code.
        ModelError: the tokenizer cannot be read.
    """
    settings, error = run.config.rollout, None
    rows = load_rows(run.config.data, split or _split(run, form), "rl", run.config.seed)
    try:
        with Components(run) as components:
            workflow = components.workflow(components.reward())
            workflow.max_length = None  # lengths are checked later, with all examples
            for row in first_rows(rows, ROWS):
                error = _run_episode(components, workflow, row)
                if not isinstance(error, DataError):  # a DataError rejects only this example
                    break
    except (ConfigError, DataError, ModelError):  # caused by a setting or by files, with a complete message
        raise
    except Exception as failure:  # noqa: BLE001 - raised while the user's code was built: reported below
        error = failure
    if error is not None:
        component = registry.load("rl.workflows", settings.workflow)
        if isinstance(error, RewardError):  # its message already names the line
            fields = f" (the example has {', '.join(sorted(row))})" if "raised KeyError" in str(error) else ""
            place, page = fields, "reward"
        else:
            place = raised_at(error) or defined_at(getattr(component, "arun_episode", component))
            page = "agent" if isinstance(component, type) and issubclass(component, AgentWorkflow) else "workflow"
        raise ConfigError(
            f"rollout.workflow={settings.workflow} with rollout.reward={settings.reward} failed on an example with a "
            f"synthetic completion: {type(error).__name__}: {str(error).splitlines()[0].rstrip('.')}{place}. "
            f"See docs/howto/{page}.md; rollout.trial_episode=false skips this trial."
        ) from error


def try_evaluation_sets(run: Run[Any]) -> list[str]:
    """Run a trial episode, and score the gold answers, for each named evaluation set of a run.

    Returns:
        A sentence about the gold answers of each set whose reward has `scores_gold`.

    Raises:
        ConfigError, DataError, ModelError: see `run_trial_episode` and `check_golds`.
    """
    messages = []
    for name, config in configs_of_sets(run.config).items():
        with naming_set(name):
            of_set = replace(run, config=config)
            run_trial_episode(of_set, "rl", "set")
            messages += [f"evaluation.sets.{name}: {sentence}" for sentence in check_golds(of_set, "rl", "set")]
    return messages


def check_golds(run: Run[Any], form: str, split: str = "") -> list[str]:
    """Score the gold answer of every example as if the model had generated it. Only for rewards with `scores_gold`.

    Args:
        form: form in which the command reads its training data, as for `run_trial_episode`.
        split: split of the examples, as for `run_trial_episode`.

    Returns:
        One sentence with the number of gold answers that score 1; empty for other rewards.

    Raises:
        ConfigError: more gold answers than `rollout.failure_budget` allows do not score 1.
    """
    settings = run.config.rollout
    if not getattr(registry.load("rl.rewards", settings.reward), "scores_gold", False):
        return []
    rows = load_rows(run.config.data, split or _split(run, form), "rl", run.config.seed)
    with Components(run) as components:
        wrong = components.loop.run(_wrong_golds(components.reward(), rows), settings.reward_timeout * (1 + len(rows)))
    sentence = f"{len(rows) - len(wrong)} of {len(rows)} gold answers score 1 with rollout.reward={settings.reward}"
    if wrong:
        number, why = next(iter(wrong.items()))
        sentence += f"; example {rows[number].get('prompt_id', number)} does not: {why}"
    if len(wrong) > settings.failure_budget * len(rows):
        raise ConfigError(
            f"{sentence}. Expected all but {settings.failure_budget:.0%} (rollout.failure_budget) to score 1: correct "
            "the answers, or use another reward."
        )
    return [sentence]


async def _wrong_golds(reward: AsyncRewardWrapper, rows: Rows) -> dict[int, str]:
    """Return why examples do not score 1 with their own answer, by index."""

    async def score(number: int) -> str:
        row = rows[number]
        answer = str(row.get("answer"))
        data = {name: value for name, value in row.items() if name not in RESERVED_KEYS}
        try:
            value = await reward(answer, answer, [], [], **data)
        except RewardError as error:
            return str(error).splitlines()[0]
        return "" if value == 1 else f"{answer[-60:]!r} scores {value:g}"

    reasons: dict[int, str] = {}
    for first in range(0, len(rows), GOLDS_AT_ONCE):
        numbers = range(first, min(first + GOLDS_AT_ONCE, len(rows)))
        reasons.update(zip(numbers, await asyncio.gather(*map(score, numbers)), strict=True))
    return {number: why for number, why in reasons.items() if why}


def try_policy_loss(config: LossConfig) -> None:
    """Call a custom policy loss on synthetic tokens. Installed losses have their own tests and are not called.

    Raises:
        ConfigError: the loss failed; with the error and the line of the user's code.
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
            f"algorithm.loss.kind={config.kind} failed on synthetic tokens: {why}. docs/howto/loss.md shows how a "
            "loss is called."
        ) from error


def _run_episode(components: Components, workflow: RolloutWorkflow, row: dict[str, Any]) -> BaseException | None:
    """Return the error of an episode on an example, or None if it succeeded."""
    from rl_contracts.testing import NullInferenceEngine, NullInferenceEngineConfig
    from rl_workflows import Ticket
    from rl_workflows.rollout.episode import Episodes
    from rl_workflows.rollout.groups import run_group

    config, tokenizer = components.config, tokenizer_of(components.tokenizer)
    ids = tokenizer.encode(str(row.get("answer") or 42), add_special_tokens=False) or [0]
    engine = NullInferenceEngine(
        NullInferenceEngineConfig(vocab_size=len(tokenizer), seconds_per_token=0.0), answer=lambda _: ids
    )
    engine.initialize(["nowhere"])
    episodes = Episodes(workflow, engine, SystemClock(), config.seed)
    trial = run_group(episodes, row, Ticket(0, 0), 1, 1)
    group = components.loop.run(trial, SECONDS + config.rollout.reward_timeout)
    if group.error is None and isinstance(config, GRPOConfig) and config.algorithm.advantage.kind == "gdpo":
        _require_reward_components(group.trajectories)
    return group.error or _serialization_error(group.trajectories)


def _require_reward_components(trajectories: Sequence[Trajectory]) -> None:
    names = sorted({name for trajectory in trajectories for name in trajectory.reward_components})
    expected = "gdpo with a reward that has components (`rl_contracts.reward.CompositeReward`), or another kind"
    require(bool(names), "algorithm.advantage.kind", expected, "gdpo with a plain number as reward")


def _serialization_error(trajectories: Sequence[Trajectory]) -> TypeError | None:
    """Return an error if `info` cannot be stored as JSON. Otherwise the run would fail after its first steps."""
    try:
        json.dumps([trajectory.info for trajectory in trajectories], ensure_ascii=False).encode()
    except (TypeError, ValueError) as error:
        return TypeError(f"`info` of a trajectory: expected values that JSON supports, found others ({error})")
    return None
