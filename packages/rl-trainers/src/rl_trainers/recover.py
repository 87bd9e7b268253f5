"""Recover points: everything that a stopped run needs to go on as if it had not been stopped.

A point is taken between two steps. It is written beside the others and renamed when it is complete, so that a process
may be killed and a machine may lose its power at any moment; older points go after that. What the run wrote after its
last point is cut off when it is resumed, because those steps are taken again.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from rl_contracts.config import Settings, bounded
from rl_contracts.data import SaveLoadMeta
from rl_contracts.errors import ConfigError
from rl_contracts.logging import get_logger
from rl_trainers.part_states import PartState, Stateful, restore_parts

if TYPE_CHECKING:
    from rl_contracts.engine import TrainEngine

log = get_logger("trainers.recover")

_STEP = re.compile(r"step_(\d+)")


@dataclass
class RecoverConfig(Settings):
    """When a run saves what it needs to go on after it was stopped."""

    setting: ClassVar[str] = "recover"
    every: int = bounded(0, "0 (none) or more steps", lambda steps: steps >= 0)
    """Steps between recover points; 0: only where the run is asked to stop."""
    resume: bool = True
    """Go on from the last recover point of the run directory, where there is one."""


class RecoverPoints:
    """Saves and restores a run; every method is collective.

    Args:
        run_dir: points lie in `recover/step_<n>`.
        config: when.
        engines: train engines by name (`actor`, `critic`); the first one's ranks decide who writes.
        parts: this rank's other parts by name; each saves a state of its own.
        stop: whether this process was asked to stop, which the run does between two steps.

    Raises:
        ConfigError: points are asked for, and a part cannot be saved.
    """

    def __init__(
        self,
        run_dir: str | Path,
        config: RecoverConfig,
        engines: Mapping[str, TrainEngine],
        parts: Mapping[str, Any],
        stop: Callable[[], bool] = lambda: False,
    ) -> None:
        stateless = {name: part for name, part in parts.items() if not isinstance(part, Stateful)}
        for name, part in stateless.items():
            if config.every:
                raise ConfigError(
                    f"recover.every={config.every}: {name} ({type(part).__name__}) cannot be saved: it has no "
                    "state_dict and load_state_dict. Set recover.every=0."
                )
        self.run_dir, self.config = Path(run_dir), config
        self.directory = self.run_dir / "recover"
        self.engines, self.parts = dict(engines), dict(parts)
        self.parallel = next(iter(self.engines.values())).parallel
        self._stop, self._stateless = stop, sorted(stateless)
        self._last = 0

    def resume(self) -> int | None:
        """Restore the last complete point, and cut off what the run wrote after it.

        Returns:
            its step; None where there is none, or resuming is switched off.

        Raises:
            ConfigError, EngineError: the point is of another layout or cannot be read.
        """
        step = resumed_step(self.run_dir, self.config)
        point = self.directory / f"step_{step}"
        for name, engine in self.engines.items() if step else ():
            engine.load(SaveLoadMeta(str(point / name), "state"))
        with self.parallel.agreeing(f"going on after step {step} of {self.run_dir}"):
            if step:
                restore_parts(point, self.parts, self.parallel)
            if self.parallel.is_main:
                drop_lost_steps(self.run_dir, self.config)
        self._last = step
        if step and self.parallel.is_main:
            log.info("resumed from %s", point)
        return step or None

    def after_step(self, step: int) -> None:
        """Save a point if one is due, or if any rank was asked to stop, unless there is one of this step. Call it when
        the step has ended everywhere; again where it is waited for the next one's batch.

        Raises:
            SystemExit: the run was asked to stop, and does so now; the code is a shell's for SIGTERM.
        """
        stopping = any(self.parallel.gather_json(self._stop()))
        due = self.config.every and step % self.config.every == 0
        if step != self._last and (due or (stopping and not self._stateless)):
            self.save(step)
        if stopping:
            left = "no recover point, for these parts cannot be saved: " + ", ".join(self._stateless)
            log.warning("stopped after step %d, as asked; %s", step, left if self._stateless else "it can be resumed")
            raise SystemExit(128 + signal.SIGTERM)

    def save(self, step: int) -> None:
        """Save a point, and drop the ones before it.

        Raises:
            EngineError: it cannot be written; the points before it are still there.
        """
        point, scratch = self.directory / f"step_{step}", self.directory / f".step_{step}.partial"
        with self.parallel.agreeing(f"preparing {point}"):
            if self.parallel.is_main:
                shutil.rmtree(scratch, ignore_errors=True)
                scratch.mkdir(parents=True)
        for name, engine in self.engines.items():
            engine.save(SaveLoadMeta(str(scratch / name), "state"))
        with self.parallel.agreeing(f"saving {point}"):
            for name, part in self.parts.items():
                PartState.of(name, part).write(scratch, self.parallel.rank)
        with self.parallel.agreeing(f"completing {point}"):
            if self.parallel.is_main:
                _to_disk([*scratch.rglob("*"), scratch])
                shutil.rmtree(point, ignore_errors=True)
                os.replace(scratch, point)
                _to_disk([self.directory, self.run_dir])
                for other in _points(self.directory).keys() - {step}:
                    shutil.rmtree(self.directory / f"step_{other}", ignore_errors=True)
        self._last = step


def resumed_step(run_dir: Path, config: RecoverConfig) -> int:
    """Step after which a run goes on; 0 where it begins."""
    return (last_point(run_dir / "recover") or 0) if config.resume else 0


def drop_lost_steps(run_dir: Path, config: RecoverConfig) -> None:
    """Cut off what a stopped run wrote after its last point (records, rollouts, saved batches and checkpoints): all of
    it, where it was stopped before its first one."""
    step = resumed_step(run_dir, config)
    if not (step or (config.every and config.resume)):
        return
    last = step or -1
    metrics = run_dir / "metrics.jsonl"
    if metrics.exists():
        lines = metrics.read_text(encoding="utf-8").splitlines(keepends=True)
        kept = [line for line in lines if line.endswith("\n") and json.loads(line)["step"] <= last]
        scratch = metrics.with_suffix(".partial")
        scratch.write_text("".join(kept), encoding="utf-8")
        os.replace(scratch, metrics)
    for folder in ("rollouts", "batches", "checkpoints"):
        for path in (run_dir / folder).glob("*step_*"):
            match = _STEP.search(path.name)
            if match and int(match[1]) > last:
                shutil.rmtree(path) if path.is_dir() else path.unlink()


def last_point(directory: Path) -> int | None:
    """Step of the latest complete point in a `recover` directory."""
    return max(_points(directory), default=None)


def _to_disk(paths: Iterable[Path]) -> None:
    """Return when files, and the entries of directories, would outlive a loss of power."""
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _points(directory: Path) -> dict[int, Path]:
    found = {path: _STEP.fullmatch(path.name) for path in directory.glob("step_*")}
    return {int(match[1]): path for path, match in found.items() if match}
