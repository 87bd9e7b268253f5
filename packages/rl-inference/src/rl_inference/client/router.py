"""Selection of a server for each request, and the set of live servers."""

from __future__ import annotations

import asyncio
import logging
import random
from collections import defaultdict
from dataclasses import dataclass
from math import inf
from weakref import WeakValueDictionary

from rl_contracts.errors import InferenceError
from rl_contracts.runtime.clock import Clock
from rl_contracts.runtime.logging import get_logger
from rl_inference.client.server_state import ServerState
from rl_inference.client.transport import Server

logger = get_logger("inference.client")

AFFINITY_SLACK = 32
"""Number of open requests by which a group's server may exceed the least busy server.

Above that, waiting for the busy server costs more than another prefill of the prompt.
"""
_COOLDOWN = (0.5, 10.0)
"""Seconds for which a failed server is avoided: the first time, and the maximum.

The time doubles with each consecutive failure.
"""


_JOINED = (
    (logging.INFO, "server %s joined at version %d"),
    (logging.WARNING, "server %s rejoined at version %d"),
)


@dataclass(eq=False)
class Group:
    """State shared by the requests of a group while at least one of them is open."""

    server: Server | None = None
    """Server of the group, or None before its first request."""


class Router:
    """Router of requests to the least busy healthy server.

    It sends the requests of a group to the same server, so that the server can share their prefix. If that server has
    more than `AFFINITY_SLACK` requests above the least busy server, the group moves to the latter.

    Args:
        servers: initial servers; `add` and `remove` change them.
        clock: clock for the cooldown of failed servers.
        version: version that the servers serve initially.
        rejoin_timeout: seconds to wait for a server after the last live server was lost; see `ServeSpec`.
    """

    def __init__(self, servers: list[Server], clock: Clock, version: int = 0, rejoin_timeout: float = 0.0) -> None:
        self.servers = servers
        self.rejoin_timeout = rejoin_timeout
        self.version = version
        """Last version committed on all live servers. Never decreases."""
        self.rejoins = 0
        """Number of rejoins so far."""
        self.sums: dict[str, float] = defaultdict(float)
        """Sum of each counter over all servers, including removed ones."""
        self.clock = clock
        self._groups: WeakValueDictionary[str, Group] = WeakValueDictionary()
        self._changed = asyncio.Event()
        self._unblocked = asyncio.Event()
        self._unblocked.set()
        self._no_server_since = inf
        self.ended: BaseException | None = None
        """Error that ended the server monitor, or None while it can still readmit servers."""
        self.final = False
        """True if no process will restart lost servers."""

    @property
    def live(self) -> list[Server]:
        """Servers that get requests and take part in weight updates."""
        return [server for server in self.servers if server.is_live]

    def group(self, name: str) -> Group:
        """Return the group of that name. It exists as long as a caller holds a reference to it."""
        return self._groups.setdefault(name, Group())

    def choose(self, group: Group | None = None) -> Server | None:
        """Choose a server for a request of `group`.

        Returns:
            a live server, or None if no server is live. A server in its cooldown is returned only if all are.
        """
        live = self.live
        if not live:
            return None
        now = self.clock.now()
        healthy = [server for server in live if server.avoid_until <= now]
        least = min(healthy, key=_busyness) if healthy else min(live, key=lambda s: s.avoid_until)
        if group is None:
            return least
        if group.server not in healthy or group.server.load > least.load + AFFINITY_SLACK:
            group.server = least
        return group.server

    def close(self) -> None:
        """Hold back new requests until `open`."""
        self._unblocked.clear()

    def open(self) -> None:
        """Release requests after `close`."""
        self._unblocked.set()

    async def wait_open(self) -> bool:
        """Wait until requests are released or the monitor ended, and return whether they were held back."""
        if self._unblocked.is_set():
            return False
        return await self._unblocked.wait()

    def sorted_by_load(self) -> list[Server]:
        """Return the live servers, least busy first."""
        return sorted(self.live, key=_busyness)

    def named(self, address: str) -> Server:
        """Return the live server at an address.

        Raises:
            InferenceError: no live server has this address.
        """
        by_address = {server.address: server for server in self.live}
        if address in by_address:
            return by_address[address]
        raise InferenceError(f"expected one of the live servers {[*by_address]}, found {address!r}: {self.reasons}")

    def evict(self, server: Server, reason: str) -> None:
        """Stop using a server until it is readmitted, and cancel its requests, which then continue on other servers."""
        if server.is_live:
            logger.error("server %s is evicted: it %s", server.address, reason)
            self._end_service(server, ServerState.EVICTED, reason)
            self.interrupt(server)

    def _end_service(self, server: Server, state: ServerState, reason: str) -> None:
        was_live = server.is_live
        server.move(state, reason)
        server.record_error(reason)
        server.forget_process()
        if was_live and not self.live:
            self._no_server_since = self.clock.now()

    def readmit(self, server: Server, version: int, state: ServerState = ServerState.SERVING) -> None:
        """Start to use a rejoining server, and reset its failures. Do nothing if it was removed meanwhile.

        Args:
            server: server to use.
            version: version that it serves.
            state: its state, serving or paused.
        """
        if server.state is ServerState.LEAVING:
            return
        logger.log(*_JOINED[server.served_before], server.address, version)
        server.move(state)
        server.record_version(version)
        self.succeeded(server)
        self.rejoins += server.served_before
        server.served_before = True
        self._no_server_since = inf
        self._changed.set()

    def add(self, address: str, name: str, served_before: bool) -> None:
        """Add a server of a source, which must rejoin before it is used.

        Args:
            address: address of the server.
            name: name in the source (see `Server.name`).
            served_before: whether it got requests before, at another address.
        """
        state, reason = ServerState.STARTING, "is waiting to join"
        self.servers.append(
            Server(address, self.version, name, state, reason, served_before, last_error=reason, counted=None)
        )

    def remove(self, server: Server, reason: str, patience: float = 0.0) -> None:
        """Remove a server, which does not count as a failure. Its requests continue on other servers.

        Args:
            server: server to remove.
            reason: reason for messages, a clause such as "was removed".
            patience: seconds to wait before its control requests are canceled, because an update on the other servers
                may depend on them.
        """
        self.servers.remove(server)
        self._end_service(server, ServerState.LEAVING, reason)
        if patience and server.steps:
            asyncio.get_running_loop().call_later(patience, self.interrupt, server)
        for task in server.tasks - server.steps if patience else list(server.tasks):
            task.cancel()

    def update_counters(self, server: Server, counters: dict[str, float]) -> None:
        """Add the increase of a server's counters since the last poll, or since its restart, to `sums`."""
        last_counters = counters if server.counted is None else server.counted
        for name, value in counters.items():
            last_value = last_counters.get(name, 0.0)
            self.sums[name] += value - last_value if value >= last_value else value
        server.counted = counters

    async def wait_live(self, *, in_vain: bool = True) -> bool:
        """Wait until a server is live. `end_late_waits` must be called regularly.

        Args:
            in_vain: whether to wait even if no process will restart lost servers.

        Returns:
            True if a server is live. False after `rejoin_timeout`, or if no server can return.
        """
        while not self.live:
            expired = self.clock.now() - self._no_server_since > self.rejoin_timeout
            if not self.rejoin_timeout or expired or self.ended is not None or (self.final and not in_vain):
                return False
            self._changed.clear()
            await self._changed.wait()
        return True

    def end_late_waits(self) -> None:
        """Wake the callers of `wait_live` if no server was live for `rejoin_timeout` or none will be restarted.

        The server monitor calls this regularly.
        """
        if self.final or self.clock.now() - self._no_server_since > self.rejoin_timeout:
            self._changed.set()

    def stop_waiting(self, error: BaseException) -> None:
        """Register that the server monitor ended: every wait for a server, now or later, fails immediately."""
        self.ended = error
        self._changed.set()
        self._unblocked.set()

    @property
    def reasons(self) -> str:
        """Problem of each server, as text for an error message."""
        problems = [f"{server.address}: {server.trouble}" for server in self.servers]
        if self.ended is not None:
            problems.append(f"the server monitor ended: {self.ended!r}")
        return "; ".join(problems) or "no servers"

    def failed(self, server: Server, reason: str) -> None:
        """Record a failure: the server is avoided during its cooldown."""
        server.failures += 1
        server.record_error(reason)
        first_seconds, max_seconds = _COOLDOWN
        server.avoid_until = self.clock.now() + min(first_seconds * 2.0 ** min(server.failures - 1, 30), max_seconds)

    def busy(self, server: Server) -> None:
        """Record that a server accepts no more requests: others are preferred briefly, to prevent a busy loop."""
        server.avoid_until = max(server.avoid_until, self.clock.now() + _COOLDOWN[0])

    def interrupt(self, server: Server) -> None:
        """Cancel all requests of a server; their callers get a `ServerLostError`."""
        for task in list(server.tasks):
            task.cancel()

    def succeeded(self, server: Server) -> None:
        """Record a success, which ends the cooldown."""
        server.failures = 0
        server.avoid_until = 0.0


def _busyness(server: Server) -> tuple[int, float]:
    """Return the load as a sort key with random ties, so that independent clients do not all choose the same server."""
    return server.load, random.random()
