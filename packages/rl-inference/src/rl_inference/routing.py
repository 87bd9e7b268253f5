"""Which server gets a request."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rl_contracts.clock import Clock
from rl_contracts.logging import get_logger

if TYPE_CHECKING:
    import asyncio

logger = get_logger("inference.client")

_COOLDOWN = (0.5, 10.0)
"""Seconds for which a server that failed is avoided: first, and at most (it doubles with each failure in a
row)."""


@dataclass(eq=False)
class Server:
    """A server as its client sees it."""

    address: str
    """`http://host:port`; also its name."""
    version: int
    """Last version it committed."""
    evicted: str | None = None
    """Why it is used no more; None while it is live."""
    open: int = 0
    """Requests that it works on."""
    failures: int = 0
    """Failures since its last success."""
    avoid_until: float = 0.0
    """Clock time before which others are preferred."""
    last_error: str = ""
    """What went wrong last."""
    tasks: set[asyncio.Task[Any]] = field(default_factory=set)
    """Open requests, to be cancelled when it is evicted."""

    @property
    def live(self) -> bool:
        """Whether it takes part."""
        return self.evicted is None


@dataclass
class _Group:
    server: Server | None = None
    members: int = 0


class Router:
    """Sends a request to the least busy healthy server, and keeps the members of a group together so that a
    server can share their prefix.

    Args:
        servers: all servers.
        clock: for the cool-down of those that failed.
        slack: open requests that the group's server may have above the least busy one before a member goes
    there instead."""

    def __init__(self, servers: list[Server], clock: Clock, slack: int) -> None:
        self.servers = servers
        self._clock = clock
        self._slack = slack
        self._groups: dict[str, _Group] = {}

    @property
    def live(self) -> list[Server]:
        """Servers that have not been evicted."""
        return [server for server in self.servers if server.live]

    @contextmanager
    def member(self, group: str | None) -> Iterator[None]:
        """Remember a group's server for as long as one of its requests is open."""
        if group is None:
            yield
            return
        state = self._groups.setdefault(group, _Group())
        state.members += 1
        try:
            yield
        finally:
            state.members -= 1
            if not state.members:
                del self._groups[group]

    def choose(self, group: str | None = None) -> Server | None:
        """A server for a request of `group`.

        Returns:
            None if no server is live. One that failed lately only if all did.
        """
        live = self.live
        if not live:
            return None
        now = self._clock.now()
        healthy = [server for server in live if server.avoid_until <= now]
        least = min(healthy, key=lambda s: s.open) if healthy else min(live, key=lambda s: s.avoid_until)
        state = self._groups.get(group) if group is not None else None
        if state is None:
            return least
        if state.server not in healthy or state.server.open > least.open + self._slack:
            state.server = least
        return state.server

    def evict(self, server: Server, reason: str) -> None:
        """Use a server no more; its open requests are cancelled, so that they continue elsewhere."""
        if server.live:
            logger.error("server %s is evicted: it %s", server.address, reason)
            server.evicted = server.last_error = reason
            for task in list(server.tasks):
                task.cancel()

    def failed(self, server: Server, reason: str) -> None:
        """Note a failure: the server is avoided for a while."""
        server.failures += 1
        server.last_error = reason
        first, most = _COOLDOWN
        server.avoid_until = self._clock.now() + min(first * 2 ** (server.failures - 1), most)

    def succeeded(self, server: Server) -> None:
        """Note a success."""
        server.failures = 0
        server.avoid_until = 0.0
