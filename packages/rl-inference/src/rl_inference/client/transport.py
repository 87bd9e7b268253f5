"""A server as its client sees it, and HTTP to it, with what can go wrong sorted into three kinds: refused (a plain
`InferenceError`), busy, lost."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from rl_contracts.config import ClientConfig
from rl_contracts.errors import InferenceError
from rl_inference.client.file_limit import NO_FILE_LEFT, TooManyFilesError
from rl_inference.client.protocol import Call, Exchange, ServerProtocol


class ServerLostError(InferenceError):
    """A server did not answer, or stopped in the middle: what it was asked can be asked of another."""


class ServerFailedError(ServerLostError):
    """A server says itself that it failed at what it was asked."""


class ServerGoneError(ServerLostError):
    """The process that was there is not: nobody listens at its address."""


class ServerRestartedError(ServerGoneError):
    """Another process than before answers at its address. What it serves must be checked before it is used."""


class ServerBusyError(InferenceError):
    """A server takes no more for now (429, 503)."""


class ServerEndedError(ServerGoneError):
    """The process that was asked is not there any more: the connection broke, and then nobody or another listened."""


class _BrokenError(ServerLostError):
    """The connection broke."""


@dataclass(eq=False)
class Server:
    """A server as its client sees it."""

    address: str
    """`http://host:port`; also what others call it."""
    version: int
    """Last version it committed."""
    name: str = ""
    """By which a source knows it, wherever it listens; empty: none has named it."""
    vetted: bool = True
    """Whether it said that it is a server that the run can use, or nobody named it but the run itself."""
    known: bool = True
    """Whether it has taken part before, here or elsewhere."""
    instance: str = ""
    """Which life of its process answers; empty: not known, the next answer tells."""
    well: bool = True
    """Whether it answered when it was last asked how it is."""
    evicted: str | None = None
    """Why it is not used now; None while it is live."""
    let_go: bool = False
    """Whether it was removed: nothing that it does or fails at counts any more."""
    open: int = 0
    """Requests of this client that it works on."""
    others: int = 0
    """Requests of other clients that it worked on when it was last asked how it is."""
    failures: int = 0
    """Failures since its last success."""
    avoid_until: float = 0.0
    """Clock time before which others are preferred."""
    last_error: str = ""
    """What went wrong last."""
    tasks: set[asyncio.Task[Any]] = field(default_factory=set)
    """What it is asked now, to be cancelled when it is evicted."""
    steps: set[asyncio.Task[Any]] = field(default_factory=set)
    """Those of them that are steps of an update or the like, which may end when it is let go."""
    counted: dict[str, float] | None = field(default_factory=dict[str, float])
    """Its growing figures when they were last added up; None: nothing of them yet, and nothing that they are by then.
    """

    @property
    def load(self) -> int:
        """Requests that it works on, as far as this client knows."""
        return self.open + self.others

    @property
    def life(self) -> str:
        """Names this life of its process; empty while that is not known."""
        return self.instance and f"{self.address} {self.instance}"

    @property
    def live(self) -> bool:
        """Whether it takes part."""
        return self.evicted is None

    @property
    def trouble(self) -> str:
        """What is wrong with it, for an error."""
        if self.evicted is None:
            return self.last_error or "no error seen"
        since = "" if self.evicted in self.last_error else f"; since then: {self.last_error}"
        return f"{self.evicted} (evicted{since})"

    async def run[T](self, work: Coroutine[Any, Any, T], step: bool = False) -> T:
        """Await `work`, in a task of its own that an eviction cancels.

        Args:
            step: of an update or the like: see `steps`.

        Raises:
            ServerLostError: the server was evicted or let go meanwhile, or the client closed.
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
            raise ServerLostError(f"{self.address}: {self.evicted or 'the client was closed'}") from None
        finally:
            task.cancel()
            self.tasks.discard(task)
            self.steps.discard(task)


def failures(servers: Sequence[Server], results: Sequence[Any]) -> list[tuple[Server, InferenceError]]:
    """Which servers failed, and how, out of results or errors per server. Any other error is raised."""
    failed: list[tuple[Server, InferenceError]] = []
    for server, result in zip(servers, results, strict=True):
        if isinstance(result, InferenceError):
            failed.append((server, result))
        elif isinstance(result, BaseException):
            raise result
    return failed


