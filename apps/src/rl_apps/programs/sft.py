"""`rl sft`: supervised learning from conversations. `gsm8k-sft` runs it with a settings file."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import rl_trainers
from rl_apps.preflight.checks import check_rows
from rl_apps.run import summary
from rl_apps.run.app import App, Run
from rl_apps.run.components import Components
from rl_apps.run.sequence_lengths import measure_rows
from rl_apps.settings.compose import CONF
from rl_apps.settings.config import SFTConfig
from rl_monitor.progress import SFT_COLUMNS

if TYPE_CHECKING:
    from tensordict import TensorDict

    from rl_apps.settings.data import Rows
    from rl_contracts.inference import InferenceEngine
    from rl_trainers.run_log.evaluation import Evaluation

__all__ = ["check", "train"]


def check(run: Run[SFTConfig]) -> list[str]:
    """Check the settings and the conversations before any process starts; return the lines to print."""
    return check_rows(run, "sft")


def train(run: Run[SFTConfig]) -> None:
    """Run one trainer process, from the conversations of the data set to the updated weights."""
    from rl_trainers.learners.supervised import shard_sequences, supervised_sequences

    with Components(run) as components:
        rows = components.rows("train", "sft")
        engine, renderer = components.engine(), components.renderer()

        def batch_of(rows: list[dict[str, Any]]) -> TensorDict:
            truncate = run.config.data.overlong == "truncate"
            return shard_sequences(
                supervised_sequences(rows, renderer, components.max_length, truncate), engine.parallel
            )

        learner, client = rl_trainers.LossLearner(engine), None
        evaluations: list[Evaluation] = []
        if run.servers:
            client = components.client(engine)
            rollout = components.runtime(client, components.workflow(components.reward()), engine)
            evaluations += components.completion_evaluations(engine, rollout)
        learn_rows(components, rows, "sft", learner, batch_of, evaluations, client)


def learn_rows(
    components: Components,
    rows: Rows,
    form: str,
    learner: rl_trainers.LossLearner,
    batch_of: Callable[[list[dict[str, Any]]], TensorDict],
    evaluations: Sequence[Evaluation] = (),
    client: InferenceEngine | None = None,
) -> None:
    """Run the training steps on the examples of a data set, and evaluate the loss on held-out examples.

    Args:
        rows: training examples.
        form: form of the examples; see `load_rows`.
        batch_of: builds this rank's shard of a batch from examples.
        evaluations: further evaluations.
        client: client of the servers that receive the weights; None without servers.
    """
    from rl_datasets import BatchLoader

    config, engine = components.config, learner.engine
    batches = BatchLoader(rows, config.data.batch_size, seed=config.seed, epochs=config.total_epochs or None)
    source = rl_trainers.DataSource(batches, batch_of)
    held_out = components.rows("test", form, config.evaluation.examples)
    losses = [rl_trainers.LossEvaluation(learner, batch_of(list(held_out)), len(held_out))] if held_out else []
    run_log = components.run_log(
        engine, [*losses, *evaluations], renamed={"loss": "loss/train"}, epochs=lambda: batches.epoch
    )
    servers = components.servers(run_log, engine, client) if client else None
    recovery = components.recovery({"actor": engine}, {"source": source, "run_log": run_log})
    rl_trainers.train(source, learner, run_log, config.total_steps, servers, recovery)


APP = App(
    name="rl sft",
    title="supervised fine-tuning on conversations",
    example="model.path=embedded data.name=word-problems total_steps=60 actor.optimizer.lr=1e-3",
    schema=SFTConfig,
    train=train,
    check=check,
    measure=partial(measure_rows, form="sft"),
    defaults=CONF / "sft.yaml",
    required={
        "model.path": "a Hugging Face directory or hub id",
        "data.path": "a directory, file or hub id; data.name and data.columns say how it is read",
    },
    rejected=("actor.minibatches",),
    servers="optional",
    form="sft",
    warm_up=False,
    columns=SFT_COLUMNS,
    summary=partial(summary.after_sft, command="grpo rollout.reward=REWARD"),
)
