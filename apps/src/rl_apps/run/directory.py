"""The run directory: a lock for one command at a time, the previous run in it, and where the next command resumes."""

from __future__ import annotations

import fcntl
import os
import shutil
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import IO, Any

import yaml

from rl_apps.run.app import Run
from rl_apps.settings.compose import to_yaml
from rl_apps.settings.model import ModelConfig
from rl_contracts.config import require
from rl_contracts.errors import ConfigError
from rl_contracts.models.directory import same_model
from rl_contracts.runtime.run_files import last_recovery_checkpoint
from rl_monitor.run_directory import FINISHED, LOCATION_SETTINGS, NAMES, flatten, last_records, read_config
from rl_trainers.recovery.lookup import has_no_finished_step, resumed_step

TRAINERS_LOCK = "trainers.lock"
"""Lock file of the trainers. If a command is killed, its trainers keep running until they are stopped."""

TRAINERS_END = 30.0
"""Seconds that a command waits for the trainers of the previous command to end.

If a command is killed, its trainers end within 6.5 s: the reaper asks them to stop, and then kills them. On a cluster,
this begins only 20 s (`HEARTBEAT_TIMEOUT` of `rl_launchers.cluster.node_agents`) after the launcher's last message.
"""

RECENT = 20
"""Number of newest records for the median duration of a step."""


@contextmanager
def lock_run_directory(directory: Path) -> Iterator[None]:
    """Create a run directory if missing, and hold its lock. A new directory without results is removed at the end.

    Raises:
        ConfigError: another process holds the lock, trainers of an earlier command keep running, or the directory
            cannot be written.
    """
    lock, fresh = directory / "lock", not directory.exists()
    try:
        directory.mkdir(parents=True, exist_ok=True)
        file = lock.open("a+")
    except OSError as error:
        raise ConfigError(
            f"run_dir={directory}: expected a directory that can be written, found: {error}. Choose another run_dir."
        ) from error
    with file:
        if not _try_lock(file):
            raise ConfigError(
                f"run_dir={directory} is in use by process {_holders(file)}. Wait for its end, stop it, or choose "
                "another run_dir."
            )
        file.truncate(0)
        _write_holder(file)
        try:
            _await_trainers(directory)
            yield
        finally:
            if fresh and {*directory.iterdir()} <= {lock, directory / NAMES}:
                shutil.rmtree(directory)


@contextmanager
def held_by_trainer(directory: Path) -> Iterator[None]:
    """Keep commands out of a run directory while this trainer works, even after its own command is gone."""
    with (directory / TRAINERS_LOCK).open("a+") as file:
        _try_lock(file, fcntl.LOCK_SH)
        _write_holder(file)
        yield


def _await_trainers(directory: Path) -> None:
    """Return when no trainer of an earlier command works in a directory.

    Raises:
        ConfigError: trainers are still running after the timeout.
    """
    if not (directory / TRAINERS_LOCK).exists():
        return
    with (directory / TRAINERS_LOCK).open("a+") as file:
        deadline, announced = time.monotonic() + TRAINERS_END, False
        while not _try_lock(file):
            who = f"trainers of an earlier command: process {_holders(file)}"
            if time.monotonic() > deadline:
                raise ConfigError(f"run_dir={directory} is in use by {who}. Stop them, or choose another run_dir.")
            if not announced:
                print(f"waiting up to {TRAINERS_END:g} s for {who}", flush=True)
            announced = True
            time.sleep(0.1)
        file.truncate(0)


def _try_lock(file: IO[str], operation: int = fcntl.LOCK_EX | fcntl.LOCK_NB) -> bool:
    """Lock a file until it is closed, and return whether that succeeded; false if another process holds the lock."""
    try:
        fcntl.flock(file, operation)
    except BlockingIOError:
        return False
    except OSError:
        pass  # the file system has no locks
    return True


def _write_holder(file: IO[str]) -> None:
    """Append this process to the holders of a lock file."""
    file.write(f"{os.getpid()} on {socket.gethostname()}\n")
    file.flush()


def _holders(file: IO[str]) -> str:
    file.seek(0)
    return ", ".join(file.read().split("\n")[:-1])


def stored_settings(directory: Path) -> dict[str, Any]:
    """Return the settings of the run in a directory by dotted name; empty if the directory holds no run."""
    file = directory / "config.yaml"
    return flatten(read_config(file)) if file.exists() and (directory / "metrics.jsonl").exists() else {}


@dataclass(frozen=True)
class PreviousRun:
    """The run that a directory already contains."""

    step: int = 0
    """Step after which a command resumes; 0: from the beginning."""
    finished: bool = False
    """True if the command has nothing left to do."""
    changes: tuple[str, ...] = ()
    """Settings that differ from the previous run, one sentence each."""


