"""Publishing weights: the one state machine for every route, seen from the trainer.

    put on the route -> servers stage -> receipts compared -> pause, swap, commit, resume -> record

Over a route on which both ends must be there at once, the first two happen together. Nothing is served from the new
weights before every receipt agrees, and `publish` returns at the commit. The record
(`rl_contracts.weights.committed`) lets a server that starts again load the version by itself.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rl_contracts.config import require, require_choice
from rl_contracts.data import WeightReceipt, WeightUpdateMeta
from rl_contracts.errors import ReceiversLostError, RLError
from rl_contracts.logging import get_logger
from rl_contracts.weights import ROUTES, verify_receipt, write_committed
from rl_contracts.weights.meeting import Place

if TYPE_CHECKING:
    from rl_contracts.engine import TrainEngine
    from rl_contracts.inference import InferenceEngine

logger = get_logger("publish")

LOOPBACK = "127.0.0.1"
STEP_SECONDS = 60.0
"""Longest that one step of a broadcast may take: to connect, to move one piece."""
TRIES = 3
"""How often a version is sent while servers are lost in the middle."""
FAREWELL_SECONDS = 10.0
"""How long to wait for what the servers say about a transfer that broke."""

Runner = Callable[[Coroutine[Any, Any, Any], float], Any]
"""`(coroutine, timeout in seconds) -> its result`: runs it on the client's event loop and waits."""


@dataclass
class PublishConfig:
    """How new weights reach the servers."""

    route: str = "shm"
    """`shm` (servers on this host), `disk` (a shared file system), `broadcast` (memory to memory, over the network) or
    `ipc` (trainer and server on one GPU)."""
    host: str = LOOPBACK
    """Of `broadcast`: address on which rank 0 listens; servers on other hosts need one that they can reach."""
    interrupt: str = "keep"
    """Unfinished answers at an update: `keep` (go on with their KV cache), `recompute` (go on, KV cache rebuilt) or
    `wait` (finish first)."""
    timeout: float = 300.0
    """Seconds for staging, and again for the commit, on all servers."""
    drain_timeout: float = 3600.0
    """With `interrupt=wait`: seconds on top of `timeout` in which unfinished answers must have ended. A server that
    makes no tokens is lost much earlier."""

    def __post_init__(self) -> None:
        require_choice("publish.route", self.route, ROUTES)
        require(
            self.host == LOOPBACK or self.route == "broadcast",
            "publish.host",
            f"{LOOPBACK} where publish.route={self.route}, which does not listen",
            self.host,
        )
        require_choice("publish.interrupt", self.interrupt, ("keep", "recompute", "wait"))
        require(self.timeout > 0, "publish.timeout", "more than 0 seconds", self.timeout)
        require(self.drain_timeout > 0, "publish.drain_timeout", "more than 0 seconds", self.drain_timeout)


class WeightPublisher:
    """Carries each version from the engine to the servers. Rank 0 speaks to them; the others take part in gathering."""

    def __init__(
        self, engine: TrainEngine, inference: InferenceEngine, run: Runner, config: PublishConfig, directory: str
    ) -> None:
        self.engine, self.inference, self.run, self.config = engine, inference, run, config
        self.directory = directory
        self.receipt: WeightReceipt | None = None
        """The trainer's own, of the last version that was published; without checksums on ranks other than 0."""
        location = directory
        if config.route == "broadcast":
            location = Place(config.host, timeout=min(STEP_SECONDS, config.timeout)).location
        engine.connect_engine(inference, WeightUpdateMeta(config.route, 0, location))

    def publish(self, version: int) -> dict[str, float]:
        """Put `version` on all servers and return once it is committed (collective).

        Returns:
            `time/stage` and `time/paused` in seconds; on ranks other than 0 they are 0.

        Raises:
            WeightUpdateError: a receipt differs, or no server acknowledged. Nothing was committed then.
        """
        parallel = self.engine.parallel
        for attempt in range(1, TRIES + 1):
            error, times = self._try(version)
            # rank 0 alone knows
            if not parallel.broadcast_json(isinstance(error, ReceiversLostError) and attempt < TRIES):
                break
            logger.warning("version %d is sent again: %s", version, error)
        parallel.agree(error, f"publishing weights of version {version}")
        if parallel.is_dp_head and not parallel.is_main:
            self.run(self.inference.stats(), self.config.timeout)  # learns the committed version
        return times

    def _try(self, version: int) -> tuple[Exception | None, dict[str, float]]:
        """Send and commit; what went wrong is returned on rank 0 and counts there."""
        times = {"time/stage": 0.0, "time/paused": 0.0}
        staging = _Staging(lambda meta: self.run(self.inference.stage_weights(meta), self.config.timeout))
        is_main = self.engine.parallel.is_main
        try:
            meta, self.receipt = self.engine.update_weights(version, staging.start)
        except (RLError, OSError) as error:  # on every rank
            return (staging.cause_of(error) if is_main else None), times
        if is_main:
            try:
                times = self._hand_over(staging, meta, self.receipt)
            except Exception as error:  # noqa: BLE001 - handed to every rank by agree, which raises it
                return error, times
        return None, times

    def _hand_over(self, staging: _Staging, meta: WeightUpdateMeta, mine: WeightReceipt) -> dict[str, float]:
        begin = time.perf_counter()
        for receipt in staging.receipts(meta):
            verify_receipt(mine, receipt, meta.route)
        staged = time.perf_counter() - begin
        limit = self.config.timeout + (self.config.drain_timeout if self.config.interrupt == "wait" else 0.0)
        paused = self.run(self.inference.commit_weights(meta.version, self.config.interrupt), limit)
        write_committed(self.directory, meta, mine)  # before the next version is written over the last but one
        return {"time/stage": staged, "time/paused": paused}


class _Staging:
    """Staging one version on all servers: in a thread, beside the sending, if the engine starts it; else after it.

    Args:
        stage: returns the receipts; has a deadline.
    """

    def __init__(self, stage: Callable[[WeightUpdateMeta], list[WeightReceipt]]) -> None:
        self._stage = stage
        self._receipts: Future[list[WeightReceipt]] | None = None

    def start(self, meta: WeightUpdateMeta) -> Callable[[], None]:
        """See `rl_contracts.engine.Announce`."""
        future: Future[list[WeightReceipt]] = Future()

        def work() -> None:
            try:
                future.set_result(self._stage(meta))
            except BaseException as error:  # noqa: BLE001 - handed to the thread that asks for the result
                future.set_exception(error)

        def check() -> None:
            if future.done():
                future.result()

        self._receipts = future
        threading.Thread(target=work, name=f"stage-{meta.version}", daemon=True).start()
        return check

    def receipts(self, meta: WeightUpdateMeta) -> list[WeightReceipt]:
        """What the servers hold."""
        return self._stage(meta) if self._receipts is None else self._receipts.result()

    def cause_of(self, error: Exception) -> Exception:
        """Why a transfer broke: lost servers, if the client knows of any, else what the trainer saw."""
        try:
            if self._receipts is not None:
                self._receipts.result(FAREWELL_SECONDS)
        except ReceiversLostError as lost:
            lost.__cause__ = error
            return lost
        except (RLError, TimeoutError) as other:
            if other is not error:
                error.add_note(f"the servers' side: {other}")
        return error
