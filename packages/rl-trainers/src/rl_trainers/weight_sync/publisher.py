"""Publishing weights: the one state machine for every route, seen from the trainer.

    begin -> send -> receipts compared -> pause, swap, commit, resume -> record

Invariant: nothing is served from version v before every live server has shown, by its receipt, that it holds what the
trainer sent as v; and when a server generates again, all live ones serve v. `publish` returns at the commit. Servers
that give no checksums show it by a canary (`rl_trainers.weight_sync.canary`), after the swap and before they get
requests again.

Each rank that `TrainEngine.full_parameters` gives something to sends that part of the version; all others take part in
the gathers. Rank 0 alone speaks to the servers: over a route that meets its receivers they stage while the ranks send,
over the others afterwards. An error on any rank is agreed on and raised on all of them, and so all ranks go through
the same states. The record (`rl_contracts.weights.committed_record`) lets a server that starts again load the version
by itself.
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
from rl_trainers.weight_sync.canary import CanaryCheck

if TYPE_CHECKING:
    from rl_contracts.engine import TrainEngine
    from rl_contracts.inference import InferenceEngine
    from rl_contracts.runtime.aio import LoopThread
    from rl_contracts.weights import WeightSender

logger = get_logger("publish")

LOOPBACK = "127.0.0.1"
STEP_SECONDS = 60.0
"""Longest that one step of a broadcast may take: to connect, to move one piece."""
MAX_ATTEMPTS = 3
"""How often a version is sent while servers are lost in the middle."""
SHUTDOWN_SECONDS = 10.0
"""How long to wait for what the servers say about a transfer that broke."""


@dataclass
class PublishConfig(Settings):
    """How new weights reach the servers."""

    setting: ClassVar[str] = "publish"
    route: str = choice("auto", ("auto", *ROUTES))
    """`shm` (servers on this host), `disk` (a shared file system), `broadcast` (memory to memory, over the network) or
    `ipc` (trainer and server on one GPU). `auto`: `shm` where all are on one machine, else `broadcast`, but `disk`
    for an only server, which could not come back otherwise; the commands know where that is, and without them it is
    `shm`."""
    host: str = ""
    """Of `broadcast`: address on which rank 0 listens; empty: that at which the ranks meet (`MASTER_ADDR`), which is
    loopback on one machine."""
    adapter: str = choice("auto", ("auto", "always", "never"))
    """Where low-rank adapters are trained: `auto` sends them alone if all servers can add them to their base weights,
    `always` refuses servers that cannot, `never` sends the merged weights whole."""
    timeout: float = bounded(300.0, "more than 0 seconds", lambda seconds: seconds > 0)
    """Seconds for staging, and again for the commit, on all servers."""
    drain_timeout: float = bounded(3600.0, "more than 0 seconds", lambda seconds: seconds > 0)
    """With `rollout.interrupt=wait`: seconds on top of `timeout` in which unfinished answers must have ended. A server
    that makes no tokens is lost much earlier."""

    canary: str = choice("auto", ("auto", "always"))
    """`auto`: servers that give no checksums show by a canary what they serve, before they get requests again.
    `always`: all do, which also finds prefix caches and packed weights that an update left as they were."""
    canary_tokens: int = bounded(384, "at least 2", lambda tokens: tokens >= 2)
    """Tokens of the canary's prompt. Several hundred, so that it lies in prefix caches; with 16 more it must fit into
    the servers' context."""
    canary_tolerance: float = bounded(0.0, "0 (by the dtype) or more nats", lambda nats: nats >= 0)
    """Mean difference between the servers' and the trainer's log-probs of the canary, in nats, above which the run
    stops. 0: 0.01 where both compute in float32, else 0.2."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            not self.host or self.route in ("auto", "broadcast"),
            "publish.host",
            f"nothing where publish.route={self.route}, which does not listen",
            self.host,
        )


class WeightPublisher:
    """Carries each version from the engine to the servers (collective: every rank of the engine has one).

    Args:
        engine: whose weights are published.
        inference: the client of the servers. Ranks that are no data-parallel heads do not use theirs.
        loop: on which that client runs.
        config: route and deadlines.
        directory: where `shm` and `disk` keep their files, and where the record of what was committed lies.
        interrupt: what happens to unfinished answers, see `InferenceEngine.commit_weights`.
        dtype: in which the engine computes.

    Raises:
        WeightUpdateError, EngineError: the route cannot work here; on every rank.
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
        """The trainer's own, of the last version that was sent; complete on rank 0."""
        self._canary = self._open_canary()
        self._adapter_alone = self._choose_adapter()
        self._specs = engine.adapter_specs() if self._adapter_alone else engine.param_specs()
        self._sender = self._open_sender()

    def publish(self, version: int) -> dict[str, float]:
        """Put `version` on all servers and return once it is committed (collective).

        Returns:
            `time/stage` and `time/paused` in seconds; on ranks other than 0 they are 0.

        Raises:
            WeightUpdateError: a receipt differs, or no server acknowledged. Nothing was committed then. With several
                ranks an EngineError, which names the error of each and has this rank's own as its cause.
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
            # rank 0 alone knows
            if not parallel.broadcast_json(isinstance(error, ReceiversLostError) and attempt < MAX_ATTEMPTS):
                break
            logger.warning("version %d is sent again: %s", version, error)
        parallel.agree(error, doing)
        parts = [sums, *parallel.gather_json({} if parallel.is_main else sums)]
        self.receipt = WeightReceipt("trainer", version, {name: s for part in parts for name, s in part.items()})
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
        """Free what the route holds. Safe to call twice."""
        if self._sender is not None:
            self._sender.close()

    def _open_canary(self) -> CanaryCheck | None:
        """The check of servers whose receipts are not enough (collective); rank 0 knows what they can do."""
        parallel, config, tolerance = self.engine.parallel, self.config, None
        with parallel.agree_on_errors(f"opening the route {config.route}"):
            if parallel.is_main:
                able = self.inference.capabilities
                expected = f"one of {', '.join(able.routes)}, which these servers can take"
                require(config.route in able.routes, "publish.route", expected, config.route)
                if self.config.canary == "always" or not able.checksums:
                    exact = self.dtype == self.inference.served_dtype == "float32"
                    by_dtype = 0.01 if exact else 0.2
                    tolerance = config.canary_tolerance or by_dtype
        tolerance = parallel.broadcast_json(tolerance)
        return tolerance and CanaryCheck(self.engine, config.route, config.canary_tokens, tolerance)

    def _choose_adapter(self) -> bool:
        """Whether adapters are sent alone (collective)."""
        parallel, wanted, alone = self.engine.parallel, self.config.adapter, False
        if wanted == "never":
            return False
        trained = self.engine.adapter() is not None
        with parallel.agree_on_errors("choosing what is published"):
            if parallel.is_main:
                able = self.inference.capabilities.lora
                alone = trained and able
                found = f"{wanted}, and " + ("these servers take whole weights alone" if trained else "there is none")
                require(alone or wanted == "auto", "publish.adapter", "auto or never", found)
        return bool(parallel.broadcast_json(alone))

    def _open_sender(self) -> WeightSender | None:
        """The end of the route on this rank: on rank 0, and wherever there is something to send (collective)."""
        from rl_contracts.weights import open_sender

        parallel, config = self.engine.parallel, self.config
        doing, location = f"opening the route {config.route}", self.directory
        if config.route == "broadcast":
            host = config.host or os.environ.get("MASTER_ADDR", LOOPBACK)
            location = Address(host, timeout=min(STEP_SECONDS, config.timeout)).location
        sender: WeightSender | None = None
        with parallel.agree_on_errors(doing):
            if parallel.is_main:
                sender = open_sender(config.route, location, 0, parallel.device)
        location = parallel.broadcast_json("" if sender is None else sender.location)
        names = [name for part in parallel.gather_json([spec.name for spec in self._specs]) for name in part]
        with parallel.agree_on_errors(doing):
            twice = sorted(name for name, count in Counter(names).items() if count > 1)
            if twice:
                raise WeightUpdateError(
                    f"full_parameters of {type(self.engine).__name__}: expected each parameter on one rank, found "
                    f"{twice[:3]} on several."
                )
            if self._specs and sender is None:
                sender = open_sender(config.route, location, parallel.rank, parallel.device)
        return sender

    def _gather_meta(self, version: int, doing: str) -> WeightUpdateMeta:
        """What the servers are told: the parts of all ranks that send (collective; complete on rank 0)."""
        parallel, metas = self.engine.parallel, list[WeightUpdateMeta]()
        adapter = self.engine.adapter() if self._adapter_alone else None
        with parallel.agree_on_errors(doing):
            if self._sender is not None:
                metas = [self._sender.begin(version, self._specs)]
        others = parallel.gather_json([] if parallel.is_main else [meta.to_json() for meta in metas])
        metas += [WeightUpdateMeta.from_json(value) for values in others for value in values]
        parts = tuple(part for meta in metas for part in meta.parts if part.params)
        return WeightUpdateMeta(self.config.route, version, parts, adapter)

    def _send(self) -> tuple[dict[str, int], Exception | None]:
        """Gather with the other ranks and send what is this rank's (collective): checksums of it, and what went
        wrong."""
        engine, sums = self.engine, dict[str, int]()
        tensors = engine.adapter_parameters() if self._adapter_alone else engine.full_parameters()
        try:
            try:
                if self._sender is not None and self._specs:
                    sums = self._sender.send(tensors)
            finally:
                deque(tensors, maxlen=0)  # the gathers of the other ranks need this one, whatever happened here
        except Exception as error:  # noqa: BLE001 - handed to every rank by agree, which raises it
            return sums, error
        return sums, None

    async def _stage(self, meta: WeightUpdateMeta) -> list[WeightReceipt]:
        """Stage on all servers. Where they do not, whoever waits for them on the route is told."""
        assert self._sender is not None
        try:
            return await asyncio.wait_for(self.inference.stage_weights(meta), self.config.timeout)
        except BaseException as error:
            await asyncio.to_thread(self._sender.cancel, f"the servers do not stage it: {error}")
            if isinstance(error, TimeoutError):
                what = f"staging version {meta.version} on the servers"
                raise StalledError(f"{what} did not finish within {self.config.timeout:g} s.") from error
            raise

    def _commit(
        self, meta: WeightUpdateMeta, sent_receipt: WeightReceipt, staging: Future[list[WeightReceipt]]
    ) -> Future[float]:
        """Begin the commit once every server has shown what it holds, where it can show it before."""
        for receipt in staging.result():
            if self.inference.capabilities.checksums:
                verify_receipt(sent_receipt, receipt, meta.route)
        if self._canary is None:
            return self.loop.submit(self.inference.commit_weights(meta.version, self.interrupt))
        return self.loop.submit(self.inference.commit_weights(meta.version, self.interrupt, self._canary.prepare()))

    def _end_commit(self, meta: WeightUpdateMeta, sent_receipt: WeightReceipt, committing: Future[float]) -> float:
        """Wait for it, and leave the record; for how many seconds servers did not generate."""
        paused = self.loop.wait(committing, f"committing version {meta.version}", self._commit_timeout)
        write_committed(self.directory, meta, sent_receipt)  # before the next version is written over the last but one
        return paused

    @property
    def _commit_timeout(self) -> float:
        return self.config.timeout + (self.config.drain_timeout if self.interrupt == "wait" else 0.0)


def _transfer_error(error: Exception | None, staging: Future[list[WeightReceipt]] | None) -> Exception | None:
    """What broke a transfer, seen from both sides; waits for the servers where they stage beside it.

    Lost servers count first, because the others can be sent the version again; then whatever went wrong first.
    """
    if staging is None:
        return error
    servers_first = staging.done()
    try:
        staging.result(None if error is None else SHUTDOWN_SECONDS)
    except Exception as servers:  # noqa: BLE001 - returned, or noted on what is
        if error is None:
            return servers
        if servers_first or isinstance(servers, ReceiversLostError):
            servers.add_note(f"the trainer's side: {error!r}")
            return servers
        error.add_note(f"the servers' side: {servers!r}")
    return error
