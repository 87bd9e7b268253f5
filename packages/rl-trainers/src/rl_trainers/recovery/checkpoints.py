"""Recovery checkpoints: everything that a stopped run needs to resume as if it had not stopped.

A recovery checkpoint is taken between two steps. The training thread copies the state, and a thread of each rank writes
the copies to a scratch directory. When the directory is complete, it is renamed, and only then are older recovery
checkpoints removed. A process may therefore be killed, and a machine may lose power, at any moment. A resumed run
removes the output of later steps, because it takes those steps again.
"""

from __future__ import annotations

import shutil
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeGuard

from rl_contracts.data import SaveLoadMeta
from rl_contracts.errors import ConfigError, EngineError, RLError
from rl_contracts.runtime.logging import get_logger
from rl_contracts.runtime.metrics import record
from rl_contracts.runtime.run_files import GROUPS_FILE, recovery_checkpoint_steps, steps_in
from rl_trainers.recovery.component_states import ComponentState, Stateful, restore_components
from rl_trainers.recovery.lookup import RecoverConfig, resumed_step, truncate_to_checkpoint
from rl_trainers.recovery.schedule import Schedule
from rl_trainers.run_log import background_writes
from rl_trainers.run_log.background_writes import BackgroundDirectory, fsync_all, remove

if TYPE_CHECKING:
    from rl_contracts.engine import Snapshot, TrainEngine

log = get_logger("trainers.recover")

MAX_PAUSE_FRACTION = 0.02
"""Maximum fraction of time for which recovery checkpoints by `recover.every_minutes` pause training."""
RETAINED = 2
"""Number of recovery checkpoints to keep: if the newest one is damaged, the run resumes from the one before."""
MAX_FAILURES = 3
"""Consecutive recovery checkpoints that may fail; after one more, the disk is unlikely to recover, and a later loss of
the run would cost too many steps."""


