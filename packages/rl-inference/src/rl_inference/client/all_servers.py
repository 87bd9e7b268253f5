"""Calls to all servers at once, with eviction of servers that fail."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from rl_contracts.errors import WeightUpdateError
from rl_inference.client import transport
from rl_inference.client.file_limit import TooManyFilesError
from rl_inference.client.router import Router
from rl_inference.client.transport import Server, ServerLostError, Transport, failures

FOREVER = 1e6
"""Timeout in seconds for a response whose progress is monitored in another way."""


class AllLostError(WeightUpdateError):
    """All servers are lost, but some may rejoin."""


class AllServers:
    """All servers of a client, as the target of weight updates, pauses and sleep.

    Args:
        router: router of the servers.
        transport: HTTP session for the servers.
        update_timeout: seconds within which a server must stage a version, or load it in place.
    """

    def __init__(self, router: Router, transport: Transport, update_timeout: float) -> None:
        self.router = router
        self.transport = transport
        self.protocol = transport.protocol
        self.config = transport.config
        self.update_timeout = update_timeout
        # a pause spans three calls (pause, commit, resume), each of which may take up to the progress timeout
        self.lease = 3 * transport.config.progress_timeout

    async def call_all(
        self, action: Callable[[Server], Coroutine[Any, Any, Any]], what: str, servers: list[Server] | None = None
    ) -> list[Any]:
        """Run `action` on all live servers concurrently. If some succeed, evict the others.

        Args:
            action: coroutine function that is called with each server.
            what: verb phrase for messages, such as "stage version 3".
            servers: servers to use instead of the live ones.

        Returns:
            results of the servers that succeeded.

        Raises:
            AllLostError: all servers were lost and may rejoin (`ServeSpec.rejoin_timeout`). They are evicted.
            WeightUpdateError: no server succeeded, or this process has reached its limit of open files.
        """
        servers = self.router.live if servers is None else servers
        results = await asyncio.gather(*(action(server) for server in servers), return_exceptions=True)
        succeeded = [result for result in results if not isinstance(result, BaseException)]
        failed = failures(servers, results)
        for _, error in failed:
            if isinstance(error, TooManyFilesError):  # not a failure of the server
                raise WeightUpdateError(f"could not {what}: {error}") from error
        lost = bool(self.router.rejoin_timeout) and all(isinstance(error, ServerLostError) for _, error in failed)
        if succeeded or lost:
            for server, error in failed:
                self.router.evict(server, f"could not {what}: {error}")
        if not succeeded:
            reasons = "; ".join(f"{server.address} could not {what}: {error}" for server, error in failed)
            message = f"no live server could {what}: {reasons or self.router.reasons}."
            raise AllLostError(message) if lost and self.router.servers else WeightUpdateError(message)
        return succeeded

    async def pause(self, server: Server, mode: str) -> None:
        """Pause a server and wait until it is paused. Waiting continues as long as the server generates tokens.

        Raises:
            ServerLostError: the server generated no token for the progress timeout while it drained.
        """
        last_tokens, last_progress = -1.0, self.router.clock.now()
        while (tokens := await self._request_pause(server, mode)) is not None:
            if tokens != last_tokens:
                last_tokens, last_progress = tokens, self.router.clock.now()
            elif self.router.clock.now() - last_progress > self.config.progress_timeout:
                raise self._drain_error(server)

    async def _request_pause(self, server: Server, mode: str) -> float | None:
        """Request the pause once, and return None or the number of generated tokens (see `ServerProtocol.pause`).

        A server without heartbeats responds only after it is paused, so its progress is monitored meanwhile.
        """
        exchange = self.protocol.pause(mode, self.lease)
        if self.protocol.capabilities.heartbeats:
            return await self.transport.call_until_evicted(server, exchange)
        request = self.transport.call_until_evicted(server, exchange, FOREVER)
        return await self.await_progress(server, request, self.config.progress_timeout, self._drain_error(server))

    async def await_progress[T](
        self, server: Server, work: Coroutine[Any, Any, T], patience: float, error: ServerLostError
    ) -> T:
        """Return the result of `work`, which may take as long as the server generates tokens.

        Args:
            server: server that does the work.
            work: coroutine to await.
            patience: seconds between two polls of the number of generated tokens.
            error: error to raise if two consecutive polls show the same number.
        """
        task, last_tokens = asyncio.create_task(work), -1.0
        try:
            while not (await asyncio.wait({task}, timeout=patience))[0]:
                stats = await self.transport.call_until_evicted(server, self.protocol.stats(), transport.PROBE_TIMEOUT)
                if stats.generated_tokens == last_tokens:
                    raise error
                last_tokens = stats.generated_tokens
            return task.result()
        finally:
            task.cancel()
            await asyncio.wait({task})

    def _drain_error(self, server: Server) -> ServerLostError:
        return ServerLostError(
            f"{server.address}: no progress of running completions for {self.config.progress_timeout:g} s "
            "(client.progress_timeout) while the client waited for a pause"
        )
