"""The client of servers that are spoken to over HTTP, whatever their protocol."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from abc import abstractmethod
from collections.abc import Callable, Coroutine
from math import nan
from typing import Any, ClassVar

from rl_contracts.config import ClientConfig, GenerationConfig
from rl_contracts.data import ModelRequest, ModelResponse, ServeSpec, StopReason, WeightReceipt, WeightUpdateMeta
from rl_contracts.errors import ConfigError, InferenceError, NoServersError
from rl_contracts.inference import Canary, Capabilities, InferenceEngine, ServedModel, ServerConfig, ServerSource
from rl_contracts.runtime.clock import Clock, SystemClock
from rl_inference.client.completion import PartialCompletion
from rl_inference.client.discovery import Discovery, checked_address
from rl_inference.client.file_limit import raise_file_limit
from rl_inference.client.health import ServerMonitor
from rl_inference.client.protocol import Exchange, GenerationChunk, ServerProtocol, Stats
from rl_inference.client.router import Group, Router
from rl_inference.client.stop_strings import StopStrings, tokenizer_of
from rl_inference.client.transport import (
    Server,
    ServerBusyError,
    ServerEndedError,
    ServerFailedError,
    ServerGoneError,
    ServerLostError,
    ServerRestartedError,
    Transport,
    failures,
)
from rl_inference.client.weight_update import WeightUpdates

_LONGEST_RETRY = 5.0
_GROWING = ("generated_tokens", "busy_seconds")
_LOOKS = 3
"""How often within the progress timeout a silent server is looked at; as many in vain, in a row, and it is lost."""


class HttpEngine(InferenceEngine):
    """An `InferenceEngine` without the protocol of its servers: routing, failover, updates, rejoin and deadlines. A
    subclass says how its servers are spoken to (`make_protocol`), started (`server_spec`) and set (`config_class`).

    Args:
        config: settings of the servers.
        spec: what follows from the run; without one there are only servers that somebody else has started.
        client: deadlines, retries, probes, routing.
        clock: for cool-downs and deadlines.
    """

    config_class: ClassVar[type[ServerConfig]]
    """Settings of the servers."""

    def __init__(
        self,
        config: Any = None,
        spec: ServeSpec | None = None,
        client: ClientConfig | None = None,
        clock: Clock | None = None,
    ) -> None:
        self.config = client or ClientConfig()
        self.server_config: Any = config or self.config_class()
        self.spec = spec or ServeSpec()
        self._clock = clock or SystemClock()
        self._protocol = self.make_protocol()
        self._connect([], "")

    @abstractmethod
    def make_protocol(self) -> ServerProtocol:
        """What is said to the servers; may depend on `server_config` and `spec`."""

    @property
    def capabilities(self) -> Capabilities:
        """What the servers can do."""
        return self._protocol.capabilities

    def initialize(self, addresses: list[str], key: str = "") -> None:
        """Remember the servers and the run key, and let this process have all the files open that it may."""
        raise_file_limit()
        if not addresses:
            raise ConfigError("inference servers: expected at least one address, found none.")
        self._connect([Server(checked_address(address), self.spec.version) for address in addresses], key)

    def follow_discovery(self, source: ServerSource) -> bool:
        """Take in servers that `source` names, and let those go that it names no more."""
        self._monitor.discovery = Discovery(source, self._router, self.config)
        return self._monitor.is_enabled

    def stop_waiting_for_servers(self) -> None:
        """Updates and scores fail from now on where no server is left; who waits for one hears of it at the next look
        at the servers."""
        self._router.final = True

    def _connect(self, servers: list[Server], key: str) -> None:
        self._router = Router(servers, self._clock, self.config.affinity_slack, self.spec.version)
        self._transport = Transport(self.config, self._protocol, key)
        self._updates = WeightUpdates(self.spec, self._router, self._transport, self.server_config.program())
        self._monitor = ServerMonitor(self._router, self._transport, self._updates)

    @property
    def servers(self) -> list[str]:
        """Addresses of the live servers."""
        return [server.address for server in self._router.live]

    @property
    def version(self) -> int:
        """The last version committed on all live servers. Never goes down, whoever is lost or comes back."""
        return self._router.version

    async def describe(self, server: str) -> ServedModel | None:
        """What one of the servers says of itself."""
        asked = self._router.named(server)
        return await self._transport.call_until_evicted(asked, self._protocol.describe(), self.config.probe_timeout)

    async def agenerate(self, request: ModelRequest) -> ModelResponse:
        """Generate one answer, through interruptions and lost servers, to its end."""
        self._monitor.start()
        started = self._clock.now()
        answer = PartialCompletion(
            request, request.request_id or secrets.token_hex(8), await self._stops(request.generation)
        )
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

    async def _stops(self, generation: GenerationConfig) -> StopStrings | None:
        """What looks for stop strings, where the servers cannot."""
        if not generation.stop or self.capabilities.resumes_completions:
            return None
        tokenizer = await asyncio.to_thread(tokenizer_of, self.spec.model_path)
        return StopStrings(generation.stop, generation.min_new_tokens, tokenizer)

    async def _finish(self, answer: PartialCompletion, group: Group | None) -> Server:
        """Ask servers until the answer is complete.

        Returns:
            the server that completed it.

        Raises:
            InferenceError: refused, or all live servers were tried in vain since the last token and the
                deadline is over.
        """
        progress, tried, delay = self._clock.now(), set[Server](), self.config.retry_seconds
        while True:
            waited = await self._router.wait_open()
            if waited or not self._router.live:
                await self._router.wait_live(self.config.rejoin_timeout)
                progress, tried, delay = self._clock.now(), set(), self.config.retry_seconds
            server = self._pick(answer, group)
            have, life = len(answer.output_ids), server.life
            try:
                await self._work(server, self._read(server, answer))
                self._router.succeeded(server)
            except ServerLostError as error:
                if not answer.done:
                    await self._record_failure(f"request {answer.rid}", answer.ended, server, life, error)
            except ServerBusyError:
                pass
            if answer.done:  # even if the server was lost right after the last token
                return server
            if len(answer.output_ids) > have:
                progress, tried, delay = self._clock.now(), set(), self.config.retry_seconds
                continue
            tried.add(server)
            waiting = self._clock.now() - max(progress, answer.heard)
            if tried.issuperset(self._router.live) and self._router.live:
                if waiting > self.config.progress_timeout:
                    raise InferenceError(self._give_up(answer, waiting))
                await self._clock.sleep(min(delay, _LONGEST_RETRY))
                delay *= 2

    async def _record_failure(
        self, request: str, ended: list[tuple[str, str]], server: Server, life: str, error: ServerLostError
    ) -> None:
        """Note whether a server ended, or failed by its own word, while it worked on a request.

        Args:
            ended: lives of those that did before, and how; this one is added.
            life: the server's when it was asked, empty if not known. One death counts once, however many calls saw it.

        Raises:
            InferenceError: it is not the first, even if tokens came of it: a request that ends servers is not carried
                on to the next. One that is told to end hands its answers back, and counts for nothing here; nor does
                one that was let go.
        """
        if server.let_go:
            return
        fatal = isinstance(error, (ServerFailedError, ServerEndedError))
        if not fatal and isinstance(error, ServerGoneError):  # it was gone before
            return
        if not fatal:
            try:
                await self._transport.call(server, self._protocol.health(), self.config.probe_timeout)
                return
            except ServerGoneError:
                pass
            except InferenceError:  # silent, but there
                return
        if life and not isinstance(error, ServerFailedError) and any(life == before for before, _ in ended):
            return
        ended.append((life, f"{server.address}: {error}"))
        if len(ended) > 1:
            raise InferenceError(
                f"{request} is given up: {len(ended)} servers ended or failed while they worked on it, and the next "
                f"might too. {'; '.join(how for _, how in ended)}. See their logs."
            ) from error

    def _pick(self, answer: PartialCompletion, group: Group | None) -> Server:
        if self._router.ended is not None:
            raise InferenceError(
                f"nobody looks after the servers any more: {self._router.ended!r}"
            ) from self._router.ended
        server = self._router.choose(group)
        if server is None:
            raise NoServersError(self._give_up(answer, 0.0))
        return server

    def _handle_failure(self, server: Server, error: InferenceError) -> None:
        """Draw the consequence of a failure: one that is gone is out, one that may be ill is looked at."""
        if server.let_go:
            return
        server.last_error = str(error)
        if isinstance(error, ServerRestartedError) or (isinstance(error, ServerGoneError) and self._monitor.is_enabled):
            self._router.evict(server, f"is gone: {error}")
        elif isinstance(error, ServerLostError):
            self._router.failed(server, str(error))
            self._monitor.check_now()
        else:
            self._router.busy(server)

    def _give_up(self, answer: PartialCompletion, waited: float) -> str:
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
            self._handle_failure(server, error)
            raise
        finally:
            server.open -= 1

    async def _read(self, server: Server, answer: PartialCompletion) -> None:
        """Let a server go on with an answer. Where silence says nothing, it is asked how it is."""
        if self.capabilities.heartbeats:
            return await self._gather(server, answer)
        reading, lines, vain, made = asyncio.create_task(self._gather(server, answer)), answer.lines, 0, -1.0
        try:
            while not (await asyncio.wait({reading}, timeout=self.config.progress_timeout / _LOOKS))[0]:
                if answer.lines != lines:
                    lines, vain, made = answer.lines, 0, -1.0
                    continue
                try:
                    before, made = made, await self._check_progress(server)
                    if made == before:
                        raise ServerLostError(
                            f"{server.address}: says that it is well and not paused, but has made no token for "
                            f"{self.config.progress_timeout:g} s (client.progress_timeout)"
                        )
                except ServerGoneError:
                    raise
                except ServerLostError:
                    vain += 1
                    if vain == _LOOKS:
                        raise
                else:
                    answer.heard, vain = self._clock.now(), 0
            return reading.result()
        finally:
            reading.cancel()
            await asyncio.wait({reading})

    async def _check_progress(self, server: Server) -> float:
        """Ask a silent server how it is; how many tokens it has made, nan where that says nothing."""
        await self._transport.call(server, self._protocol.health(), self.config.probe_timeout)
        if not self._protocol.counts_tokens:
            return nan
        stats = await self._transport.call(server, self._protocol.stats(), self.config.probe_timeout)
        return nan if stats.paused else stats.generated_tokens

    async def _gather(self, server: Server, answer: PartialCompletion) -> None:
        committed, call = server.version, answer.next_call(self._protocol)
        chunks, started = self._transport.stream(server, call), False
        try:
            async with contextlib.aclosing(chunks):
                async for chunk in chunks:
                    answer.lines += 1
                    if chunk is None:
                        continue
                    self._add_chunk(server, answer, chunk, committed)
                    if answer.stopped() and answer.finish is None and not started:
                        if not self.capabilities.version_stamps_at_end:
                            break
                        await self._transport.call(server, self._protocol.abort(answer.attempt_id))
                        started = True
        finally:
            answer.truncate_at_stop()
        if answer.finish is None:
            raise ServerLostError(f"{server.address}: the stream ended before the answer")

    def _add_chunk(self, server: Server, answer: PartialCompletion, chunk: GenerationChunk, committed: int) -> None:
        """Add what a server sent, which had committed a version when it was asked, unless it cannot be right: one that
        is behind those before it, which another client updated, is out until it has caught up."""
        if chunk.error is not None:
            raise ServerFailedError(f"{server.address}: {chunk.error}")
        found = min(chunk.stamps or chunk.versions, default=committed)
        self._check_version(server, found, committed)
        if answer.begin and (chunk.stamps or chunk.versions) and found < (before := answer.versions[answer.begin - 1]):
            answer.drop_attempt()
            self._router.evict(server, f"serves version {found} after others had made tokens at {before}")
        if not server.live:
            raise ServerLostError(f"{server.address}: {server.evicted}")
        answer.add(chunk, committed)

    async def score(self, input_ids: list[int], temperature: float = 1.0, server: str | None = None) -> list[float]:
        """Log-probs of given tokens at the current weights; entry 0 is 0."""
        if temperature != 1 and not self.capabilities.any_score_temperature:
            raise InferenceError(f"these servers score at temperature 1 alone, found {temperature:g}.")
        return await self._score(lambda: self._protocol.score(input_ids, temperature), server)

    async def score_previous_weights(self, input_ids: list[int], temperature: float = 1.0) -> list[float]:
        """The same at the weights that were served before the last commit."""
        if not self.capabilities.scores_previous_weights:
            return await super().score_previous_weights(input_ids, temperature)
        return await self._score(lambda: self._protocol.score(input_ids, temperature, before=True))

    async def _score(self, question: Callable[[], Exchange[list[float]]], address: str | None = None) -> list[float]:
        self._monitor.start()
        if address is not None:
            server = self._router.named(address)
            return await self._work(server, self._transport.call(server, question()))
        begin, ended = self._clock.now(), list[tuple[str, str]]()
        while await self._router.wait_live(self.config.rejoin_timeout, in_vain=False):
            await self._router.wait_open()
            for server in self._router.sorted_by_load():
                life = server.life
                try:
                    return await self._work(server, self._transport.call(server, question()))
                except ServerLostError as error:
                    await self._record_failure("a score", ended, server, life, error)
                except ServerBusyError:
                    pass
            if not self.config.rejoin_timeout or self._clock.now() - begin > self.config.progress_timeout:
                break
            await self._clock.sleep(self.config.retry_seconds)
        raise InferenceError(f"no live server could score: {self._router.reasons}")

    async def live_receipts(self, server: str | None = None) -> list[WeightReceipt]:
        """Checksums of the tensors that each server serves now, under all of their names."""
        if not self.capabilities.checksums:
            return await super().live_receipts(server)
        asked = self._router.live if server is None else [self._router.named(server)]
        answers = await self._call_all(asked, self._protocol.receipt, self.config.update_timeout)
        found = [answer for answer in answers if isinstance(answer, WeightReceipt)]
        if not found:
            raise InferenceError(f"no live server gave a receipt: {answers or self._router.reasons}")
        return found

    async def _call_all(
        self, servers: list[Server], question: Callable[[], Exchange[Any]], timeout: float
    ) -> list[Any]:
        """Each server's answer, or its error."""
        return await asyncio.gather(
            *(self._transport.call_until_evicted(server, question(), timeout) for server in servers),
            return_exceptions=True,
        )

    async def stage_weights(self, meta: WeightUpdateMeta) -> list[WeightReceipt]:
        """Load a version beside the served one on every server, while they go on generating."""
        self._monitor.start()
        return await self._updates.stage(meta)

    async def commit_weights(self, version: int, interrupt: str = "keep", canary: Canary | None = None) -> float:
        """pause -> swap -> commit -> resume the staged version on every server."""
        self._monitor.start()
        return await self._updates.commit(version, interrupt, canary)

    async def pause(self) -> None:
        """Stop generating on all servers; unfinished answers stay where they are."""
        await self._updates.pause()

    async def resume(self) -> None:
        """Undo `pause`."""
        await self._updates.resume()

    async def sleep(self) -> float:
        """Give the servers' memory back until the next commit, or `wake`."""
        if not self.capabilities.sleeps:
            await super().sleep()
        self._monitor.start()
        return await self._updates.sleep()

    async def wake(self) -> None:
        """Undo `sleep`."""
        if not self.capabilities.sleeps:
            await super().wake()
        await self._updates.wake()

    async def stats(self) -> dict[str, float]:
        """Sums over the servers that answer, of what grows over all that there have been, and `rejoins`, servers taken
        back so far. Also learns the version of servers that another client updated."""
        found = await self._request_stats(self._router.live)
        await self._learn_version(found)
        for server, stats in found.items():
            self._router.update_counters(server, {name: getattr(stats, name) for name in _GROWING})
        now = {name: float(sum(getattr(stats, name) for stats in found.values())) for name in ("running", "waiting")}
        grown = {name: float(self._router.sums[name]) for name in _GROWING}
        return {"servers": float(len(self._router.live)), "rejoins": float(self._router.rejoins), **now, **grown}

    async def sync_version(self, version: int) -> None:
        """Go on at a version that another client has committed. A server that does not show it when it is asked twice
        is out until it does."""
        for _ in range(2):
            await self.stats()
            behind = [server for server in self._router.live if server.version < version]
            if not behind:
                break
        for server in behind:
            self._router.evict(server, f"has not shown version {version}, which another client committed")
        self._router.version = max(self._router.version, version)

    async def _request_stats(self, servers: list[Server]) -> dict[Server, Stats]:
        """The figures of those that answer."""
        versions = [server.version for server in servers]
        answers = await self._call_all(servers, self._protocol.stats, self.config.probe_timeout)
        failed = dict(failures(servers, answers))
        for server, error in failed.items():
            self._handle_failure(server, error)
        found: dict[Server, Stats] = {}
        for server, version, value in zip(servers, versions, answers, strict=True):
            if server not in failed:
                found[server] = value
                self._check_version(server, value.version, version)
                server.version = max(server.version, value.version)
        return found

    async def _learn_version(self, found: dict[Server, Stats]) -> None:
        """What all live servers serve is committed. One that lags behind the others was lost in an update of another
        client: it is out until it has caught up."""
        newest = max((server.version for server in self._router.live), default=self._router.version)
        behind = [server for server in self._router.live if server.version < newest]
        in_update = self._updates.is_in_progress or any(stats.paused for stats in found.values())
        if behind and not in_update:
            again = await self._request_stats(behind)  # the update may have come between two answers
            in_update = self._updates.is_in_progress or any(stats.paused for stats in again.values())
            for server in behind:
                if server.version < newest and not in_update:
                    self._router.evict(server, f"serves version {server.version} while others serve {newest}")
        if self._router.live and not self._updates.is_in_progress:
            self._router.version = max(self._router.version, min(server.version for server in self._router.live))

    def _check_version(self, server: Server, found: int, committed: int) -> None:
        """Evict a server that shows an older version than it had when it was asked: it was restarted."""
        if found < committed:
            self._router.evict(server, f"serves version {found} after it had committed {committed}")

    async def destroy(self) -> None:
        """Close connections. Requests that still wait fail with an `InferenceError`."""
        await self._monitor.stop()
        self._updates.end_lease()
        self._router.stop_waiting(InferenceError("the client was closed"))
        tasks = [task for server in self._router.servers for task in server.tasks]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._transport.close()