class RecoveryCheckpoints:
    """Writer and reader of a run's recovery checkpoints; every method is collective.

    One recovery checkpoint is written at a time. If another one is due during a write, training waits for the end of
    that write; `time/recover` includes the wait. The steps of recovery checkpoints therefore do not depend on the speed
    of the disk.

    Args:
        run_dir: run directory; recovery checkpoints are in its `recover/step_<n>`.
        config: schedule.
        engines: train engines by name (`actor`, `critic`); the ranks of the first one decide which process writes.
        components: this rank's other components by name; each saves its state separately.
        stop: returns whether this process was asked to stop; the run then stops at the end of a step.

    Raises:
        ConfigError: `config` has an interval in steps, but a component cannot be saved.
    """

    def __init__(
        self,
        run_dir: str | Path,
        config: RecoverConfig,
        engines: Mapping[str, TrainEngine],
        components: Mapping[str, object],
        stop: Callable[[], bool] = lambda: False,
    ) -> None:
        stateless = {name: component for name, component in components.items() if not _can_be_saved(component)}
        for name, component in stateless.items():
            if config.every:
                raise ConfigError(
                    f"recover.every={config.every}: component {name} ({type(component).__name__}) cannot be saved. "
                    "Implement state_dict and load_state_dict, or set recover.every=0."
                )
            log.warning("no recovery checkpoints: component %s (%s) cannot be saved", name, type(component).__name__)
            config = replace(config, every_minutes=0.0)
        self.run_dir, self.config = Path(run_dir), config
        self.directory = self.run_dir / "recover"
        self.engines = dict(engines)
        self.components = {name: component for name, component in components.items() if _can_be_saved(component)}
        self.parallel = next(iter(self.engines.values())).parallel
        self._stop, self._stateless, self._schedule = stop, sorted(stateless), Schedule(config)
        self._completed_steps: list[int] = []
        """Steps of this run's complete recovery checkpoints, including those from before it resumed."""
        self._pending: tuple[int, BackgroundDirectory] | None = None
        self._failures = 0

    def resume(self) -> int | None:
        """Restore the newest complete recovery checkpoint, and remove the output of later steps.

        Returns:
            the step of the recovery checkpoint; None if there is none, or if resuming is disabled.

        Raises:
            ConfigError, EngineError: the recovery checkpoint has another layout or cannot be read, or all are damaged.
        """
        step = 0
        with self.parallel.agree_on_errors(f"finding recovery checkpoints in {self.directory}"):
            if self.parallel.is_main:
                step = resumed_step(self.run_dir, self.config)
        step = self.parallel.broadcast_json(step)  # other hosts may see the files later
        checkpoint = self.directory / f"step_{step}"
        for name, engine in self.engines.items() if step else ():
            engine.load(SaveLoadMeta(str(checkpoint / name), "state"))
        with self.parallel.agree_on_errors(f"resuming {self.run_dir} after step {step}"):
            if step:
                restore_components(checkpoint, self.components, self.parallel)
            if self.parallel.is_main:
                truncate_to_checkpoint(self.run_dir, self.config)
                self._completed_steps = [
                    saved for saved in recovery_checkpoint_steps(self.run_dir) if step and saved <= step
                ]
        self._completed_steps = self.parallel.broadcast_json(self._completed_steps)
        self._schedule.restart()
        if step and self.parallel.is_main:
            log.info("resumed from %s", checkpoint)
        return step or None

    def stop_requested(self) -> bool:
        """Return whether any rank was asked to stop (collective)."""
        return any(self.parallel.gather_json(self._stop()))

    def after_step(self, step: int) -> None:
        """Start a recovery checkpoint if one is due, and stop the run if any rank was asked to stop.

        Before stopping, save this step and wait for the write, unless the step has a recovery checkpoint. Call this
        when the step has ended on all ranks, and again if a stop interrupts the wait for the next batch.

        Raises:
            SystemExit: the run was asked to stop; the exit code is 143, as after SIGTERM.
            EngineError: more than `MAX_FAILURES` consecutive recovery checkpoints could not be written.
        """
        status = self._pending[1].status() if self._pending else None
        replies = self.parallel.gather_json([self._stop(), self._schedule.is_due(step), status])
        if self._pending and self._pending[1].merge([peer_status for _, _, peer_status in replies]):
            self._clear_pending()
        if any(stop for stop, _, _ in replies):
            self._stop_run(step)
        if replies[0][1] and step not in self._steps():
            self._attempt(self._start_write, step)
        if self._failures > MAX_FAILURES:
            raise EngineError(
                f"{self._failures} consecutive recovery checkpoints could not be written (allowed: {MAX_FAILURES}). "
                "Check the disk and the warnings in the log, then run the command again."
            )

    def abandon(self, step: int, return_batch: Callable[[], None] | None) -> None:
        """Stop in the middle of the step after `step`, which every rank has abandoned.

        Args:
            return_batch: returns the abandoned step's batch to its source, so that `step` can be saved; None: the
                weights have changed, and the run resumes from the newest recovery checkpoint.

        Raises:
            SystemExit: always; the exit code is 143, as after SIGTERM.
        """
        reason = "the optimizer had already updated the weights"
        if return_batch is not None:
            try:
                with self.parallel.agree_on_errors("returning the batch of the abandoned step"):
                    return_batch()
                reason = ""
            except RLError as error:
                reason = str(error)
        if reason:
            log.warning("step %d was abandoned without a recovery checkpoint: %s", step + 1, reason)
        self._stop_run(step, save=not reason)

    def save(self, step: int) -> None:
        """Save a recovery checkpoint, and return when it is complete.

        Raises:
            EngineError: the recovery checkpoint cannot be written; earlier ones remain.
        """
        self._start_write(step)
        self._finish()
        if step not in self._completed_steps:
            raise EngineError(f"{self.directory / f'step_{step}'} could not be saved; see the warning in the log.")

    def finish(self) -> None:
        """Wait for the pending recovery checkpoint, if any; one that exceeds the timeout counts as failed."""
        self._attempt(self._finish)

    def _steps(self) -> list[int]:
        """Return the steps with a complete or pending recovery checkpoint."""
        return self._completed_steps + ([self._pending[0]] if self._pending else [])

    def _start_write(self, step: int) -> None:
        """Copy the state of the run, and start writing it in the background."""
        start = time.monotonic()
        self._finish()
        target, entries = self.directory / f"step_{step}", {"step": step, "ranks": self.parallel.world_size}
        retained = [*self._completed_steps, step][-RETAINED:]
        completed = partial(_remove_all_but, self.directory, retained)
        self._pending = step, BackgroundDirectory(target, self.parallel, self._copy, entries, completed)
        self._schedule.min_seconds = (time.monotonic() - start) / MAX_PAUSE_FRACTION

    def _copy(self, directory: Path) -> list[Snapshot]:
        writers: list[Snapshot] = []
        for name, engine in self.engines.items():
            meta = SaveLoadMeta(str(directory / name), "state")
            if (snapshot := engine.snapshot(meta)) is not None:
                writers.append(snapshot)
                continue
            engine.save(meta)
            if self.parallel.is_main:
                writers.append(partial(_files, directory / name))
        states = [ComponentState.capture(name, component) for name, component in self.components.items()]
        writers += [partial(state.write, directory, self.parallel.rank) for state in states]
        return [*writers, self._sync_records] if self.parallel.is_main else writers

    def _sync_records(self) -> list[Path]:
        """Flush the records of the steps so far to disk, before the recovery checkpoint is complete."""
        fsync_all(file for name in ("metrics.jsonl", GROUPS_FILE) if (file := self.run_dir / name).exists())
        return []

    def _finish(self) -> None:
        """Wait until no write is pending.

        Raises:
            EngineError: the write exceeds the timeout.
        """
        if self._pending and not self._pending[1].wait():
            raise EngineError(
                f"{self._pending[1].path} was not written within {2 * background_writes.WRITE_SECONDS:g} s; use a "
                "faster disk, or save less often (recover.every_minutes)."
            )
        if self._pending:
            self._clear_pending()

    def _clear_pending(self) -> None:
        """Take over the result of the pending write, which has ended."""
        assert self._pending is not None
        (step, directory), self._pending = self._pending, None
        if directory.error:
            self._failed(f"{directory.path}: {directory.error}")
            return
        self._completed_steps, self._failures = [*self._completed_steps, step][-RETAINED:], 0
        record("time/recover_written", directory.write_seconds, kind="max")

    def _attempt(self, function: Callable[..., None], *arguments: Any) -> None:
        try:
            function(*arguments)
        except (EngineError, OSError) as error:
            self._failed(str(error))

    def _failed(self, reason: str) -> None:
        self._failures += 1
        record("recover/failed", 1, kind="max")
        newest = self._completed_steps[-1] if self._completed_steps else "none"
        log.warning("a recovery checkpoint could not be written (newest: step %s): %s", newest, reason)

    def _stop_run(self, step: int, save: bool = True) -> None:
        """Stop the run, with a recovery checkpoint of this step if possible."""
        outcome = "no recovery checkpoint, because these components cannot be saved: " + ", ".join(self._stateless)
        if not self._stateless:
            try:
                self._finish()
                if save and step and step not in self._steps():
                    self.save(step)
            except (EngineError, OSError) as error:
                log.warning("%s", error)
            outcome = (
                f"the run can resume after step {self._completed_steps[-1]}"
                if self._completed_steps
                else "there is no recovery checkpoint"
            )
        log.warning("stopped after step %d on request; %s", step, outcome)
        raise SystemExit(128 + signal.SIGTERM)


def _can_be_saved(component: object) -> TypeGuard[Stateful]:
    return isinstance(component, Stateful) and getattr(component, "can_be_saved", True)


def _files(directory: Path) -> list[Path]:
    return [path for path in directory.rglob("*") if path.is_file()]


def _remove_all_but(directory: Path, steps: Sequence[int]) -> None:
    """Remove the recovery checkpoints of all steps but `steps`, and the damaged ones that were set aside."""
    for path in directory.glob(".step_*.damaged"):
        shutil.rmtree(path, ignore_errors=True)
    for step in {*steps_in(directory)} - {*steps}:
        remove(directory / f"step_{step}")
