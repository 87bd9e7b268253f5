"""Clients' connections, each with a deadline: who says nothing, stops in the middle of a header or does not read its
answer is disconnected."""

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
"""Within which a connection must bring a whole header, or have its answer read; more than clients keep one unused."""

logger = get_logger("inference.server.http")


class Connections:
    """Runs an app, and ends connections on which nothing happens. What is at work may take its time."""

    def __init__(self, app: web.Application) -> None:
        app.middlewares.append(self._track_request)
        self.runner = web.AppRunner(
            app,
            handler_cancellation=True,
            access_log=None,
            logger=logger,
            shutdown_timeout=5.0,
            keepalive_timeout=SILENT_SECONDS,
            auto_decompress=False,  # a small body may become a very large one
        )
        self._since: dict[Any, float] = {}
        """Since when nothing happens on a connection; infinite where a request is at work."""

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
        """End connections that are silent for too long, until cancelled."""
        while True:
            await asyncio.sleep(SILENT_SECONDS / 4)
            now = time.monotonic()
            there = self.runner.server.connections if self.runner.server else []
            self._since = {connection: self._since.get(connection, now) for connection in there}
            for connection, since in self._since.items():
                if now - since > SILENT_SECONDS and connection.transport is not None:
                    connection.transport.abort()


def _is_own_error(record: logging.LogRecord) -> bool:
    """Whether a line is about this server, and not about a client that speaks no HTTP and was told so."""
    return not (record.exc_info and isinstance(record.exc_info[1], HttpProcessingError))


logger.addFilter(_is_own_error)
