"""The directory of a run: one command at a time, what was run in it before, and where the next command goes on."""

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
"""File that the trainers hold: they outlive a command that is killed, by the time in which they are ended."""

TRAINERS_END = 10.0
"""Seconds that a command waits for the trainers of the one before. Those of a local one that was killed take 6.5 at
most: the keeper notices, asks them to end, and kills them. On the nodes of a cluster that begins when an agent has not
heard of the launcher for `heartbeat_timeout`, which is waited for as well."""

RECENT = 20
"""Records of which the usual seconds of a step are the median."""


@contextmanager
def lock_run_directory(directory: Path) -> Iterator[None]:
    """Hold a run directory, made where it is missing, for this process. One in which nothing was done goes again.

    Raises:
        ConfigError: another process holds it, trainers of a command that is gone do not end, or it cannot be written.
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
        if not _locked(file):
            raise ConfigError(
                f"run_dir={directory} is in use by process {_holders(file)}. Wait for its end, stop it, or choose "
                "another run_dir."
            )
        file.truncate(0)
        _sign(file)
        try:
            _await_trainers(directory)
            yield
        finally:
            if fresh and {*directory.iterdir()} <= {lock, directory / NAMES}:
                shutil.rmtree(directory)


@contextmanager
def held_by_trainer(directory: Path) -> Iterator[None]:
    """Keep commands out of a run directory while this trainer works, also when its own command is gone."""
    with (directory / TRAINERS_LOCK).open("a+") as file:
        _locked(file, fcntl.LOCK_SH)
        _sign(file)
        yield


def _await_trainers(directory: Path) -> None:
    """Return when no trainer of an earlier command works in a directory any more."""
    if not (directory / TRAINERS_LOCK).exists():
        return
    config = directory / "config.yaml"
    settings = flatten(read_config(config)) if config.exists() else {}  # those of the earlier command
    seconds = TRAINERS_END + settings.get("launcher.options.heartbeat_timeout", 0.0)
    with (directory / TRAINERS_LOCK).open("a+") as file:
        deadline, announced = time.monotonic() + seconds, False
        while not _locked(file):
            who = f"trainers of an earlier command: process {_holders(file)}"
            if time.monotonic() > deadline:
                raise ConfigError(f"run_dir={directory} is in use by {who}. Stop them, or choose another run_dir.")
            if not announced:
                print(f"waiting up to {seconds:g} s for {who}", flush=True)
            announced = True
            time.sleep(0.1)
        file.truncate(0)


def _locked(file: IO[str], how: int = fcntl.LOCK_EX | fcntl.LOCK_NB) -> bool:
    """Whether nobody else holds a file, which this process then does until it closes it."""
    try:
        fcntl.flock(file, how)
    except BlockingIOError:
        return False
    except OSError:
        pass  # a file system without locks: there is nothing to hold
    return True


def _sign(file: IO[str]) -> None:
    """Add this process to those that hold a file."""
    file.write(f"{os.getpid()} on {socket.gethostname()}\n")
    file.flush()


def _holders(file: IO[str]) -> str:
    file.seek(0)
    return ", ".join(file.read().split("\n")[:-1])


@dataclass(frozen=True)
class PreviousRun:
    """What was run in a directory before."""

    step: int = 0
    """After which a command goes on; 0: it begins."""
    finished: bool = False
    """Whether there is nothing left to do for the command."""
    changes: tuple[str, ...] = ()
    """Settings that differ from those of before, in words."""


def previous_run(run: Run[Any], start: int = 0) -> PreviousRun:
    """Look at what is in the directory of a run.

    Args:
        start: step of the recovery checkpoint that `resume_from` names; 0: the newest one counts.

    Raises:
        ConfigError: it holds a run that this command cannot go on with: of another kind, of another seed, without a
            recover point, or with a `config.yaml` that cannot be read.
    """
    config, directory = run.config, run.directory
    if not (directory / "metrics.jsonl").exists():
        return PreviousRun(start)
    step = start or resumed_step(directory, config.recover)
    resumes = bool(step or has_no_finished_step(directory) or (config.recover.regular and config.recover.resume))
    file, now = directory / "config.yaml", yaml.safe_load(to_yaml(config))
    before = read_config(file) if file.exists() else now
    if other := ({*before} ^ {*now}) - {"resume_from"}:  # which runs of earlier commits do not have
        raise ConfigError(
            f"run_dir={directory} holds a run of another kind: only one of the two has the settings "
            f"{', '.join(sorted(other))}. Choose another run_dir, or the command of that run."
        )
    new, old = flatten(now), flatten(before)
    found = [key for key in {**old, **new} if old.get(key) != new.get(key) and not key.startswith(LOCATION_SETTINGS)]
    if "seed" in found:
        raise ConfigError(
            f"seed: expected {old.get('seed')}, that of the run in {directory}, found {config.seed}; give that one, or "
            "choose another run_dir for a new run."
        )
    ended = (directory / FINISHED).exists() and config.total_steps <= old.get("total_steps", 0)
    if ended and not start and (step or not found) and "total_epochs" not in found:
        return PreviousRun(finished=True)
    if not resumes or not (step or (file.exists() and can_begin_again(directory, old))):
        raise ConfigError(
            f"{directory} contains an earlier run that cannot be resumed: it has no recovery checkpoint, is finished, "
            "or recover.resume=false. Choose another trial=<name> or run_dir=<directory>; "
            "recover.every_minutes=10 saves recovery checkpoints."
        )
    changes = (f"{key} changed from {old.get(key, 'unset')} to {new.get(key, 'unset')}" for key in found)
    return PreviousRun(step, changes=tuple(changes))


def can_begin_again(directory: Path, settings: dict[str, Any]) -> bool:
    """Return whether a run without a recovery checkpoint can start again at step 1. Not where it has finished, or took
    steps and was not to save any: they would be lost.

    Args:
        settings: of the run, by dotted name.
    """
    saves = any(settings.get(f"recover.{each}") for each in ("every", "every_epochs", "every_minutes"))
    return (saves or has_no_finished_step(directory)) and not (directory / FINISHED).exists()


def check_started_from(run: Run[Any]) -> None:
    """Refuse to go on with a run that began with another kind of model.

    Raises:
        ConfigError: its architecture or size was another.
    """
    file, new = run.directory / "config.yaml", run.config.model
    before = read_config(file).get("model", {}) if file.exists() else {}
    old = ModelConfig(str(before.get("path", "")), directories=dict(before.get("directories", {})))
    there = all((Path(model.directory()) / "config.json").is_file() for model in (old, new))
    expected = (
        f"a model like {old.path}, with which the run in {run.directory} began; choose another run_dir for this one"
    )
    require(not there or same_model(old.directory(), new.directory()), "model.path", expected, new.path)


def leftover_files(directory: Path) -> list[str]:
    """A note where a new run's directory holds files that are no run's, such as data."""
    found = {entry.name for entry in directory.iterdir()} - {"lock", "logs", NAMES, "slurm"}
    if not found or (directory / "config.yaml").exists():
        return []
    return [f"warning: this directory contains other files ({', '.join(sorted(found)[:3])}); the run adds its own"]


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
    """Write `config.yaml`. One that was there and said something else stays beside it, as `config-<number>.yaml`."""
    file, text = run.directory / "config.yaml", to_yaml(run.config)
    if file.exists() and file.read_text(encoding="utf-8") != text:
        shutil.copy(file, file.with_name(f"config-{len([*run.directory.glob('config-*.yaml')]) + 1}.yaml"))
    scratch = file.with_suffix(".partial")
    scratch.write_text(text, encoding="utf-8")
    scratch.replace(file)
    (run.directory / FINISHED).unlink(missing_ok=True)
