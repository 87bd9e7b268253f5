"""`gsm8k-grpo`: reinforcement learning of word problems with verifiable answers, asynchronously."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

from rl_apps import closing, driver, parts, policy
from rl_apps.config import GRPOConfig
from rl_apps.data import load_rows
from rl_apps.layout import Layout, check_batch, layout_of
from rl_apps.model import check_model, make_model
from rl_apps.progress import GRPO_COLUMNS
from rl_contracts.scheduler import JobSpec


def layout(config: GRPOConfig) -> Layout:
    """Servers and trainers."""
    return layout_of(config.allocation, needs_servers=True)


def check(config: GRPOConfig, layout: Layout) -> list[str]:
    """Everything that can be known before a process starts."""
    check_model(config.model.path)
    parts.check_rollout(config.rollout)
    parts.check_publish(config.publish, config.allocation)
    models = policy.check_algorithm(config)
    train_rows = load_rows(config.data, "train", "rl", config.seed)
    if config.evaluation.rows:
        load_rows(config.data, "test", "rl", config.seed)
    step = check_batch(
        config.data.batch_size, config.rollout.group_size, config.actor.minibatches, layout.actor.strategy.data
    )
    return [step, f"{len(train_rows)} prompts in the data, {config.total_steps} steps", *models]


def servers(config: GRPOConfig, layout: Layout, run_dir: Path) -> list[JobSpec]:
    """The servers that generate."""
    return [parts.server_job(config, config.rollout, layout, run_dir)]


def train(config: GRPOConfig, layout: Layout, run_dir: Path, addresses: list[str]) -> None:
    """The work of one trainer process: what happens to a prompt, from the data set to the updated weights."""
    from rl_datasets import PromptLoader
    from rl_trainers import Books, RecoverPoints
    from rl_trainers import train as run_loop
    from rl_trainers.recover import resumed_step

    with parts.Closing() as stack:
        engine = stack.add(parts.make_engine(config, layout))
        rows = load_rows(config.data, "train", "rl", config.seed)
        shards, shard = engine.parallel.dp_size, engine.parallel.dp_rank
        prompts = PromptLoader(rows, seed=config.seed, epochs=config.epochs, num_shards=shards, shard=shard)
        rollout, weights = parts.make_answering(
            stack,
            config,
            config.rollout,
            engine,
            layout,
            run_dir,
            addresses,
            prompts=prompts,
            minibatches=config.actor.minibatches,
            gap=config.gap,
            first_step=resumed_step(run_dir, config.recover) + 1,
        )
        actor = policy.make_actor(stack, config, engine, layout)
        evaluations = [parts.answer_evaluation(config, engine, rollout, run_dir)] if config.evaluation.rows else []
        books = Books(
            engine,
            run_dir,
            config.checkpoint,
            evaluations=evaluations,
            evaluate_every=config.evaluation.every,
            counters=rollout.stats,
            tokenizer_path=config.model.path,
        )
        engines = {"actor": engine} | ({"critic": actor.critic.engine} if actor.critic else {})
        recover = RecoverPoints(run_dir, config.recover, engines, {"rollout": rollout, "books": books})
        run_loop(rollout, actor, weights, books, config.total_steps, recover)


APP = driver.App(
    name="gsm8k-grpo",
    title=__doc__,
    schema=GRPOConfig,
    layout=layout,
    check=check,
    make_model=partial(make_model, warm_up=True),
    servers=servers,
    train=train,
    columns=GRPO_COLUMNS,
    closing=closing.after_grpo,
)


def main() -> None:
    """Entry point of the command."""
    sys.exit(driver.main(APP))
