"""What is done on all servers at once; who fails is out."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from rl_contracts.errors import WeightUpdateError
from rl_inference.client.file_limit import TooManyFilesError
from rl_inference.client.router import Router
from rl_inference.client.transport import Server, ServerLostError, Transport, failures

FOREVER = 1e6
"""Seconds for an answer of which something else says whether it will come."""


class AllLostError(WeightUpdateError):
    """No server is left, but some may come back."""


class AllServers:
    """The servers of a client, for whoever changes what all of them do."""

    def __init__(self, router: Router, transport: Transport) -> None:
        self.router = router
        self.transport = transport
        self.protocol = transport.protocol
        self.config = transport.config
        # between a pause and its end lie a commit and the longest answers to all three
        self.lease = 3 * transport.config.progress_timeout

    async def call_all(
        self, action: Callable[[Server], Coroutine[Any, Any, Any]], what: str, servers: list[Server] | None = None
    ) -> list[Any]:
        """Do something on all live servers at once (or on `servers`); those that fail are evicted.

        Raises:
            AllLostError: none succeeded, and all of them were lost; they are evicted, and may come back.
            WeightUpdateError: none succeeded, or this process has no file left for a connection.
        """
        servers = self.router.live if servers is None else servers
        results = await asyncio.gather(*(action(server) for server in servers), return_exceptions=True)
        good = [result for result in results if not isinstance(result, BaseException)]
        bad = failures(servers, results)
        for _, error in bad:
            if isinstance(error, TooManyFilesError):  # which says nothing of the server
                raise WeightUpdateError(f"could not {what}: {error}") from error
        lost = bool(self.config.rejoin_timeout) and all(isinstance(error, ServerLostError) for _, error in bad)
        if good or lost:
            for server, error in bad:
                self.router.evict(server, f"could not {what}: {error}")
        if not good:
            reasons = "; ".join(f"{server.address} could not {what}: {error}" for server, error in bad)
            message = f"no live server could {what}: {reasons or self.router.reasons}."
            raise AllLostError(message) if lost and self.router.servers else WeightUpdateError(message)
        return good

    async def pause(self, server: Server, mode: str) -> None:
        """Wait for the pause; a drain may take as long as it makes tokens."""
        before, since = -1.0, self.router.clock.now()
        while (tokens := await self._pause(server, mode)) is not None:
            if tokens != before:
                before, since = tokens, self.router.clock.now()
            elif self.router.clock.now() - since > self.config.progress_timeout:
                raise self._stuck(server)

    async def _pause(self, server: Server, mode: str) -> float | None:
        """Ask for it once; one that answers only when it stands still is watched meanwhile."""
        exchange = self.protocol.pause(mode, self.lease)
        if self.protocol.capabilities.heartbeats:
            return await self.transport.call_until_evicted(server, exchange)
        asked = self.transport.call_until_evicted(server, exchange, FOREVER)
        return await self.await_progress(server, asked, self.config.progress_timeout, self._stuck(server))

    async def await_progress[T](
        self, server: Server, work: Coroutine[Any, Any, T], patience: float, error: ServerLostError
    ) -> T:
        """Await what may take as long as the server makes tokens; raise `error` where it made none for `patience`
        seconds."""
        task, before = asyncio.create_task(work), -1.0
        try:
            while not (await asyncio.wait({task}, timeout=patience))[0]:
                stats = await self.transport.call_until_evicted(
                    server, self.protocol.stats(), self.config.probe_timeout
                )
                if stats.generated_tokens == before:
                    raise error
                before = stats.generated_tokens
            return task.result()
        finally:
            task.cancel()
            await asyncio.wait({task})

    def _stuck(self, server: Server) -> ServerLostError:
        return ServerLostError(
            f"{server.address}: drained no further for {self.config.progress_timeout:g} s (client.progress_timeout)"
        )
