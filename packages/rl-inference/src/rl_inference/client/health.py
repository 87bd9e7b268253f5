"""Health probes of servers: evict lost servers and readmit those that returned."""

from __future__ import annotations

import asyncio
import random
from itertools import count
from weakref import WeakKeyDictionary

from rl_contracts.errors import InferenceError, WeightUpdateError
from rl_contracts.runtime.logging import get_logger
from rl_inference.client import transport
from rl_inference.client.discovery import Discovery
from rl_inference.client.file_limit import TooManyFilesError
from rl_inference.client.router import Router
from rl_inference.client.server_state import ServerState
from rl_inference.client.transport import Server, ServerGoneError, Transport
from rl_inference.client.weight_update import WeightUpdateClient

logger = get_logger("inference.client")

PROBE_INTERVAL = 2.0
"""Mean seconds between two probes of a live server by a single client. A lost server is noticed within seconds, at the
cost of one small request."""
CHECKS_BEFORE_EVICTION = 4
"""Number of probes of evicted servers per probe of live servers, because requests may wait for evicted ones."""


class ServerMonitor:
    """Background task that probes all servers, from the first use of the client until it is closed.

    A live server is evicted if its process ended, or if it does not respond after a failed request or for the progress
    timeout. An evicted server that responds is passed to `WeightUpdateClient.rejoin`, which decides whether to use it.
    If the task itself fails, all waits for a server end with its error.

    Args:
        router: router of the servers.
        transport: HTTP session for the servers.
        updates: weight updates of the servers.
        clients: number of clients of the servers.
    """

    def __init__(self, router: Router, transport: Transport, updates: WeightUpdateClient, clients: int = 1) -> None:
        self._router = router
        self._transport = transport
        self._updates = updates
        self._clients = clients
        self._probe_requested = asyncio.Event()
        self._silent_since: WeakKeyDictionary[Server, float] = WeakKeyDictionary()
        self._returning: set[Server] = set()
        self._rejected: WeakKeyDictionary[Server, tuple[str, int | None, int]] = WeakKeyDictionary()
        self._task: asyncio.Task[None] | None = None
        self.discovery: Discovery | None = None
        """Service discovery, or None to keep the initial servers."""

    @property
    def probe_interval(self) -> float:
        """Mean seconds between two probes of a live server.

        All clients together probe about as often as a single client. The interval does not grow beyond a quarter of
        `progress_timeout` (and of `rejoin_timeout`, if set), so each client notices in time that a server is silent or
        has returned. After a failure a client probes immediately.
        """
        progress_timeout = self._transport.config.progress_timeout
        longest = min(progress_timeout, self._router.rejoin_timeout or progress_timeout) / 4
        return min(self._clients * PROBE_INTERVAL, max(PROBE_INTERVAL, longest))

    def start(self) -> None:
        """Start the task on the running event loop. Further calls do nothing."""
        if self._task is None:
            self._task = asyncio.create_task(self._watch(), name="server-monitor")
            self._task.add_done_callback(self._on_task_end)

    def check_now(self) -> None:
        """Probe the servers now, because a request failed."""
        self._probe_requested.set()

    async def stop(self) -> None:
        """Cancel the task and all rejoins in progress."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})

    def _on_task_end(self, task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        if error is not None:
            logger.error("the server monitor failed", exc_info=error)
        self._router.stop_waiting(error or asyncio.CancelledError("the client was closed"))

    async def _watch(self) -> None:
        async with asyncio.TaskGroup() as tasks:  # an unexpected error of a rejoin ends the monitor
            if self.discovery is not None:
                tasks.create_task(self.discovery.watch(self.check_now), name="discovery")
            for round_number in count():
                evicted = [server for server in self._router.servers if not server.is_live]
                requested = await self._wait(1 / CHECKS_BEFORE_EVICTION if evicted else 1.0)
                probe_all = requested or not evicted or round_number % CHECKS_BEFORE_EVICTION == 0
                await asyncio.gather(
                    *(self._check(server, tasks) for server in (self._router.servers if probe_all else evicted))
                )
                self._router.end_late_waits()

    async def _wait(self, fraction: float) -> bool:
        """Wait for a fraction of the probe interval or until `check_now`, and return whether `check_now` was called.

        The time is random, so that clients that started together do not probe at the same time.
        """
        interval = self.probe_interval * fraction * random.uniform(0.5, 1.5)
        waits = {
            asyncio.ensure_future(self._router.clock.sleep(interval)),
            asyncio.ensure_future(self._probe_requested.wait()),
        }
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
        requested = self._probe_requested.is_set()
        self._probe_requested.clear()
        return requested

    async def _check(self, server: Server, tasks: asyncio.TaskGroup) -> None:
        """Probe one server and update its state. Start a rejoin if it is evicted and responds."""
        if server in self._returning:
            return
        committed = server.version
        try:
            health = await self._transport.call(server, self._transport.protocol.health(), transport.PROBE_TIMEOUT)
        except TooManyFilesError as error:  # not a failure of the server
            if server.record_error(str(error)):
                logger.warning("cannot probe server %s: %s", server.address, error)
            return
        except InferenceError as error:
            self._on_unhealthy(server, error)
            return
        if server.state is ServerState.LEAVING:  # removed during the probe
            return
        if server.state is ServerState.EVICTED:
            server.move(ServerState.REJOINING, server.reason)
        server.other_requests = max((health.open or 0) - server.open, 0)
        self._silent_since.pop(server, None)
        if server.is_live and health.version is not None and health.version < committed:
            self._router.evict(server, f"serves version {health.version} after it had committed {committed}")
        state = (server.instance, health.version, self._router.version)
        if not server.is_live and self._rejected.get(server) != state:
            self._returning.add(server)
            tasks.create_task(self._readmit(server, state), name=f"rejoin {server.address}")

    def _on_unhealthy(self, server: Server, error: InferenceError) -> None:
        if not server.is_live:
            if server.state is ServerState.REJOINING:
                server.move(ServerState.EVICTED, server.reason)
            server.forget_process()  # the next response may come from another process
            self._log_once(server, error)
            return
        now = self._router.clock.now()
        silent_seconds = now - self._silent_since.setdefault(server, now)
        if isinstance(error, ServerGoneError):
            self._router.evict(server, f"is gone: {error}")
        elif server.failures or silent_seconds >= self._transport.config.progress_timeout:
            self._router.evict(server, f"no longer responds: {error}")

    async def _readmit(self, server: Server, state: tuple[str, int | None, int]) -> None:
        """Try to readmit a server. After a `WeightUpdateError`, the next attempt requires a new server state."""
        try:
            await self._updates.rejoin(server)
        except WeightUpdateError as error:
            self._rejected[server] = state
            server.record_error(str(error))
            logger.warning("server %s responds but cannot rejoin: %s", server.address, error)
        except InferenceError as error:
            self._log_once(server, error)
        finally:
            self._returning.discard(server)

    def _log_once(self, server: Server, error: InferenceError) -> None:
        if server.record_error(str(error)):
            logger.info("server %s cannot rejoin yet: %s", server.address, error)
