"""The embedded server without HTTP, in the process of the caller."""

from __future__ import annotations

import asyncio
import secrets
import time
from concurrent.futures import Future
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, ClassVar, Never

import msgspec

from rl_contracts.config import ClientConfig, require, require_choice
from rl_contracts.data import (
    NO_GPU_ROUTES,
    RENDEZVOUS_ROUTES,
    ModelRequest,
    ModelResponse,
    ServeSpec,
    StopReason,
    WeightReceipt,
    WeightUpdateMeta,
)
from rl_contracts.errors import ConfigError, InferenceError
from rl_contracts.inference import Canary, InferenceEngine
from rl_contracts.models.directory import check_model_directory
from rl_contracts.runtime.aio import run_in_thread
from rl_contracts.runtime.http_requests import decode
from rl_inference.backends.embedded.config import EmbeddedEngineConfig, ServerOptions
from rl_inference.backends.embedded.protocol import EmbeddedProtocol
from rl_inference.client.completion import reject_schema
from rl_inference.embedded_server.requests import Generate, Score, read_images, to_jobs
from rl_inference.embedded_server.scoring import to_score_job

_NAME = "in-process"
_ALIVE_SECONDS = 1.0
"""Seconds between two checks that the decode thread of a waiting request is alive."""


class InProcessEngine(InferenceEngine):
    """Embedded server without HTTP: the decode thread runs in this process. For notebooks and tests.

    The constructor loads the model, which takes seconds; `initialize` is not needed. A run cannot use this engine,
    because each of its trainers would load a model, and only the trainer that publishes weights would update it.

    Args:
        config: settings of the embedded server; `addresses`, `python` and `ready_timeout` are ignored.
        spec: the model directory, and `weights_dir` for weight updates; `cpus` limits the threads of torch in this
            process.
        client: ignored, since no connection can fail.

    Raises:
        ModelError: the model cannot be served.
    """

    capabilities: ClassVar = replace(EmbeddedProtocol.capabilities, routes=NO_GPU_ROUTES, sleeps=False)

    def __init__(
        self,
        config: EmbeddedEngineConfig | None = None,
        spec: ServeSpec | None = None,
        client: ClientConfig | None = None,
    ) -> None:
        options = ServerOptions(config or EmbeddedEngineConfig(), spec or ServeSpec(), port=0)
        require(bool(options.spec.model_path), "ServeSpec.model_path", "a model directory", options.spec.model_path)
        check_model_directory(options.spec.model_path)
        from rl_inference.embedded_server.startup import load_decode_loop

        self.config, self.spec = options.config, options.spec
        self._protocol = EmbeddedProtocol()
        self._loop = load_decode_loop(options, _NAME, on_crash=lambda error: None)  # the loop logs the error
        self._loop.start()
        self._updating = asyncio.Lock()
        self._is_paused = False
        """True between `pause` and `resume`; commits then leave generation paused."""

    @classmethod
    def server_spec(cls, config: Any, spec: ServeSpec) -> Never:
        """Raise a ConfigError, because this engine has no servers that a launcher could start."""
        raise ConfigError(f"{cls.__name__} is for notebooks and tests; in a run, use allocation=embedded:...")

    def initialize(self, addresses: list[str], key: str = "") -> None:
        """Do nothing, because there are no servers to connect to."""

    @property
    def served_dtype(self) -> str:
        """Dtype of the weights and the computation."""
        return self.config.served_dtype

    @property
    def servers(self) -> list[str]:
        """Name of this engine in responses and receipts."""
        return [_NAME]

    @property
    def version(self) -> int:
        """Last committed version."""
        return self._loop.weights.version

    async def agenerate(self, request: ModelRequest) -> ModelResponse:
        """Generate one completion. If the caller is cancelled, its decode slot becomes free."""
        started = time.perf_counter()
        job = await self._job(request)
        self._loop.submit(job)
        try:
            await self._result(job.ended)
        finally:
            if job.finish_reason is None:
                self._loop.abort(lambda each: each is job, "the request was cancelled")
        assert job.finish_reason is not None
        reason = str(job.finish_reason["type"])
        if reason not in (StopReason.STOP, StopReason.LENGTH):
            raise InferenceError(f"request {job.rid}: {job.finish_reason['message']}")
        return ModelResponse(
            input_ids=request.input_ids,
            output_ids=job.output_ids,
            logprobs=job.logprobs,
            versions=job.versions,
            stop_reason=StopReason(reason),
            server=_NAME,
            seconds=time.perf_counter() - started,
        )

    async def _job(self, request: ModelRequest) -> Any:
        """Check a request as the server does, and return its `GenerationJob`."""
        if request.schema is not None:
            reject_schema(self.capabilities)
        rid, seed = request.request_id or secrets.token_hex(8), request.seed
        call = self._protocol.generate(rid, request.input_ids, request.generation, seed, 0, images=request.images)
        body = decode(msgspec.json.encode(call.body), Generate)
        [job] = to_jobs(body, self._loop.model, most=1)
        if body.images:
            job.images = await asyncio.to_thread(read_images, body, self._loop.model)
        return job

    async def score(self, input_ids: list[int], temperature: float = 1.0, server: str | None = None) -> list[float]:
        """Return the log-prob of each input token at the current weights; entry 0 is 0."""
        self._check_name(server)
        return await self._score(Score(input_ids, temperature))

    async def score_previous_weights(self, input_ids: list[int], temperature: float = 1.0) -> list[float]:
        """Return the log-prob of each input token at the weights that were served before the last commit."""
        return await self._score(Score(input_ids, temperature, before=True))

    async def _score(self, request: Score) -> list[float]:
        job = to_score_job(request, self._loop.model)
        async with self._updating if job.before else nullcontext():  # staging overwrites the previous weights
            self._loop.submit_score(job)
            return (await self._result(job.done))[0]

    async def live_receipts(self, server: str | None = None) -> list[WeightReceipt]:
        """Return checksums of the served tensors; a tied tensor appears under all its names."""
        self._check_name(server)
        return [await self._result(self._loop.run(self._loop.weights.receipt))]

    def _check_name(self, server: str | None) -> None:
        if server not in (None, _NAME):
            raise InferenceError(f"server: expected {_NAME!r} or None, found {server!r}.")

    async def stage_weights(self, meta: WeightUpdateMeta) -> list[WeightReceipt]:
        """Load a new version while the current one is served. See `InferenceEngine.stage_weights`."""
        if meta.route in RENDEZVOUS_ROUTES:
            from rl_contracts.weights import with_rank

            meta = with_rank(meta, 1, 2)
        weights, seconds = self._loop.weights, self.spec.update_timeout
        async with self._updating:
            return [await self._result(run_in_thread(lambda: weights.stage(meta, seconds)))]

    async def commit_weights(self, version: int, interrupt: str = "keep", canary: Canary | None = None) -> float:
        """Switch to the staged version. See `InferenceEngine.commit_weights`; the canary is not used."""
        require_choice("interrupt", interrupt, ("keep", "recompute", "wait"))
        async with self._updating:
            try:
                await self._result(self._loop.pause(wait=interrupt == "wait"))
                await self._result(self._loop.commit(version, recompute=interrupt == "recompute"))
            finally:
                seconds = 0.0 if self._is_paused else await self._result(self._loop.resume())
        return seconds

    async def pause(self) -> None:
        """Pause generation. Unfinished completions keep their slots."""
        async with self._updating:
            self._is_paused = True
            await self._result(self._loop.pause(wait=False))

    async def resume(self) -> None:
        """Resume generation after `pause`."""
        async with self._updating:
            self._is_paused = False
            await self._result(self._loop.resume())

    async def stats(self) -> dict[str, float]:
        """Return the metrics of the decode thread; see `InferenceEngine.stats`."""
        stats = self._loop.stats()
        return {"servers": 1.0} | {
            name: stats[name] for name in ("running", "waiting", "generated_tokens", "busy_seconds")
        }

    async def destroy(self) -> None:
        """End the decode thread. Waiting requests fail with an `InferenceError`."""
        await asyncio.to_thread(self._loop.stop)

    async def _result[T](self, future: Future[T]) -> T:
        """Return the result of a future of the decode thread.

        Raises:
            InferenceError: the thread ended without setting the result.
        """
        result = asyncio.wrap_future(future)
        while not result.done():
            if not (self._loop.is_alive or future.done()):
                raise InferenceError("the engine was destroyed, or its decode thread died; create a new engine.")
            await asyncio.wait({result}, timeout=_ALIVE_SECONDS)
        return result.result()
