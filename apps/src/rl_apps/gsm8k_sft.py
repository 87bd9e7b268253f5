"""`gsm8k-sft`: supervised learning from worked answers."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from rl_apps import closing, driver
from rl_apps.app import App, Run
from rl_apps.checks import check_rows
from rl_apps.compose import CONF
from rl_apps.config import SFTConfig
from rl_apps.data import head, load_rows
from rl_apps.parts import Parts
from rl_apps.progress import SFT_COLUMNS

if TYPE_CHECKING:
    from tensordict import TensorDict


def check(run: Run[SFTConfig]) -> list[str]:
    """Everything of this command that can be known before a process starts."""
    return check_rows(run, "sft")


def train(run: Run[SFTConfig]) -> None:
    """The work of one trainer process: from the data set's conversations to the updated weights."""
    from rl_datasets import BatchLoader
    from rl_trainers import DataSource, LossEvaluation, LossLearner, RecoverPoints
    from rl_trainers import train as run_loop
    from rl_trainers.evaluation import Evaluation
    from rl_trainers.supervised import supervised_rows, whole_to_share

    config = run.config
    with Parts(run) as parts:
        engine, renderer = parts.engine(), parts.renderer()
        rows = load_rows(config.data, "train", "sft", config.seed)
        batches = BatchLoader(rows, config.data.batch_size, seed=config.seed, epochs=config.epochs)

        def batch_of(rows: list[dict[str, Any]]) -> TensorDict:
            return whole_to_share(supervised_rows(rows, renderer, config.data.max_length), engine.parallel)

        source = DataSource(batches, batch_of)
        held_out = head(load_rows(config.data, "test", "sft", config.seed), config.evaluation.rows)
        evaluations: list[Evaluation] = [LossEvaluation(engine, batch_of(held_out))] if held_out else []
        publisher = gap = None
        if run.servers:
            client = parts.client()
            rollout = parts.runtime(client, parts.workflow(parts.reward()), engine)
            publisher, gap = parts.publisher(engine, client), parts.gate(engine, client)
            evaluations.append(parts.answer_evaluation(engine, rollout))
        books = parts.books(engine, evaluations, renamed={"loss": "loss/train"})
        recover = RecoverPoints(run.directory, config.recover, {"actor": engine}, {"source": source, "books": books})
        learner = LossLearner(engine)
        run_loop(source, learner, books, config.total_steps, publisher=publisher, gap=gap, recover=recover)


APP = App(
    name="gsm8k-sft",
    title=__doc__,
    schema=SFTConfig,
    train=train,
    check=check,
    defaults=CONF / "gsm8k_sft.yaml",
    servers="optional",
    form="sft",
    warm_up=False,
    columns=SFT_COLUMNS,
    closing=closing.after_sft,
)


def main() -> None:
    """Entry point of the command."""
    sys.exit(driver.main("rl_apps.gsm8k_sft:APP"))
