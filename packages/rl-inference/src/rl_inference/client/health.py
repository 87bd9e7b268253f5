"""Asks servers whether they are well: evicts those that are gone, and takes back those that have returned."""

from __future__ import annotations

import asyncio
import random
from itertools import count
from weakref import WeakKeyDictionary

from rl_contracts.errors import InferenceError, WeightUpdateError
from rl_contracts.runtime.logging import get_logger
from rl_inference.client.discovery import Discovery
from rl_inference.client.file_limit import TooManyFilesError
from rl_inference.client.router import Router
from rl_inference.client.transport import Server, ServerGoneError, Transport
from rl_inference.client.weight_update import WeightUpdates

logger = get_logger("inference.client")

CHECKS_BEFORE_EVICTION = 4
"""How many times as often as the others the servers are asked that are away, and may be waited for."""


class ServerMonitor:
    """One background task, from the client's first use to its end.

    A live server is evicted when its process is gone, when it is silent although something it was asked failed
    already, or when it has been silent for the progress timeout. An evicted server that answers is handed to
    `WeightUpdates.rejoin`, which decides. Should the task die, nobody waits for a returning server any more, and the
    requests' errors say why.
    """

    def __init__(self, router: Router, transport: Transport, updates: WeightUpdates) -> None:
        self._router = router
        self._transport = transport
        self._updates = updates
        self._hurry = asyncio.Event()
        self._silent_since: WeakKeyDictionary[Server, float] = WeakKeyDictionary()
        self._returning: set[Server] = set()
        self._refused: WeakKeyDictionary[Server, tuple[str, int | None, int]] = WeakKeyDictionary()
        self._task: asyncio.Task[None] | None = None
        self.discovery: Discovery | None = None
        """What says which servers there are; None: those of the start."""

    @property
    def is_enabled(self) -> bool:
        """Whether servers are asked at all."""
        return self._transport.config.probe_interval > 0

    def start(self) -> None:
        """Begin, in the running loop. Further calls do nothing."""
        if self._task is None and self.is_enabled:
            self._task = asyncio.create_task(self._watch(), name="server-monitor")
            self._task.add_done_callback(self._ended)

    def check_now(self) -> None:
        """Something failed: ask now."""
        self._hurry.set()

    async def stop(self) -> None:
        """End the task and the rejoins under way."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})

    def _ended(self, task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        if error is not None:
            logger.error("the monitor of the inference servers died", exc_info=error)
        self._router.stop_waiting(error or asyncio.CancelledError("the client was closed"))

    async def _watch(self) -> None:
        async with asyncio.TaskGroup() as returns:  # an error that a return does not expect ends the monitor
            if self.discovery is not None:
                returns.create_task(self.discovery.watch(self.check_now), name="discovery")
            for look in count():
                away = [server for server in self._router.servers if not server.live]
                hurry = await self._pause(1 / CHECKS_BEFORE_EVICTION if away else 1.0)
                everybody = hurry or not away or look % CHECKS_BEFORE_EVICTION == 0
                await asyncio.gather(*(self._check(s, returns) for s in (self._router.servers if everybody else away)))
                self._router.give_up_after(self._transport.config.rejoin_timeout)

    async def _pause(self, share: float) -> bool:
        """Until a share of the interval is over, or somebody is in a hurry: then True. Clients that began together ask
        at other times."""
        interval = self._transport.config.probe_interval * share * random.uniform(0.5, 1.5)
        waits = {
            asyncio.ensure_future(self._router.clock.sleep(interval)),
            asyncio.ensure_future(self._hurry.wait()),
        }
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
        hurry = self._hurry.is_set()
        self._hurry.clear()
        return hurry

    async def _check(self, server: Server, returns: asyncio.TaskGroup) -> None:
        """Ask one server, and draw the consequence."""
        if server in self._returning:
            return
        committed = server.version
        try:
            health = await self._transport.call(
                server, self._transport.protocol.health(), self._transport.config.probe_timeout
            )
        except TooManyFilesError as error:  # which says nothing of the server
            if server.last_error != str(error):
                logger.warning("server %s cannot be asked how it is: %s", server.address, error)
            server.last_error = str(error)
            return
        except InferenceError as error:
            self._on_unhealthy(server, error)
            return
        if server.let_go:  # meanwhile
            return
        server.well = True
        server.others = max((health.open or 0) - server.open, 0)
        self._silent_since.pop(server, None)
        if server.live and health.version is not None and health.version < committed:
            self._router.evict(server, f"serves version {health.version} after it had committed {committed}")
        state = (server.instance, health.version, self._router.version)
        if not server.live and self._refused.get(server) != state:
            self._returning.add(server)
            returns.create_task(self._readmit(server, state), name=f"rejoin {server.address}")

    def _on_unhealthy(self, server: Server, error: InferenceError) -> None:
        server.well = False
        if not server.live:
            server.instance = ""  # whoever answers next may be another process
            self._say(server, error)
            return
        now = self._router.clock.now()
        silent = now - self._silent_since.setdefault(server, now)
        if isinstance(error, ServerGoneError):
            self._router.evict(server, f"is gone: {error}")
        elif server.failures or silent >= self._transport.config.progress_timeout:
            self._router.evict(server, f"does not answer any more: {error}")

    async def _readmit(self, server: Server, state: tuple[str, int | None, int]) -> None:
        """Try to take a server back; one that holds the wrong weights is not asked again in the same state."""
        try:
            await self._updates.rejoin(server)
        except WeightUpdateError as error:
            self._refused[server] = state
            server.last_error = str(error)
            logger.warning("server %s answers but stays out: %s", server.address, error)
        except InferenceError as error:
            self._say(server, error)
        finally:
            self._returning.discard(server)

    def _say(self, server: Server, error: InferenceError) -> None:
        if server.last_error != str(error):
            logger.info("server %s does not take part yet: %s", server.address, error)
        server.last_error = str(error)
