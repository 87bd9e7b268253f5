"""One training loop for synchronous and asynchronous reinforcement learning and for supervised learning.

The components select the mode. A rollout runtime with `max_staleness=0` makes the loop synchronous. A data set as
the source and no servers make it supervised.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from rl_contracts.errors import StopRequestedError
from rl_trainers.run_log.training_run import NoRecovery, TrainingRun
from rl_trainers.weight_sync.servers import NoServers

if TYPE_CHECKING:
    from tensordict import TensorDict

    from rl_trainers.run_log.run_log import RunLog
    from rl_trainers.run_log.training_run import BatchSource, Recovery
    from rl_trainers.weight_sync.servers import Servers


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
    servers: Servers | None = None,
    recovery: Recovery | None = None,
) -> None:
    """Run the remaining steps up to `total_steps`, or until the data is exhausted (collective).

    Args:
        source: batches to learn from.
        learner: learns from each batch.
        run_log: metrics, evaluations and checkpoints of the run.
        total_steps: training steps of the whole run, including those before a resume.
        servers: inference servers that receive the weights (`ServerSync`), or None without servers.
        recovery: recovery checkpoints (`RecoveryCheckpoints`), or None to save none.

    Raises:
        RLError: the run failed; the cause is chained. Also raised if no step of this call changed the weights.
        SystemExit: the process was asked to stop, and `recovery` ended the run after a finished step.
    """
    servers, run = servers or NoServers(), TrainingRun(run_log, recovery or NoRecovery())
    with run.recording_failure():
        run.resume()
        servers.start(learner.version)  # they must serve the trainer's weights before the first completion counts
        run.start(learner.version)
        for batch in run.batches(source, total_steps):
            stats = servers.before_update(batch)
            with run.training(source):
                stats |= _learn(learner, batch)
            with run.tolerating_stopped_servers():
                stats |= servers.publish(learner.version)
            run.finish_step(source, batch, stats, learner.version)
        run.finish(learner.version)


def _learn(learner: Learner, batch: TensorDict) -> dict[str, float | None]:
    try:
        stats = learner.prepare(batch)  # for a policy: advantages and proximal log-probs
    except StopRequestedError as stop:
        stop.weights_unchanged = True
        raise
    return stats | learner.update(batch)
