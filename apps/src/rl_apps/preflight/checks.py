"""Preflight checks that combine several components. A config class checks its own settings itself."""

from __future__ import annotations

import os
import resource
import shutil
from collections.abc import Sequence
from dataclasses import replace
from typing import Any
from urllib.parse import urlsplit

from rl_apps.run.app import Run
from rl_apps.run.chat_template import check_chat_template
from rl_apps.run.components import attached, memory_of, serve_spec
from rl_apps.run.sequence_lengths import longest_row
from rl_apps.settings.config import GRPOConfig, RunConfig, ServedConfig
from rl_apps.settings.data import load_rows
from rl_apps.settings.device_layout import Devices, Layout
from rl_apps.settings.evaluation_sets import configs_of_sets, naming_set
from rl_apps.settings.model import as_planned, check_architecture, check_generates
from rl_contracts import registry
from rl_contracts.config import require
from rl_contracts.errors import ConfigError
from rl_contracts.models.directory import context_length, parameters_in
from rl_contracts.workflow import AgentWorkflow, Environment, RolloutWorkflow
from rl_trainers.run_log.tracking import load_trackers

__all__ = ["check_algorithm", "check_batch", "check_held_out", "check_rollout", "check_rows"]

MIB = 2**20
LOOPBACKS = ("127.0.0.1", "::1", "localhost")
LARGEST_SHARE = 0.7
"""Maximum fraction of a GPU's memory for servers if a trainer uses the same GPU."""
SERVED_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
"""Bytes per parameter, by served dtype."""
FILES_BESIDE_REQUESTS = 200
"""Open files of a trainer process besides its requests: modules, logs, shared memory, connections to other ranks."""


def check_run(run: Run[Any]) -> None:
    """Check the run against the limits of trackers, train engine, servers and model.

    Raises:
        ConfigError: a setting exceeds one of these limits; the message names the setting.
    """
    load_trackers(run.config.trackers)
    engine = run.config.actor.engine
    with as_planned(run.config.model, run.config.data) as directory:
        spec = replace(run.config.finetune_spec(), model_path=directory, device=run.device)
        engine.check(run.layout.actor.strategy, spec)
    check_models(run)


def check_models(run: Run[Any]) -> None:
    """Check the servers of a run, and the architectures of its models.

    Raises:
        ConfigError: a setting is not supported by the servers.
        ModelError: a model is of an unknown type, or does not generate text.
    """
    if run.layout.rollout is not None:
        servers, addresses = run.layout.rollout.strategy.data, attached(run.config, run.layout)
        require(
            len(addresses) in (0, servers),
            "rollout.server.addresses",
            f"{servers}, the d of {run.layout.rollout} (or none, to let the run start servers)",
            list(addresses),
        )
        require(
            not (addresses and run.config.rollout.port),
            "rollout.port with rollout.server.addresses",
            "0, because attached servers already have ports",
            run.config.rollout.port,
        )
        run.config.rollout.server.check(serve_spec(run))
    for path, directory in run.config.model.directories.items():
        if run.layout.rollout is not None and path == run.config.model.path:
            check_generates(path, directory)
    longest_row(run.config.data, run.config.model.directory())


def check_architectures(run: Run[Any]) -> None:
    """Reject models of a type that transformers does not have. This imports transformers, so other checks come first.

    Raises:
        ModelError: see `check_architecture`.
    """
    for path, directory in run.config.model.directories.items():
        check_architecture(path, directory)


def choose_route(config: RunConfig, layout: Layout, devices: Devices) -> None:
    """Resolve `publish.route=auto`.

    The route is `shm` if servers and trainers are on one machine, and `broadcast` otherwise. The exception is a single
    server that this run starts: it gets `disk`, because it could not rejoin over `broadcast` after a restart.

    Raises:
        ConfigError: the route needs one machine, and servers and trainers are on several.
    """
    if layout.rollout is None or not isinstance(config, ServedConfig):
        return
    if addresses := attached(config, layout):
        same_machine = on_this_machine(addresses)
        where = ", ".join(addresses)
    else:
        same_machine = devices.together(layout.rollout.name, layout.actor.name)
        where = ", ".join(f"{role} on {', '.join(sorted({*nodes}))}" for role, nodes in devices.places.items())
    if config.publish.route == "auto":
        single = layout.rollout.strategy.data == 1 and not addresses
        config.publish.route = "shm" if same_machine else "disk" if single else "broadcast"
    expected = f"broadcast, disk or auto, because servers and trainers are on several machines ({where})"
    require(same_machine or config.publish.route not in ("shm", "ipc"), "publish.route", expected, config.publish.route)


