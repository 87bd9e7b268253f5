"""A weight update over all servers: two phases, and whoever does not acknowledge is out before anyone goes
on. A server that returns is brought to the committed version and checked before it takes part again."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any

from rl_contracts.config import require_choice
from rl_contracts.data import MEETING_ROUTES, STORED_ROUTES, ServeSpec, WeightReceipt, WeightUpdateMeta
from rl_contracts.errors import InferenceError, ReceiversLostError, WeightUpdateError
from rl_contracts.logging import get_logger
from rl_contracts.weights import CommittedWeights, read_committed, seated, verify_receipt
from rl_inference.routing import Router
from rl_inference.transport import Server, ServerLostError, Transport, failures

logger = get_logger("inference.client")

_FAREWELL = 5.0
"""Seconds within which servers pass on that the trainer broke off."""


_PATIENCE = 10.0
"""Seconds for which an update waits for a server that is coming back."""


class _AllLostError(WeightUpdateError):
    """No server is left, but some may come back."""


class WeightUpdates:
    """stage on all -> pause all -> commit on all -> resume all; and the way back for a server that was evicted.

    Invariant: when a server resumes, every live server has committed the same version. So nobody rejoins between a
    stage and its commit.
    """

    def __init__(self, spec: ServeSpec, router: Router, transport: Transport) -> None:
        self._spec = spec
        self._router = router
        self._transport = transport
        self._lock = asyncio.Lock()
        self._held = False
        self._staged: CommittedWeights | None = None
        self._committed: CommittedWeights | None = None
        self._joining: list[Server] = []
        self._rejoining: Server | None = None

    @property
    def under_way(self) -> bool:
        """Whether this client is changing what servers serve, or is about to."""
        return self._lock.locked() or self._staged is not None

    async def stage(self, meta: WeightUpdateMeta) -> list[WeightReceipt]:
        """Load a version beside the served one everywhere. See `InferenceEngine.stage_weights`.

        A rejoin that is under way gets a moment and is then broken off: a server that hangs must not hold up the
        others, but frequent updates must not keep a healthy one out for ever.
        """
        if self._rejoining is not None:
            await self._end_rejoin(self._rejoining)
        while await self._router.wait_live(self._transport.config.rejoin_timeout):
            with contextlib.suppress(_AllLostError):
                async with self._lock:
                    return await self._stage_all(meta)
        raise WeightUpdateError(f"no live server could stage version {meta.version}: {self._router.reasons}.")

    async def commit(self, version: int, interrupt: str) -> float:
        """Serve the staged version everywhere. See `InferenceEngine.commit_weights`."""
        require_choice("interrupt", interrupt, ("keep", "recompute", "wait"))
        begin = self._router.clock.now()
        async with self._lock:
            try:
                await self._everywhere(lambda s: self._pause(s, interrupt), f"pause for version {version}")
                await self._everywhere(lambda s: self._commit(s, version, interrupt), f"commit version {version}")
                await self._admit_joining(version)
            except _AllLostError:
                if self._staged is None or self._staged.version != version:
                    raise
                self._settle(version)
            except BaseException:
                self._staged = None
                # nobody may stay paused; what went wrong first is what counts
                with contextlib.suppress(WeightUpdateError):
                    await self._resume_all()
                raise
            else:
                self._settle(version)
                with contextlib.suppress(_AllLostError):
                    return max(await self._resume_all(), default=0.0)
        # Every server was lost on the way. The trainer has decided for this version, so it is what the first one that
        # comes back must serve.
        if not await self._router.wait_live(self._transport.config.rejoin_timeout):
            raise WeightUpdateError(f"no live server could commit version {version}: {self._router.reasons}.")
        return self._router.clock.now() - begin

    async def rejoin(self, server: Server) -> None:
        """Take an evicted server back that answers again, once it holds what is committed. Does nothing during an
        update.

        Raises:
            WeightUpdateError: it holds something else and could not be brought to what it should hold.
            InferenceError: it does not answer; or nobody can say yet what it should hold.
        """
        if self.under_way:
            return
        async with self._lock:
            if server.live or self._staged is not None:
                return
            self._rejoining = server
            try:
                await self._take_back(server)
            finally:
                self._rejoining = None

    async def _end_rejoin(self, server: Server) -> None:
        try:
            async with asyncio.timeout(_PATIENCE), self._lock:
                return
        except TimeoutError:
            logger.warning("server %s takes too long to come back: an update goes first", server.address)
            self._router.interrupt(server)

    async def _take_back(self, server: Server) -> None:
        """Bring it to what is committed, compare, and let it take part."""
        server.instance = ""
        version = self._router.version
        known = self._known()
        found, _ = await self._transport.ask(server, self._transport.protocol.health())
        if found != version:
            await self._bring_up(server, known, found)
        if known is not None:
            await self._check_receipt(server, known)
        elif version != self._spec.version:
            raise InferenceError(f"{server.address}: no record says yet what version {version} must hold.")
        call = self._transport.protocol.pause("keep") if self._held else self._transport.protocol.resume()
        await self._transport.ask(server, call)
        self._router.readmit(server, version)

    async def pause(self) -> None:
        """Pause everywhere until `resume`; updates in between do not resume either."""
        async with self._lock:
            self._held = True
            await self._everywhere(lambda server: self._pause(server, "keep"), "pause")

    async def resume(self) -> None:
        """Undo `pause`."""
        async with self._lock:
            self._held = False
            await self._resume_all()

    def _settle(self, version: int) -> None:
        """`version` is what counts from now on."""
        if self._staged is not None and self._staged.version == version:
            self._committed = self._staged
        self._staged = None
        self._router.version = max(self._router.version, version)

    def _known(self) -> CommittedWeights | None:
        """What the committed version holds: as staged by this client, or as recorded by the trainer of another one."""
        found, version = self._committed, self._router.version
        if (found is None or found.version != version) and self._spec.weights_dir:
            found = read_committed(self._spec.weights_dir)
        return found if found is not None and found.version == version else None

    async def _bring_up(self, server: Server, known: CommittedWeights | None, found: int) -> None:
        """Stage and commit the committed version on a server that came back with another one."""
        version = self._router.version
        if known is None or known is not self._committed:  # another client publishes, and will bring it up
            raise InferenceError(f"{server.address}: serves version {found}, committed is {version}.")
        if not known.readable:
            raise InferenceError(
                f"{server.address}: serves version {found}, committed is {version}; route {known.meta.route} leaves "
                "nothing to read, so it takes part again from the next update on."
            )
        verify_receipt(known.receipt, await self._stage(server, known.meta), known.meta.route)
        await self._commit(server, version, "keep")

    async def _check_receipt(self, server: Server, known: CommittedWeights) -> None:
        """Compare the live tensors with what was verified when the version was committed."""
        found = await self._transport.ask(
            server, self._transport.protocol.receipt(), self._transport.config.update_timeout
        )
        # a live receipt has a sum under every name of a tied parameter, and of what is never sent
        sums = {name: found.checksums[name] for name in known.receipt.checksums if name in found.checksums}
        verify_receipt(known.receipt, replace(found, checksums=sums), known.meta.route)

    async def _stage_all(self, meta: WeightUpdateMeta) -> list[WeightReceipt]:
        """Stage on all live servers. Over a route that leaves nothing to read, servers that came back can only be
        brought up by an update: they are staged with the others, and take part from its commit on."""
        self._staged, self._joining = None, []
        joining = [server for server in self._router.servers if not server.live and server.well]
        if meta.route in STORED_ROUTES:
            joining = []
        for server in joining:
            server.instance = ""
        servers = [*self._router.live, *joining]
        if meta.route in MEETING_ROUTES:
            receipts = await self._stage_together(servers, meta)
        else:
            receipts = await self._everywhere(lambda s: self._stage(s, meta), f"stage version {meta.version}", servers)
        self._staged, self._joining = CommittedWeights(meta, receipts[0]), joining
        return receipts

    async def _stage_together(self, servers: list[Server], meta: WeightUpdateMeta) -> list[WeightReceipt]:
        """Stage on servers that wait for each other, each with a seat: where one fails, nobody can go on.

        Raises:
            ReceiversLostError: some were lost, and are evicted; whoever is left can be sent the version again.
            WeightUpdateError: one refused, or nobody is left.
        """
        seats = [seated(meta, rank, len(servers) + 1) for rank in range(1, len(servers) + 1)]
        tasks = [asyncio.create_task(self._stage(*pair)) for pair in zip(servers, seats, strict=True)]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
            errors = [task.exception() if task.done() else None for task in tasks]
            if any(errors) and not any(isinstance(error, ServerLostError) for error in errors):
                # The trainer broke off, for a reason that it told all of them; who does not pass it on is not there.
                await asyncio.wait(tasks, timeout=_FAREWELL)
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
                await self._commit(server, version, "keep")
            except InferenceError as error:
                server.last_error = f"could not commit version {version}: {error}"
            else:
                self._router.readmit(server, version)

    async def _stage(self, server: Server, meta: WeightUpdateMeta) -> WeightReceipt:
        try:
            return await self._transport.ask(
                server, self._transport.protocol.stage(meta), self._transport.config.update_timeout
            )
        except InferenceError as error:
            server.well = False  # if it is out, or will be, it is not staged again before it has shown that it is well
            if server.live:
                raise
            raise ServerLostError(str(error)) from error  # nobody counts on it yet, whatever it refused

    async def _pause(self, server: Server, mode: str) -> None:
        """Wait for the pause; a drain may take as long as it makes tokens."""
        before, since = -1.0, self._router.clock.now()
        while (tokens := await self._transport.ask(server, self._transport.protocol.pause(mode))) is not None:
            if tokens != before:
                before, since = tokens, self._router.clock.now()
            elif self._router.clock.now() - since > self._transport.config.progress_timeout:
                raise ServerLostError(
                    f"{server.address}: drained no further for {self._transport.config.progress_timeout:g} s"
                )

    async def _commit(self, server: Server, version: int, mode: str) -> None:
        await self._transport.ask(server, self._transport.protocol.commit(version, mode))
        server.version = version

    async def _resume_all(self) -> list[float]:
        """Let all live servers go on, unless their owner holds them paused.

        Returns:
            how long each stood still, in seconds.
        """
        if self._held:
            return []
        return await self._everywhere(lambda s: self._transport.ask(s, self._transport.protocol.resume()), "resume")

    async def _everywhere(
        self, action: Callable[[Server], Coroutine[Any, Any, Any]], what: str, servers: list[Server] | None = None
    ) -> list[Any]:
        """Do something on all live servers at once (or on `servers`); those that fail are evicted.

        Raises:
            _AllLostError: none succeeded, and all of them were lost; they are evicted, and may come back.
            WeightUpdateError: none succeeded.
        """
        servers = self._router.live if servers is None else servers
        results = await asyncio.gather(*(action(server) for server in servers), return_exceptions=True)
        good = [result for result in results if not isinstance(result, BaseException)]
        bad = failures(servers, results)
        lost = bool(self._transport.config.rejoin_timeout) and all(
            isinstance(error, ServerLostError) for _, error in bad
        )
        if good or lost:
            for server, error in bad:
                self._router.evict(server, f"could not {what}: {error}")
        if not good:
            reasons = "; ".join(f"{server.address} could not {what}: {error}" for server, error in bad)
            message = f"no live server could {what}: {reasons or self._router.reasons}."
            raise _AllLostError(message) if lost and self._router.servers else WeightUpdateError(message)
        return good
