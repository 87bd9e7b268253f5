"""Weight updates on all servers in two phases, stage and commit, and the rejoin of evicted servers.

A server that does not acknowledge a phase is evicted before any server resumes. A server that returns must load the
committed version and pass a check before it rejoins.
"""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass

from rl_contracts.config import require_choice
from rl_contracts.data import RENDEZVOUS_ROUTES, STORED_ROUTES, ServeSpec, WeightReceipt, WeightUpdateMeta
from rl_contracts.errors import InferenceError, ReceiversLostError, WeightUpdateError
from rl_contracts.inference import Canary, ServerProgram
from rl_contracts.runtime.logging import get_logger
from rl_contracts.weights import CommittedWeights, read_committed, with_rank
from rl_inference.client import transport
from rl_inference.client.all_servers import AllLostError, AllServers
from rl_inference.client.router import Router
from rl_inference.client.server_state import UPDATE_TRANSITIONS, ServerState, UpdateState, require_transition
from rl_inference.client.transport import Server, ServerBusyError, ServerLostError, Transport, failures
from rl_inference.client.weight_loading import InPlaceLoad, StagedLoad

logger = get_logger("inference.client")

_SHUTDOWN_SECONDS = 5.0
"""Seconds to wait until every server has reported that the trainer canceled a transfer."""
_REJOIN_SECONDS = 10.0
"""Seconds for which an update waits for a rejoin in progress."""


@dataclass(frozen=True)
class _StagedUpdate:
    """Version that the servers can commit."""

    weights: CommittedWeights
    joining: list[Server]
    """Rejoining servers that have staged the version. They become live at the commit."""


