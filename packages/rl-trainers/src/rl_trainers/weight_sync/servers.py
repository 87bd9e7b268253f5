"""The training loop's view of the inference servers: give them weights, compare log-probs, share memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from tensordict import TensorDict

    from rl_trainers.run_log.run_log import RunLog
    from rl_trainers.weight_sync.gap.gate import GapGate
    from rl_trainers.weight_sync.memory_sharing import MemorySharing
    from rl_trainers.weight_sync.publisher import WeightPublisher


class Servers(Protocol):
    """Inference servers of a training run; every method is collective and returns metrics."""

    def start(self, version: int) -> None:
        """Give the servers the trainer's weights before the first batch."""

    def before_update(self, batch: TensorDict) -> dict[str, float | None]:
        """Prepare the servers for the update from a batch."""

    def publish(self, version: int) -> dict[str, float | None]:
        """Give the servers a new version, and return when they serve it. The update may have left the old one."""


class NoServers:
    """Servers of a run without any."""

    def start(self, version: int) -> None:
        """Do nothing."""

    def before_update(self, batch: TensorDict) -> dict[str, float | None]:
        """Return no metrics."""
        return {}

    def publish(self, version: int) -> dict[str, float | None]:
        """Return no metrics."""
        return {}


class ServerSync:
    """Servers that receive each version from a publisher.

    Args:
        run_log: records the seconds of each stage.
        publisher: sends new weights to the servers.
        gap: log-prob gap gate, which compares the servers with the trainer; None to compare nothing.
        sharing: puts the servers to sleep while the trainer learns; None if the servers have their own memory.
    """

    def __init__(
        self,
        run_log: RunLog,
        publisher: WeightPublisher,
        gap: GapGate | None = None,
        sharing: MemorySharing | None = None,
    ) -> None:
        self.run_log, self.publisher, self.gap, self.sharing = run_log, publisher, gap, sharing
        self._published = -1

    def start(self, version: int) -> None:
        """Publish the trainer's weights.

        Raises:
            RLError: see `WeightPublisher.publish`.
        """
        self.publisher.publish(version)
        self._published = version

    def before_update(self, batch: TensorDict) -> dict[str, float | None]:
        """Compare log-probs with the trainer's, and put the servers to sleep.

        A comparison for which the servers score the batch comes before the sleep.

        Raises:
            RLError: see `GapGate.before_update` and `MemorySharing.sleep`.
        """
        if self.gap is not None and self.gap.scores_before_update():
            return self._compare(batch) | self._sleep()
        return self._sleep() | self._compare(batch)

    def publish(self, version: int) -> dict[str, float | None]:
        """Publish a new version, whose commit also wakes the servers, and compare log-probs.

        If the update left the weights at the last published version, only wake the servers.

        Raises:
            RLError: see `WeightPublisher.publish`, `GapGate.after_commit` and `MemorySharing.wake`.
        """
        if version == self._published:
            self._wake()
            return {}
        with self.run_log.time("publish"):
            stats: dict[str, float | None] = {**self.publisher.publish(version)}
        self._published = version
        if self.gap is not None:
            with self.run_log.time("gap"):
                stats |= self.gap.after_commit(self.publisher.receipt)
        return stats

    def _compare(self, batch: TensorDict) -> dict[str, float | None]:
        if self.gap is None:
            return {}
        with self.run_log.time("gap"):
            return self.gap.before_update(batch)

    def _sleep(self) -> dict[str, float | None]:
        if self.sharing is None:
            return {}
        with self.run_log.time("sleep"):
            return {**self.sharing.sleep()}

    def _wake(self) -> None:
        if self.sharing is not None:
            with self.run_log.time("sleep"):
                self.sharing.wake()
