"""The training loop: one page for synchronous and asynchronous reinforcement learning, and for supervised learning.

What differs lies in the parts: a rollout runtime with `max_staleness=0` makes it synchronous; a data set as the source
and no publisher makes it supervised.
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
"""Seconds that a run which ends by an error waits for what is being written."""


class BatchSource(Protocol):
    """Where batches come from: an `rl_contracts.rollout.RolloutRuntime`, or a data set."""

    def next_batch(self) -> TensorDict:
        """This rank's rows of the next batch; StopIteration at the end of the data, StopRequestedError where the
        process was asked to stop meanwhile."""

    def return_batch(self) -> None:
        """Take the last batch back: its step was abandoned before anything was learned from it."""

    def end_step(self, version: int) -> None:
        """The step of the last batch is over, at `version`."""


class Learner(Protocol):
    """What turns a batch into the next version of the weights."""

    @property
    def version(self) -> int:
        """Training batches applied."""

    def prepare(self, batch: TensorDict) -> dict[str, float | None]:
        """Compute what the update needs over the whole batch."""

    def update(self, batch: TensorDict) -> dict[str, float | None]:
        """Take the optimizer steps."""


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
    """Run the steps that are left until `total_steps`, or to the end of the data (collective).

    Args:
        publisher: how new weights reach the servers; None: there are none.
        gap: the check that they compute what the trainer computes; only with a publisher.
        sharing: lets them sleep while the trainer learns; only with a publisher.

    Raises:
        RLError: whatever stops the run, with its cause; also where none of the steps taken here was applied.
    """
    try:
        _train(source, learner, run_log, total_steps, publisher, gap, recover, sharing)
    except RLError as error:
        if not isinstance(error, StalledError):  # nothing that stands still is asked again
            run_log.fail()
        raise
    finally:
        wait_for_writes(LINGER_SECONDS)  # a run that ends by an error leaves what was nearly written


def _train(
    source: BatchSource,
    learner: Learner,
    books: RunLog,
    total_steps: int,
    publisher: WeightPublisher | None,
    gap: GapGate | None,
    recover: RecoveryCheckpoints | None,
    sharing: MemorySharing | None,
) -> None:
    from rl_contracts.models.step_gate import STEP

    if recover is not None:
        recover.resume()
    first, start = books.step, learner.version
    if publisher is not None:
        # from here on the servers hold what the trainer holds, verified, before the first answer counts
        publisher.publish(learner.version)
    books.start(learner.version)
    for step in range(first + 1, total_steps + 1):
        with books.time("rollout_wait"):
            try:
                batch = source.next_batch()  # waits for accepted groups
            except StopIteration:
                break
            except StopRequestedError:
                if recover is not None:
                    recover.after_step(step - 1)  # which ends the run
                raise
        before, stats = learner.version, dict[str, float | None]()
        asks = gap is not None and gap.scores_before_update()
        if sharing is not None and not asks:
            with books.time("sleep"):
                stats |= sharing.sleep()
        if gap is not None:
            with books.time("gap"):
                stats |= gap.before_update(batch)  # what the servers recorded, and what the trainer says
        if sharing is not None and asks:
            with books.time("sleep"):
                stats |= sharing.sleep()
        try:
            with books.time("train"), STEP.step():
                stats |= _learn(learner, batch)
        except StopRequestedError as stop:
            if recover is not None:
                recover.abandon(step - 1, source.return_batch if stop.weights_unchanged else None)  # which ends the run
            raise
        if publisher is not None and learner.version > before:
            try:
                with books.time("publish"):
                    stats |= publisher.publish(learner.version)  # returns at the commit; servers run on, awake
            except RLError as error:
                if not _stopping(recover):
                    raise
                log.warning("servers ended before they had version %d: %s", learner.version, error)
            else:
                if gap is not None:
                    with books.time("gap"):
                        stats |= gap.after_commit(publisher.receipt)
        elif sharing is not None:
            with books.time("sleep"):
                sharing.wake()
        books.update_counters()
        source.end_step(learner.version)
        try:
            books.finish_step(
                step, batch, stats, before, learner.version
            )  # its record, and an evaluation where one is due
        except RLError as error:
            if not _stopping(recover):
                raise
            log.warning("servers ended before the evaluation of step %d did: %s", step, error)
        if recover is not None:
            with books.time("recover"):
                recover.after_step(step)  # seconds of the next record
    if recover is not None:
        recover.finish()
    try:
        books.finish()
    except RLError:
        if recover is not None and recover.stop_requested():
            recover.after_step(books.step)  # which ends the run
        raise
    if books.step > first and learner.version == start:
        raise EngineError(
            f"none of {books.step - first} steps was applied: the weights are those of the start. Either loss or "
            "gradients were never finite (the log says so; `rl replay` runs a saved batch again), or there was nothing "
            "to learn from (`minibatches/empty` in metrics.jsonl)."
        )


def _learn(learner: Learner, batch: TensorDict) -> dict[str, float | None]:
    try:
        stats = learner.prepare(batch)  # proximal log-probs, advantages
    except StopRequestedError as stop:
        stop.weights_unchanged = True
        raise
    return stats | learner.update(batch)  # minibatches of packed micro-batches


def _stopping(recover: RecoveryCheckpoints | None) -> bool:
    """Whether the run was asked to stop, as its servers may have been, so that it ends with this step's point."""
    return recover is not None and recover.stop_requested()
