"""A weight update over all servers: two phases, and whoever does not acknowledge is out before anyone goes
on. A server that returns is brought to the committed version and checked before it takes part again."""

from __future__ import annotations

import asyncio
import contextlib

from rl_contracts.config import require_choice
from rl_contracts.data import RENDEZVOUS_ROUTES, STORED_ROUTES, ServeSpec, WeightReceipt, WeightUpdateMeta
from rl_contracts.errors import InferenceError, ReceiversLostError, WeightUpdateError
from rl_contracts.inference import Canary, ServerProgram
from rl_contracts.runtime.logging import get_logger
from rl_contracts.weights import CommittedWeights, read_committed, with_rank
from rl_inference.client.all_servers import AllLostError, AllServers
from rl_inference.client.router import Router
from rl_inference.client.transport import Server, ServerBusyError, ServerLostError, Transport, failures
from rl_inference.client.weight_loading import InPlaceLoad, StagedLoad

logger = get_logger("inference.client")

_SHUTDOWN_SECONDS = 5.0
"""Seconds within which servers pass on that the trainer broke off."""
_PATIENCE = 10.0
"""Seconds for which an update waits for a server that is coming back."""


class WeightUpdates:
    """stage on all -> pause all -> commit on all -> resume all; and the way back for a server that was evicted. How a
    server stages and commits is up to `rl_inference.client.weight_loading`.

    Invariant: when a server resumes, every live server has committed the same version. So nobody rejoins between a
    stage and its commit.
    """

    def __init__(
        self, spec: ServeSpec, router: Router, transport: Transport, program: ServerProgram | None = None
    ) -> None:
        self._spec = spec
        self._program = program
        self._router = router
        self._transport = transport
        self._fleet = AllServers(router, transport)
        loading = StagedLoad if transport.protocol.capabilities.staged_load else InPlaceLoad
        self._loading = loading(self._fleet, spec.model_path)
        self._lock = asyncio.Lock()
        self._held = self._asleep = self._owns = False
        self._renewing: asyncio.Task[None] | None = None
        self._leases = asyncio.Lock()
        self._staged: CommittedWeights | None = None
        self._committed: CommittedWeights | None = None
        self._joining: list[Server] = []
        self._rejoining: Server | None = None

    @property
    def is_in_progress(self) -> bool:
        """Whether this client is changing what servers serve, or is about to."""
        return self._lock.locked() or self._staged is not None or self._asleep

    async def stage(self, meta: WeightUpdateMeta) -> list[WeightReceipt]:
        """Load a version beside the served one everywhere. See `InferenceEngine.stage_weights`.

        A rejoin that is under way gets a moment and is then broken off: a server that hangs must not hold up the
        others, but frequent updates must not keep a healthy one out for ever.
        """
        self._owns = True
        self._asleep = self._asleep and bool(self._router.live)  # whoever comes back is awake
        if self._rejoining is not None:
            await self._end_rejoin(self._rejoining)
        while await self._router.wait_live(self._transport.config.rejoin_timeout, in_vain=False):
            with contextlib.suppress(AllLostError):
                async with self._lock:
                    return await self._stage_all(meta)
        raise WeightUpdateError(f"no live server could stage version {meta.version}: {self._router.reasons}.")

    async def commit(self, version: int, interrupt: str, canary: Canary | None = None) -> float:
        """Serve the staged version everywhere. See `InferenceEngine.commit_weights`."""
        require_choice("interrupt", interrupt, ("keep", "recompute", "wait"))
        begin = self._router.clock.now()
        async with self._lock:
            try:
                return await self._commit_all(version, interrupt, canary)
            except AllLostError:
                if self._committed is None or self._committed.version != version:
                    raise
            finally:
                await self._renew("keep" if self._held else "")
                self._asleep = False
                self._loading.release()
        # Every server was lost on the way. The trainer has decided for this version, so it is what the first one that
        # comes back must serve.
        if not await self._router.wait_live(self._transport.config.rejoin_timeout, in_vain=False):
            raise WeightUpdateError(f"no live server could commit version {version}: {self._router.reasons}.")
        return self._router.clock.now() - begin

    async def _commit_all(self, version: int, interrupt: str, canary: Canary | None) -> float:
        """pause -> commit -> resume -> prove; the longest time for which a server stood still, in seconds.

        Raises:
            AllLostError: no server is left. If the version was staged, it counts as committed.
        """
        fleet, loading = self._fleet, self._loading
        try:
            slept = await self._wake_all()
            await loading.before_pause(version, canary, self._held or slept)
            begin = self._router.clock.now()
            await self._renew(interrupt)
            await fleet.call_all(lambda s: fleet.pause(s, interrupt), f"pause for version {version}")
            await fleet.call_all(lambda s: loading.commit(s, version, interrupt), f"commit version {version}")
            await self._admit_joining(version)
        except AllLostError:
            if self._staged is not None and self._staged.version == version:
                self._set_committed(version)
            raise
        except BaseException:
            self._staged = None
            # nobody may stay paused; what went wrong first is what counts
            with contextlib.suppress(WeightUpdateError):
                await self._resume_all()
            raise
        self._set_committed(version)
        if self._held and not loading.needs_proof:
            return 0.0
        stood = await self._resume_all(held=False)
        try:
            await loading.prove(version)
        finally:
            if self._held:
                await fleet.call_all(lambda s: fleet.pause(s, "keep"), "pause again")
        pause_seconds = [seconds for seconds in stood if seconds is not None]
        return max(pause_seconds) if pause_seconds and not loading.needs_proof else self._router.clock.now() - begin

    async def rejoin(self, server: Server) -> None:
        """Take an evicted server back that answers again, or a new one in, once it holds what is committed. Does
        nothing during an update.

        Raises:
            WeightUpdateError: it holds something else and could not be brought to what it should hold.
            InferenceError: it does not answer; or nobody can say yet what it should hold.
        """
        if self.is_in_progress:
            return
        async with self._lock:
            if server.live or self._staged is not None:
                return
            self._rejoining = server
            try:
                await self._readmit(server)
            finally:
                self._rejoining = None

    async def _end_rejoin(self, server: Server) -> None:
        try:
            async with asyncio.timeout(_PATIENCE), self._lock:
                return
        except TimeoutError:
            logger.warning("server %s takes too long to come back: an update goes first", server.address)
            self._router.interrupt(server)

    async def _readmit(self, server: Server) -> None:
        """Bring it to what is committed, compare, and let it take part."""
        server.instance = ""
        known = self._committed_weights()
        version = self._router.version
        if server.name:
            await self._check_identity(server, known)
        health = await self._transport.call_until_evicted(server, self._transport.protocol.health())
        if self._owns and self._transport.protocol.capabilities.sleeps:  # it may have been lost asleep
            await self._transport.call_until_evicted(server, self._transport.protocol.wake())
        if health.version != version:
            await self._load_committed(server, known, f"version {health.version}")
        elif not self._loading.is_complete(server):
            await self._load_committed(server, known, "what is left of a load that failed")
        if known is not None:
            await self._loading.check(server, known)
        elif version != self._spec.version:
            raise InferenceError(f"{server.address}: no record says yet what version {version} must hold.")
        protocol = self._transport.protocol
        if self._owns:  # who has not paused a server does not let it go on: its owner may be in the middle of an update
            exchange = protocol.pause("keep", self._fleet.lease) if self._held else protocol.resume()
            await self._transport.call_until_evicted(server, exchange)
        self._router.readmit(server, version)

    async def _check_identity(self, server: Server, known: CommittedWeights | None) -> None:
        """Ask what it is: its address may be another server's by now.

        Raises:
            WeightUpdateError: the run cannot use it.
        """
        server.vetted = False
        try:
            description = await self._transport.call_until_evicted(server, self._transport.protocol.describe())
            if description is not None:
                stored = known is not None and known.readable
                await asyncio.to_thread(description.check, self._spec, self._program, stored)
        except (ServerBusyError, ServerLostError):
            raise
        except InferenceError as error:
            raise WeightUpdateError(f"{server.address} is no server that this run can use: {error}") from error
        server.vetted = True

    async def pause(self) -> None:
        """Pause everywhere until `resume`; updates in between do not resume either."""
        async with self._lock:
            self._held = self._owns = True
            await self._renew("keep")
            await self._fleet.call_all(lambda server: self._fleet.pause(server, "keep"), "pause")

    async def resume(self) -> None:
        """Undo `pause`."""
        async with self._lock:
            self._held = False
            await self._resume_all()

    async def sleep(self) -> float:
        """Interrupt all answers, hold requests back, and let servers free their memory until the next commit, or
        `wake`; returns how many bytes they say it was. Nobody rejoins meanwhile."""
        async with self._lock:
            self._router.close()
            self._asleep = self._owns = True
            try:
                await self._renew("recompute")
                await self._fleet.call_all(lambda s: self._fleet.pause(s, "recompute"), "pause")
                ask, protocol = self._transport.call_until_evicted, self._fleet.protocol
                return sum(await self._fleet.call_all(lambda s: ask(s, protocol.sleep()), "sleep"))
            except BaseException:
                with contextlib.suppress(WeightUpdateError):  # what went wrong first is what counts
                    await self._resume_after_update()
                raise

    async def wake(self) -> None:
        """Undo `sleep`, where no commit has."""
        async with self._lock:
            if self._asleep:
                await self._resume_after_update()

    async def _resume_after_update(self) -> None:
        """Wake all, and let them generate unless their owner holds them paused; who does not wake is out."""
        fleet = self._fleet
        try:
            await self._wake_all()
            await self._resume_all(held=False)
            if self._held:
                await fleet.call_all(lambda s: fleet.pause(s, "keep"), "pause again")
        except BaseException as error:
            for server in self._router.live:
                self._router.evict(server, f"could not wake: {error}")
            raise
        finally:
            await self._renew("keep" if self._held else "")
            self._asleep = False
            self._router.open()

    async def _wake_all(self) -> bool:
        """Whether servers slept: they have their memory again, and generate nothing yet."""
        if self._asleep:
            ask, protocol = self._transport.call_until_evicted, self._fleet.protocol
            await self._fleet.call_all(lambda s: ask(s, protocol.wake()), "wake")
        return self._asleep

    def end_lease(self) -> None:
        """Renew the lease of a pause no more."""
        if self._renewing is not None:
            self._renewing.cancel()

    async def _renew(self, mode: str) -> None:
        """Keep the servers paused as `mode` says for as long as this client lives; empty: no more. Returns when none of
        the earlier kind is under way, so that it cannot come after a resume."""
        async with self._leases:
            self.end_lease()
            self._renewing = asyncio.create_task(self._renewals(mode), name="pause") if mode else None

    async def _renewals(self, mode: str) -> None:
        transport, lease = self._transport, self._fleet.lease
        while True:
            await self._router.clock.sleep(lease / 3)
            async with self._leases:
                asked = (
                    transport.call_until_evicted(
                        s, transport.protocol.pause(mode, lease), transport.config.probe_timeout
                    )
                    for s in self._router.live
                )
                await asyncio.gather(*asked, return_exceptions=True)

    def _set_committed(self, version: int) -> None:
        """`version` is what counts from now on."""
        if self._staged is not None and self._staged.version == version:
            self._committed = self._staged
        self._staged = None
        self._router.version = max(self._router.version, version)

    def _committed_weights(self) -> CommittedWeights | None:
        """What the committed version holds: as staged by this client, or as recorded by the trainer of another one.
        Where no server is left to learn a later version from, the record tells that too; one from before this run
        began does not count.

        Raises:
            InferenceError: the record cannot be read, which says nothing of any server.
        """
        found, router = self._committed, self._router
        if (found is None or found.version != router.version) and self._spec.weights_dir:
            try:
                found = read_committed(self._spec.weights_dir)
            except WeightUpdateError as error:
                raise InferenceError(str(error)) from error
            if found is not None and not router.live and router.version > self._spec.version:
                router.version = max(router.version, found.version)
        return found if found is not None and found.version == router.version else None

    async def _load_committed(self, server: Server, known: CommittedWeights | None, found: str) -> None:
        """Stage and commit the committed version on a server that came back with something else."""
        version = self._router.version
        if known is None or known is not self._committed:  # another client publishes, and will bring it up
            raise InferenceError(f"{server.address}: serves {found}, committed is {version}.")
        if not known.readable:
            raise InferenceError(
                f"{server.address}: serves {found}, committed is {version}; route {known.meta.route} leaves "
                "nothing to read, so it takes part again from the next update on."
            )
        await self._loading.load_committed(server, known)

    async def _stage_all(self, meta: WeightUpdateMeta) -> list[WeightReceipt]:
        """Stage on all live servers. Over a route that leaves nothing to read, servers that came back can only be
        brought up by an update: they are staged with the others, and take part from its commit on."""
        self._staged, self._joining = None, []
        await self._loading.prepare(meta)
        joining = [server for server in self._router.servers if not server.live and server.well and server.vetted]
        if meta.route in STORED_ROUTES:
            joining = []
        for server in joining:
            server.instance = ""
        servers = [*self._router.live, *joining]
        if meta.route in RENDEZVOUS_ROUTES:
            receipts = await self._stage_together(servers, meta)
        else:
            receipts = await self._fleet.call_all(
                lambda s: self._stage(s, meta), f"stage version {meta.version}", servers
            )
        self._staged, self._joining = CommittedWeights(meta, receipts[0]), joining
        return receipts

    async def _stage_together(self, servers: list[Server], meta: WeightUpdateMeta) -> list[WeightReceipt]:
        """Stage on servers that wait for each other, each with a seat: where one fails, nobody can go on.

        Raises:
            ReceiversLostError: some were lost, and are evicted; whoever is left can be sent the version again.
            WeightUpdateError: one refused, or nobody is left.
        """
        seats = [with_rank(meta, rank, len(servers) + 1) for rank in range(1, len(servers) + 1)]
        tasks = [asyncio.create_task(self._stage(*pair)) for pair in zip(servers, seats, strict=True)]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
            errors = [task.exception() if task.done() else None for task in tasks]
            if any(errors) and not any(isinstance(error, ServerLostError) for error in errors):
                # The trainer broke off, for a reason that it told all of them; who does not pass it on is not there.
                await asyncio.wait(tasks, timeout=_SHUTDOWN_SECONDS)
                errors = [task.exception() if task.done() else ServerLostError("did not answer") for task in tasks]
            if not any(errors):
                return [task.result() for task in tasks]
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        failed = failures(servers, errors)
        lost = [(server, error) for server, error in failed if isinstance(error, ServerLostError)]
        for server, error in lost:
            server.well = False  # until it answers again
            self._router.evict(server, f"could not stage version {meta.version}: {error}")
        reasons = "; ".join(f"{server.address}: {error}" for server, error in lost or failed)
        if lost and (self._router.live or self._transport.config.rejoin_timeout):
            raise ReceiversLostError(f"route {meta.route}, version {meta.version}: servers were lost: {reasons}.")
        raise WeightUpdateError(f"route {meta.route}: no server could stage version {meta.version}: {reasons}.")

    async def _admit_joining(self, version: int) -> None:
        """Let servers that were staged although they did not take part commit as well, and take part."""
        joining, self._joining = self._joining, []
        for server in joining:
            try:
                if self._held:
                    await self._fleet.pause(server, "keep")
                await self._loading.commit(server, version, "keep")
            except InferenceError as error:
                server.last_error = f"could not commit version {version}: {error}"
            else:
                self._router.readmit(server, version)

    async def _stage(self, server: Server, meta: WeightUpdateMeta) -> WeightReceipt:
        try:
            return await self._loading.stage(server, meta)
        except InferenceError as error:
            server.well = False  # if it is out, or will be, it is not staged again before it has shown that it is well
            if server.live:
                raise
            raise ServerLostError(str(error)) from error  # nobody counts on it yet, whatever it refused

    async def _resume_all(self, held: bool | None = None) -> list[float | None]:
        """Let all live servers go on, unless their owner holds them paused (`held` False: even then).

        Returns:
            how long each stood still, in seconds; None where it does not say.
        """
        if self._held if held is None else held:
            return []
        await self._renew("")
        protocol = self._transport.protocol
        return await self._fleet.call_all(lambda s: self._transport.call_until_evicted(s, protocol.resume()), "resume")