class Transport:
    """One HTTP session for all servers; opened at the first call, in the loop that makes it."""

    def __init__(self, config: ClientConfig, protocol: ServerProtocol, key: str) -> None:
        self.config = config
        self.protocol = protocol
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._session: aiohttp.ClientSession | None = None

    async def call_until_evicted[T](self, server: Server, exchange: Exchange[T], timeout: float | None = None) -> T:
        """As `call`, for as long as the server is not evicted meanwhile."""
        return await server.run(self.call(server, exchange, timeout), step=True)

    async def call[T](self, server: Server, exchange: Exchange[T], timeout: float | None = None) -> T:
        """Make the calls of an exchange. A broken connection is tried once more: every control call may be repeated.

        Args:
            timeout: seconds for each answer; None: the progress timeout.

        Raises:
            InferenceError: refused; ServerBusyError, ServerLostError: see there.
        """
        found: Any = None
        while True:
            try:
                call = exchange.send(found)
            except StopIteration as end:
                result: T = end.value
                return result
            except (ValueError, LookupError, TypeError) as error:
                raise ServerLostError(f"{server.address}: an answer that cannot be read: {error!r}") from error
            found = await self._ask_twice(server, call, timeout)

    async def _ask_twice[T](self, server: Server, call: Call[T], timeout: float | None) -> T:
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
        with _sorted_errors(where, f"no answer within {limit:g} s"):
            async with asyncio.timeout(limit), self._request(server, call, None) as response:
                await self._check(server, response, where)
                body = await response.read()
        return _parsed(where, call, body)

    async def stream[T](self, server: Server, call: Call[T]) -> AsyncGenerator[T]:
        """Ask and yield what each line of the answer says, as they come; empty ones, which part messages, are left out.

        Raises:
            InferenceError: refused; ServerBusyError, ServerLostError: see there. A silence longer than the
                progress timeout is a loss, where servers show signs of life.
        """
        where = f"{server.address}{call.path}"
        silence = self.config.progress_timeout if self.protocol.capabilities.heartbeats else None
        with _sorted_errors(where, f"not a byte for {self.config.progress_timeout:g} s"):
            async with self._request(server, call, silence) as response:
                await self._check(server, response, where)
                rest = b""
                async for data in response.content.iter_any():
                    *lines, rest = (rest + data).split(b"\n")
                    for line in filter(None, lines):
                        yield _parsed(where, call, line)

    def _request(self, server: Server, call: Call[Any], silence: float | None) -> Any:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                headers=self._headers, connector=aiohttp.TCPConnector(limit=0), auto_decompress=False
            )
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=self.config.connect_timeout, sock_read=silence)
        return self._session.request(call.verb, server.address + call.target, json=call.body, timeout=timeout)

    async def _check(self, server: Server, response: aiohttp.ClientResponse, where: str) -> None:
        """Raise unless it is a good answer of the process that the server was before."""
        found = response.headers.get(self.protocol.life_header, "")
        server.instance = server.instance or found
        if found and found != server.instance:
            raise ServerRestartedError(f"{where}: another process answers than before; it was restarted")
        if response.status == 200:
            return
        message = f"{where} answered {response.status}: {self.protocol.error_message(await response.read())}"
        if response.status in (429, 503):
            raise ServerBusyError(message)
        raise InferenceError(message) if 400 <= response.status < 500 else ServerFailedError(message)

    async def close(self) -> None:
        """Close all connections."""
        if self._session is not None:
            await self._session.close()
            self._session = None


@contextmanager
def _sorted_errors(where: str, silence: str) -> Iterator[None]:
    """Raise what goes wrong with a connection as a kind of `ServerLostError`, unless it is this process's own doing."""
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


def _parsed[T](where: str, call: Call[T], answer: bytes) -> T:
    try:
        return call.parse(answer)
    except (ValueError, LookupError, TypeError) as error:
        raise ServerLostError(f"{where}: an answer that cannot be read: {error!r}") from error
