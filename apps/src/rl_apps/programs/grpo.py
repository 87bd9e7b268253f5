"""`rl grpo`: reinforcement learning from verifiable rewards, asynchronously.

`gsm8k-grpo` and others are presets of it: files in `conf/` that say what has no sensible default here (`required`).
"""

from __future__ import annotations

from functools import partial

import rl_trainers
from rl_apps.preflight.checks import check_algorithm, check_batch, check_rollout
from rl_apps.run import summary
from rl_apps.run.app import App, Run
from rl_apps.run.components import Components
from rl_apps.run.sequence_lengths import measure_rows
from rl_apps.settings.compose import CONF
from rl_apps.settings.config import GRPOConfig
from rl_apps.settings.data import load_rows

__all__ = ["check", "train"]


def check(run: Run[GRPOConfig]) -> list[str]:
    """Everything of this command that can be known before a process starts."""
    config = run.config
    check_rollout(run)
    models = check_algorithm(run)
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

    config = run.config
    with Components(run) as parts:
        rows = parts.rows("train", "rl")
        engine = parts.engine()  # the policy, and this process's place among the trainer's ranks
        ranks = engine.parallel
        prompts = PromptLoader(
            rows, seed=config.seed, epochs=config.total_epochs or None, num_shards=ranks.dp_size, shard=ranks.dp_rank
        )
        epochs = partial(getattr, prompts, "epoch")
        client = parts.client(engine)
        reward = parts.reward()
        workflow = parts.workflow(reward)
        rollout = parts.runtime(client, workflow, engine, prompts)
        actor = parts.actor(engine)
        publisher = parts.publisher(engine, client)
        sharing = parts.memory_sharing(engine, client)
        gap = parts.gate(engine, client, sharing)
        evaluations = [parts.completion_evaluation(engine, rollout)] if config.evaluation.rows else []
        told = {
            "counters": rollout.stats,
            "outcomes": rollout.outcomes,
            "write_learned": parts.writer(engine).write_learned,
        }
        books = parts.run_log(engine, evaluations, epochs=epochs, **told)
        engines = {"actor": engine} | ({"critic": actor.critic.engine} if actor.critic else {})
        recover = parts.recover(engines, {"rollout": rollout, "books": books}, epochs)
        rl_trainers.train(
            rollout, actor, books, config.total_steps, publisher=publisher, gap=gap, recover=recover, sharing=sharing
        )


APP = App(
    name="rl grpo",
    title="asynchronous reinforcement learning with your own data and reward",
    schema=GRPOConfig,
    train=train,
    check=check,
    measure=partial(measure_rows, form="rl"),
    defaults=CONF / "grpo.yaml",
    required={
        "model.path": "a Hugging Face directory or hub id",
        "data.path": "a directory, file or hub id; data.name and data.columns say how it is read",
        "rollout.reward": "an installed reward such as `gsm8k`, `math`, `code`, or my_reward.py:my_function",
    },
    summary=partial(summary.after_grpo, command="rl grpo"),
)
