"""HTTP to the servers, with what can go wrong sorted into three kinds: refused, busy, lost."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from types import TracebackType
from typing import Any, Self

import aiohttp

from rl_contracts.config import ClientConfig
from rl_contracts.errors import InferenceError
from rl_inference.losses import ServerBusyError, ServerGoneError, ServerLostError, ServerRestartedError
from rl_inference.protocol import Call, EmbeddedProtocol
from rl_inference.routing import Server


class Transport:
    """One HTTP session for all servers; opened at the first call, in the loop that makes it."""

    def __init__(self, config: ClientConfig, protocol: EmbeddedProtocol, key: str) -> None:
        self._config = config
        self._protocol = protocol
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def call(self, server: Server, call: Call, timeout: float | None = None) -> dict[str, Any]:
        """Ask and read the whole answer. A broken connection is tried once more: every control call may be
        repeated.

        Args:
            timeout: seconds for the answer; None: the progress timeout.

        Raises:
            InferenceError: refused; ServerBusyError, ServerLostError: see there.
        """
        try:
            return await self._call(server, call, timeout)
        except ConnectionResetError:
            try:
                return await self._call(server, call, timeout)
            except ConnectionResetError as error:
                raise ServerLostError(f"{server.address}{call.path}: {error}") from error

    async def _call(self, server: Server, call: Call, timeout: float | None) -> dict[str, Any]:
        limit = timeout or self._config.progress_timeout
        where = f"{server.address}{call.path}"
        try:
            async with asyncio.timeout(limit), self._request(server, call, None) as response:
                await self._check(server, response, where)
                value = await response.json(content_type=None)
        except TimeoutError as error:
            raise ServerLostError(f"{where}: no answer within {limit:g} s") from error
        except aiohttp.ClientConnectorError as error:
            raise _unreachable(where, error) from error
        except (aiohttp.ClientError, OSError) as error:
            raise ConnectionResetError(_describe(error)) from error
        except ValueError as error:
            raise ServerLostError(f"{where}: the answer is not JSON: {error}") from error
        if not isinstance(value, dict):
            raise ServerLostError(f"{where}: expected a JSON object, found {type(value).__name__}")
        return value

    async def stream(self, server: Server, call: Call) -> AsyncGenerator[bytes]:
        """Ask and yield the lines of the answer as they come.

        Raises:
            InferenceError: refused; ServerBusyError, ServerLostError: see there. A silence longer than the
        progress timeout is a loss."""
        where = f"{server.address}{call.path}"
        silence = self._config.progress_timeout
        try:
            async with self._request(server, call, silence) as response:
                await self._check(server, response, where)
                rest = b""
                async for data in response.content.iter_any():
                    *lines, rest = (rest + data).split(b"\n")
                    for line in lines:
                        yield line
        except TimeoutError as error:
            raise ServerLostError(f"{where}: not a byte for {silence:g} s") from error
        except aiohttp.ClientConnectorError as error:
            raise _unreachable(where, error) from error
        except (aiohttp.ClientError, OSError) as error:
            raise ServerLostError(f"{where}: {_describe(error)}") from error

    def _request(self, server: Server, call: Call, silence: float | None) -> Any:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                headers=self._headers, connector=aiohttp.TCPConnector(limit=0), auto_decompress=False
            )
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=self._config.connect_timeout, sock_read=silence)
        method = "GET" if call.body is None else "POST"
        return self._session.request(method, server.address + call.path, json=call.body, timeout=timeout)

    async def _check(self, server: Server, response: aiohttp.ClientResponse, where: str) -> None:
        """Raise unless it is a good answer of the process that the server was before."""
        found = response.headers.get(self._protocol.instance_header, "")
        server.instance = server.instance or found
        if found and found != server.instance:
            raise ServerRestartedError(f"{where}: another process answers than before; it was restarted")
        if response.status == 200:
            return
        message = f"{where} answered {response.status}: {self._protocol.error_message(await response.read())}"
        if response.status == 503:
            raise ServerBusyError(message)
        if 400 <= response.status < 500:
            raise InferenceError(message)
        raise ServerLostError(message)

    async def close(self) -> None:
        """Close all connections."""
        if self._session is not None:
            await self._session.close()
            self._session = None


def _unreachable(where: str, error: aiohttp.ClientConnectorError) -> ServerLostError:
    kind = ServerGoneError if isinstance(error.os_error, ConnectionRefusedError) else ServerLostError
    return kind(f"{where}: {error}")


def _describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
