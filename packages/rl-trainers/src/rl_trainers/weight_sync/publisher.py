"""Publish weights from the trainer to the servers: one state machine for every route.

    begin -> send -> compare receipts -> pause, swap, commit, resume -> record

Invariant: no server serves version v before the receipts of all live servers match the weights that the trainer sent
as v. When a server generates again, all live servers serve v. `publish` returns at the commit. Servers without
checksums pass a canary check (`rl_trainers.weight_sync.canary`) instead, after the swap and before they get requests
again.

Each rank for which `TrainEngine.full_parameters` yields parameters sends its part of the version. All other ranks take
part in the gathers. Only rank 0 talks to the servers. On a route with a rendezvous, the servers stage while the ranks
send; on the other routes, the servers stage afterwards. An error on one rank is raised on all ranks, so that all ranks
go through the same states. The record (`rl_contracts.weights.committed_record`) lets a restarted server load the
version automatically.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections import Counter, deque
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from rl_contracts.config import Settings, bounded, choice, require
from rl_contracts.data import RENDEZVOUS_ROUTES, ROUTES, WeightReceipt, WeightUpdateMeta
from rl_contracts.errors import ReceiversLostError, StalledError, WeightUpdateError
from rl_contracts.runtime.logging import get_logger
from rl_contracts.weights import verify_receipt, write_committed
from rl_contracts.weights.rendezvous import Address
from rl_trainers.weight_sync.canary import FLOAT32_TOLERANCE, TOLERANCE, CanaryCheck

if TYPE_CHECKING:
    from rl_contracts.engine import TrainEngine
    from rl_contracts.inference import InferenceEngine
    from rl_contracts.runtime.aio import LoopThread
    from rl_contracts.weights import WeightSender

logger = get_logger("publish")

LOOPBACK = "127.0.0.1"
STEP_SECONDS = 60.0
"""Largest timeout, in seconds, of one step of a broadcast: to connect, or to transfer one chunk."""
MAX_ATTEMPTS = 3
"""Number of attempts to send a version when servers are lost during the transfer."""
DRAIN_SECONDS = 3600.0
"""Seconds, in addition to `publish.timeout`, to wait for unfinished completions with `rollout.interrupt=wait`. One hour
exceeds the longest completions, and the client evicts a server that generates no tokens much earlier."""
SHUTDOWN_SECONDS = 10.0
"""Seconds to wait for the servers' result after a failed transfer."""


@dataclass
class PublishConfig(Settings):
    """Route and deadlines for publishing weights to the servers."""

    setting: ClassVar[str] = "publish"
    route: str = choice("auto", ("auto", *ROUTES))
    """Transport of the weights: `shm`, `disk`, `broadcast`, `ipc` or `auto`. `shm`: servers on this host. `disk`: a
    shared file system. `broadcast`: memory to memory, over the network; rank 0 listens at the rendezvous address of
    the ranks (`MASTER_ADDR`). `ipc`: trainer and server on one GPU. `auto` is `shm` if servers and trainers are on one
    machine, else `broadcast`. A single server that the run starts on another machine gets `disk`, because it could not
    rejoin over `broadcast` after a restart. In a program that does not use the commands, `auto` is always `shm`."""
    adapter: str = choice("auto", ("auto", "always", "never"))
    """Policy for low-rank adapters. `auto`: send them alone if all servers can add them to their base weights, else the
    full merged weights. `always`: reject servers that cannot. `never`: send the full merged weights."""
    timeout: float = bounded(300.0, "more than 0 seconds", lambda seconds: seconds > 0)
    """Timeout of staging on all servers, in seconds, and separately of the commit. A run adds the time that it waits
    for lost servers."""

    canary: str = choice("auto", ("auto", "always"))
    """Servers that must pass the canary check after an update, before they get requests again. `auto`: servers
    without checksums. `always`: all servers; this also finds prefix caches and packed weights that an update left
    unchanged. The canary needs 240 tokens of the servers' context and of a micro-batch."""