def on_this_machine(addresses: Sequence[str]) -> bool:
    """Return whether all servers have loopback addresses of this machine."""
    return all((urlsplit(address).hostname or "") in LOOPBACKS for address in addresses)


def check_limits(run: Run[Any]) -> None:
    """Check the run against the context of its model and the limits of this machine.

    Raises:
        ConfigError: the canary does not fit; or /dev/shm or the limit of open files of this machine is too small.
    """
    shortage = file_shortage(run)
    if shortage and run.config.launcher.kind == "local":
        raise ConfigError(f"{shortage}.")
    if run.layout.rollout is not None:
        _check_canary(run)
        _check_shared_memory(run)


def _check_canary(run: Run[Any]) -> None:
    """Reject a canary that does not fit into the servers' context or the trainer's micro-batches."""
    from rl_trainers.weight_sync.canary import PROMPT_TOKENS, TOKENS

    server, tokens = run.config.rollout.server, run.config.actor.micro_batch.max_tokens
    if run.config.publish.canary == "always":
        context = getattr(server, "context_length", 0) or context_length(run.config.model.directory()) or tokens
        limits = {"the servers' context": context, "actor.micro_batch.max_tokens": tokens}
        name, room = min(limits.items(), key=lambda limit: limit[1])
        needed = PROMPT_TOKENS + TOKENS
        require(room >= needed, name, f"at least {needed} tokens, which publish.canary=always needs", room)


def _check_shared_memory(run: Run[Any]) -> None:
    """Reject `publish.route=shm` if /dev/shm of this machine has no room for two versions of the weights."""
    config = run.config
    adapters = getattr(getattr(config.actor.engine, "lora", None), "rank", 0) and config.publish.adapter != "never"
    if not memory_of(run) or config.launcher.kind != "local" or adapters:
        return
    remedies = "start the container with --shm-size=8g, or set publish.route=disk or broadcast"
    require(os.access("/dev/shm", os.W_OK), "publish.route=shm", f"a writable /dev/shm; {remedies}", "read-only")
    dtype = getattr(config.actor.engine, "serve_dtype", "") or config.actor.dtype
    needed = 2 * parameters_in(config.model.directory()) * SERVED_BYTES[dtype]
    free = shutil.disk_usage("/dev/shm").free
    expected = f"{needed / MIB:.1f} MiB free in /dev/shm for two versions of the weights; {remedies}"
    require(free >= needed, "publish.route=shm", expected, f"{free / MIB:.1f} MiB")


def file_shortage(run: Run[Any]) -> str:
    """Return a sentence if a trainer may exceed the limit of open files of this machine with its requests, or ""."""
    from rl_workflows.rollout.evaluation import CONCURRENT_EPISODES

    if not isinstance(run.config, GRPOConfig):
        return ""
    rollout, batch_size, replicas = run.config.rollout, run.config.data.batch_size, run.layout.actor.strategy.data
    groups = (rollout.max_staleness + 1) * batch_size
    groups = min(groups, rollout.max_concurrent or groups)
    base = CONCURRENT_EPISODES + FILES_BESIDE_REQUESTS
    needed, allowed = groups * rollout.group_size // replicas + base, resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if allowed == resource.RLIM_INFINITY or needed <= allowed:
        return ""
    at_most = (allowed - base) // rollout.group_size * replicas
    lower = f"set rollout.max_concurrent={at_most}" if at_most > 0 else "lower rollout.group_size"
    return (
        f"rollout.max_concurrent: a trainer sends up to {needed - base} concurrent requests and needs about {needed} "
        f"open files; the limit is {allowed} (`ulimit -Hn`). Raise the limit, or {lower}"
    )


def check_batch(prompts: int, group_size: int, minibatches: int, replicas: int) -> str:
    """Check the batch of a step and describe it in one sentence.

    Raises:
        ConfigError: the prompts are not divisible by the replicas, or the sequences not by the minibatches.
    """
    sequences = prompts * group_size
    if prompts % replicas:
        raise ConfigError(
            f"data.batch_size={prompts} must be divisible by the {replicas} data-parallel replicas; "
            f"use {_near(prompts, replicas)}."
        )
    if sequences % minibatches:
        raise ConfigError(
            f"data.batch_size={prompts} x rollout.group_size={group_size} = {sequences} sequences must be divisible by "
            f"actor.minibatches={minibatches}; use a divisor of {sequences}."
        )
    return (
        f"{prompts} prompts x {group_size} completions = {sequences} sequences per step, {minibatches} minibatch(es) "
        f"of {sequences // minibatches}, {prompts // replicas} prompts per step from each of {replicas} replica(s)"
    )


def _near(prompts: int, replicas: int) -> str:
    below = prompts // replicas * replicas
    return f"{below} or {below + replicas}" if below else str(replicas)


