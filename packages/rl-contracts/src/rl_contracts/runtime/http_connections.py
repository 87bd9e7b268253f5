"""Idle timeout for the connections of an HTTP server.

A client is disconnected if it sends nothing, stops in the middle of a header, or does not read its response.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from math import inf
from typing import Any

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from rl_contracts.runtime.logging import get_logger

SILENT_SECONDS = 30.0
"""Seconds in which a client must send a complete header or read its response; longer than clients keep idle
connections."""

logger = get_logger("inference.server.http")


class Connections:
    """Runner of an app that closes idle connections. A request in progress has no time limit."""

    def __init__(self, app: web.Application) -> None:
        app.middlewares.append(self._track_request)
        self.runner = web.AppRunner(
            app,
            handler_cancellation=True,
            access_log=None,
            logger=logger,
            shutdown_timeout=5.0,
            keepalive_timeout=SILENT_SECONDS,
            auto_decompress=False,  # a small compressed body may expand to a very large one
        )
        self._since: dict[Any, float] = {}
        """Time of the last activity of each connection; infinite while a request is in progress."""

    @web.middleware
    async def _track_request(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        self._since[request.protocol] = inf
        try:
            return await handler(request)
        finally:
            self._since[request.protocol] = time.monotonic()

    async def close_silent_connections(self) -> None:
        """Abort connections that have been idle for more than `SILENT_SECONDS`, until cancelled."""
        while True:
            await asyncio.sleep(SILENT_SECONDS / 4)
            now = time.monotonic()
            connections = self.runner.server.connections if self.runner.server else []
            self._since = {connection: self._since.get(connection, now) for connection in connections}
            for connection, since in self._since.items():
                if now - since > SILENT_SECONDS and connection.transport is not None:
                    connection.transport.abort()


def _is_own_error(record: logging.LogRecord) -> bool:
    """Return False for records about malformed requests, to which the client already gets an error response."""
    return not (record.exc_info and isinstance(record.exc_info[1], HttpProcessingError))


logger.addFilter(_is_own_error)
