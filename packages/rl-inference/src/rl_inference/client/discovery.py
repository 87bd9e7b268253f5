"""Which servers there are, while they come and go: those that a source names."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable

from rl_contracts.config import ClientConfig
from rl_contracts.errors import ConfigError
from rl_contracts.inference import ServerSource, is_address
from rl_contracts.runtime.aio import run_in_thread
from rl_contracts.runtime.logging import get_logger
from rl_inference.client.router import Router

logger = get_logger("inference.client")

_MIN_READINGS = 2
"""Readings in a row without its name after which a server is let go: a reader may see a directory half written."""
_WARN_AFTER = 1.0
"""Seconds between two readings, at most, while something is amiss."""
_PATIENCE = 10.0
"""Seconds that a step of an update has on a server that is let go."""


class Discovery:
    """Asks a source now and then, and makes the router's servers those that it names.

    A server is its address. One that is named for the first time is added as one that was evicted, and so comes in as
    one that returns. One whose name has another address is removed at once. One whose name is gone is let go when it
    was not there twice in a row and another one takes part: no reading, whatever is in it, takes the last server away.
    A source that is empty, raises or is silent changes nothing.
    """

    def __init__(self, source: ServerSource, router: Router, config: ClientConfig) -> None:
        self._source = source
        self._router = router
        self._config = config
        self._missed: dict[str, int] = {}
        self._told = ""

    async def watch(self, added: Callable[[], object]) -> None:
        """Until it is cancelled; `added` is called where there is a new server to ask."""
        while True:
            if self.apply(await self._read()):
                added()
            await self._router.clock.sleep(self._interval * random.uniform(0.5, 1.5))

    @property
    def _interval(self) -> float:
        """Seconds to the next reading: few where one is lost or was not named, however many clients read."""
        calm = not self._missed and all(server.live for server in self._router.servers)
        return self._config.discover_interval if calm else min(self._config.discover_interval, _WARN_AFTER)

    async def _read(self) -> dict[str, str]:
        """What the source says, address by name; nothing where that cannot be used. It is asked in a thread, because a
        shared file system may take its time, or for ever."""
        reading = asyncio.wrap_future(run_in_thread(lambda: dict(self._source())))
        while not (await asyncio.wait({reading}, timeout=self._config.probe_timeout))[0]:
            self._log_change(f"it has not answered for {self._config.probe_timeout:g} s (client.probe_timeout)")
        try:
            found = {name: checked_address(address) for name, address in reading.result().items()}
        except Exception as error:  # noqa: BLE001 - somebody else's code, whose errors change nothing but are told
            self._log_change(f"{type(error).__name__}: {error}")
            return {}
        if found:
            self._told = ""
        elif any(server.name for server in self._router.servers):
            self._log_change("it names none")
        return found

    def _log_change(self, problem: str) -> None:
        if problem != self._told:
            logger.warning("which inference servers there are cannot be read, so they stay as they are: %s", problem)
        self._told = problem

    def apply(self, found: dict[str, str]) -> bool:
        """Follow one reading, address by name; whether servers were added."""
        if not found:
            return False
        router, names, moved = self._router, {address: name for name, address in found.items()}, set[str]()
        for server in list(router.servers):
            if server.address in names:
                server.name = names[server.address]
                self._missed.pop(server.address, None)
            elif server.name in found:
                moved.add(server.name)
                logger.warning("server %s is now at %s: %s", server.name, found[server.name], server.address)
                self._missed.pop(server.address, None)
                router.remove(server, f"is now at {found[server.name]}")
            else:
                self._missed[server.address] = self._missed.get(server.address, 0) + 1
        for server in list(router.servers):
            others = (other for other in router.live if other.address in names)
            if self._missed.get(server.address, 0) >= _MIN_READINGS and (not server.live or any(others)):
                logger.info("server %s is let go: nothing names it any more", server.address)
                self._missed.pop(server.address)
                router.remove(server, "was let go", _PATIENCE)
        known = {server.address for server in router.servers}
        fresh = {address: name for address, name in names.items() if address not in known}
        for address, name in fresh.items():
            logger.info("server %s (%s) is named: it takes part once it holds what is served", address, name)
            router.add(address, name, known=name in moved)
        return bool(fresh)


def checked_address(address: str) -> str:
    """An address without a slash at its end.

    Raises:
        ConfigError: it is no `http://host:port`.
    """
    if not is_address(address):
        raise ConfigError(f"inference servers: expected http://host:port, found {address!r}.")
    return address.rstrip("/")
