"""Recover points: everything that a stopped run needs to go on as if it had not been stopped.

A point is taken between two steps: the training thread copies, and a thread of each rank writes the copies beside the
other points, which is renamed when it is complete. So a process may be killed and a machine may lose its power at any
moment; older points go after that. What the run wrote after the point that it goes on from is cut off, because those
steps are taken again.
"""

from __future__ import annotations

import shutil
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rl_contracts.data import SaveLoadMeta
from rl_contracts.errors import ConfigError, EngineError, RLError
from rl_contracts.runtime.logging import get_logger
from rl_contracts.runtime.metrics import record
from rl_contracts.runtime.run_files import GROUPS_FILE, recovery_checkpoint_steps, steps_in
from rl_trainers.recovery.component_states import ComponentState, Stateful, restore_components
from rl_trainers.recovery.lookup import RecoverConfig, resumed_step, truncate_to_checkpoint
from rl_trainers.run_log.background_writes import BackgroundDirectory, fsync_all, remove
from rl_trainers.run_log.schedule import Schedule

if TYPE_CHECKING:
    from rl_contracts.engine import Snapshot, TrainEngine

log = get_logger("trainers.recover")

COST = 0.02
"""Fraction of the time, at most, for which training is held by the points that the clock asks for."""


class RecoveryCheckpoints:
    """Saves and restores a run; every method is collective.

    One point at a time is written. A step at which the next one is due waits for it (`time/recover` shows that), so
    that which points there are does not depend on how fast a disk is.

    Args:
        run_dir: points lie in `recover/step_<n>`.
        config: when.
        engines: train engines by name (`actor`, `critic`); the first one's ranks decide who writes.
        parts: this rank's other parts by name; each saves a state of its own.
        stop: whether this process was asked to stop, which the run does between two steps.
        epochs: passes over the data that are over; needed for `recover.every_epochs`.

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
        epochs: Callable[[], int] | None = None,
    ) -> None:
        stateless = {name: part for name, part in parts.items() if not _can_be_saved(part)}
        for name, part in stateless.items():
            if config.every or config.every_epochs:
                setting = f"recover.every={config.every}" if config.every else "recover.every_epochs"
                raise ConfigError(
                    f"{setting}: {name} ({type(part).__name__}) cannot be saved: it has no "
                    "state_dict and load_state_dict. Set recover.every=0."
                )
            log.warning("no recovery checkpoints: %s (%s) cannot be saved", name, type(part).__name__)
            config = replace(config, every_minutes=0.0)
        self.run_dir, self.config = Path(run_dir), config
        self.directory = self.run_dir / "recover"
        self.engines, self.parts = dict(engines), dict(parts)
        self.parallel = next(iter(self.engines.values())).parallel
        self._stop, self._stateless, self._due = stop, sorted(stateless), Schedule(config, epochs)
        self._kept: list[int] = []
        """Steps of this run's complete points, those before it was resumed included."""
        self._pending: tuple[int, BackgroundDirectory] | None = None
        self._failures = 0

    def resume(self) -> int | None:
        """Restore the last whole point, and cut off what the run wrote after it.

        Returns:
            its step; None where there is none, or resuming is switched off.

        Raises:
            ConfigError, EngineError: the point is of another layout or cannot be read, or all points are damaged.
        """
        step = 0
        with self.parallel.agree_on_errors(f"looking for recover points in {self.directory}"):
            if self.parallel.is_main:
                step = resumed_step(self.run_dir, self.config)
        step = self.parallel.broadcast_json(step)  # other hosts may see files later
        point = self.directory / f"step_{step}"
        for name, engine in self.engines.items() if step else ():
            engine.load(SaveLoadMeta(str(point / name), "state"))
        with self.parallel.agree_on_errors(f"going on after step {step} of {self.run_dir}"):
            if step:
                restore_components(point, self.parts, self.parallel)
            if self.parallel.is_main:
                truncate_to_checkpoint(self.run_dir, self.config)
                self._kept = [other for other in recovery_checkpoint_steps(self.run_dir) if step and other <= step]
        self._kept = self.parallel.broadcast_json(self._kept)
        self._due.restart()
        if step and self.parallel.is_main:
            log.info("resumed from %s", point)
        return step or None

    def stop_requested(self) -> bool:
        """Whether any rank was (collective)."""
        return any(self.parallel.gather_json(self._stop()))

    def after_step(self, step: int) -> None:
        """Begin a point if one is due; save one and wait for it if any rank was asked to stop, unless there is one of
        this step. Call it when the step has ended everywhere; again where it is waited for the next one's batch.

        Raises:
            SystemExit: the run was asked to stop, and does so now; the code is a shell's for SIGTERM.
            EngineError: more points one after the other than allowed could not be written.
        """
        status = self._pending[1].status() if self._pending else None
        replies = self.parallel.gather_json([self._stop(), self._due.is_due(step), status])
        if self._pending and self._pending[1].merge([peer_status for _, _, peer_status in replies]):
            self._clear_pending()
        if any(stop for stop, _, _ in replies):
            self._stop_run(step)
        if replies[0][1] and step not in self._steps():
            self._attempt(self._start_write, step)
        if self._failures > self.config.max_failures:
            raise EngineError(
                f"{self._failures} recover points in a row could not be written (recover.max_failures="
                f"{self.config.max_failures} are allowed); the log says why."
            )

    def abandon(self, step: int, return_batch: Callable[[], None] | None) -> None:
        """Stop in the middle of the step after `step`, which was abandoned on every rank.

        Args:
            return_batch: takes the abandoned step's batch back, so that a point of `step` is saved; None: the weights
                have changed, and the newest point counts.

        Raises:
            SystemExit: always; the code is a shell's for SIGTERM.
        """
        why = "it had changed the weights"
        if return_batch is not None:
            try:
                with self.parallel.agree_on_errors("returning the batch of the abandoned step"):
                    return_batch()
                why = ""
            except RLError as error:
                why = str(error)
        if why:
            log.warning("the abandoned step %d leaves no recovery checkpoint: %s", step + 1, why)
        self._stop_run(step, save=not why)

    def save(self, step: int) -> None:
        """Save a point, and return when it is complete.

        Raises:
            EngineError: it cannot be written; the points before it are still there.
        """
        self._start_write(step)
        self._finish()
        if step not in self._kept:
            raise EngineError(f"{self.directory / f'step_{step}'} could not be saved; the log says why.")

    def finish(self) -> None:
        """Wait for the point that is being written, if any; one that does not come counts as failed."""
        self._attempt(self._finish)

    def _steps(self) -> list[int]:
        """Steps of which there is a point, or will be."""
        return self._kept + ([self._pending[0]] if self._pending else [])

    def _start_write(self, step: int) -> None:
        """Copy what the run is, and have it written."""
        began = time.monotonic()
        self._finish()
        target, entries = self.directory / f"step_{step}", {"step": step, "ranks": self.parallel.world_size}
        kept = [*self._kept, step][-self.config.keep :]
        completed = partial(_remove_all_but, self.directory, kept)
        self._pending = (
            step,
            BackgroundDirectory(target, self.parallel, self._copy, self.config.timeout, entries, completed),
        )
        self._due.least = (time.monotonic() - began) / COST

    def _copy(self, directory: Path) -> list[Snapshot]:
        writers: list[Snapshot] = []
        for name, engine in self.engines.items():
            meta = SaveLoadMeta(str(directory / name), "state")
            if (written := engine.snapshot(meta)) is not None:
                writers.append(written)
                continue
            engine.save(meta)
            if self.parallel.is_main:
                writers.append(partial(_files, directory / name))
        states = [ComponentState.describe(name, part) for name, part in self.parts.items()]
        writers += [partial(state.write, directory, self.parallel.rank) for state in states]
        return [*writers, self._keep_records] if self.parallel.is_main else writers

    def _keep_records(self) -> list[Path]:
        """See that no point outlives the records of the steps before it."""
        fsync_all(file for name in ("metrics.jsonl", GROUPS_FILE) if (file := self.run_dir / name).exists())
        return []

    def _finish(self) -> None:
        """Wait until nothing is being written.

        Raises:
            EngineError: it takes longer than allowed.
        """
        if self._pending and not self._pending[1].wait():
            raise EngineError(f"{self._pending[1].path} is still being written after recover.timeout.")
        if self._pending:
            self._clear_pending()

    def _clear_pending(self) -> None:
        """What was pending is over."""
        assert self._pending is not None
        (step, point), self._pending = self._pending, None
        if point.error:
            self._failed(f"{point.path}: {point.error}")
            return
        self._kept, self._failures = [*self._kept, step][-self.config.keep :], 0
        record("time/recover_written", point.took, kind="max")

    def _attempt(self, what: Callable[..., None], *arguments: Any) -> None:
        try:
            what(*arguments)
        except (EngineError, OSError) as error:
            self._failed(str(error))

    def _failed(self, why: str) -> None:
        self._failures += 1
        record("recover/failed", 1, kind="max")
        last = self._kept[-1] if self._kept else "none"
        log.warning("a recover point could not be written; the last one is of step %s. %s", last, why)

    def _stop_run(self, step: int, save: bool = True) -> None:
        """Stop, with a point of this step if there can be one."""
        left = "no recover point, for these parts cannot be saved: " + ", ".join(self._stateless)
        if not self._stateless:
            try:
                self._finish()
                if save and step and step not in self._steps():
                    self.save(step)
            except (EngineError, OSError) as error:
                log.warning("%s", error)
            left = f"it can be resumed after step {self._kept[-1]}" if self._kept else "there is no recover point"
        log.warning("stopped after step %d, as asked; %s", step, left)
        raise SystemExit(128 + signal.SIGTERM)


def _can_be_saved(part: Any) -> bool:
    return isinstance(part, Stateful) and getattr(part, "can_be_saved", True)


def _files(directory: Path) -> list[Path]:
    return [path for path in directory.rglob("*") if path.is_file()]


def _remove_all_but(directory: Path, steps: Sequence[int]) -> None:
    """Remove all other points, and what is left of damaged ones."""
    for path in directory.glob(".step_*.damaged"):
        shutil.rmtree(path, ignore_errors=True)
    for step in {*steps_in(directory)} - {*steps}:
        remove(directory / f"step_{step}")