def check_rollout(run: Run[Any]) -> None:
    """Check that workflow and reward are installed, and that the allocation supports the route of weights.

    Raises:
        ConfigError: one of these checks fails; the message names the setting.
    """
    check_chat_template(run)
    settings, layout = run.config.rollout, run.layout
    workflow, reward = registry.load("rl.workflows", settings.workflow), registry.load("rl.rewards", settings.reward)
    kinds = (RolloutWorkflow, AgentWorkflow, Environment)
    fits = issubclass(workflow, kinds) if isinstance(workflow, type) else callable(workflow)
    names = ", ".join(kind.__name__ for kind in kinds)
    require(fits, "rollout.workflow", f"a class derived from one of {names} (rl_contracts.workflow)", settings.workflow)
    require(callable(reward), "rollout.reward", f"a function, not a {type(reward).__name__}", settings.reward)
    share_gpu = layout.shared and run.device == "cuda"
    require(
        run.config.publish.route != "ipc" or (share_gpu and layout.actor.world_size == 1),
        f"publish.route with allocation={run.config.allocation}",
        "shm on one host, or broadcast: ipc needs one trainer and one server on one GPU (such as `vllm:d1|fsdp:d1`)",
        run.config.publish.route,
    )
    memory_share = getattr(settings.server, "memory_share", 0.0)
    expected = f"at most {LARGEST_SHARE:g}, so that the trainer has room on the same GPU"
    require(not share_gpu or memory_share <= LARGEST_SHARE, "rollout.server.memory_share", expected, memory_share)


def check_algorithm(run: Run[GRPOConfig]) -> list[str]:
    """Check the components of the algorithm and return a sentence for each further model that is loaded.

    Raises:
        ConfigError: a component is not installed or has invalid constants, or the train engine cannot run the reference
            policy or the critic.
    """
    config, lines = run.config, []
    algorithm = config.algorithm
    for component in (algorithm.loss, algorithm.advantage, algorithm.correction, algorithm.mask):
        registry.require_installed(component)  # before the imports of torch
    from rl_trainers.algorithms.objective import make_policy_loss

    make_policy_loss(config.algorithm, config.actor.minibatches)
    registry.load_component(config.algorithm.advantage)
    for needed, name, model, spec in (
        (config.algorithm.needs_reference, "reference policy", config.ref, config.reference_spec()),
        (config.algorithm.needs_critic, "critic", config.critic, config.critic_spec()),
    ):
        if needed:
            model.engine.check(run.layout.actor.strategy, replace(spec, device=run.device))
            lines.append(f"a {name} besides the policy, from {spec.model_path}")
    return lines


def check_held_out(run: Run[Any], form: str) -> None:
    """Load the held-out examples and those of the named evaluation sets, with their rewards.

    Args:
        form: form of the held-out examples of the run, see `load_rows`.

    Raises:
        ConfigError, DataError: the data or the reward of a set cannot be used, or named sets have no servers.
    """
    config, sets = run.config, configs_of_sets(run.config)
    if config.evaluation.examples:
        load_rows(config.data, "test", form, config.seed)
    expected = "none without servers; add servers to the allocation, such as allocation=embedded:d1+fsdp:d1"
    require(run.layout.rollout is not None or not sets, "evaluation.sets", expected, [*sets])
    for name, of_set in sets.items():
        with naming_set(name):
            reward = registry.load("rl.rewards", of_set.rollout.reward)
            require(callable(reward), "reward", f"a function, not a {type(reward).__name__}", of_set.rollout.reward)
            load_rows(of_set.data, "set", "rl", of_set.seed)


def check_rows(run: Run[Any], form: str) -> list[str]:
    """Check settings and data of supervised or preference learning, with one optimizer step per batch.

    Args:
        form: form of the examples, see `load_rows`.

    Returns:
        A sentence about the batch size.

    Raises:
        ConfigError: a setting is not supported by these commands, or the batch size is not divisible or above the
            number of examples.
        DataError: the data cannot be used.
    """
    config = run.config
    require(
        config.actor.minibatches == 1,
        "actor.minibatches",
        "1: each batch is one optimizer step here; set data.batch_size to the size of a step",
        config.actor.minibatches,
    )
    check_chat_template(run)
    rows = load_rows(config.data, "train", form, config.seed)
    check_held_out(run, form)
    check_batch(config.data.batch_size, 1, 1, run.layout.actor.strategy.data)
    unit, size = "pairs" if form == "pairs" else "examples", config.data.batch_size
    require(size <= len(rows), "data.batch_size", f"at most the number of training {unit} ({len(rows)})", size)
    return [f"{size} of {len(rows)} {unit} per step"]
