"""Publishing weights: the one state machine for every route, seen from the trainer.

    put on the route -> servers stage -> receipts compared -> pause, swap, commit, resume -> record

Nothing is served from the new weights before every receipt agrees, and `publish` returns at the commit. The record
(`rl_contracts.weights.committed`) lets a server that starts again load the version by itself.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rl_contracts.config import require, require_choice
from rl_contracts.data import WeightReceipt, WeightUpdateMeta
from rl_contracts.weights import verify_receipt, write_committed

if TYPE_CHECKING:
    from rl_contracts.engine import TrainEngine
    from rl_contracts.inference import InferenceEngine

Runner = Callable[[Coroutine[Any, Any, Any], float], Any]
"""`(coroutine, timeout in seconds) -> its result`: runs it on the client's event loop and waits."""


@dataclass
class PublishConfig:
    """How new weights reach the servers."""

    route: str = "shm"
    """`shm` (servers on this host) or `disk` (a shared file system)."""
    interrupt: str = "keep"
    """Unfinished answers at an update: `keep` (go on with their KV cache), `recompute` (go on, KV cache rebuilt) or
    `wait` (finish first)."""
    timeout: float = 300.0
    """Seconds for staging, and again for the commit, on all servers."""

    def __post_init__(self) -> None:
        require_choice("publish.route", self.route, ("shm", "disk"))
        require_choice("publish.interrupt", self.interrupt, ("keep", "recompute", "wait"))
        require(self.timeout > 0, "publish.timeout", "more than 0 seconds", self.timeout)


class WeightPublisher:
    """Carries each version from the engine to the servers. Rank 0 speaks to them; the others take part in gathering."""

    def __init__(
        self, engine: TrainEngine, inference: InferenceEngine, run: Runner, config: PublishConfig, directory: str
    ) -> None:
        self.engine, self.inference, self.run, self.config = engine, inference, run, config
        self.directory = directory
        self.receipt: WeightReceipt | None = None
        """The trainer's own, of the last version that was published; without checksums on ranks other than 0."""
        engine.connect_engine(inference, WeightUpdateMeta(config.route, 0, directory))

    def publish(self, version: int) -> dict[str, float]:
        """Put `version` on all servers and return once it is committed (collective).

        Returns:
            `time/stage` and `time/paused` in seconds; on ranks other than 0 they are 0.

        Raises:
            WeightUpdateError: a receipt differs, or no server acknowledged. Nothing was committed then.
        """
        meta, mine = self.engine.update_weights(version)
        error, times = None, {"time/stage": 0.0, "time/paused": 0.0}
        if self.engine.parallel.is_main:
            try:
                times = self._hand_over(meta, mine)
            except Exception as caught:  # noqa: BLE001 - handed to every rank by agree, which raises it
                error = caught
        self.engine.parallel.agree(error, f"publishing weights of version {version}")
        self.receipt = mine
        if self.engine.parallel.is_dp_head and not self.engine.parallel.is_main:
            self.run(self.inference.stats(), self.config.timeout)  # learns the committed version
        return times

    def _hand_over(self, meta: WeightUpdateMeta, mine: WeightReceipt) -> dict[str, float]:
        begin = time.perf_counter()
        for receipt in self.run(self.inference.stage_weights(meta), self.config.timeout):
            verify_receipt(mine, receipt, meta.route)
        staged = time.perf_counter() - begin
        paused = self.run(self.inference.commit_weights(meta.version, self.config.interrupt), self.config.timeout)
        write_committed(self.directory, meta, mine)  # before the next version is written over the last but one
        return {"time/stage": staged, "time/paused": paused}
