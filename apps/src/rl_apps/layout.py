"""What would run where: allocation, batch arithmetic and run directory, checked before any process starts."""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from rl_contracts.allocation import Allocation, Component
from rl_contracts.errors import ConfigError
from rl_launchers.resources import visible_gpus


@dataclass(frozen=True)
class Layout:
    """One trainer, and the servers of one role or none."""

    actor: Component
    rollout: Component | None

    @property
    def processes(self) -> int:
        """Processes of the run, the launcher not counted."""
        return self.actor.world_size + (self.rollout.strategy.data if self.rollout else 0)

    @property
    def cores_each(self) -> int:
        """Cores and threads per process, so that together they fill this machine."""
        return max(1, (os.cpu_count() or 1) // self.processes)

    @property
    def gpus_each(self) -> int:
        """Devices per process: 1 where this machine has one for each, else 0, and everything runs on the CPU."""
        return int(len(visible_gpus(os.environ)) >= self.processes)


def layout_of(allocation: str, needs_servers: bool) -> Layout:
    """Parse an allocation and find its parts.

    Raises:
        ConfigError: no trainer or several, no servers where they are needed, or components that share devices.
    """
    parsed = Allocation.parse(allocation)
    if len(parsed.train) != 1:
        raise ConfigError(f"allocation={allocation}: expected one trainer, found {len(parsed.train)}.")
    if len(parsed.inference) > 1 or (needs_servers and not parsed.inference):
        found = len(parsed.inference)
        raise ConfigError(
            f"allocation={allocation}: expected servers of one kind, found {found}; for example embedded:d1+fsdp:d1."
        )
    if any(len(group) > 1 for group in parsed.groups):
        raise ConfigError(
            f"allocation={allocation}: components that share devices (`|`) are not supported here; use `+`."
        )
    return Layout(parsed.train[0], parsed.inference[0] if parsed.inference else None)


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


def run_directory(run_dir: str, experiment: str, trial: str, resumes: bool = False) -> Path:
    """Where a run keeps its files: `run_dir`, or `runs/<experiment>/<trial>`; an empty trial is the time of day.

    Args:
        resumes: whether the command goes on with a run that is there already.

    Raises:
        ConfigError: the directory already holds a run.
    """
    name = trial or datetime.now().strftime("%Y%m%d-%H%M%S")
    directory = Path(run_dir or Path("runs") / experiment / name).resolve()
    if (directory / "metrics.jsonl").exists() and not resumes:
        raise ConfigError(
            f"{directory} already holds a run; choose another trial=<name> or run_dir=<directory>. (With recover.every "
            "and recover.resume a command goes on with the run that is there.)"
        )
    return directory
