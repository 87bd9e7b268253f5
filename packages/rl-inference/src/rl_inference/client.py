"""The client of embedded servers."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import Coroutine
from typing import Any
from urllib.parse import urlsplit

from rl_contracts.clock import Clock, SystemClock
from rl_contracts.config import ClientConfig
from rl_contracts.data import ModelRequest, ModelResponse, ServeSpec, StopReason, WeightReceipt, WeightUpdateMeta
from rl_contracts.errors import ConfigError, InferenceError
from rl_contracts.inference import InferenceEngine
from rl_contracts.scheduler import JobSpec
from rl_inference.config import EmbeddedEngineConfig, server_job
from rl_inference.monitor import ServerMonitor
from rl_inference.protocol import Call, EmbeddedProtocol, PartialAnswer
from rl_inference.routing import Group, Router
from rl_inference.transport import (
    Server,
    ServerBusyError,
    ServerGoneError,
    ServerLostError,
    ServerRestartedError,
    Transport,
    failures,
)
from rl_inference.updates import WeightUpdates

_LONGEST_RETRY = 5.0


class EmbeddedEngine(InferenceEngine):
    """An `InferenceEngine` over embedded servers.

    Args:
        config: settings of the servers.
        spec: what follows from the run; without one there are only servers that somebody else has started.
        client: deadlines, retries, probes, routing.
        clock: for cool-downs and deadlines.
    """

    def __init__(
        self,
        config: EmbeddedEngineConfig | None = None,
        spec: ServeSpec | None = None,
        client: ClientConfig | None = None,
        clock: Clock | None = None,
    ) -> None:
        self.config = client or ClientConfig()
        self._server_config = config or EmbeddedEngineConfig()
        self._spec = spec or ServeSpec()
        self._clock = clock or SystemClock()
        self._protocol = EmbeddedProtocol()
        self._limit = asyncio.Semaphore(self.config.max_concurrent)
        self._connect([], "")

    @classmethod
    def server_spec(cls, config: EmbeddedEngineConfig, spec: ServeSpec) -> JobSpec:
        """The servers of a run as a job: role `rollout`, ready when `/health` answers 200."""
        return server_job(config, spec)

    def initialize(self, addresses: list[str], key: str = "") -> None:
        """Remember the servers and the run key."""
        if not addresses:
            raise ConfigError("inference servers: expected at least one address, found none.")
        for address in addresses:
            parts = urlsplit(address)
            if parts.scheme not in ("http", "https") or not parts.netloc:
                raise ConfigError(f"inference servers: expected http://host:port, found {address!r}.")
        self._connect([Server(address.rstrip("/"), self._spec.version) for address in addresses], key)

    def _connect(self, servers: list[Server], key: str) -> None:
        self._router = Router(servers, self._clock, self.config.affinity_slack, self._spec.version)
        self._transport = Transport(self.config, self._protocol, key)
        self._updates = WeightUpdates(self._spec, self._router, self._transport)
        self._monitor = ServerMonitor(self._router, self._transport, self._updates)

    @property
    def served_dtype(self) -> str:
        """Dtype in which the servers hold weights and compute."""
        return self._server_config.dtype

    @property
    def servers(self) -> list[str]:
        """Addresses of the live servers."""
        return [server.address for server in self._router.live]

    @property
    def version(self) -> int:
        """The last version committed on all live servers. Never goes down, whoever is lost or comes back."""
        return self._router.version

    async def agenerate(self, request: ModelRequest) -> ModelResponse:
        """Generate one answer, through interruptions and lost servers, to its end."""
        self._monitor.start()
        started = self._clock.now()
        answer = PartialAnswer(request, request.request_id or secrets.token_hex(8))
        async with self._limit:
            server = await self._finish(answer, self._router.group(request.group) if request.group else None)
        assert answer.finish is not None
        return ModelResponse(
            input_ids=request.input_ids,
            output_ids=answer.output_ids,
            logprobs=answer.logprobs,
            versions=answer.versions,
            stop_reason=StopReason(answer.finish),
            server=server.address,
            seconds=self._clock.now() - started,
            resubmissions=answer.attempts - 1,
        )

    async def _finish(self, answer: PartialAnswer, group: Group | None) -> Server:
        """Ask servers until the answer is complete.

        Returns:
            the server that completed it.

        Raises:
            InferenceError: refused, or all live servers were tried in vain since the last token and the
                deadline is over.
        """
        progress, tried, delay = self._clock.now(), set[Server](), self.config.retry_seconds
        while True:
            if not self._router.live:
                await self._router.wait_live(self.config.rejoin_timeout)
                progress, tried, delay = self._clock.now(), set(), self.config.retry_seconds
            server = self._pick(answer, group)
            have = len(answer.output_ids)
            with contextlib.suppress(ServerLostError, ServerBusyError):
                await self._work(server, self._read(server, answer))
                self._router.succeeded(server)
            if answer.done:  # even if the server was lost right after the last token
                return server
            if len(answer.output_ids) > have:
                progress, tried, delay = self._clock.now(), set(), self.config.retry_seconds
                continue
            tried.add(server)
            waiting = self._clock.now() - progress
            if tried.issuperset(self._router.live) and self._router.live:
                if waiting > self.config.progress_timeout:
                    raise InferenceError(self._give_up(answer, waiting))
                await self._clock.sleep(min(delay, _LONGEST_RETRY))
                delay *= 2

    def _pick(self, answer: PartialAnswer, group: Group | None) -> Server:
        if self._router.ended is not None:
            raise InferenceError(
                f"nobody looks after the servers any more: {self._router.ended!r}"
            ) from self._router.ended
        server = self._router.choose(group)
        if server is None:
            raise InferenceError(self._give_up(answer, 0.0))
        return server

    def _note(self, server: Server, error: InferenceError) -> None:
        """Draw the consequence of a failure: one that is gone is out, one that may be ill is looked at."""
        server.last_error = str(error)
        if isinstance(error, ServerRestartedError) or (isinstance(error, ServerGoneError) and self._monitor.on):
            self._router.evict(server, f"is gone: {error}")
        elif isinstance(error, ServerLostError):
            self._router.failed(server, str(error))
            self._monitor.hurry()
        else:
            self._router.busy(server)

    def _give_up(self, answer: PartialAnswer, waited: float) -> str:
        return (
            f"request {answer.rid}: no server goes on with it ({len(answer.output_ids)} tokens so far, "
            f"{waited:.0f} s without progress). Last errors: {self._router.reasons}. See their logs."
        )

    async def _work[T](self, server: Server, work: Coroutine[Any, Any, T]) -> T:
        """Let a server work on a request until it is evicted; how it fails has its consequence."""
        server.open += 1
        try:
            return await server.run(work)
        except (ServerLostError, ServerBusyError) as error:
            self._note(server, error)
            raise
        finally:
            server.open -= 1

    async def _read(self, server: Server, answer: PartialAnswer) -> None:
        committed = server.version
        stream = self._transport.stream(server, answer.next_call(self._protocol))
        async with contextlib.aclosing(stream) as chunks:
            async for chunk in chunks:
                if chunk is None:
                    continue
                if chunk.error is not None:
                    raise ServerLostError(f"{server.address}: {chunk.error}")
                self._check_version(server, min(chunk.versions, default=committed), committed)
                if not server.live:
                    raise ServerLostError(f"{server.address}: {server.evicted}")
                answer.add(chunk)
        if answer.finish is None:
            raise ServerLostError(f"{server.address}: the stream ended before the answer")

    async def score(self, input_ids: list[int], temperature: float = 1.0, server: str | None = None) -> list[float]:
        """Log-probs of given tokens at the current weights; entry 0 is 0."""
        return await self._score(self._protocol.score(input_ids, temperature), server)

    async def score_before(self, input_ids: list[int], temperature: float = 1.0) -> list[float]:
        """The same at the weights that were served before the last commit."""
        return await self._score(self._protocol.score(input_ids, temperature, before=True))

    async def _score(self, call: Call[list[float]], address: str | None = None) -> list[float]:
        self._monitor.start()
        if address is not None:
            server = self._router.named(address)
            return await self._work(server, self._transport.call(server, call))
        begin = self._clock.now()
        while await self._router.wait_live(self.config.rejoin_timeout):
            for server in self._router.by_load():
                with contextlib.suppress(ServerLostError, ServerBusyError):
                    return await self._work(server, self._transport.call(server, call))
            if not self.config.rejoin_timeout or self._clock.now() - begin > self.config.progress_timeout:
                break
            await self._clock.sleep(self.config.retry_seconds)
        raise InferenceError(f"no live server could score: {self._router.reasons}")

    async def live_receipts(self, server: str | None = None) -> list[WeightReceipt]:
        """Checksums of the tensors that each server serves now, under all of their names."""
        asked = self._router.live if server is None else [self._router.named(server)]
        answers = await self._ask_all(asked, self._protocol.receipt(), self.config.update_timeout)
        found = [answer for answer in answers if isinstance(answer, WeightReceipt)]
        if not found:
            raise InferenceError(f"no live server gave a receipt: {answers or self._router.reasons}")
        return found

    async def _ask_all(self, servers: list[Server], call: Call[Any], timeout: float) -> list[Any]:
        """Each server's answer, or its error."""
        return await asyncio.gather(
            *(self._transport.ask(server, call, timeout) for server in servers), return_exceptions=True
        )

    async def stage_weights(self, meta: WeightUpdateMeta) -> list[WeightReceipt]:
        """Load a version beside the served one on every server, while they go on generating."""
        self._monitor.start()
        return await self._updates.stage(meta)

    async def commit_weights(self, version: int, interrupt: str = "keep") -> float:
        """pause -> swap -> commit -> resume the staged version on every server."""
        self._monitor.start()
        return await self._updates.commit(version, interrupt)

    async def pause(self) -> None:
        """Stop generating on all servers; unfinished answers stay where they are."""
        await self._updates.pause()

    async def resume(self) -> None:
        """Undo `pause`."""
        await self._updates.resume()

    async def stats(self) -> dict[str, float]:
        """Sums over the servers that answer, and `rejoins`, servers taken back so far. Also learns the version of
        servers that another client updated."""
        found = await self._ask_figures(self._router.live)
        await self._learn_version(found)
        names = ("running", "waiting", "generated_tokens", "busy_seconds")
        sums = {name: float(sum(value[name] for value in found.values())) for name in names}
        return {"servers": float(len(self._router.live)), "rejoins": float(self._router.rejoins), **sums}

    async def _ask_figures(self, servers: list[Server]) -> dict[Server, dict[str, Any]]:
        """The figures of those that answer."""
        versions = [server.version for server in servers]
        answers = await self._ask_all(servers, self._protocol.stats(), self.config.probe_timeout)
        failed = dict(failures(servers, answers))
        for server, error in failed.items():
            self._note(server, error)
        found: dict[Server, dict[str, Any]] = {}
        for server, version, value in zip(servers, versions, answers, strict=True):
            if server not in failed:
                found[server] = value
                self._check_version(server, int(value["version"]), version)
                server.version = max(server.version, int(value["version"]))
        return found

    async def _learn_version(self, found: dict[Server, dict[str, Any]]) -> None:
        """What all live servers serve is committed. One that lags behind the others was lost in an update of another
        client: it is out until it has caught up."""
        newest = max((server.version for server in self._router.live), default=self._router.version)
        behind = [server for server in self._router.live if server.version < newest]
        in_update = self._updates.under_way or any(value["paused"] for value in found.values())
        if behind and not in_update:
            again = await self._ask_figures(behind)  # the update may have come between two answers
            in_update = self._updates.under_way or any(value["paused"] for value in again.values())
            for server in behind:
                if server.version < newest and not in_update:
                    self._router.evict(server, f"serves version {server.version} while others serve {newest}")
        if self._router.live and not self._updates.under_way:
            self._router.version = max(self._router.version, min(server.version for server in self._router.live))

    def _check_version(self, server: Server, found: int, committed: int) -> None:
        """Evict a server that shows an older version than it had when it was asked: it was restarted."""
        if found < committed:
            self._router.evict(server, f"serves version {found} after it had committed {committed}")

    async def destroy(self) -> None:
        """Close connections. Requests that still wait fail with an `InferenceError`."""
        await self._monitor.stop()
        self._router.end(InferenceError("the client was closed"))
        tasks = [task for server in self._router.servers for task in server.tasks]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._transport.close()
