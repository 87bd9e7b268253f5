"""`rl grpo`: asynchronous reinforcement learning from verifiable rewards.

`gsm8k-grpo` and other commands run this program with a settings file in `conf/`. The file sets the values that have no
default here (`required`).
"""

from __future__ import annotations

from functools import partial

import rl_trainers
from rl_apps.preflight.checks import check_algorithm, check_batch, check_held_out, check_rollout
from rl_apps.run import summary
from rl_apps.run.app import App, Run
from rl_apps.run.components import Components
from rl_apps.run.sequence_lengths import measure_rows
from rl_apps.settings.compose import CONF
from rl_apps.settings.config import GRPOConfig
from rl_apps.settings.data import load_rows

__all__ = ["check", "train"]


def check(run: Run[GRPOConfig]) -> list[str]:
    """Check settings, algorithm, data and batch sizes before any process starts; return the lines to print."""
    config = run.config
    step = check_batch(
        config.data.batch_size, config.rollout.group_size, config.actor.minibatches, run.layout.actor.strategy.data
    )
    check_rollout(run)
    train_rows = load_rows(config.data, "train", "rl", config.seed)
    check_held_out(run, "rl")
    models = check_algorithm(run)  # last, because it imports torch
    return [step, f"{len(train_rows)} prompts in the data, {config.total_steps} steps", *models]


def train(run: Run[GRPOConfig]) -> None:
    """Run one trainer process, from the prompts of the data set to the updated weights."""
    with Components(run) as components:
        examples = components.rows("train", "rl")
        engine = components.engine()  # policy model, with the parallel layout of the trainer
        prompts = components.prompts(examples, engine)
        client = components.client(engine)
        workflow = components.workflow(components.reward())
        rollout = components.runtime(client, workflow, engine, prompts if run.config.total_steps else ())
        actor = components.actor(engine)
        run_log = components.run_log(
            engine,
            components.completion_evaluations(engine, rollout),
            counters=rollout.stats,
            outcomes=rollout.outcomes,
            write_learned=components.writer(engine).write_learned,
            epochs=lambda: prompts.epoch,
        )
        servers = components.servers(run_log, engine, client)
        recovery = components.recovery(actor.engines, {"rollout": rollout, "run_log": run_log})
        rl_trainers.train(rollout, actor, run_log, run.config.total_steps, servers, recovery)


APP = App(
    name="rl grpo",
    title="asynchronous RL with your own data and reward",
    example="model.path=embedded data.name=word-problems rollout.reward=gsm8k total_steps=60 actor.optimizer.lr=2e-4",
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
    summary=partial(summary.after_grpo, command="grpo"),
)