def previous_run(run: Run[Any], start: int = 0) -> PreviousRun:
    """Return the state of the run in a directory.

    Args:
        start: step of the recovery checkpoint that `resume_from` names; 0: use the newest one.

    Raises:
        ConfigError: this command cannot resume the run: another kind of run, another seed, no recovery checkpoint, or a
            `config.yaml` that cannot be read.
    """
    config, directory = run.config, run.directory
    if not (directory / "metrics.jsonl").exists():
        return PreviousRun(start)
    step = start or resumed_step(directory, config.recover)
    resumes = bool(step or has_no_finished_step(directory) or (config.recover.regular and config.recover.resume))
    file, now = directory / "config.yaml", yaml.safe_load(to_yaml(config))
    before = read_config(file) if file.exists() else now
    if different := ({*before} ^ {*now}) - {"resume_from"}:  # runs of earlier versions do not have this setting
        raise ConfigError(
            f"run_dir={directory} holds a run of another kind: only one of the two has the settings "
            f"{', '.join(sorted(different))}. Choose another run_dir, or the command of that run."
        )
    new, old = flatten(now), flatten(before)
    changed = [key for key in {**old, **new} if old.get(key) != new.get(key) and not key.startswith(LOCATION_SETTINGS)]
    if "seed" in changed:
        raise ConfigError(
            f"seed: expected {old.get('seed')}, the seed of the run in {directory}, found {config.seed}; use that "
            "seed, or choose another run_dir for a new run."
        )
    finished = (directory / FINISHED).exists() and config.total_steps <= old.get("total_steps", 0)
    if finished and not start and (step or not changed) and "total_epochs" not in changed:
        return PreviousRun(finished=True)
    if not resumes or not (step or (file.exists() and can_begin_again(directory, old))):
        why = "it has no recovery checkpoint" if config.recover.resume else "recover.resume=false"
        raise ConfigError(
            f"{directory} contains an earlier run that cannot be resumed: {why}. Choose another trial=<name> or "
            "run_dir=<directory>; recover.every=N saves a recovery checkpoint every N steps."
        )
    changes = (f"{key} changed from {old.get(key, 'unset')} to {new.get(key, 'unset')}" for key in changed)
    return PreviousRun(step, changes=tuple(changes))


def can_begin_again(directory: Path, settings: dict[str, Any]) -> bool:
    """Return whether a run without a recovery checkpoint can start again at step 1.

    A finished run cannot, and neither can a run that took steps without saving recovery checkpoints: the steps would be
    lost.

    Args:
        settings: settings of the run, by dotted name.
    """
    saves = any(settings.get(f"recover.{each}") for each in ("every", "every_minutes"))
    return (saves or has_no_finished_step(directory)) and not (directory / FINISHED).exists()


def check_started_from(run: Run[Any], point: Path | None = None) -> None:
    """Reject resuming a run that started with another kind of model.

    Args:
        point: recovery checkpoint that `resume_from` names; None: the run's own newest one.

    Raises:
        ConfigError: architecture or size of the model differ.
    """
    directory = point.parent.parent if point else run.directory
    file, new = directory / "config.yaml", run.config.model
    before = read_config(file).get("model", {}) if file.exists() else {}
    old = ModelConfig(str(before.get("path", "")), directories=dict(before.get("directories", {})))
    configs_exist = all((Path(model.directory()) / "config.json").is_file() for model in (old, new))
    expected = f"the architecture and size of {old.path}, the model of the run in {directory} (or start a new run)"
    require(not configs_exist or same_model(old.directory(), new.directory()), "model.path", expected, new.path)


def leftover_files(directory: Path) -> list[str]:
    """Return a warning if the directory of a new run contains files that belong to no run, such as data."""
    files = {entry.name for entry in directory.iterdir()} - {"lock", "logs", NAMES, "slurm"}
    if not files or (directory / "config.yaml").exists():
        return []
    return [f"warning: this directory contains other files ({', '.join(sorted(files)[:3])}); the run adds its own"]


def resumption(directory: Path) -> str:
    """Return a sentence on where a stopped run resumes."""
    if step := last_recovery_checkpoint(directory / "recover"):
        return f"The same command resumes after step {step}."
    file = directory / "config.yaml"
    if not file.exists() or can_begin_again(directory, flatten(read_config(file))):
        return "No recovery checkpoint was saved; the same command starts again at step 1."
    return "No recovery checkpoint was saved, so this run cannot be resumed."


def step_seconds(directory: Path) -> float:
    """Return the median `time/step` of the newest steps of a run, in seconds; 0 before the first one."""
    records = last_records(directory, RECENT)
    return median([record["time/step"] for record in records if "time/step" in record] or [0.0])


def write_config(run: Run[Any]) -> None:
    """Write `config.yaml`. A different earlier version is kept beside it as `config-<number>.yaml`."""
    file, text = run.directory / "config.yaml", to_yaml(run.config)
    if file.exists() and file.read_text(encoding="utf-8") != text:
        shutil.copy(file, file.with_name(f"config-{len([*run.directory.glob('config-*.yaml')]) + 1}.yaml"))
    scratch = file.with_suffix(".partial")
    scratch.write_text(text, encoding="utf-8")
    scratch.replace(file)
    (run.directory / FINISHED).unlink(missing_ok=True)
