"""`resume_from`: the recovery checkpoint that a run starts from, one of its own or of another run."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

from rl_apps.run.app import Run
from rl_contracts.config import require
from rl_contracts.errors import ConfigError
from rl_contracts.runtime.run_files import MANIFEST, find_damage, last_recovery_checkpoint, recovery_checkpoint_steps
from rl_monitor.run_directory import read_config
from rl_trainers.run_log.background_writes import remove


def named_point(run: Run[Any]) -> Path | None:
    """Return the recovery checkpoint that `resume_from` names; None where it is empty, or where this run started from
    it before: the same command continues after its newest one.

    Raises:
        ConfigError: there is none, it is damaged, or it is another run's and this directory holds a run.
    """
    wanted, directory = run.config.resume_from, run.directory
    file, holds_run = directory / "config.yaml", (directory / "metrics.jsonl").exists()
    if not wanted or (holds_run and file.exists() and read_config(file).get("resume_from") == wanted):
        return None
    require(run.config.recover.resume, "recover.resume", f"true, as resume_from={wanted} needs", False)
    point = _found(wanted, directory)
    if fault := find_damage(point):
        there = ", ".join(map(str, recovery_checkpoint_steps(point.parent.parent))) or "none"
        raise ConfigError(
            f"resume_from={wanted}: {point} is no recovery checkpoint ({fault}); steps in that run: {there}. "
            "Choose one of them, a run directory, or RUN/recover/step_N."
        )
    if holds_run and point.parent.resolve() != (directory / "recover").resolve():
        raise ConfigError(
            f"resume_from={wanted} starts a new run, but {directory} already holds one. Choose another run_dir, "
            "or give a step of that run."
        )
    return point


def step_of(point: Path) -> int:
    """Return the step after which a recovery checkpoint was saved."""
    return int(json.loads((point / MANIFEST).read_text(encoding="utf-8"))["step"])


def take_over(run: Run[Any]) -> None:
    """Make the recovery checkpoint that `resume_from` names the newest of a run: later ones are removed, and that of
    another run is linked into this one, or copied where it is on another file system."""
    point = named_point(run)
    if point is None:
        return
    step, directory = step_of(point), run.directory / "recover"
    own = directory / f"step_{step}"
    for later in (other for other in recovery_checkpoint_steps(run.directory) if other > step):
        remove(directory / f"step_{later}")
    if point.resolve() != own.resolve():
        remove(own)
        scratch = directory / f".step_{step}.partial"
        shutil.rmtree(scratch, ignore_errors=True)
        shutil.copytree(point, scratch, copy_function=_link)
        scratch.rename(own)


def _found(wanted: str, directory: Path) -> Path:
    """Return the directory that a step of this run, a run, or a path names."""
    if wanted.isdigit():
        return directory / "recover" / f"step_{wanted}"
    path = Path(wanted)
    newest = last_recovery_checkpoint(path / "recover")
    return path / "recover" / f"step_{newest}" if newest else path


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # on another file system
        shutil.copy2(source, target)
