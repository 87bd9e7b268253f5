"""Lifetime of a training run: its remaining steps, and their end by a stop request, an error or the last step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

from rl_contracts.errors import EngineError, RLError, StalledError, StopRequestedError
from rl_contracts.runtime.logging import get_logger
from rl_trainers.run_log.background_writes import wait_for_writes

if TYPE_CHECKING:
    from tensordict import TensorDict

    from rl_trainers.run_log.run_log import RunLog

log = get_logger("trainers")

LINGER_SECONDS = 10.0
"""Seconds to wait for pending writes when a run ends, for example after an error."""


class BatchSource(Protocol):
    """Source of training batches: an `rl_contracts.rollout.RolloutRuntime`, or a data set."""

    def next_batch(self) -> TensorDict:
        """Return this rank's sequences of the next batch.

        Raises:
            StopIteration: the data is exhausted.
            StopRequestedError: the process was asked to stop while waiting for the batch.
        """

    def return_batch(self) -> None:
        """Take back the last batch, because its step was abandoned before it changed the weights."""

    def end_step(self, version: int) -> None:
        """Record that the step of the last batch ended with the weights at `version`."""


class Recovery(Protocol):
    """Recovery checkpoints of a run and its requests to stop; see `rl_trainers.RecoveryCheckpoints`."""

    def resume(self) -> int | None:
        """Restore the newest recovery checkpoint and return its step, or None."""

    def stop_requested(self) -> bool:
        """Return whether the run was asked to stop."""

    def after_step(self, step: int) -> None:
        """Save the step if that is due, and end the process if the run was asked to stop."""

    def abandon(self, step: int, return_batch: Callable[[], None] | None) -> None:
        """End the process in the middle of the step after `step`."""

    def finish(self) -> None:
        """Wait for the pending recovery checkpoint."""


class NoRecovery:
    """Recovery of a run that saves no recovery checkpoints and cannot be asked to stop."""

    def resume(self) -> int | None:
        """Return None."""
        return None

    def stop_requested(self) -> bool:
        """Return False."""
        return False

    def after_step(self, step: int) -> None:
        """Do nothing."""

    def abandon(self, step: int, return_batch: Callable[[], None] | None) -> None:
        """Do nothing; the request that reached the trainer is raised."""

    def finish(self) -> None:
        """Do nothing."""


class TrainingRun:
    """A training run and its steps; every method is collective.

    Args:
        run_log: metrics, evaluations and checkpoints.
        recovery: recovery checkpoints, and requests to stop.
    """

    def __init__(self, run_log: RunLog, recovery: Recovery) -> None:
        self._log, self._recovery = run_log, recovery
        self._step = self._initial_step = 0
        self._version = self._initial_version = 0

    @contextmanager
    def recording_failure(self) -> Iterator[None]:
        """Write the outcomes of failed prompts if the run fails, and wait for pending writes in any case."""
        try:
            yield
        except RLError as error:
            if not isinstance(error, StalledError):  # the stalled component would block this call too
                self._log.fail()
            raise
        finally:
            wait_for_writes(LINGER_SECONDS)  # keeps files that are nearly complete when the run fails

    def resume(self) -> None:
        """Restore the newest recovery checkpoint, if there is one."""
        self._recovery.resume()

    def start(self, version: int) -> None:
        """Evaluate before the first step, unless the run was resumed."""
        self._step = self._initial_step = self._log.step
        self._version = self._initial_version = version
        self._log.start(version)

    def batches(self, source: BatchSource, total_steps: int) -> Iterator[TensorDict]:
        """Yield the batch of each remaining step, until the data is exhausted."""
        while self._step < total_steps:
            with self._log.time("rollout_wait"):
                try:
                    batch = source.next_batch()  # waits for accepted groups
                except StopIteration:
                    return
                except StopRequestedError:
                    self._recovery.after_step(self._step)  # raises SystemExit
                    raise
            self._step += 1
            yield batch

    @contextmanager
    def training(self, source: BatchSource) -> Iterator[None]:
        """Run a block that trains on the last batch of `source`; an urgent request to stop abandons it."""
        from rl_contracts.models.step_gate import STEP

        try:
            with self._log.time("train"), STEP.step():
                yield
        except StopRequestedError as stop:  # `abandon` raises SystemExit
            self._recovery.abandon(self._step - 1, source.return_batch if stop.weights_unchanged else None)
            raise

    @contextmanager
    def tolerating_stopped_servers(self) -> Iterator[None]:
        """Only log an error of the block if the run was asked to stop.

        The servers may have received the same request. Their errors are then expected, and the run ends with a recovery
        checkpoint of this step.
        """
        try:
            yield
        except RLError as error:
            if not self._recovery.stop_requested():
                raise
            log.warning("servers stopped before step %d was finished: %s", self._step, error)

    def finish_step(self, source: BatchSource, batch: TensorDict, stats: dict[str, float | None], version: int) -> None:
        """End a step at its source, write its record, and evaluate and save if that is due.

        If the run was asked to stop, this ends the process.
        """
        self._log.update_counters()
        source.end_step(version)
        version_before, self._version = self._version, version
        with self.tolerating_stopped_servers():
            self._log.finish_step(self._step, batch, stats, version_before, version)
        with self._log.time("recover"):  # these seconds count in the next record
            self._recovery.after_step(self._step)

    def finish(self, version: int) -> None:
        """Wait for the last recovery checkpoint, run the last evaluation and save the last checkpoint.

        Raises:
            EngineError: no step of this process changed the weights.
        """
        self._recovery.finish()
        try:
            self._log.finish()
        except RLError:
            if self._recovery.stop_requested():
                self._recovery.after_step(self._step)  # raises SystemExit
            raise
        if self._step > self._initial_step and version == self._initial_version:
            raise EngineError(
                f"none of {self._step - self._initial_step} steps was applied, so the weights are unchanged. Check the "
                "log for non-finite losses or gradients (`rl replay` repeats a step on a saved batch), and "
                "`minibatches/empty` in metrics.jsonl for batches without trained tokens."
            )
