"""HTTP connections to servers, and the state of each server in its client.

Failures are of three kinds: rejected (`InferenceError`), busy (`ServerBusyError`) and lost (`ServerLostError`).
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import aiohttp

from rl_contracts.config import ClientConfig
from rl_contracts.errors import InferenceError
from rl_inference.client.file_limit import NO_FILE_LEFT, TooManyFilesError
from rl_inference.client.identification import identify
from rl_inference.client.protocol import Call, Exchange, ServerProtocol
from rl_inference.client.server_state import SERVER_TRANSITIONS, ServerState, require_transition

PROBE_TIMEOUT = 5.0
"""Seconds to wait for a response that needs no work, such as to a health probe. A healthy server responds within
milliseconds; the rest covers a lost packet and a busy machine."""
_IDLE_SECONDS = 3.0
"""Seconds to keep an idle connection. vLLM and SGLang close theirs after 5 s, and a request on a closed one fails."""
_CONNECT_SECONDS = 5.0
"""Seconds to wait for a connection to a server, longer than a retransmission of a lost packet (1 s, then 2 s)."""


class ServerLostError(InferenceError):
    """Server that did not respond, or stopped during its response. The request can be sent to another server."""


class ServerFailedError(ServerLostError):
    """Failure that the server itself reported."""


class ServerGoneError(ServerLostError):
    """Server whose process no longer exists: no process listens at its address."""


class ServerRestartedError(ServerGoneError):
    """Server whose address now belongs to a new process. Its weights must be checked before use."""


class ServerBusyError(InferenceError):
    """Server that accepts no more requests at the moment (HTTP status 429 or 503)."""


class ServerEndedError(ServerGoneError):
    """Server that ended during a request.

    The connection broke. Afterwards no process, or a new process, listened at the address.
    """


class _BrokenError(ServerLostError):
    """Broken connection."""


@dataclass(eq=False)
class Server:
    """State of one server in its client.

    Only the methods of this class write the state, version, process id and last error. The router writes the cooldown
    and the counters, the health monitor the requests of other clients, and discovery the name.
    """

    address: str
    """Address `http://host:port`, which is also the name of the server in results."""
    version: int
    """Last version that the server committed."""
    name: str = ""
    """Name of the server in the source of servers, independent of its address; empty if it has none."""
    state: ServerState = ServerState.SERVING
    """State as the client sees it; `move` sets it."""
    reason: str = ""
    """Reason why the server is not live, as the predicate of a sentence; empty while it is live."""
    served_before: bool = True
    """True if the server got requests before, at this address or another one."""
    instance: str = ""
    """Id of the server's process, from a response header; empty until the next response."""
    open: int = 0
    """Number of open requests of this client."""
    other_requests: int = 0
    """Number of open requests of other clients at the last health probe."""
    failures: int = 0
    """Number of failures since the last success."""
    avoid_until: float = 0.0
    """Clock time until which other servers are preferred."""
    last_error: str = ""
    """Message of the last error."""
    tasks: set[asyncio.Task[Any]] = field(default_factory=set)
    """Running requests, which an eviction cancels."""
    steps: set[asyncio.Task[Any]] = field(default_factory=set)
    """Subset of `tasks` with control requests, such as the steps of an update. They may finish after a removal."""
    counted: dict[str, float] | None = field(default_factory=dict[str, float])
    """Counter values at the last poll, or None before the first.

    With None, the values of the first poll are not added to the sums; with an empty dictionary they are.
    """

    @property
    def load(self) -> int:
        """Number of open requests of all clients, as far as this client knows."""
        return self.open + self.other_requests

    @property
    def life(self) -> str:
        """Unique id of the server's process, with its address; empty if the id is unknown."""
        return self.instance and f"{self.address} {self.instance}"

    @property
    def is_live(self) -> bool:
        """True if the server gets requests and takes part in weight updates."""
        return self.state.is_live

    def move(self, state: ServerState, reason: str = "") -> None:
        """Set the state. A server that leaves keeps its state and its reason.

        Args:
            state: next state.
            reason: see `reason`.

        Raises:
            TransitionError: the state cannot follow the current one.
        """
        if self.state is not ServerState.LEAVING:
            require_transition(SERVER_TRANSITIONS, self.state, state, f"server {self.address}")
            self.state, self.reason = state, reason

    def record_version(self, version: int) -> None:
        """Set the last version that the server committed."""
        self.version = version

    def forget_process(self) -> None:
        """Accept responses of another process from now on."""
        self.instance = ""

    def is_same_process(self, instance: str) -> bool:
        """Return whether a response with this process id comes from the same process as the responses before.

        Args:
            instance: id in the response, or empty if the response has none, which counts as the same process.
        """
        self.instance = self.instance or instance
        return not instance or instance == self.instance

    def record_error(self, message: str) -> bool:
        """Set `last_error`, and return whether it changed."""
        is_new = message != self.last_error
        self.last_error = message
        return is_new

    @property
    def trouble(self) -> str:
        """Problem of the server, as text for an error message."""
        if self.is_live:
            return self.last_error or "no error seen"
        since = "" if self.reason in self.last_error else f"; since then: {self.last_error}"
        return f"{self.reason} ({self.state}{since})"

    async def run[T](self, work: Coroutine[Any, Any, T], step: bool = False) -> T:
        """Run `work` in a separate task, which an eviction cancels, and return its result.

        Args:
            work: coroutine to run.
            step: whether it is a control request (see `steps`).

        Raises:
            ServerLostError: the server was evicted or removed meanwhile, or the client was closed.
        """
        task = asyncio.create_task(work)
        self.tasks.add(task)
        if step:
            self.steps.add(task)
        try:
            return await task
        except asyncio.CancelledError:
            current = asyncio.current_task()
            if current is not None and current.cancelling():
                raise
            raise ServerLostError(f"{self.address}: {self.reason or 'the client was closed'}") from None
        finally:
            task.cancel()
            self.tasks.discard(task)
            self.steps.discard(task)


