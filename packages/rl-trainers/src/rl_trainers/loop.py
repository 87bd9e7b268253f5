"""One training loop for synchronous and asynchronous reinforcement learning and for supervised learning.

The components select the mode. A rollout runtime with `max_staleness=0` makes the loop synchronous. A data set as
the source and no publisher make it supervised.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from rl_contracts.errors import EngineError, RLError, StalledError, StopRequestedError
from rl_contracts.runtime.logging import get_logger
from rl_trainers.run_log.background_writes import wait_for_writes

if TYPE_CHECKING:
    from tensordict import TensorDict

    from rl_trainers.recovery.checkpoints import RecoveryCheckpoints
    from rl_trainers.run_log.run_log import RunLog
    from rl_trainers.weight_sync.gap.gate import GapGate
    from rl_trainers.weight_sync.memory_sharing import MemorySharing
    from rl_trainers.weight_sync.publisher import WeightPublisher


log = get_logger("trainers")

LINGER_SECONDS = 10.0
"""Seconds to wait for pending writes when `train` ends, for example after an error."""


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


class Learner(Protocol):
    """Component that turns a batch into the next version of the weights."""

    @property
    def version(self) -> int:
        """Number of training batches applied."""

    def prepare(self, batch: TensorDict) -> dict[str, float | None]:
        """Add the entries that the update needs, computed over the whole batch, and return metrics."""

    def update(self, batch: TensorDict) -> dict[str, float | None]:
        """Take the optimizer steps and return their metrics."""


def train(
    source: BatchSource,
    learner: Learner,
    run_log: RunLog,
    total_steps: int,
    *,
    publisher: WeightPublisher | None = None,
    gap: GapGate | None = None,
    recover: RecoveryCheckpoints | None = None,
    sharing: MemorySharing | None = None,
) -> None:
    """Run the remaining steps up to `total_steps`, or until the data is exhausted (collective).

    Args:
        source: batches to learn from.
        learner: learns from each batch.
        run_log: metrics, evaluations and checkpoints of the run.
        total_steps: training steps of the whole run, including those before a resume.
        publisher: sends new weights to the servers, or None without servers.
        gap: log-prob gap gate, which checks the servers against the trainer; only with a publisher.
        recover: recovery checkpoints, or None to save none.
        sharing: puts the servers to sleep while the trainer learns; only with a publisher.

    Raises:
        RLError: the run failed; the cause is chained. Also raised if no step of this call changed the weights.
        SystemExit: the process was asked to stop, and `recover` ended the run after a finished step.
    """
    try:
        _train(source, learner, run_log, total_steps, publisher, gap, recover, sharing)
    except RLError as error:
        if not isinstance(error, StalledError):  # the stalled component would block this call too
            run_log.fail()
        raise
    finally:
        wait_for_writes(LINGER_SECONDS)  # keeps files that are nearly complete when the run fails


def _train(
    source: BatchSource,
    learner: Learner,
    run_log: RunLog,
    total_steps: int,
    publisher: WeightPublisher | None,
    gap: GapGate | None,
    recover: RecoveryCheckpoints | None,
    sharing: MemorySharing | None,
) -> None:
    from rl_contracts.models.step_gate import STEP

    if recover is not None:
        recover.resume()
    initial_step, initial_version = run_log.step, learner.version
    if publisher is not None:
        # servers must serve the trainer's verified weights before the first completion counts
        publisher.publish(learner.version)
    run_log.start(learner.version)
    for step in range(initial_step + 1, total_steps + 1):
        with run_log.time("rollout_wait"):
            try:
                batch = source.next_batch()  # waits for accepted groups
            except StopIteration:
                break
            except StopRequestedError:
                if recover is not None:
                    recover.after_step(step - 1)  # raises SystemExit
                raise
        version_before, stats = learner.version, dict[str, float | None]()
        scores_before_update = gap is not None and gap.scores_before_update()
        if sharing is not None and not scores_before_update:
            with run_log.time("sleep"):
                stats |= sharing.sleep()
        if gap is not None:
            with run_log.time("gap"):
                stats |= gap.before_update(batch)  # compares the servers' log-probs with the trainer's
        if sharing is not None and scores_before_update:
            with run_log.time("sleep"):
                stats |= sharing.sleep()
        try:
            with run_log.time("train"), STEP.step():
                stats |= _learn(learner, batch)
        except StopRequestedError as stop:
            if recover is not None:
                recover.abandon(step - 1, source.return_batch if stop.weights_unchanged else None)  # raises SystemExit
            raise
        if publisher is not None and learner.version > version_before:
            try:
                with run_log.time("publish"):
                    stats |= publisher.publish(learner.version)  # returns at the commit, which also wakes the servers
            except RLError as error:
                if not _is_stop_requested(recover):
                    raise
                log.warning("servers stopped before they received version %d: %s", learner.version, error)
            else:
                if gap is not None:
                    with run_log.time("gap"):
                        stats |= gap.after_commit(publisher.receipt)
        elif sharing is not None:
            with run_log.time("sleep"):
                sharing.wake()
        run_log.update_counters()
        source.end_step(learner.version)
        try:
            # writes the step's record and evaluates if an evaluation is due
            run_log.finish_step(step, batch, stats, version_before, learner.version)
        except RLError as error:
            if not _is_stop_requested(recover):
                raise
            log.warning("servers stopped before the evaluation of step %d finished: %s", step, error)
        if recover is not None:
            with run_log.time("recover"):
                recover.after_step(step)  # these seconds count in the next record
    if recover is not None:
        recover.finish()
    try:
        run_log.finish()
    except RLError:
        if recover is not None and recover.stop_requested():
            recover.after_step(run_log.step)  # raises SystemExit
        raise
    if run_log.step > initial_step and learner.version == initial_version:
        raise EngineError(
            f"none of {run_log.step - initial_step} steps was applied, so the weights are unchanged. Check the log for "
            "non-finite losses or gradients (`rl replay` repeats a step on a saved batch), and `minibatches/empty` in "
            "metrics.jsonl for batches without trained tokens."
        )


def _learn(learner: Learner, batch: TensorDict) -> dict[str, float | None]:
    try:
        stats = learner.prepare(batch)  # for a policy: advantages and proximal log-probs
    except StopRequestedError as stop:
        stop.weights_unchanged = True
        raise
    return stats | learner.update(batch)


def _is_stop_requested(recover: RecoveryCheckpoints | None) -> bool:
    """Return whether the run was asked to stop.

    The servers may have received the same signal. Their errors are then expected, and the run ends with a recovery
    checkpoint of this step.
    """
    return recover is not None and recover.stop_requested()