class WeightPublisher:
    """Publishes each version from the engine to the servers (collective: every rank of the engine has one).

    Args:
        engine: the trainer, whose weights are published.
        inference: client of the servers. Ranks that are not data-parallel leaders do not use theirs.
        loop: thread that runs the client's coroutines.
        config: route and deadlines.
        directory: directory of the record of committed weights, and of the files of `shm` and `disk`.
        interrupt: how to treat unfinished completions, see `InferenceEngine.commit_weights`.
        dtype: dtype in which the engine computes.

    Raises:
        WeightUpdateError, EngineError: the route cannot work here; raised on every rank.
    """

    def __init__(
        self,
        engine: TrainEngine,
        inference: InferenceEngine,
        loop: LoopThread,
        config: PublishConfig,
        directory: str,
        interrupt: str = "keep",
        dtype: str = "float32",
    ) -> None:
        self.dtype = dtype
        route = "shm" if config.route == "auto" else config.route
        self.engine, self.inference, self.loop, self.config = engine, inference, loop, replace(config, route=route)
        self.directory, self.interrupt = directory, interrupt
        self.receipt: WeightReceipt | None = None
        """The trainer's receipt of the last version that was sent; complete on rank 0."""
        self._canary = self._open_canary()
        self._adapter_alone = self._choose_adapter()
        self._specs = engine.adapter_specs() if self._adapter_alone else engine.param_specs()
        self._sender = self._open_sender()

    def publish(self, version: int) -> dict[str, float]:
        """Load `version` on all servers and return once it is committed (collective).

        Returns:
            `time/stage` and `time/paused` in seconds; 0 on ranks other than 0.

        Raises:
            WeightUpdateError: a receipt differs, or no server acknowledged; nothing was committed.
            EngineError: the same with several ranks. The message has the error of each rank, and the cause is this
                rank's error.
        """
        parallel, doing = self.engine.parallel, f"publishing weights of version {version}"
        for attempt in range(1, MAX_ATTEMPTS + 1):
            meta = self._gather_meta(version, doing)
            staging = None
            with parallel.agree_on_errors(doing):
                if parallel.is_main and meta.route in RENDEZVOUS_ROUTES:
                    staging = self.loop.submit(self._stage(meta))
            sums, error = self._send()
            sent = time.perf_counter()
            error = _transfer_error(error, staging)
            # only rank 0 knows the servers' errors
            if not parallel.broadcast_json(isinstance(error, ReceiversLostError) and attempt < MAX_ATTEMPTS):
                break
            logger.warning("sending version %d again: %s", version, error)
        parallel.agree(error, doing)
        rank_sums = [sums, *parallel.gather_json({} if parallel.is_main else sums)]
        self.receipt = WeightReceipt("trainer", version, {name: s for part in rank_sums for name, s in part.items()})
        times, committing = {"time/stage": 0.0, "time/paused": 0.0}, None
        with parallel.agree_on_errors(doing):
            if parallel.is_main:
                staging = staging or self.loop.submit(self._stage(meta))
                committing = self._commit(meta, self.receipt, staging)
                times["time/stage"] = time.perf_counter() - sent
                if self._canary is None:
                    times["time/paused"] = self._end_commit(meta, self.receipt, committing)
        if self._canary is not None:
            self._canary.compare(version, committing, self._commit_timeout)
            with parallel.agree_on_errors(doing):
                if committing is not None:
                    times["time/paused"] = self._end_commit(meta, self.receipt, committing)
        with parallel.agree_on_errors(doing):
            if parallel.is_dp_leader and not parallel.is_main:
                self.loop.run(self.inference.sync_version(version), self.config.timeout)
        return times

    def destroy(self) -> None:
        """Release the resources of the route. Safe to call twice."""
        if self._sender is not None:
            self._sender.close()

    def _open_canary(self) -> CanaryCheck | None:
        """Return the canary check, or None if no server must pass it (collective)."""
        parallel, config, tolerance = self.engine.parallel, self.config, None
        with parallel.agree_on_errors(f"opening the route {config.route}"):
            if parallel.is_main:
                able = self.inference.capabilities
                expected = f"one of {', '.join(able.routes)}, which these servers support"
                require(config.route in able.routes, "publish.route", expected, config.route)
                if self.config.canary == "always" or not able.checksums:
                    exact = self.dtype == self.inference.served_dtype == "float32"
                    tolerance = FLOAT32_TOLERANCE if exact else TOLERANCE
        tolerance = parallel.broadcast_json(tolerance)
        return tolerance and CanaryCheck(self.engine, config.route, tolerance)

    def _choose_adapter(self) -> bool:
        """Return whether to send adapters alone (collective)."""
        parallel, setting, alone = self.engine.parallel, self.config.adapter, False
        if setting == "never":
            return False
        trained = self.engine.adapter() is not None
        with parallel.agree_on_errors("choosing between adapters and full weights"):
            if parallel.is_main:
                able = self.inference.capabilities.lora
                alone = trained and able
                actual = f"{setting}, but " + (
                    "these servers accept only full weights" if trained else "no adapter is trained"
                )
                require(alone or setting == "auto", "publish.adapter", "auto or never", actual)
        return bool(parallel.broadcast_json(alone))

    def _open_sender(self) -> WeightSender | None:
        """Return this rank's end of the route, or None if it has nothing to send and is not rank 0 (collective)."""
        from rl_contracts.weights import open_sender

        parallel, config = self.engine.parallel, self.config
        doing, location = f"opening the route {config.route}", self.directory
        if config.route == "broadcast":
            host = os.environ.get("MASTER_ADDR", LOOPBACK)
            location = Address(host, timeout=min(STEP_SECONDS, config.timeout)).location
        sender: WeightSender | None = None
        with parallel.agree_on_errors(doing):
            if parallel.is_main:
                sender = open_sender(config.route, location, 0, parallel.device)
        location = parallel.broadcast_json("" if sender is None else sender.location)
        names = [name for part in parallel.gather_json([spec.name for spec in self._specs]) for name in part]
        with parallel.agree_on_errors(doing):
            duplicates = sorted(name for name, count in Counter(names).items() if count > 1)
            if duplicates:
                raise WeightUpdateError(
                    f"full_parameters of {type(self.engine).__name__}: expected each parameter on one rank, found "
                    f"{duplicates[:3]} on several."
                )
            if self._specs and sender is None:
                sender = open_sender(config.route, location, parallel.rank, parallel.device)
        return sender

    def _gather_meta(self, version: int, doing: str) -> WeightUpdateMeta:
        """Return the update's description for the servers, with the parts of all ranks that send.

        Collective; complete on rank 0.
        """
        parallel, metas = self.engine.parallel, list[WeightUpdateMeta]()
        adapter = self.engine.adapter() if self._adapter_alone else None
        with parallel.agree_on_errors(doing):
            if self._sender is not None:
                metas = [self._sender.begin(version, self._specs)]
        rank_metas = parallel.gather_json([] if parallel.is_main else [meta.to_json() for meta in metas])
        metas += [WeightUpdateMeta.from_json(value) for values in rank_metas for value in values]
        parts = tuple(part for meta in metas for part in meta.parts if part.params)
        return WeightUpdateMeta(self.config.route, version, parts, adapter)

    def _send(self) -> tuple[dict[str, int], Exception | None]:
        """Gather the parameters with the other ranks and send this rank's part (collective).

        Returns:
            the checksums of this rank's part, and the error if sending failed.
        """
        engine, sums = self.engine, dict[str, int]()
        tensors = engine.adapter_parameters() if self._adapter_alone else engine.full_parameters()
        try:
            try:
                if self._sender is not None and self._specs:
                    sums = self._sender.send(tensors)
            finally:
                deque(tensors, maxlen=0)  # the gathers of the other ranks need this one even after an error
        except Exception as error:  # noqa: BLE001 - handed to every rank by agree, which raises it
            return sums, error
        return sums, None

    async def _stage(self, meta: WeightUpdateMeta) -> list[WeightReceipt]:
        """Stage the version on all servers. If that fails, cancel the transfer."""
        assert self._sender is not None
        try:
            return await asyncio.wait_for(self.inference.stage_weights(meta), self.config.timeout)
        except BaseException as error:
            await asyncio.to_thread(self._sender.cancel, f"the servers failed to stage the version: {error}")
            if isinstance(error, TimeoutError):
                doing = f"staging version {meta.version} on the servers"
                raise StalledError(f"{doing} did not finish within {self.config.timeout:g} s.") from error
            raise

    def _commit(
        self, meta: WeightUpdateMeta, sent_receipt: WeightReceipt, staging: Future[list[WeightReceipt]]
    ) -> Future[float]:
        """Start the commit once the staged receipts of all servers are verified, if they have checksums."""
        for receipt in staging.result():
            if self.inference.capabilities.checksums:
                verify_receipt(sent_receipt, receipt, meta.route)
        if self._canary is None:
            return self.loop.submit(self.inference.commit_weights(meta.version, self.interrupt))
        return self.loop.submit(self.inference.commit_weights(meta.version, self.interrupt, self._canary.prepare()))

    def _end_commit(self, meta: WeightUpdateMeta, sent_receipt: WeightReceipt, committing: Future[float]) -> float:
        """Wait for the commit and write the record; return the seconds in which servers did not generate."""
        paused = self.loop.wait(committing, f"committing version {meta.version}", self._commit_timeout)
        write_committed(self.directory, meta, sent_receipt)  # before the next version overwrites an older one
        return paused

    @property
    def _commit_timeout(self) -> float:
        return self.config.timeout + (DRAIN_SECONDS if self.interrupt == "wait" else 0.0)


def _transfer_error(error: Exception | None, staging: Future[list[WeightReceipt]] | None) -> Exception | None:
    """Return the error of a transfer, combined from the errors of trainer and servers.

    If the servers stage during the transfer, wait for them. An error about lost servers takes precedence, because the
    version can be sent to the other servers again. Otherwise the earlier error is returned.
    """
    if staging is None:
        return error
    servers_first = staging.done()
    try:
        staging.result(None if error is None else SHUTDOWN_SECONDS)
    except Exception as server_error:  # noqa: BLE001 - returned, or noted on the returned error
        if error is None:
            return server_error
        if servers_first or isinstance(server_error, ReceiversLostError):
            server_error.add_note(f"error on the trainer's side: {error!r}")
            return server_error
        error.add_note(f"error on the servers' side: {server_error!r}")
    return error