def failures(servers: Sequence[Server], results: Sequence[Any]) -> list[tuple[Server, InferenceError]]:
    """Return the servers that failed, each with its `InferenceError`, and raise the first error of another class.

    Args:
        servers: servers that were called.
        results: result or error of each server.
    """
    failed: list[tuple[Server, InferenceError]] = []
    for server, result in zip(servers, results, strict=True):
        if isinstance(result, InferenceError):
            failed.append((server, result))
        elif isinstance(result, BaseException):
            raise result
    return failed


class Transport:
    """HTTP session for all servers, opened at the first call, on the event loop of that call."""

    def __init__(self, config: ClientConfig, protocol: ServerProtocol, key: str) -> None:
        self.config = config
        self.protocol = protocol
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._session: aiohttp.ClientSession | None = None

    async def call_until_evicted[T](self, server: Server, exchange: Exchange[T], timeout: float | None = None) -> T:
        """Run `call`, and raise a `ServerLostError` as soon as the server is evicted."""
        return await server.run(self.call(server, exchange, timeout), step=True)

    async def call[T](self, server: Server, exchange: Exchange[T], timeout: float | None = None) -> T:
        """Make the calls of an exchange and return its result.

        After a broken connection a call is repeated once, which is safe for every control request.

        Args:
            server: server to call.
            exchange: calls to make.
            timeout: seconds to wait for each response; None for the progress timeout.

        Raises:
            ServerBusyError: the server accepts no more requests at the moment.
            ServerLostError: the server did not respond, or its response does not follow the protocol.
            InferenceError: the server rejected the request.
        """
        reply: Any = None
        while True:
            try:
                call = exchange.send(reply)
            except StopIteration as end:
                result: T = end.value
                return result
            except (ValueError, LookupError, TypeError) as error:
                raise ServerLostError(f"{server.address}: cannot parse the response: {error!r}") from error
            reply = await self._call_with_retry(server, call, timeout)

    async def _call_with_retry[T](self, server: Server, call: Call[T], timeout: float | None) -> T:
        try:
            return await self._call(server, call, timeout)
        except _BrokenError as broken:
            try:
                return await self._call(server, call, timeout)
            except ServerGoneError as error:
                raise ServerEndedError(f"{broken}; then {error}") from error

    async def _call[T](self, server: Server, call: Call[T], timeout: float | None) -> T:
        limit = timeout or self.config.progress_timeout
        where = f"{server.address}{call.path}"
        with _classified_errors(where, f"no response within {limit:g} s"):
            async with asyncio.timeout(limit), self._request(server, call, None) as response:
                await self._check(server, response, where)
                body = await response.read()
        return _parse(where, call, body)

    async def stream[T](self, server: Server, call: Call[T]) -> AsyncGenerator[T]:
        """Send a request and yield the parsed lines of the response as they arrive, without the empty lines.

        Raises:
            ServerBusyError: the server accepts no more requests at the moment.
            ServerLostError: the connection failed, or a line does not follow the protocol. For servers with heartbeats,
                also if no byte arrives within the progress timeout.
            InferenceError: the server rejected the request.
        """
        where = f"{server.address}{call.path}"
        silence = self.config.progress_timeout if self.protocol.capabilities.heartbeats else None
        with _classified_errors(where, f"no byte received for {self.config.progress_timeout:g} s"):
            async with self._request(server, call, silence) as response:
                await self._check(server, response, where)
                rest = b""
                async for data in response.content.iter_any():
                    *lines, rest = (rest + data).split(b"\n")
                    for line in filter(None, lines):
                        yield _parse(where, call, line)

    def _request(self, server: Server, call: Call[Any], silence: float | None) -> Any:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                headers=self._headers,
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_IDLE_SECONDS),
                auto_decompress=False,
            )
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_SECONDS, sock_read=silence)
        return self._session.request(call.verb, server.address + call.target, json=call.body, timeout=timeout)

    async def _check(self, server: Server, response: aiohttp.ClientResponse, where: str) -> None:
        """Raise an error unless the response has status 200 and comes from the same process as before."""
        if not server.is_same_process(response.headers.get(self.protocol.life_header, "")):
            raise ServerRestartedError(f"{where}: the server was restarted; another process responds at its address")
        if response.status == 200:
            return
        message = f"{where} answered {response.status}: {self.protocol.error_message(await response.read())}"
        if response.status == 404:
            get = partial(self._get_json, server)
            program = await identify(response.headers, self.protocol.life_header, get)
            raise InferenceError(f"{message}; the program at this address is {program}")
        if response.status in (429, 503):
            raise ServerBusyError(message)
        raise InferenceError(message) if 400 <= response.status < 500 else ServerFailedError(message)

    async def _get_json(self, server: Server, path: str) -> Any:
        """Return the JSON value at a path of a server, or None if it has none."""
        try:
            async with asyncio.timeout(PROBE_TIMEOUT), self._request(server, Call(path, bytes), None) as response:
                return json.loads(await response.read()) if response.status == 200 else None
        except (TimeoutError, aiohttp.ClientError, OSError, ValueError):
            return None

    async def close(self) -> None:
        """Close all connections."""
        if self._session is not None:
            await self._session.close()
            self._session = None


@contextmanager
def _classified_errors(where: str, silence: str) -> Iterator[None]:
    """Convert connection errors to a `ServerLostError`, or to `TooManyFilesError` if this process caused them."""
    try:
        yield
    except TimeoutError as error:
        raise ServerLostError(f"{where}: {silence}") from error
    except aiohttp.ClientConnectorError as error:
        if error.os_error.errno in NO_FILE_LEFT:
            raise TooManyFilesError(where, error.os_error) from error
        kind = ServerGoneError if isinstance(error.os_error, ConnectionRefusedError) else ServerLostError
        raise kind(f"{where}: {error}") from error
    except (aiohttp.ClientError, OSError) as error:
        raise _BrokenError(f"{where}: {type(error).__name__}: {error}".removesuffix(": ")) from error


def _parse[T](where: str, call: Call[T], body: bytes) -> T:
    try:
        return call.parse(body)
    except (ValueError, LookupError, TypeError) as error:
        raise ServerLostError(f"{where}: cannot parse the response: {error!r}") from error
