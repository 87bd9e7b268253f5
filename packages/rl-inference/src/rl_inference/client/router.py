"""Which servers take part, and which of them gets a request."""

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
from rl_inference.client.transport import Server

logger = get_logger("inference.client")

_COOLDOWN = (0.5, 10.0)
"""Seconds for which a server that failed is avoided: first, and at most (it doubles with each failure in a
row)."""


_JOINED = (
    (logging.INFO, "server %s takes part, at version %d"),
    (logging.WARNING, "server %s is back, at version %d"),
)


@dataclass(eq=False)
class Group:
    """What the requests of a group share while one of them is open."""

    server: Server | None = None
    """Where they go."""


class Router:
    """Sends a request to the least busy healthy server, and keeps the members of a group together so that a
    server can share their prefix.

    Args:
        servers: all servers of the start; `add` and `remove` change them.
        clock: for the cool-down of those that failed.
        slack: requests that the group's server may have above the least busy one before a member goes there instead.
        version: what the servers serve at first.
    """

    def __init__(self, servers: list[Server], clock: Clock, slack: int, version: int = 0) -> None:
        self.servers = servers
        self.version = version
        """Last version committed on all servers that were live then. Never goes down."""
        self.rejoins = 0
        """Servers taken back so far."""
        self.sums: dict[str, float] = defaultdict(float)
        """Growing figures of all servers there have been, added up by name."""
        self.clock = clock
        self._slack = slack
        self._groups: WeakValueDictionary[str, Group] = WeakValueDictionary()
        self._news = asyncio.Event()
        self._open = asyncio.Event()
        self._open.set()
        self._dark_since = inf
        self.ended: BaseException | None = None
        """Why nobody looks after the servers any more; None while somebody does."""
        self.final = False
        """Whether nobody starts servers again."""

    @property
    def live(self) -> list[Server]:
        """Servers that take part."""
        return [server for server in self.servers if server.live]

    def group(self, name: str) -> Group:
        """The group of that name, which is remembered for as long as somebody holds it."""
        return self._groups.setdefault(name, Group())

    def choose(self, group: Group | None = None) -> Server | None:
        """A server for a request of `group`.

        Returns:
            None if no server is live. One that failed lately only if all did.
        """
        live = self.live
        if not live:
            return None
        now = self.clock.now()
        healthy = [server for server in live if server.avoid_until <= now]
        least = min(healthy, key=_busyness) if healthy else min(live, key=lambda s: s.avoid_until)
        if group is None:
            return least
        if group.server not in healthy or group.server.load > least.load + self._slack:
            group.server = least
        return group.server

    def close(self) -> None:
        """Hold requests back until `open`."""
        self._open.clear()

    def open(self) -> None:
        """Undo `close`."""
        self._open.set()

    async def wait_open(self) -> bool:
        """Return once no request is held back, or nobody looks after the servers any more; whether that took time."""
        if self._open.is_set():
            return False
        return await self._open.wait()

    def sorted_by_load(self) -> list[Server]:
        """Live servers, the least busy first."""
        return sorted(self.live, key=_busyness)

    def named(self, address: str) -> Server:
        """The live server at an address.

        Raises:
            InferenceError: there is none.
        """
        known = {server.address: server for server in self.live}
        if address in known:
            return known[address]
        raise InferenceError(f"expected one of the live servers {[*known]}, found {address!r}: {self.reasons}")

    def evict(self, server: Server, reason: str) -> None:
        """Use a server no more, until it is readmitted; what it is asked is cancelled, so that answers continue
        elsewhere."""
        if server.live:
            logger.error("server %s is evicted: it %s", server.address, reason)
            self._out(server, reason)
            self.interrupt(server)

    def _out(self, server: Server, reason: str) -> None:
        server.evicted = server.last_error = reason
        server.instance = ""
        if not self.live:
            self._dark_since = self.clock.now()

    def readmit(self, server: Server, version: int) -> None:
        """Use an evicted server again, or a new one, with a clean slate; one that was removed meanwhile stays out."""
        if server.let_go:
            return
        logger.log(*_JOINED[server.known], server.address, version)
        server.evicted, server.version = None, version
        self.succeeded(server)
        self.rejoins += server.known
        server.known = True
        self._dark_since = inf
        self._news.set()

    def add(self, address: str, name: str, known: bool) -> None:
        """Remember a server that somebody named: it is out until it has been readmitted, as one that was evicted.

        Args:
            name: see `Server.name`.
            known: whether it took part before, elsewhere.
        """
        reason = "has not taken part yet"
        server = Server(address, self.version, name, vetted=False, known=known, well=False, counted=None)
        server.evicted = server.last_error = reason
        self.servers.append(server)

    def remove(self, server: Server, reason: str, patience: float = 0.0) -> None:
        """Forget a server, which is no failure of it: answers continue elsewhere.

        Args:
            patience: seconds for steps of an update that are under way there, which others may count on.
        """
        self.servers.remove(server)
        server.let_go = True
        if server.live:
            self._out(server, reason)
        if patience and server.steps:
            asyncio.get_running_loop().call_later(patience, self.interrupt, server)
        for task in server.tasks - server.steps if patience else list(server.tasks):
            task.cancel()

    def update_counters(self, server: Server, figures: dict[str, float]) -> None:
        """Take what has grown at a server since it was last asked, or began anew, into `sums`."""
        before = figures if server.counted is None else server.counted
        for name, value in figures.items():
            last = before.get(name, 0.0)
            self.sums[name] += value - last if value >= last else value
        server.counted = figures

    async def wait_live(self, timeout: float, *, in_vain: bool = True) -> bool:
        """Return once a server is live.

        Args:
            timeout: seconds from the moment on at which the last one was evicted; `give_up_after` keeps the time.
            in_vain: whether to wait also where nobody starts servers again.

        Returns:
            False if the time was over, now or before, or waiting is pointless.
        """
        while not self.live:
            late = self.clock.now() - self._dark_since > timeout
            if not timeout or late or self.ended is not None or (self.final and not in_vain):
                return False
            self._news.clear()
            await self._news.wait()
        return True

    def give_up_after(self, timeout: float) -> None:
        """Wake those who wait for a server if there has been none for `timeout` seconds, or nobody starts any again. To
        be called often."""
        if self.final or self.clock.now() - self._dark_since > timeout:
            self._news.set()

    def stop_waiting(self, error: BaseException) -> None:
        """Nobody looks for returning servers any more: whoever waits for one, now or later, waits in vain."""
        self.ended = error
        self._news.set()
        self._open.set()

    @property
    def reasons(self) -> str:
        """What is wrong with each server, for an error."""
        listed = [f"{server.address}: {server.trouble}" for server in self.servers]
        if self.ended is not None:
            listed.append(f"nobody looks for returning servers: {self.ended!r}")
        return "; ".join(listed) or "no server known"

    def failed(self, server: Server, reason: str) -> None:
        """Note a failure: the server is avoided for a while."""
        server.failures += 1
        server.last_error = reason
        first, most = _COOLDOWN
        server.avoid_until = self.clock.now() + min(first * 2.0 ** min(server.failures - 1, 30), most)

    def busy(self, server: Server) -> None:
        """Note that it takes no more requests: for a moment others are preferred, so that nobody asks it in a loop."""
        server.avoid_until = max(server.avoid_until, self.clock.now() + _COOLDOWN[0])

    def interrupt(self, server: Server) -> None:
        """Cancel what a server is asked; those who wait for it get a `ServerLostError`."""
        for task in list(server.tasks):
            task.cancel()

    def succeeded(self, server: Server) -> None:
        """Note a success."""
        server.failures = 0
        server.avoid_until = 0.0


def _busyness(server: Server) -> tuple[int, float]:
    """Its load; ties are in random order, because clients that know nothing of each other must not all go to one."""
    return server.load, random.random()
