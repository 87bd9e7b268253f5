"""Inference engine for servers with an HTTP API, independent of their protocol."""

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
from rl_inference.client import transport
from rl_inference.client.completion import PartialCompletion
from rl_inference.client.discovery import Discovery, checked_address
from rl_inference.client.file_limit import raise_file_limit
from rl_inference.client.health import ServerMonitor
from rl_inference.client.protocol import Exchange, GenerationChunk, ServerProtocol, Stats
from rl_inference.client.router import Group, Router
from rl_inference.client.server_state import ServerState
from rl_inference.client.stop_strings import StopStrings, tokenizer_of
from rl_inference.client.transport import (
    Server,
    ServerBusyError,
    ServerEndedError,
    ServerFailedError,
    ServerGoneError,
    ServerLostError,
    Transport,
    failures,
)
from rl_inference.client.weight_update import WeightUpdateClient

_FIRST_RETRY_SECONDS = 0.2
"""Seconds to wait before the first retry of a request; short, because a busy server frees a slot within seconds."""
_MAX_RETRY_SECONDS = 5.0
"""Maximum seconds between two retries. The wait doubles with each retry, so that it adds little to an outage."""
_COUNTERS = ("generated_tokens", "busy_seconds")
_PROBES = 3
"""Number of probes of a silent server per progress timeout. After this many failures in a row, it counts as lost."""


