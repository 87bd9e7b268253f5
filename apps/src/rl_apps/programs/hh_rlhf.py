"""`hh-rlhf-rm` and `hh-rlhf-dpo`: train a reward model or a policy on preference pairs."""

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
    """Settings of a policy that learns from preference pairs."""

    preference: PreferenceConfig = field(default_factory=PreferenceConfig)
    """Preference loss and its constants."""


def check(run: Run[Any]) -> list[str]:
    """Check the settings and the preference pairs before any process starts; return the lines to print."""
    return check_rows(run, "pairs")


def check_reward_model(run: Run[RunConfig]) -> list[str]:
    """Do the checks of `check`, and check that the engine can train a model with a score head."""
    run.config.actor.engine.check(run.layout.actor.strategy, replace(score_spec(run), device=run.device))
    return check(run)


def score_spec(run: Run[RunConfig]) -> FinetuneSpec:
    """Return the run's spec with a score head, which outputs one number per sequence."""
    return replace(run.config.finetune_spec(), head="score")


def train_reward_model(run: Run[RunConfig]) -> None:
    """Run one trainer process that trains a reward model (Bradley-Terry)."""
    with Components(run) as components:
        pairs = components.rows("train", "pairs")
        engine = components.engine(spec=score_spec(run))
        learn_pairs(components, pairs, engine, rl_trainers.reward_model_loss)


def train_policy(run: Run[DPOConfig]) -> None:
    """Run one trainer process that trains a policy against a frozen copy of its initial weights (DPO or IPO)."""
    with Components(run) as components:
        pairs = components.rows("train", "pairs")
        engine = components.engine()
        reference = components.engine(spec=replace(run.config.finetune_spec(), optimizer=None))
        learn_pairs(components, pairs, engine, rl_trainers.PolicyPreferenceLoss(run.config.preference), reference)


def learn_pairs(
    components: Components, rows: Rows, engine: TrainEngine, loss: LossFn, reference: TrainEngine | None = None
) -> None:
    """Run the training steps on preference pairs.

    Args:
        reference: engine of the frozen reference policy; None for a reward model.
    """
    from rl_trainers.learners.preference import count_pairs, preference_sequences
    from rl_trainers.learners.supervised import shard_sequences

    renderer = components.renderer()

    def batch_of(rows: list[dict[str, Any]]) -> TensorDict:
        truncate = components.config.data.overlong == "truncate"
        return shard_sequences(preference_sequences(rows, renderer, components.max_length, truncate), engine.parallel)

    learn_rows(components, rows, "pairs", rl_trainers.LossLearner(engine, loss, count_pairs, reference), batch_of)


REWARD_MODEL = App(
    name="hh-rlhf-rm",
    title="train a reward model on preference pairs (Bradley-Terry)",
    example="total_steps=30 actor.optimizer.lr=2e-4",
    schema=RunConfig,
    train=train_reward_model,
    check=check_reward_model,
    measure=partial(measure_rows, form="pairs"),
    defaults=CONF / "hh_rlhf_rm.yaml",
    rejected=("actor.minibatches",),
    servers="rejected",
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
