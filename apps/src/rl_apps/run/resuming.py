"""`resume_from`: the recovery checkpoint from which a run starts, its own or another run's."""

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
    """Return the recovery checkpoint that `resume_from` names.

    Returns:
        None if `resume_from` is empty, or if this run already started from that checkpoint. In both cases, the run
        resumes from its own newest recovery checkpoint.

    Raises:
        ConfigError: there is no such checkpoint, it is damaged, or it belongs to another run and this directory already
            holds a run.
    """
    name, directory = run.config.resume_from, run.directory
    file, holds_run = directory / "config.yaml", (directory / "metrics.jsonl").exists()
    if not name or (holds_run and file.exists() and read_config(file).get("resume_from") == name):
        return None
    require(run.config.recover.resume, "recover.resume", f"true, as resume_from={name} needs", False)
    point = _resolve(name, directory)
    if not (point / MANIFEST).exists():
        steps = ", ".join(map(str, recovery_checkpoint_steps(point.parent.parent)))
        found = f"only those of steps {steps}" if steps and point.parent.name == "recover" else f"none in {point}"
        raise ConfigError(
            f"resume_from={name}: expected a recovery checkpoint, found {found}. Give another run's directory, "
            "RUN/recover/step_N, or a step with run_dir=RUN."
        )
    if fault := find_damage(point):
        raise ConfigError(f"resume_from={name}: {point} is damaged ({fault}). Give an earlier recovery checkpoint.")
    if holds_run and point.parent.resolve() != (directory / "recover").resolve():
        raise ConfigError(
            f"resume_from={name} starts a new run, but {directory} already holds one. Choose another run_dir, "
            "or give a step of that run."
        )
    return point


def step_of(point: Path) -> int:
    """Return the step after which a recovery checkpoint was saved."""
    return int(json.loads((point / MANIFEST).read_text(encoding="utf-8"))["step"])


def take_over(run: Run[Any]) -> None:
    """Make the recovery checkpoint that `resume_from` names the newest one of a run.

    Later ones are removed. The checkpoint of another run is linked into this run, or copied if it is on another file
    system.
    """
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


def _resolve(name: str, directory: Path) -> Path:
    """Return the directory of a recovery checkpoint, given a step of this run, a run directory or a path."""
    if name.isdigit():
        return directory / "recover" / f"step_{name}"
    path = Path(name)
    newest = last_recovery_checkpoint(path / "recover")
    return path / "recover" / f"step_{newest}" if newest else path


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # on another file system
        shutil.copy2(source, target)
