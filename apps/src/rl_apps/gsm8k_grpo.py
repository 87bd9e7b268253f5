"""`gsm8k-grpo`: reinforcement learning of word problems with verifiable answers, asynchronously."""

from __future__ import annotations

import sys

from rl_apps import closing, driver, parts, policy
from rl_apps.app import App, Run
from rl_apps.compose import CONF
from rl_apps.config import GRPOConfig
from rl_apps.data import load_rows
from rl_apps.layout import check_batch


def check(run: Run[GRPOConfig]) -> list[str]:
    """Everything of this command that can be known before a process starts."""
    config = run.config
    parts.check_rollout(config.rollout)
    parts.check_publish(config.publish, config.allocation)
    models = policy.check_algorithm(run)
    train_rows = load_rows(config.data, "train", "rl", config.seed)
    if config.evaluation.rows:
        load_rows(config.data, "test", "rl", config.seed)
    step = check_batch(
        config.data.batch_size, config.rollout.group_size, config.actor.minibatches, run.layout.actor.strategy.data
    )
    return [step, f"{len(train_rows)} prompts in the data, {config.total_steps} steps", *models]


def train(run: Run[GRPOConfig]) -> None:
    """The work of one trainer process: what happens to a prompt, from the data set to the updated weights."""
    from rl_datasets import PromptLoader
    from rl_trainers import Books, RecoverPoints
    from rl_trainers import train as run_loop

    config, run_dir = run.config, run.directory
    with parts.Closing() as stack:
        engine = stack.add(parts.make_engine(run))
        rows = load_rows(config.data, "train", "rl", config.seed)
        shards, shard = engine.parallel.dp_size, engine.parallel.dp_rank
        prompts = PromptLoader(rows, seed=config.seed, epochs=config.epochs, num_shards=shards, shard=shard)
        rollout, publisher, gap = parts.make_answering(
            stack,
            run,
            engine,
            prompts=prompts,
            minibatches=config.actor.minibatches,
            gap=config.gap,
        )
        actor = policy.make_actor(stack, run, engine)
        evaluations = [parts.answer_evaluation(stack, run, engine, rollout)] if config.evaluation.rows else []
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
        run_loop(rollout, actor, books, config.total_steps, publisher=publisher, gap=gap, recover=recover)


APP = App(
    name="gsm8k-grpo",
    title=__doc__,
    schema=GRPOConfig,
    train=train,
    check=check,
    defaults=CONF / "gsm8k_grpo.yaml",
    closing=closing.after_grpo,
)


def main() -> None:
    """Entry point of the command."""
    sys.exit(driver.main("rl_apps.gsm8k_grpo:APP"))
