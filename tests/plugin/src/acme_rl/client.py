"""Client and settings of the servers."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections import Counter
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from rl_contracts.config import ClientConfig, bounded, require
from rl_contracts.data import ModelRequest, ModelResponse, ServeSpec, StopReason, WeightReceipt, WeightUpdateMeta
from rl_contracts.errors import ConfigError, InferenceError, WeightUpdateError
from rl_contracts.inference import InferenceEngine, ServerConfig
from rl_contracts.scheduler import JobSpec

if TYPE_CHECKING:
    import aiohttp

CONNECT_SECONDS = 5.0
"""Seconds to wait for a connection to a server."""


@dataclass
class AcmeInferenceEngineConfig(ServerConfig):
    """Settings of the servers."""

    setting: ClassVar[str] = "rollout.server"
    context_length: int = bounded(512, "at least 2", lambda tokens: tokens >= 2)
    """Maximum number of tokens in prompt and completion together."""
    slots: int = bounded(8, "at least 1", lambda number: number >= 1)
    """Number of completions decoded at the same time; more requests wait."""

    def check(self, spec: ServeSpec) -> None:
        require(spec.strategy.model_size == 1, "allocation", "one process per server (d only)", str(spec.strategy))
        require(spec.device != "cuda", "cluster.device", "cpu or auto (acmeserver runs on the CPU)", spec.device)


class AcmeInferenceEngine(InferenceEngine):
    """Send each request to the server with the fewest open requests.

    Requests to a lost server raise `InferenceError`, which fails their episodes.
    """

    def __init__(
        self,
        config: AcmeInferenceEngineConfig | None = None,
        spec: ServeSpec | None = None,
        client: ClientConfig | None = None,
    ) -> None:
        self.config, self._client = config or AcmeInferenceEngineConfig(), client or ClientConfig()
        self._spec = spec or ServeSpec()
        self._version = self._spec.version
        self._addresses: list[str] = []
        self._open: Counter[str] = Counter()
        self._session: aiohttp.ClientSession | None = None
        self._calls: set[asyncio.Task[dict[str, Any]]] = set()
        self._headers: dict[str, str] = {}
        self._destroyed = False

    @classmethod
    def server_spec(cls, config: AcmeInferenceEngineConfig, spec: ServeSpec) -> JobSpec:
        config.check(spec)
        options = {
            "--model": spec.model_path,
            "--host": "{host}",
            "--port": "{port}",
            "--weights-dir": spec.weights_dir,
            "--context-length": str(config.context_length),
            "--slots": str(config.slots),
            "--threads": str(spec.cpus or 1),
        }
        return JobSpec(
            "rollout",
            (sys.executable, "-m", "acme_rl.server", *(text for option in options.items() for text in option)),
            count=spec.strategy.data,
            cpus=spec.cpus or 1,
            needs_port=True,
            ready_path="/health",
        )

    def initialize(self, addresses: list[str], key: str = "") -> None:
        if not addresses or not all(address.startswith("http://") for address in addresses):
            raise ConfigError(f"servers: expected addresses such as http://host:port, found {addresses}.")
        self._addresses = list(addresses)
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}

    @property
    def served_dtype(self) -> str:
        return "float32"

    @property
    def servers(self) -> list[str]:
        return [address.removeprefix("http://") for address in self._addresses]

    @property
    def version(self) -> int:
        return self._version

    async def agenerate(self, request: ModelRequest) -> ModelResponse:
        if not request.input_ids:
            raise InferenceError("expected a prompt, found no tokens.")
        begin = time.monotonic()
        body = {"input_ids": request.input_ids, "generation": asdict(request.generation), "seed": request.seed}
        address = self._least_busy()
        self._open[address] += 1
        try:
            value = await self._call(address, "/generate", body)
        finally:
            self._open[address] -= 1
        return ModelResponse(
            input_ids=list(request.input_ids),
            output_ids=value["output_ids"],
            logprobs=value["logprobs"],
            versions=value["versions"],
            stop_reason=StopReason(value["stop_reason"]),
            server=address.removeprefix("http://"),
            seconds=time.monotonic() - begin,
        )

    async def score(self, input_ids: list[int], temperature: float = 1.0, server: str | None = None) -> list[float]:
        if server is not None and server not in self.servers:
            raise InferenceError(f"no live server {server!r}; live servers: {', '.join(self.servers) or 'none'}.")
        address = self._least_busy() if server is None else f"http://{server}"
        value = await self._call(address, "/score", {"input_ids": input_ids, "temperature": temperature})
        logprobs: list[float] = value["logprobs"]
        return logprobs

    async def stage_weights(self, meta: WeightUpdateMeta) -> list[WeightReceipt]:
        staged = await self._on_all("/stage", meta.to_json(), self._spec.update_timeout)
        return [
            WeightReceipt(r["holder"], r["version"], {name: int(value) for name, value in r["checksums"].items()})
            for r in staged
        ]

    async def commit_weights(self, version: int, interrupt: str = "keep") -> float:
        await self._on_all("/pause", {"drain": interrupt == "wait"}, self._spec.update_timeout)
        try:
            await self._on_all("/commit", {"version": version, "recompute": interrupt == "recompute"})
            self._version = version
        finally:  # the remaining servers all committed, or all serve the previous version
            resumed = await self._on_all("/resume", {})
        return max(float(reply["seconds"]) for reply in resumed)

    async def pause(self) -> None:
        await self._on_all("/pause", {"drain": False})

    async def resume(self) -> None:
        await self._on_all("/resume", {})

    async def stats(self) -> dict[str, float]:
        replies = await asyncio.gather(*(self._call(address, "/stats") for address in self._addresses))
        self._version = min((int(reply["version"]) for reply in replies), default=self._version)
        names = ("running", "waiting", "generated_tokens", "busy_seconds")
        return {"servers": float(len(replies)), **{name: float(sum(r[name] for r in replies)) for name in names}}

    async def destroy(self) -> None:
        self._destroyed = True
        for call in self._calls:
            call.cancel()
        if self._session is not None:
            await self._session.close()

    def _least_busy(self) -> str:
        if not self._addresses:
            raise InferenceError("no live server.")
        return min(self._addresses, key=lambda address: self._open[address])

    async def _on_all(self, path: str, body: dict[str, Any], timeout: float | None = None) -> list[dict[str, Any]]:
        """Send a request to all servers, and stop routing to servers that fail.

        Raises:
            WeightUpdateError: all servers failed; contains the first error.
        """
        calls = (self._call(address, path, body, timeout) for address in self._addresses)
        results = await asyncio.gather(*calls, return_exceptions=True)
        replies = {a: value for a, value in zip(self._addresses, results, strict=True) if isinstance(value, dict)}
        if not replies:
            raise WeightUpdateError(f"{path}: {results[0] if results else 'no live server'}")
        self._addresses = list(replies)
        return list(replies.values())

    async def _call(
        self, address: str, path: str, body: dict[str, Any] | None = None, silence: float | None = None
    ) -> dict[str, Any]:
        """Send a request and return the JSON object of the response.

        Raises:
            InferenceError: the server is unreachable, silent or rejects the request; or the client was closed.
        """
        if self._destroyed:
            raise InferenceError("the client was closed.")
        call = asyncio.ensure_future(self._request(address, path, body, silence))
        self._calls.add(call)
        call.add_done_callback(self._calls.discard)
        try:
            return await call
        except asyncio.CancelledError:
            if self._destroyed:
                raise InferenceError("the client was closed.") from None
            raise

    async def _request(
        self, address: str, path: str, body: dict[str, Any] | None, silence: float | None
    ) -> dict[str, Any]:
        import aiohttp

        if self._session is None:
            self._session = aiohttp.ClientSession(headers=self._headers, connector=aiohttp.TCPConnector(limit=0))
        limits = aiohttp.ClientTimeout(
            total=None,
            sock_connect=CONNECT_SECONDS,
            sock_read=silence or self._client.progress_timeout,
        )
        method = "GET" if body is None else "POST"
        try:
            async with self._session.request(method, address + path, json=body, timeout=limits) as response:
                value: dict[str, Any] = json.loads(await response.read())  # after the empty lines of the heartbeat
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise InferenceError(f"{address}{path}: {type(error).__name__}: {error}") from error
        if response.status != 200:
            raise InferenceError(f"{address}{path}: {value.get('error', response.status)}")
        return value
