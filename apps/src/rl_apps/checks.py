"""What cannot work, found before any process starts. What one config can see by itself, it refuses itself."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from rl_apps.app import Run
from rl_apps.config import GRPOConfig
from rl_apps.data import load_rows
from rl_apps.model import EMBEDDED
from rl_apps.parts import serve_spec
from rl_contracts import registry
from rl_contracts.config import require
from rl_contracts.errors import ConfigError
from rl_contracts.model_directory import check_model_directory


def check_run(run: Run[Any]) -> None:
    """Refuse a model that is not there, and what the train engine or the servers cannot do.

    Raises:
        ConfigError: names the settings.
        ModelError: the directory has no `config.json`, no weights or no tokenizer.
    """
    check_model(run.config.model.path)
    run.config.actor.engine.check(run.layout.actor.strategy, replace(run.config.finetune_spec(), device=run.device))
    if run.layout.rollout is not None:
        run.config.rollout.server.check(serve_spec(run))


def check_model(path: str, setting: str = "model.path") -> None:
    """Refuse a local directory that is no model before any process starts; hub ids are looked up when they are loaded.

    Args:
        setting: what the path is the value of.

    Raises:
        ModelError: the directory has no `config.json`, no weights or no tokenizer.
    """
    if path != EMBEDDED:
        check_model_directory(path, setting, tokenizer=True)


def check_batch(prompts: int, group_size: int, minibatches: int, replicas: int) -> str:
    """The arithmetic of a step, in one sentence.

    Raises:
        ConfigError: the prompts do not divide over the replicas, or the rows over the minibatches.
    """
    rows = prompts * group_size
    if prompts % replicas:
        raise ConfigError(
            f"data.batch_size={prompts} does not divide over {replicas} data-parallel replicas "
            f"({prompts} / {replicas} = {prompts / replicas:g}); use {_near(prompts, replicas)}."
        )
    if rows % minibatches:
        raise ConfigError(
            f"data.batch_size={prompts} x rollout.group_size={group_size} = {rows} rows do not divide into "
            f"actor.minibatches={minibatches} ({rows / minibatches:g} each)."
        )
    return (
        f"{prompts} prompts x {group_size} answers = {rows} rows a step, {minibatches} minibatch(es) of "
        f"{rows // minibatches}, {prompts // replicas} prompts a step from each of {replicas} replica(s)"
    )


def _near(prompts: int, replicas: int) -> str:
    below = prompts // replicas * replicas
    return f"{below} or {below + replicas}" if below else str(replicas)


def check_rollout(run: Run[Any]) -> None:
    """Refuse workflows and rewards that are not installed, and a route of weights that this allocation cannot have.

    Raises:
        ConfigError: names the settings.
    """
    settings, allocation = run.config.rollout, run.config.allocation
    registry.load("rl.workflows", settings.workflow)
    registry.load("rl.rewards", settings.reward)
    require(
        run.config.publish.route != "ipc",
        f"publish.route with allocation={allocation}",
        "shm on one host, or broadcast: ipc needs trainer and server on one CUDA device, and here each has its own",
        run.config.publish.route,
    )


def check_algorithm(run: Run[GRPOConfig]) -> list[str]:
    """Refuse parts that are not installed or cannot be composed, and other models that are not there; what else is
    loaded, in words.

    Raises:
        ConfigError: a part of the algorithm, its constants, or what the engine of another model cannot do.
        ModelError: the path of the reference or the critic.
    """
    from rl_trainers.objective import make_policy_loss

    config, lines = run.config, []
    make_policy_loss(config.algorithm, config.actor.minibatches)
    for needed, name, setting, model, spec in (
        (config.algorithm.needs_reference, "reference policy", "ref.path", config.ref, config.reference_spec()),
        (config.algorithm.needs_critic, "critic", "critic.path", config.critic, config.critic_spec()),
    ):
        if needed:
            check_model(spec.model_path, setting)
            model.engine.check(run.layout.actor.strategy, replace(spec, device=run.device))
            lines.append(f"a {name} beside the policy, from {spec.model_path}")
    return lines


def check_rows(run: Run[Any], form: str) -> list[str]:
    """The checks of commands that learn from the rows of a data set: one optimizer step per batch, no servers needed.

    Args:
        form: what a row is to be, see `load_rows`.

    Returns:
        the arithmetic of the run, for the one who started it.

    Raises:
        ConfigError: a setting asks for what these commands do not do, or the batch does not divide.
        DataError: data cannot be used.
    """
    config = run.config
    require(
        config.actor.minibatches == 1,
        "actor.minibatches",
        "1: a batch of rows is one optimizer step here; set data.batch_size to the size of a step",
        config.actor.minibatches,
    )
    rows = load_rows(config.data, "train", form, config.seed)
    load_rows(config.data, "test", form, config.seed)
    check_batch(config.data.batch_size, 1, 1, run.layout.actor.strategy.data)
    what = "pairs" if form == "pairs" else "rows"
    return [f"{config.data.batch_size} of {len(rows)} {what} a step, {config.total_steps} steps"]
