"""`hh-rlhf-rm` and `hh-rlhf-dpo`: pairs in, a model that tells chosen from rejected out."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import rl_trainers
from rl_apps.preflight.checks import check_rows
from rl_apps.programs.sft import learn_rows
from rl_apps.run.app import App, Run
from rl_apps.run.components import Components
from rl_apps.run.sequence_lengths import measure_rows
from rl_apps.settings.compose import CONF
from rl_apps.settings.config import RunConfig
from rl_monitor.progress import PREFERENCE_COLUMNS
from rl_trainers.learners.preference import PreferenceConfig

if TYPE_CHECKING:
    from tensordict import TensorDict

    from rl_apps.settings.data import Rows
    from rl_contracts.data import FinetuneSpec
    from rl_contracts.engine import LossFn, TrainEngine


@dataclass
class DPOConfig(RunConfig):
    """A policy that learns from preference pairs."""

    preference: PreferenceConfig = field(default_factory=PreferenceConfig)
    """The loss and its constants."""


def check(run: Run[Any]) -> list[str]:
    """Everything of `hh-rlhf-dpo` that can be known before a process starts."""
    return check_rows(run, "pairs")


def check_reward_model(run: Run[RunConfig]) -> list[str]:
    """The same of `hh-rlhf-rm`, and that the engine can train a model with one output."""
    run.config.actor.engine.check(run.layout.actor.strategy, replace(score_spec(run), device=run.device))
    return check(run)


def score_spec(run: Run[RunConfig]) -> FinetuneSpec:
    """What is trained: a model that gives a row one number."""
    return replace(run.config.finetune_spec(), head="score")


def train_reward_model(run: Run[RunConfig]) -> None:
    """The work of one trainer process: a reward model (Bradley-Terry)."""
    with Components(run) as parts:
        rows = parts.rows("train", "pairs")
        engine = parts.engine(spec=score_spec(run))
        learn_pairs(parts, rows, engine, rl_trainers.reward_model_loss)


def train_policy(run: Run[DPOConfig]) -> None:
    """The work of one trainer process: a policy, beside a frozen copy of itself (DPO or IPO)."""
    with Components(run) as parts:
        rows = parts.rows("train", "pairs")
        engine = parts.engine()
        reference = parts.engine(spec=replace(run.config.finetune_spec(), optimizer=None))
        learn_pairs(parts, rows, engine, rl_trainers.PolicyPreferenceLoss(run.config.preference), reference)


def learn_pairs(
    parts: Components, rows: Rows, engine: TrainEngine, loss: LossFn, reference: TrainEngine | None = None
) -> None:
    """The steps: from the data set's pairs to the updated weights."""
    from rl_trainers.learners.preference import count_pairs, preference_sequences
    from rl_trainers.learners.supervised import shard_sequences

    renderer = parts.renderer()

    def batch_of(rows: list[dict[str, Any]]) -> TensorDict:
        cuts = parts.config.data.overlong == "truncate"
        return shard_sequences(preference_sequences(rows, renderer, parts.max_length, cuts), engine.parallel)

    learn_rows(parts, rows, "pairs", rl_trainers.LossLearner(engine, loss, count_pairs, reference), batch_of)


REWARD_MODEL = App(
    name="hh-rlhf-rm",
    title="train a reward model on preference pairs (Bradley-Terry)",
    schema=RunConfig,
    train=train_reward_model,
    check=check_reward_model,
    measure=partial(measure_rows, form="pairs"),
    defaults=CONF / "hh_rlhf_rm.yaml",
    rejected=("actor.minibatches",),
    servers="refused",
    form="pairs",
    columns=PREFERENCE_COLUMNS,
)

DPO = replace(
    REWARD_MODEL,
    name="hh-rlhf-dpo",
    title="train a policy on preference pairs with DPO or IPO",
    schema=DPOConfig,
    train=train_policy,
    check=check,
    defaults=CONF / "hh_rlhf_dpo.yaml",
)
