"""Find the recovery checkpoint that a run resumes from, and remove the output of later steps.

A recovery checkpoint is `recover/step_<n>` with a manifest of its files. Only `resumed_step` decides from which one a
run resumes.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from rl_contracts.config import Settings, bounded
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
from rl_trainers.run_log.rollouts import IMAGE_FOLDER

log = get_logger("trainers.recover")


_STEP = re.compile(r"step_(\d+)")


@dataclass
class RecoverConfig(Settings):
    """Schedule of recovery checkpoints. Each interval that is set applies, and every save restarts the minutes.

    With no interval set, only a request to stop saves one.
    """

    setting: ClassVar[str] = "recover"
    every: int = bounded(0, "0 (none) or more steps", lambda steps: steps >= 0)
    """Steps between saves; 0 disables this interval."""
    every_minutes: float = bounded(10.0, "0 (none) or more minutes", lambda minutes: minutes >= 0)
    """Minutes between saves; a save follows the first step after that time. 0 disables this interval. The
    interval is at least 50 times the pause of the last save, so that saves take less than 2 % of the time."""
    resume: bool = True
    """Resume from the newest complete recovery checkpoint of the run directory, if there is one."""

    @property
    def regular(self) -> bool:
        """True if any interval is set."""
        return bool(self.every or self.every_minutes)


def resumed_step(run_dir: Path, config: RecoverConfig) -> int:
    """Return the step after which a run resumes; 0 if it starts from the beginning.

    Raises:
        ConfigError: all recovery checkpoints are damaged.
    """
    directory = run_dir / "recover"
    if not config.resume:
        return 0
    if (step := last_recovery_checkpoint(directory)) is not None:
        return step
    if steps := recovery_checkpoint_steps(run_dir):
        faults = "; ".join(f"step_{step}: {find_damage(directory / f'step_{step}')}" for step in steps)
        raise ConfigError(
            f"{directory}: expected a complete recovery checkpoint, found only damaged ones: {faults}. Choose another "
            "run_dir, or remove them to start over."
        )
    return 0


def has_no_finished_step(run_dir: Path) -> bool:
    """Return whether a run wrote records but finished no step."""
    records = run_dir / "metrics.jsonl"
    return records.exists() and not re.search(rb'"step": [1-9]', records.read_bytes())


def truncate_to_checkpoint(run_dir: Path, config: RecoverConfig) -> None:
    """Remove the output of steps after the recovery checkpoint that a run resumes from.

    This includes records, rollouts, saved batches, checkpoints, damaged recovery checkpoints and unfinished
    directories, but not the images of rollouts, which repeated steps use again. All output is removed if the run
    finished no step. The same holds if there is no recovery checkpoint, although `config` enables saving and resuming.

    Raises:
        ConfigError: see `resumed_step`.
    """
    step = resumed_step(run_dir, config)
    for folder in ("recover", "checkpoints"):
        for scratch in (run_dir / folder).glob(".step_*.partial"):
            shutil.rmtree(scratch)
    if not (step or (config.regular and config.resume) or has_no_finished_step(run_dir)):
        return
    last = step or -1
    for lost in (n for n in recovery_checkpoint_steps(run_dir) if n > last):
        checkpoint = run_dir / "recover" / f"step_{lost}"
        log.warning("%s is damaged; the run resumes after step %d: %s", checkpoint, step, find_damage(checkpoint))
        aside = checkpoint.with_name(f".step_{lost}.damaged")
        shutil.rmtree(aside, ignore_errors=True)
        checkpoint.rename(aside)  # kept for inspection until the next recovery checkpoint
    for file in (run_dir / "metrics.jsonl", run_dir / GROUPS_FILE):
        _truncate_lines(file, last)
    for lost in (n for n in steps_in(run_dir / "checkpoints") if n > last):
        shutil.rmtree(run_dir / "checkpoints" / f"step_{lost}")
    for folder in ("rollouts", "batches"):
        for path in (run_dir / folder).glob("*step_*"):
            match = _STEP.search(path.name)
            if match and int(match[1]) > last:
                shutil.rmtree(path) if path.is_dir() else path.unlink()
    if last < 0:
        shutil.rmtree(run_dir / "rollouts" / IMAGE_FOLDER, ignore_errors=True)


def _truncate_lines(file: Path, last: int) -> None:
    """Remove the records of steps after `last` from a file of JSON lines, and all incomplete or damaged lines."""
    if not file.exists():
        return
    retained, damaged = list[bytes](), 0
    with file.open("rb") as stream:
        for line in (line for line in stream if line.endswith(b"\n")):
            try:
                retained += [line] if json.loads(line)["step"] <= last else []
            except (ValueError, TypeError, KeyError):
                damaged += 1
    if damaged:
        log.warning("%s: removing %d lines that cannot be read", file, damaged)
    scratch = file.with_suffix(".partial")
    scratch.write_bytes(b"".join(retained))
    fsync_all([scratch])
    os.replace(scratch, file)
