"""Where a run's recover points lie, which of them are whole, and what is cut off where a run goes on.

A point is `recover/step_<n>` with a manifest of its files. Everybody who looks for the point from which a run goes on
asks `resumed_step`.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from rl_contracts.config import bounded
from rl_contracts.errors import ConfigError
from rl_contracts.runtime.logging import get_logger
from rl_contracts.runtime.run_files import (
    GROUPS_FILE,
    find_damage,
    last_recovery_checkpoint,
    recovery_checkpoint_steps,
    steps_in,
)
from rl_trainers.run_log.background_writes import fsync_all
from rl_trainers.run_log.schedule import EveryConfig

log = get_logger("trainers.recover")


_STEP = re.compile(r"step_(\d+)")


@dataclass
class RecoverConfig(EveryConfig):
    """When a run saves recovery checkpoints; where nothing is set, only when it is asked to stop."""

    setting: ClassVar[str] = "recover"
    every_minutes: float = bounded(10.0, "0 (none) or more minutes", lambda minutes: minutes >= 0)
    """Minutes between two of them, at the first step after that; 0: the clock does not count. At least 50 times as long
    as training was held for the last one, so that they cost less than 2 % of the time."""
    resume: bool = True
    """Go on from the last whole recover point of the run directory, where there is one."""
    keep: int = bounded(2, "at least 1", lambda points: points >= 1)
    """Recover points that stay; older ones go when a new one is on the disk. The one before the last is what a run goes
    on from where the last one was damaged."""
    max_failures: int = bounded(3, "0 or more", lambda failures: failures >= 0)
    """Points one after the other that may fail to be written, by a full disk for example; one more ends the run. Older
    points stay, and the next one that is due is another attempt."""
    timeout: float = bounded(120.0, "more than 0 seconds", lambda seconds: seconds > 0)
    """Seconds in which a point must be written; a step at which the next one is due, and a stop, wait for it."""


def resumed_step(run_dir: Path, config: RecoverConfig) -> int:
    """Step after which a run goes on; 0 where it begins.

    Raises:
        ConfigError: there are points, and each of them is damaged.
    """
    directory = run_dir / "recover"
    if not config.resume:
        return 0
    if (step := last_recovery_checkpoint(directory)) is not None:
        return step
    if steps := recovery_checkpoint_steps(run_dir):
        faults = "; ".join(f"step_{step}: {find_damage(directory / f'step_{step}')}" for step in steps)
        raise ConfigError(
            f"{directory}: expected a whole recover point, found only damaged ones: {faults}. Choose another run_dir, "
            "or remove them to begin anew in this one."
        )
    return 0


def took_no_step(run_dir: Path) -> bool:
    """Return whether a run wrote records, and none of a step that it finished."""
    records = run_dir / "metrics.jsonl"
    return records.exists() and not re.search(rb'"step": [1-9]', records.read_bytes())


def truncate_to_checkpoint(run_dir: Path, config: RecoverConfig) -> None:
    """Cut off what a stopped run wrote after the point from which it goes on (records, rollouts, saved batches and
    checkpoints, damaged recover points): all of it, where it was stopped before its first point or step. What it had
    half written goes as well.

    Raises:
        ConfigError: see `resumed_step`.
    """
    step = resumed_step(run_dir, config)
    for folder in ("recover", "checkpoints"):
        for scratch in (run_dir / folder).glob(".step_*.partial"):
            shutil.rmtree(scratch)
    if not (step or (config.regular and config.resume) or took_no_step(run_dir)):
        return
    last = step or -1
    for lost in (n for n in recovery_checkpoint_steps(run_dir) if n > last):
        point = run_dir / "recover" / f"step_{lost}"
        log.warning("%s is damaged, the run goes on after step %d: %s", point, step, find_damage(point))
        aside = point.with_name(f".step_{lost}.damaged")
        shutil.rmtree(aside, ignore_errors=True)
        point.rename(aside)  # which is kept until the next point: somebody may want to see what became of it
    for file in (run_dir / "metrics.jsonl", run_dir / GROUPS_FILE):
        _truncate_lines(file, last)
    for lost in (n for n in steps_in(run_dir / "checkpoints") if n > last):
        shutil.rmtree(run_dir / "checkpoints" / f"step_{lost}")
    for folder in ("rollouts", "batches"):
        for path in (run_dir / folder).glob("*step_*"):
            match = _STEP.search(path.name)
            if match and int(match[1]) > last:
                shutil.rmtree(path) if path.is_dir() else path.unlink()


def _truncate_lines(file: Path, last: int) -> None:
    """Cut off what a file of JSON lines has of steps after `last`, half a line, and what a loss of power left of
    others."""
    if not file.exists():
        return
    kept, damaged = list[bytes](), 0
    with file.open("rb") as found:
        for line in (line for line in found if line.endswith(b"\n")):
            try:
                kept += [line] if json.loads(line)["step"] <= last else []
            except (ValueError, TypeError, KeyError):
                damaged += 1
    if damaged:
        log.warning("%s: %d lines cannot be read, and are cut off", file, damaged)
    scratch = file.with_suffix(".partial")
    scratch.write_bytes(b"".join(kept))
    fsync_all([scratch])
    os.replace(scratch, file)