class HttpEngine(InferenceEngine):
    """Base class of inference engines, with routing, failover, weight updates, rejoin and deadlines.

    A subclass defines the protocol of its servers (`make_protocol`), their start (`server_spec`) and their settings
    (`config_class`).

    Args:
        config: settings of the servers; None for the defaults.
        spec: settings of the run; None for the defaults.
        client: deadlines; None for the defaults.
        clock: clock for cooldowns and deadlines; None for the system clock.
    """

    config_class: ClassVar[type[ServerConfig]]
    """Class of the servers' settings."""

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
        """Create the protocol of the servers, which may depend on `server_config` and `spec`."""

    @property
    def capabilities(self) -> Capabilities:
        """Optional features of the servers."""
        return self._protocol.capabilities

    def initialize(self, addresses: list[str], key: str = "") -> None:
        """Set the addresses of the servers and the run key, and raise this process's limit of open files."""
        raise_file_limit()
        if not addresses:
            raise ConfigError("inference servers: expected at least one address, found none.")
        self._connect([Server(checked_address(address), self.spec.version) for address in addresses], key)

    def follow_discovery(self, source: ServerSource) -> bool:
        """Keep the list of servers equal to the list from `source`. See `InferenceEngine.follow_discovery`."""
        self._monitor.discovery = Discovery(source, self._router, self._monitor.probe_interval)
        return True

    def stop_waiting_for_servers(self) -> None:
        """Fail weight updates and scores immediately if no server is left. Waiting calls fail at the next probe."""
        self._router.final = True

    def _connect(self, servers: list[Server], key: str) -> None:
        self._router = Router(servers, self._clock, self.spec.version, self.spec.rejoin_timeout)
        self._transport = Transport(self.config, self._protocol, key)
        self._updates = WeightUpdateClient(self.spec, self._router, self._transport, self.server_config.program())
        self._monitor = ServerMonitor(self._router, self._transport, self._updates, self.spec.clients)

    @property
    def servers(self) -> list[str]:
        """Addresses of the live servers."""
        return [server.address for server in self._router.live]

    @property
    def version(self) -> int:
        """Last version committed on all live servers. Never decreases, even when servers are lost or rejoin."""
        return self._router.version

    async def describe(self, server: str) -> ServedModel | None:
        """Return the self-description of one of the servers, or None if this kind of server has none."""
        live_server = self._router.named(server)
        return await self._transport.call_until_evicted(live_server, self._protocol.describe(), transport.PROBE_TIMEOUT)

    async def agenerate(self, request: ModelRequest) -> ModelResponse:
        """Generate one complete completion, resuming it after interruptions and lost servers."""
        self._monitor.start()
        started = self._clock.now()
        completion = PartialCompletion(
            request, request.request_id or secrets.token_hex(8), await self._stops(request.generation)
        )
        server = await self._finish(completion, self._router.group(request.group) if request.group else None)
        assert completion.finish is not None
        return ModelResponse(
            input_ids=request.input_ids,
            output_ids=completion.output_ids,
            logprobs=completion.logprobs,
            versions=completion.versions,
            stop_reason=StopReason(completion.finish),
            server=server.address,
            seconds=self._clock.now() - started,
            resubmissions=completion.attempts - 1,
        )

    async def _stops(self, generation: GenerationConfig) -> StopStrings | None:
        """Return a detector of stop strings if the servers do not detect them across interruptions."""
        if not generation.stop or self.capabilities.resumes_completions:
            return None
        tokenizer = await asyncio.to_thread(tokenizer_of, self.spec.model_path)
        return StopStrings(generation.stop, generation.min_new_tokens, tokenizer)

    async def _finish(self, completion: PartialCompletion, group: Group | None) -> Server:
        """Send the request to servers until the completion is finished.

        Returns:
            the server that finished it.

        Raises:
            InferenceError: a server rejected the request, no server became live in time, or all live servers failed
                and no token arrived within the progress timeout.
        """
        last_progress, tried, delay = self._clock.now(), set[Server](), _FIRST_RETRY_SECONDS
        while True:
            waited = await self._router.wait_open()
            if waited or not self._router.live:
                await self._router.wait_live()
                last_progress, tried, delay = self._clock.now(), set(), _FIRST_RETRY_SECONDS
            server = self._pick(completion, group)
            tokens_before, instance_id = len(completion.output_ids), server.life
            try:
                await self._run_request(server, self._receive_with_probes(server, completion))
                self._router.succeeded(server)
            except ServerLostError as error:
                if not completion.done:
                    await self._record_failure(
                        f"request {completion.rid}", completion.ended, server, instance_id, error
                    )
            except ServerBusyError:
                pass
            if completion.done:  # true even if the server was lost right after the last token
                return server
            if len(completion.output_ids) > tokens_before:
                last_progress, tried, delay = self._clock.now(), set(), _FIRST_RETRY_SECONDS
                continue
            tried.add(server)
            stalled_seconds = self._clock.now() - max(last_progress, completion.last_probe)
            if tried.issuperset(self._router.live) and self._router.live:
                if stalled_seconds > self.config.progress_timeout:
                    raise InferenceError(self._no_progress_message(completion, stalled_seconds))
                await self._clock.sleep(min(delay, _MAX_RETRY_SECONDS))
                delay *= 2

    async def _record_failure(
        self,
        request: str,
        failed_servers: list[tuple[str, str]],
        server: Server,
        instance_id: str,
        error: ServerLostError,
    ) -> None:
        """Record that a server ended, or reported a failure, while it worked on a request.

        Removed servers, and servers that return their unfinished completions before they end, do not count.

        Args:
            request: name of the request for messages.
            failed_servers: id of the process and error of each server that ended or failed during the request. This
                function appends to it.
            server: server that was called.
            instance_id: id of the server's process before the call; empty if unknown. Each process that ended is
                counted once.
            error: error of the call.

        Raises:
            InferenceError: this is the second such server. The request may be the cause, so it is not sent to another
                server, even if tokens were received.
        """
        if server.state is ServerState.LEAVING:
            return
        fatal = isinstance(error, (ServerFailedError, ServerEndedError))
        if not fatal and isinstance(error, ServerGoneError):  # the server had ended before the request
            return
        if not fatal:
            try:
                await self._transport.call(server, self._protocol.health(), transport.PROBE_TIMEOUT)
                return
            except ServerGoneError:
                pass
            except InferenceError:  # no healthy response, but the process exists
                return
        if (
            instance_id
            and not isinstance(error, ServerFailedError)
            and any(instance_id == earlier for earlier, _ in failed_servers)
        ):
            return
        failed_servers.append((instance_id, f"{server.address}: {error}"))
        if len(failed_servers) > 1:
            raise InferenceError(
                f"{request} is abandoned: {len(failed_servers)} servers ended or failed during it, and others might "
                f"too. {'; '.join(failure for _, failure in failed_servers)}. See their logs."
            ) from error

    def _pick(self, completion: PartialCompletion, group: Group | None) -> Server:
        if self._router.ended is not None:
            raise InferenceError(f"the server monitor ended: {self._router.ended!r}") from self._router.ended
        server = self._router.choose(group)
        if server is None:
            raise NoServersError(self._no_progress_message(completion, 0.0))
        return server

    def _handle_failure(self, server: Server, error: InferenceError) -> None:
        """Evict a server whose process ended or changed; avoid and probe a lost one; avoid a busy one."""
        if server.state is ServerState.LEAVING:
            return
        server.record_error(str(error))
        if isinstance(error, ServerGoneError):
            self._router.evict(server, f"is gone: {error}")
        elif isinstance(error, ServerLostError):
            self._router.failed(server, str(error))
            self._monitor.check_now()
        else:
            self._router.busy(server)

    def _no_progress_message(self, completion: PartialCompletion, stalled_seconds: float) -> str:
        return (
            f"request {completion.rid}: no server continues it ({len(completion.output_ids)} tokens so far, "
            f"{stalled_seconds:.0f} s without progress). Last errors: {self._router.reasons}. See their logs."
        )

    async def _run_request[T](self, server: Server, work: Coroutine[Any, Any, T]) -> T:
        """Run a request on a server, cancel it if the server is evicted, and handle a failure of the server."""
        server.open += 1
        try:
            return await server.run(work)
        except (ServerLostError, ServerBusyError) as error:
            self._handle_failure(server, error)
            raise
        finally:
            server.open -= 1

    async def _receive_with_probes(self, server: Server, completion: PartialCompletion) -> None:
        """Receive a completion from a server. A server without heartbeats is probed while it is silent."""
        if self.capabilities.heartbeats:
            return await self._receive(server, completion)
        task, lines, failed, tokens = asyncio.create_task(self._receive(server, completion)), completion.lines, 0, -1.0
        try:
            while not (await asyncio.wait({task}, timeout=self.config.progress_timeout / _PROBES))[0]:
                if completion.lines != lines:
                    lines, failed, tokens = completion.lines, 0, -1.0
                    continue
                try:
                    last_tokens, tokens = tokens, await self._check_progress(server)
                    if tokens == last_tokens:
                        raise ServerLostError(
                            f"{server.address}: reports that it is healthy and not paused, but generated no token for "
                            f"{self.config.progress_timeout:g} s (client.progress_timeout)"
                        )
                except ServerGoneError:
                    raise
                except ServerLostError:
                    failed += 1
                    if failed == _PROBES:
                        raise
                else:
                    completion.last_probe, failed = self._clock.now(), 0
            return task.result()
        finally:
            task.cancel()
            await asyncio.wait({task})

    async def _check_progress(self, server: Server) -> float:
        """Probe a silent server and return its number of generated tokens.

        The result is nan if the number does not show progress: the server is paused, or does not count each token.
        """
        await self._transport.call(server, self._protocol.health(), transport.PROBE_TIMEOUT)
        if not self._protocol.counts_tokens:
            return nan
        stats = await self._transport.call(server, self._protocol.stats(), transport.PROBE_TIMEOUT)
        return nan if stats.paused else stats.generated_tokens

    async def _receive(self, server: Server, completion: PartialCompletion) -> None:
        committed, call = server.version, completion.next_call(self._protocol)
        chunks, abort_sent = self._transport.stream(server, call), False
        try:
            async with contextlib.aclosing(chunks):
                async for chunk in chunks:
                    completion.lines += 1
                    if chunk is None:
                        continue
                    self._add_chunk(server, completion, chunk, committed)
                    if completion.request.on_tokens is not None:
                        completion.request.on_tokens(completion.output_ids)
                    if completion.stopped() and completion.finish is None and not abort_sent:
                        if not self.capabilities.version_stamps_at_end:
                            break
                        await self._transport.call(server, self._protocol.abort(completion.attempt_id))
                        abort_sent = True
        finally:
            completion.truncate_at_stop()
        if completion.finish is None:
            raise ServerLostError(f"{server.address}: the stream ended before the completion was finished")

    def _add_chunk(self, server: Server, completion: PartialCompletion, chunk: GenerationChunk, committed: int) -> None:
        """Append a chunk to the completion, unless its versions are older than the versions of earlier tokens.

        A server that sends older versions missed an update of another client. It is evicted until it serves the
        committed version.

        Args:
            server: server that sent the chunk.
            completion: completion to extend.
            chunk: tokens to append.
            committed: version that the server had committed when the request was sent.
        """
        if chunk.error is not None:
            raise ServerFailedError(f"{server.address}: {chunk.error}")
        oldest = min(chunk.stamps or chunk.versions, default=committed)
        self._check_version(server, oldest, committed)
        if (
            completion.begin
            and (chunk.stamps or chunk.versions)
            and oldest < (previous := completion.versions[completion.begin - 1])
        ):
            completion.drop_attempt()
            self._router.evict(server, f"serves version {oldest}, but earlier tokens have version {previous}")
        if not server.is_live:
            raise ServerLostError(f"{server.address}: {server.reason}")
        completion.add(chunk, committed)

    async def score(self, input_ids: list[int], temperature: float = 1.0, server: str | None = None) -> list[float]:
        """Return the log-prob of each input token at the current weights; entry 0 is 0."""
        if temperature != 1 and not self.capabilities.any_score_temperature:
            raise InferenceError(f"temperature={temperature:g}: these servers can only score at temperature 1.")
        return await self._score(lambda: self._protocol.score(input_ids, temperature), server)

    async def score_previous_weights(self, input_ids: list[int], temperature: float = 1.0) -> list[float]:
        """Return the log-prob of each input token at the weights that were served before the last commit."""
        if not self.capabilities.scores_previous_weights:
            return await super().score_previous_weights(input_ids, temperature)
        return await self._score(lambda: self._protocol.score(input_ids, temperature, before=True))

    async def _score(
        self, make_exchange: Callable[[], Exchange[list[float]]], address: str | None = None
    ) -> list[float]:
        self._monitor.start()
        if address is not None:
            server = self._router.named(address)
            return await self._run_request(server, self._transport.call(server, make_exchange()))
        start, failed_servers = self._clock.now(), list[tuple[str, str]]()
        while await self._router.wait_live(in_vain=False):
            await self._router.wait_open()
            for server in self._router.sorted_by_load():
                instance_id = server.life
                try:
                    return await self._run_request(server, self._transport.call(server, make_exchange()))
                except ServerLostError as error:
                    await self._record_failure("a score", failed_servers, server, instance_id, error)
                except ServerBusyError:
                    pass
            if not self._router.rejoin_timeout or self._clock.now() - start > self.config.progress_timeout:
                break
            await self._clock.sleep(_FIRST_RETRY_SECONDS)
        raise InferenceError(f"no live server could score: {self._router.reasons}")

    async def live_receipts(self, server: str | None = None) -> list[WeightReceipt]:
        """Return checksums of the tensors that each server serves now; a tied tensor appears under all its names."""
        if not self.capabilities.checksums:
            return await super().live_receipts(server)
        servers = self._router.live if server is None else [self._router.named(server)]
        results = await self._call_all(servers, self._protocol.receipt, self.spec.update_timeout)
        receipts = [result for result in results if isinstance(result, WeightReceipt)]
        if not receipts:
            raise InferenceError(f"no live server returned a receipt: {results or self._router.reasons}")
        return receipts

    async def _call_all(
        self, servers: list[Server], make_exchange: Callable[[], Exchange[Any]], timeout: float
    ) -> list[Any]:
        """Return the response or error of each server."""
        return await asyncio.gather(
            *(self._transport.call_until_evicted(server, make_exchange(), timeout) for server in servers),
            return_exceptions=True,
        )

    async def stage_weights(self, meta: WeightUpdateMeta) -> list[WeightReceipt]:
        """Load a new version on every server while the current one is served. See `InferenceEngine.stage_weights`."""
        self._monitor.start()
        return await self._updates.stage(meta)

    async def commit_weights(self, version: int, interrupt: str = "keep", canary: Canary | None = None) -> float:
        """Switch every server to the staged version. See `InferenceEngine.commit_weights`."""
        self._monitor.start()
        return await self._updates.commit(version, interrupt, canary)

    async def pause(self) -> None:
        """Pause generation on all servers. Unfinished completions stay on their servers."""
        await self._updates.pause()

    async def resume(self) -> None:
        """Resume generation after `pause`."""
        await self._updates.resume()

    async def sleep(self) -> float:
        """Release the servers' device memory until the next commit or `wake`, and return the released bytes."""
        if not self.capabilities.sleeps:
            await super().sleep()
        self._monitor.start()
        return await self._updates.sleep()

    async def wake(self) -> None:
        """End `sleep` without a commit."""
        if not self.capabilities.sleeps:
            await super().wake()
        await self._updates.wake()

    async def stats(self) -> dict[str, float]:
        """Return sums of metrics over the servers that respond, and `rejoins`, the number of rejoins so far.

        `generated_tokens` and `busy_seconds` include servers that were removed or restarted. This also detects
        versions that another client committed.
        """
        stats_by_server = await self._request_stats(self._router.live)
        await self._learn_version(stats_by_server)
        for server, stats in stats_by_server.items():
            self._router.update_counters(server, {name: getattr(stats, name) for name in _COUNTERS})
        current = {
            name: float(sum(getattr(stats, name) for stats in stats_by_server.values()))
            for name in ("running", "waiting")
        }
        totals = {name: float(self._router.sums[name]) for name in _COUNTERS}
        return {"servers": float(len(self._router.live)), "rejoins": float(self._router.rejoins), **current, **totals}

    async def sync_version(self, version: int) -> None:
        """Register that another client has committed a version on the servers.

        A server that does not report the version in two polls is evicted until it does.
        """
        for _ in range(2):
            await self.stats()
            behind = [server for server in self._router.live if server.version < version]
            if not behind:
                break
        for server in behind:
            self._router.evict(server, f"does not report version {version}, which another client committed")
        self._router.version = max(self._router.version, version)

    async def _request_stats(self, servers: list[Server]) -> dict[Server, Stats]:
        """Return the metrics of each server that responds, and handle the failures of the others."""
        versions = [server.version for server in servers]
        results = await self._call_all(servers, self._protocol.stats, transport.PROBE_TIMEOUT)
        failed = dict(failures(servers, results))
        for server, error in failed.items():
            self._handle_failure(server, error)
        stats_by_server: dict[Server, Stats] = {}
        for server, version, stats in zip(servers, versions, results, strict=True):
            if server not in failed:
                stats_by_server[server] = stats
                self._check_version(server, stats.version, version)
                server.record_version(max(server.version, stats.version))
        return stats_by_server

    async def _learn_version(self, stats_by_server: dict[Server, Stats]) -> None:
        """Set `version` to the oldest version of all live servers, because every live server has committed it.

        A server that stays behind the others missed an update of another client. It is evicted until it serves the
        committed version.
        """
        newest = max((server.version for server in self._router.live), default=self._router.version)
        behind = [server for server in self._router.live if server.version < newest]
        in_update = self._updates.is_in_progress or any(stats.paused for stats in stats_by_server.values())
        if behind and not in_update:
            repeated_stats = await self._request_stats(behind)  # the commit may have happened between two responses
            in_update = self._updates.is_in_progress or any(stats.paused for stats in repeated_stats.values())
            for server in behind:
                if server.version < newest and not in_update:
                    self._router.evict(server, f"serves version {server.version} while others serve {newest}")
        if self._router.live and not self._updates.is_in_progress:
            self._router.version = max(self._router.version, min(server.version for server in self._router.live))

    def _check_version(self, server: Server, reported: int, committed: int) -> None:
        """Evict a server that reports an older version than it had committed: it was restarted."""
        if reported < committed:
            self._router.evict(server, f"serves version {reported} after it had committed {committed}")

    async def destroy(self) -> None:
        """Close all connections. Waiting requests fail with an `InferenceError`."""
        await self._monitor.stop()
        self._updates.stop_renewal()
        self._router.stop_waiting(InferenceError("the client was closed"))
        tasks = [task for server in self._router.servers for task in server.tasks]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._transport.close()
