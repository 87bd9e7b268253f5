"""`gsm8k-sft`: supervised learning from worked answers."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

from rl_apps import closing, driver, parts
from rl_apps.config import SFTConfig
from rl_apps.data import head, load_rows
from rl_apps.layout import Layout, layout_of
from rl_apps.model import make_model
from rl_apps.progress import SFT_COLUMNS
from rl_apps.supervised import check_rows
from rl_contracts.scheduler import JobSpec


def layout(config: SFTConfig) -> Layout:
    """Trainers, and servers if held-out questions are to be answered."""
    return layout_of(config.allocation, needs_servers=False)


def check(config: SFTConfig, layout: Layout) -> list[str]:
    """Everything that can be known before a process starts."""
    return check_rows(config, layout, "sft")


def servers(config: SFTConfig, layout: Layout, run_dir: Path) -> list[JobSpec]:
    """Servers for the evaluation of answers, where they are allocated."""
    return [parts.server_job(config, config.rollout, layout, run_dir)] if layout.rollout else []


def train(config: SFTConfig, layout: Layout, run_dir: Path, addresses: list[str]) -> None:
    """The work of one trainer process."""
    from rl_datasets import BatchLoader
    from rl_trainers import Books, LossEvaluation, RecoverPoints, SupervisedLearner, SupervisedSource
    from rl_trainers import train as run_loop
    from rl_trainers.supervised import supervised_rows, whole_to_share

    with parts.Closing() as stack:
        engine = stack.add(parts.make_engine(config, layout))
        renderer = parts.make_renderer(config)
        rows = load_rows(config.data, "train", "sft", config.seed)
        batches = BatchLoader(rows, config.data.batch_size, seed=config.seed, epochs=config.epochs)
        source = SupervisedSource(batches, renderer, config.data.max_length, engine.parallel)
        held_out = head(load_rows(config.data, "test", "sft", config.seed), config.evaluation.rows)
        held_out_rows = supervised_rows(held_out, renderer, config.data.max_length)
        evaluations = [LossEvaluation(engine, whole_to_share(held_out_rows, engine.parallel))] if held_out else []
        weights = None
        if addresses:
            rollout, weights = parts.make_answering(stack, config, config.rollout, engine, layout, run_dir, addresses)
            evaluations.append(parts.answer_evaluation(config, engine, rollout, run_dir))
        books = Books(
            engine,
            run_dir,
            config.checkpoint,
            evaluations=evaluations,
            evaluate_every=config.evaluation.every,
            tokenizer_path=config.model.path,
            renamed={"loss": "loss/train"},
        )
        recover = RecoverPoints(run_dir, config.recover, {"actor": engine}, {"source": source, "books": books})
        run_loop(source, SupervisedLearner(engine), weights, books, config.total_steps, recover)


APP = driver.App(
    name="gsm8k-sft",
    title=__doc__,
    schema=SFTConfig,
    layout=layout,
    check=check,
    make_model=partial(make_model, warm_up=False),
    servers=servers,
    train=train,
    columns=SFT_COLUMNS,
    closing=closing.after_sft,
)


def main() -> None:
    """Entry point of the command."""
    sys.exit(driver.main(APP))
