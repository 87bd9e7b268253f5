"""Service discovery: keep the servers of a router equal to the list of a source."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable

from rl_contracts.errors import ConfigError
from rl_contracts.inference import ServerSource, is_address
from rl_contracts.runtime.aio import run_in_thread
from rl_contracts.runtime.logging import get_logger
from rl_inference.client.router import Router

logger = get_logger("inference.client")

_MIN_READINGS = 2
"""Number of consecutive readings without a server after which it is removed.

A single reading may see a directory that is being written.
"""
_READINGS_PER_PROBE = 2
"""Number of readings of the source per probe of a server, because a reading is one small file per server."""
_READ_SECONDS = 5.0
"""Seconds without a result after which a warning states that a reading takes long. It is one small file per server."""
_FAST_INTERVAL = 1.0
"""Maximum seconds between two readings while a server is lost or missing from the source."""
_REMOVAL_SECONDS = 10.0
"""Seconds that a removed server has to finish its steps of a weight update."""


class Discovery:
    """Periodic reader of a source that adds and removes the router's servers.

    A server is identified by its address. A new server is added as evicted, so it must rejoin before it gets requests.
    A server whose name has moved to another address is removed immediately. A server whose name is missing is removed
    after two such readings in a row. If it is live, another listed server must be live too, so that no reading removes
    the last live server. If the source is empty, raises an error or does not return, nothing changes.

    Args:
        source: function that returns the addresses of the servers by name.
        router: router of the servers.
        probe_interval: mean seconds between two probes of a server.
    """

    def __init__(self, source: ServerSource, router: Router, probe_interval: float) -> None:
        self._source = source
        self._router = router
        self._probe_interval = probe_interval
        self._missed: dict[str, int] = {}
        self._last_problem = ""

    async def watch(self, added: Callable[[], object]) -> None:
        """Read the source until canceled, and call `added` after each reading that added servers."""
        while True:
            if self.apply(await self._read()):
                added()
            await self._router.clock.sleep(self._interval * random.uniform(0.5, 1.5))

    @property
    def _interval(self) -> float:
        """Mean seconds until the next reading; at most `_FAST_INTERVAL` while a server is lost or missing."""
        calm = not self._missed and all(server.is_live for server in self._router.servers)
        interval = self._probe_interval / _READINGS_PER_PROBE
        return interval if calm else min(interval, _FAST_INTERVAL)

    async def _read(self) -> dict[str, str]:
        """Read the source and return addresses by name, or an empty dictionary if the result cannot be used.

        The source runs in a thread, because a shared file system may block, possibly forever.
        """
        reading = asyncio.wrap_future(run_in_thread(lambda: dict(self._source())))
        while not (await asyncio.wait({reading}, timeout=_READ_SECONDS))[0]:
            self._log_change(f"no result within {_READ_SECONDS:g} s")
        try:
            addresses = {name: checked_address(address) for name, address in reading.result().items()}
        except Exception as error:  # noqa: BLE001 - third-party code; its errors are logged and change nothing
            self._log_change(f"{type(error).__name__}: {error}")
            return {}
        if addresses:
            self._last_problem = ""
        elif any(server.name for server in self._router.servers):
            self._log_change("the list is empty")
        return addresses

    def _log_change(self, problem: str) -> None:
        if problem != self._last_problem:
            logger.warning("cannot read the list of inference servers; keeping the current servers: %s", problem)
        self._last_problem = problem

    def apply(self, addresses: dict[str, str]) -> bool:
        """Update the router's servers from one reading (addresses by name). Return whether servers were added."""
        if not addresses:
            return False
        router, names, moved = self._router, {address: name for name, address in addresses.items()}, set[str]()
        for server in list(router.servers):
            if server.address in names:
                server.name = names[server.address]
                self._missed.pop(server.address, None)
            elif server.name in addresses:
                moved.add(server.name)
                logger.warning("server %s moved to %s from %s", server.name, addresses[server.name], server.address)
                self._missed.pop(server.address, None)
                router.remove(server, f"is now at {addresses[server.name]}")
            else:
                self._missed[server.address] = self._missed.get(server.address, 0) + 1
        for server in list(router.servers):
            listed_servers = (candidate for candidate in router.live if candidate.address in names)
            if self._missed.get(server.address, 0) >= _MIN_READINGS and (not server.is_live or any(listed_servers)):
                logger.info("server %s is removed: the source no longer lists it", server.address)
                self._missed.pop(server.address)
                router.remove(server, "was removed", _REMOVAL_SECONDS)
        current_addresses = {server.address for server in router.servers}
        new_servers = {address: name for address, name in names.items() if address not in current_addresses}
        for address, name in new_servers.items():
            logger.info("new server %s (%s): waiting until it serves the committed weights", address, name)
            router.add(address, name, served_before=name in moved)
        return bool(new_servers)


def checked_address(address: str) -> str:
    """Return an address without a trailing slash.

    Raises:
        ConfigError: the address is not of the form `http://host:port`.
    """
    if not is_address(address):
        raise ConfigError(f"inference servers: expected http://host:port, found {address!r}.")
    return address.rstrip("/")