class WeightUpdateClient:
    """Weight updates (stage, pause, commit and resume on all servers), pauses, sleep, and the rejoin of a server.

    `rl_inference.client.weight_loading` implements how one server stages and commits. `server_state` lists the states
    of a server and of an update.

    Invariant: when a server resumes, all live servers have committed the same version. Therefore no server rejoins
    between a stage and its commit.
    """

    def __init__(
        self, spec: ServeSpec, router: Router, transport: Transport, program: ServerProgram | None = None
    ) -> None:
        self._spec = spec
        self._program = program
        self._router = router
        self._transport = transport
        self._all_servers = AllServers(router, transport, spec.update_timeout)
        loading = StagedLoad if transport.protocol.capabilities.staged_load else InPlaceLoad
        self._loading = loading(self._all_servers, spec.model_path)
        self._lock = asyncio.Lock()
        self._pauses = PauseRenewal(self._all_servers)
        self.state = UpdateState.IDLE
        self._is_paused = False
        """True between `pause` and `resume`; updates then leave the servers paused."""
        self._controls_servers = False
        """True if this client pauses or updates the servers. Otherwise another client does."""
        self._staged: _StagedUpdate | None = None
        self._committed: CommittedWeights | None = None

    @property
    def is_in_progress(self) -> bool:
        """True if this client is changing the servers: a step is in progress, a version is staged, or they sleep."""
        return self._lock.locked() or self.state is not UpdateState.IDLE

    def _move(self, state: UpdateState) -> None:
        require_transition(UPDATE_TRANSITIONS, self.state, state, "the weight update")
        self.state = state

    async def stage(self, meta: WeightUpdateMeta) -> list[WeightReceipt]:
        """Load a new version on all servers while the current one is served. See `InferenceEngine.stage_weights`.

        A rejoin in progress may continue for `_REJOIN_SECONDS` and is then canceled: a hanging server must not delay
        the others, but frequent updates must not exclude a healthy server forever.
        """
        self._controls_servers = True
        if self.state is UpdateState.SLEEPING and not self._router.live:
            self._move(UpdateState.IDLE)  # a server that rejoins is awake
        await self._end_rejoin()
        while await self._router.wait_live(in_vain=False):
            with contextlib.suppress(AllLostError):
                async with self._lock:
                    return await self._stage_all(meta)
        raise WeightUpdateError(f"no live server could stage version {meta.version}: {self._router.reasons}.")

    async def commit(self, version: int, interrupt: str, canary: Canary | None = None) -> float:
        """Switch all servers to the staged version. See `InferenceEngine.commit_weights`."""
        require_choice("interrupt", interrupt, ("keep", "recompute", "wait"))
        start = self._router.clock.now()
        async with self._lock:
            try:
                return await self._commit_all(version, interrupt, canary)
            except AllLostError:
                if self._committed is None or self._committed.version != version:
                    raise
            finally:
                await self._pauses.renew("keep" if self._is_paused else "")
                self._staged = None
                self._move(UpdateState.IDLE)
                self._loading.release()
        # All servers were lost during the commit. The version counts as committed, so a server must load it to rejoin.
        if not await self._router.wait_live(in_vain=False):
            raise WeightUpdateError(f"no live server could commit version {version}: {self._router.reasons}.")
        return self._router.clock.now() - start

    async def _commit_all(self, version: int, interrupt: str, canary: Canary | None) -> float:
        """Pause, commit, resume and check all servers, and return the longest pause of a server in seconds.

        Raises:
            AllLostError: all servers were lost. If the version was staged, it counts as committed.
        """
        all_servers, loading = self._all_servers, self._loading
        was_sleeping = self.state is UpdateState.SLEEPING
        self._move(UpdateState.COMMITTING)
        try:
            if was_sleeping:
                await self._wake_all()
            await loading.before_pause(version, canary, self._is_paused or was_sleeping)
            start = self._router.clock.now()
            await self._pauses.renew(interrupt)
            await self._pause_all(interrupt, f"pause for version {version}")
            await all_servers.call_all(lambda s: loading.commit(s, version, interrupt), f"commit version {version}")
            await self._admit_joining(version)
        except AllLostError:
            if self._staged is not None and self._staged.weights.version == version:
                self._set_committed(version)
            raise
        except BaseException:
            # no server may stay paused; report the first error
            with contextlib.suppress(WeightUpdateError):
                await self._resume_all()
            raise
        self._set_committed(version)
        if self._is_paused and not loading.needs_proof:
            return 0.0
        pauses = await self._resume_all(stay_paused=False)
        try:
            await loading.prove(version)
        finally:
            if self._is_paused:
                await self._pause_all("keep", "pause again")
        pause_seconds = [seconds for seconds in pauses if seconds is not None]
        return max(pause_seconds) if pause_seconds and not loading.needs_proof else self._router.clock.now() - start

    async def rejoin(self, server: Server) -> None:
        """Readmit an evicted server that responds again, or admit a new one, once it serves the committed version.

        Does nothing during an update.

        Raises:
            WeightUpdateError: the run cannot use the server, or the server holds other weights and could not load the
                committed weights.
            InferenceError: the server does not respond, or the committed weights are not known yet.
        """
        if self.is_in_progress:
            return
        async with self._lock:
            if not server.is_live and self.state is UpdateState.IDLE:
                await self._readmit(server)

    async def _end_rejoin(self) -> None:
        """Wait for a rejoin in progress, if there is one, and cancel it after `_REJOIN_SECONDS`."""
        try:
            async with asyncio.timeout(_REJOIN_SECONDS), self._lock:
                return
        except TimeoutError:
            for server in self._router.servers:
                if server.tasks and not server.is_live:
                    logger.warning("server %s takes too long to rejoin; canceled for a weight update", server.address)
                    self._router.interrupt(server)

    async def _readmit(self, server: Server) -> None:
        """Load the committed version on a server if necessary, check its weights, and readmit it."""
        server.forget_process()
        committed = self._committed_weights()
        version = self._router.version
        if server.name:
            await self._check_identity(server, committed)
        else:
            server.move(ServerState.REJOINING, server.reason)
        health = await self._transport.call_until_evicted(server, self._transport.protocol.health())
        if self._controls_servers and self._transport.protocol.capabilities.sleeps:  # it may have been lost asleep
            await self._transport.call_until_evicted(server, self._transport.protocol.wake())
        if health.version != version:
            await self._load_committed(server, committed, f"version {health.version}")
        elif not self._loading.is_complete(server):
            await self._load_committed(server, committed, "incomplete weights of a failed load")
        if committed is not None:
            await self._loading.check(server, committed)
        elif version != self._spec.version:
            raise InferenceError(
                f"{server.address}: cannot check version {version}: its commit record does not exist yet."
            )
        protocol = self._transport.protocol
        if self._controls_servers:  # otherwise the client that paused the server, perhaps for an update, must resume it
            exchange = protocol.pause("keep", self._all_servers.lease) if self._is_paused else protocol.resume()
            await self._transport.call_until_evicted(server, exchange)
        self._router.readmit(server, version, ServerState.PAUSED if self._is_paused else ServerState.SERVING)

    async def _check_identity(self, server: Server, committed: CommittedWeights | None) -> None:
        """Check the self-description of a server, because another server may have taken over its address.

        Raises:
            WeightUpdateError: the run cannot use this server.
        """
        server.move(ServerState.STARTING, server.reason)
        try:
            description = await self._transport.call_until_evicted(server, self._transport.protocol.describe())
            if description is not None:
                stored = committed is not None and committed.readable
                await asyncio.to_thread(description.check, self._spec, self._program, stored)
        except (ServerBusyError, ServerLostError):
            raise
        except InferenceError as error:
            raise WeightUpdateError(f"this run cannot use the server {server.address}: {error}") from error
        server.move(ServerState.REJOINING, server.reason)

    async def pause(self) -> None:
        """Pause all servers until `resume`. Updates in between leave them paused."""
        async with self._lock:
            self._is_paused = self._controls_servers = True
            await self._pauses.renew("keep")
            await self._pause_all("keep", "pause")

    async def resume(self) -> None:
        """Resume all servers after `pause`; sleeping servers resume when they wake."""
        async with self._lock:
            self._is_paused = False
            if self.state is not UpdateState.SLEEPING:
                await self._resume_all()

    async def sleep(self) -> float:
        """Release the servers' device memory until the next commit or `wake`.

        Unfinished completions are interrupted, and requests are held back. No server rejoins meanwhile.

        Returns:
            number of bytes released, as reported by the servers.
        """
        async with self._lock:
            self._router.close()
            self._controls_servers = True
            self._move(UpdateState.SLEEPING)
            try:
                await self._pauses.renew("recompute")
                await self._pause_all("recompute", "pause")
                call, protocol = self._transport.call_until_evicted, self._all_servers.protocol
                return sum(await self._all_servers.call_all(lambda s: call(s, protocol.sleep()), "sleep"))
            except BaseException:
                with contextlib.suppress(WeightUpdateError):  # report the first error
                    await self._wake_and_resume()
                raise

    async def wake(self) -> None:
        """Wake the servers after `sleep`, unless a commit already woke them."""
        async with self._lock:
            if self.state is UpdateState.SLEEPING:
                await self._wake_and_resume()

    async def _wake_and_resume(self) -> None:
        """Wake all servers, evict those that do not wake, and resume generation unless `pause` was called."""
        try:
            await self._wake_all()
            self._move(UpdateState.STAGED if self._staged else UpdateState.IDLE)
            await self._resume_all(stay_paused=False)
            if self._is_paused:
                await self._pause_all("keep", "pause again")
        except BaseException as error:
            for server in self._router.live:
                self._router.evict(server, f"could not wake: {error}")
            raise
        finally:
            await self._pauses.renew("keep" if self._is_paused else "")
            self._move(UpdateState.STAGED if self._staged else UpdateState.IDLE)
            self._router.open()

    async def _wake_all(self) -> None:
        """Wake the sleeping servers, without resuming generation."""
        call, protocol = self._transport.call_until_evicted, self._all_servers.protocol
        await self._all_servers.call_all(lambda s: call(s, protocol.wake()), "wake")

    def stop_renewal(self) -> None:
        """Stop renewing the pauses of the servers."""
        self._pauses.stop()

    def _set_committed(self, version: int) -> None:
        """Make `version` the committed version."""
        if self._staged is not None and self._staged.weights.version == version:
            self._committed = self._staged.weights
        self._router.version = max(self._router.version, version)

    def _committed_weights(self) -> CommittedWeights | None:
        """Return the committed weights, as staged by this client or as recorded by the trainer of another client.

        If no server is live and this run has already committed a version, a later version in the record counts as
        committed.

        Raises:
            InferenceError: the record cannot be read.
        """
        weights, router = self._committed, self._router
        if (weights is None or weights.version != router.version) and self._spec.weights_dir:
            try:
                weights = read_committed(self._spec.weights_dir)
            except WeightUpdateError as error:
                raise InferenceError(str(error)) from error
            if weights is not None and not router.live and router.version > self._spec.version:
                router.version = max(router.version, weights.version)
        return weights if weights is not None and weights.version == router.version else None

    async def _load_committed(self, server: Server, committed: CommittedWeights | None, served: str) -> None:
        """Load the committed version on a server that returned with other weights.

        Args:
            server: server to load it on.
            committed: committed weights, or None if unknown.
            served: description of the weights that the server serves, for messages.

        Raises:
            InferenceError: another client publishes, or the weights can no longer be read.
        """
        version = self._router.version
        if committed is None or committed is not self._committed:  # the client that publishes will load it
            raise InferenceError(f"{server.address}: serves {served}, but version {version} is committed.")
        if not committed.readable:
            raise InferenceError(
                f"{server.address}: serves {served}, but version {version} is committed. Route {committed.meta.route} "
                "stores no weights to load, so the server rejoins with the next update."
            )
        await self._loading.load_committed(server, committed)

    async def _stage_all(self, meta: WeightUpdateMeta) -> list[WeightReceipt]:
        """Stage a version on all live servers and return their receipts.

        If the route stores no weights, also stage it on rejoining servers: they can get weights only from an update.
        """
        self._staged = None
        was_sleeping = self.state is UpdateState.SLEEPING
        if not was_sleeping:
            self._move(UpdateState.IDLE)
        await self._loading.prepare(meta)
        joining = [server for server in self._router.servers if server.state is ServerState.REJOINING]
        if meta.route in STORED_ROUTES:
            joining = []
        for server in joining:
            server.forget_process()
        servers = [*self._router.live, *joining]
        if meta.route in RENDEZVOUS_ROUTES:
            receipts = await self._stage_together(servers, meta)
        else:
            receipts = await self._all_servers.call_all(
                lambda s: self._stage(s, meta), f"stage version {meta.version}", servers
            )
        self._staged = _StagedUpdate(CommittedWeights(meta, receipts[0]), joining)
        if not was_sleeping:
            self._move(UpdateState.STAGED)
        for server in self._router.live:
            if server.state is ServerState.SERVING:
                server.move(ServerState.STAGED)
        return receipts

    async def _stage_together(self, servers: list[Server], meta: WeightUpdateMeta) -> list[WeightReceipt]:
        """Stage on servers that form a group, each with its own rank. If one fails, none can complete the transfer.

        Raises:
            ReceiversLostError: some servers were lost and evicted. The version can be sent again to the others.
            WeightUpdateError: a server rejected the version, or no server is left.
        """
        metas = [with_rank(meta, rank, len(servers) + 1) for rank in range(1, len(servers) + 1)]
        tasks = [asyncio.create_task(self._stage(*pair)) for pair in zip(servers, metas, strict=True)]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
            errors = [task.exception() if task.done() else None for task in tasks]
            if any(errors) and not any(isinstance(error, ServerLostError) for error in errors):
                # The trainer canceled the transfer and sent the reason to all servers. A server that does not report it
                # counts as lost.
                await asyncio.wait(tasks, timeout=_SHUTDOWN_SECONDS)
                errors = [task.exception() if task.done() else ServerLostError("no response") for task in tasks]
            if not any(errors):
                return [task.result() for task in tasks]
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        failed = failures(servers, errors)
        lost = [(server, error) for server, error in failed if isinstance(error, ServerLostError)]
        for server, error in lost:
            self._drop(server, f"could not stage version {meta.version}: {error}")
        reasons = "; ".join(f"{server.address}: {error}" for server, error in lost or failed)
        if lost and (self._router.live or self._router.rejoin_timeout):
            raise ReceiversLostError(f"route {meta.route}, version {meta.version}: servers were lost: {reasons}.")
        raise WeightUpdateError(f"route {meta.route}: no server could stage version {meta.version}: {reasons}.")

    async def _admit_joining(self, version: int) -> None:
        """Commit the version on the servers that were staged while evicted, and readmit them."""
        for server in self._staged.joining if self._staged is not None else ():
            if server.state is not ServerState.REJOINING:
                continue
            try:
                if self._is_paused:
                    await self._all_servers.pause(server, "keep")
                await self._loading.commit(server, version, "keep")
            except InferenceError as error:
                server.record_error(f"could not commit version {version}: {error}")
            else:
                self._router.readmit(server, version, ServerState.PAUSED)

    async def _stage(self, server: Server, meta: WeightUpdateMeta) -> WeightReceipt:
        try:
            return await self._loading.stage(server, meta)
        except InferenceError as error:
            if server.is_live:
                raise
            self._drop(server, str(error))
            raise ServerLostError(str(error)) from error  # even a rejection by a rejoining server fails no update

    def _drop(self, server: Server, reason: str) -> None:
        """Evict a server. A rejoining server takes part again only after a successful probe."""
        if server.is_live:
            self._router.evict(server, reason)
        elif server.state is ServerState.REJOINING:
            server.move(ServerState.EVICTED, reason)

    async def _pause_all(self, mode: str, what: str) -> None:
        await self._all_servers.call_all(lambda server: self._all_servers.pause(server, mode), what)
        for server in self._router.live:
            server.move(ServerState.PAUSED)

    async def _resume_all(self, stay_paused: bool | None = None) -> list[float | None]:
        """Resume all live servers, unless `pause` holds them paused.

        Args:
            stay_paused: whether to leave them paused; None to leave them paused only after a call of `pause`.

        Returns:
            duration of each server's pause in seconds, or None if not reported.
        """
        if self._is_paused if stay_paused is None else stay_paused:
            return []
        await self._pauses.renew("")
        protocol = self._transport.protocol
        pauses: list[float | None] = await self._all_servers.call_all(
            lambda s: self._transport.call_until_evicted(s, protocol.resume()), "resume"
        )
        for server in self._router.live:
            server.move(ServerState.STAGED if self.state is UpdateState.STAGED else ServerState.SERVING)
        return pauses


class PauseRenewal:
    """Renews the pauses of all live servers, which end by themselves if their client is lost.

    Args:
        all_servers: the servers.
    """

    def __init__(self, all_servers: AllServers) -> None:
        self._all_servers = all_servers
        self._task: asyncio.Task[None] | None = None
        self._lock = asyncio.Lock()

    def stop(self) -> None:
        """Stop the renewal without waiting."""
        if self._task is not None:
            self._task.cancel()

    async def renew(self, mode: str) -> None:
        """Start to renew the pauses with `mode` regularly; an empty `mode` only stops the renewal.

        Returns after all earlier renewals have ended, so that none of them follows a resume.
        """
        async with self._lock:
            self.stop()
            self._task = asyncio.create_task(self._repeat(mode), name="pause") if mode else None

    async def _repeat(self, mode: str) -> None:
        servers = self._all_servers
        while True:
            await servers.router.clock.sleep(servers.lease / 3)
            async with self._lock:
                calls = (
                    servers.transport.call_until_evicted(
                        server, servers.protocol.pause(mode, servers.lease), transport.PROBE_TIMEOUT
                    )
                    for server in servers.router.live
                )
                await asyncio.gather(*calls, return_exceptions=True)
