"""HTTP side of the server: a subset of SGLang's routes, such as `/generate`, and routes for weights and scores."""

from __future__ import annotations

import asyncio
import hmac
import json
import secrets
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from math import isfinite
from typing import TYPE_CHECKING, Any

from aiohttp import ClientPayloadError, web
from aiohttp.http_exceptions import HttpProcessingError
from msgspec import Struct

from rl_contracts.data import WeightReceipt
from rl_contracts.errors import InferenceError, WeightUpdateError
from rl_contracts.runtime.aio import run_in_thread
from rl_contracts.runtime.http_requests import decode
from rl_contracts.runtime.logging import get_logger
from rl_inference.backends.embedded.config import ServerOptions
from rl_inference.backends.embedded.protocol import EmbeddedProtocol, generation_key
from rl_inference.embedded_server.job import GenerationJob
from rl_inference.embedded_server.requests import (
    IMAGE_BYTES,
    Abort,
    Commit,
    Generate,
    Nothing,
    Pause,
    SamplingParams,
    Score,
    Stage,
    expect,
    is_batch,
    read_images,
    to_jobs,
)
from rl_inference.embedded_server.scoring import to_score_job

if TYPE_CHECKING:
    from rl_inference.embedded_server.loop import DecodeLoop

logger = get_logger("inference.server")

PROGRESS_SECONDS = 0.5
"""Longest time in seconds between two events of a stream while the decode thread is alive."""
DRAIN_ANSWER_SECONDS = 0.5
"""Seconds after which `/pause_generation` with `wait` replies `paused: false`; the client then asks again."""
BODY_SECONDS = 30.0
"""Seconds within which a request's body must arrive."""
UNREAD_SECONDS = 30.0
"""Seconds within which a client must read the data of a stream."""
MAX_WAITING = 4096
"""Maximum number of jobs that wait for a decode slot, enough for any batch while their prompts need little memory.

The server rejects further requests with status 503, and clients back off.
"""
STUCK_SECONDS = 300.0
"""Seconds without an iteration of the decode thread after which `/health` fails, longer than any pass of the model."""
IMAGE_THREADS = 4
"""Number of threads that decode images, each one image at a time. A decoded image can take hundreds of MiB."""
WHOLE_PROMPTS = 8
"""Number of prompts with the full context length that a body may hold."""
AGENT_ROUTES = ("/model_info", "/stats", "/generate", "/score")
"""Routes that the generation key gives access to; all other routes control the server."""

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class ServerApp:
    """The HTTP routes and their shared state.

    Args:
        options: settings of the process.
        key: run key that `Authorization: Bearer` must carry. `AGENT_ROUTES` also accept the generation key derived
            from it (`generation_key`). Empty: no key is required.
        shut_down: called by `/shutdown`.
    """

    def __init__(self, options: ServerOptions, key: str, shut_down: Callable[[], None]) -> None:
        self.config, self._spec = options.config, options.spec
        self._keys = [key.encode(), generation_key(key).encode()] if key else []
        self._shut_down = shut_down
        self._loop: DecodeLoop | None = None
        self._max_jobs = self.config.max_sequences + MAX_WAITING
        self._jobs = self._scores = 0
        self._image_threads = ThreadPoolExecutor(IMAGE_THREADS, "images")
        self._staging = asyncio.Lock()
        self._last_beat = (-1, 0.0)
        self._lease: asyncio.TimerHandle | None = None
        self.instance = secrets.token_hex(8)
        self.app = web.Application(middlewares=[self._guard])
        self.app.add_routes(
            [
                web.get("/health", self.health),
                web.get("/model_info", self.model_info),
                web.get("/stats", self.stats),
                web.get("/weight_receipt", self.weight_receipt),
                web.post("/generate", self.generate),
                web.post("/abort_request", self.abort_request),
                web.post("/score", self.score),
                web.post("/stage_weights", self.stage_weights),
                web.post("/pause_generation", self.pause_generation),
                web.post("/commit_weights", self.commit_weights),
                web.post("/continue_generation", self.continue_generation),
                web.post("/sleep", self.sleep),
                web.post("/wake", self.wake),
                web.post("/shutdown", self.shutdown),
            ]
        )
        self.app.on_response_prepare.append(self._sign)

    async def _sign(self, _: web.Request, response: web.StreamResponse) -> None:
        response.headers[EmbeddedProtocol.life_header] = self.instance

    def serve(self, loop: DecodeLoop) -> None:
        """Start to serve requests with a loaded model."""
        self._loop = loop

    @property
    def loop(self) -> DecodeLoop:
        """Decode thread of the server.

        Raises:
            HTTPServiceUnavailable: the model is still being loaded.
        """
        if self._loop is None:
            raise web.HTTPServiceUnavailable(
                text="the model is still loading; try again.", headers={"Retry-After": "1"}
            )
        return self._loop

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Check the key and the content type, and turn errors into JSON with one sentence."""
        try:
            self._check_key(request)
            if request.method == "POST" and request.content_type != "application/json":
                raise web.HTTPUnsupportedMediaType(text="expected a body with Content-Type: application/json.")
            return await handler(request)
        except WeightUpdateError as error:
            return _error(409, str(error))
        except InferenceError as error:
            return _error(400, str(error))
        except web.HTTPException as error:
            return _error(error.status, error.text or error.reason, dict(error.headers))
        except ConnectionError:  # the client went away
            raise
        except Exception as error:  # the boundary to HTTP: log it and reply with one sentence
            logger.exception("%s %s", request.method, request.path)
            return _error(500, f"{type(error).__name__}: {error}")

    def _check_key(self, request: web.Request) -> None:
        if not self._keys or request.path == "/health":
            return
        header = request.headers.get("Authorization", "").encode(errors="surrogateescape")
        control, agent = (hmac.compare_digest(header, b"Bearer " + key) for key in self._keys)
        if not (control or agent):
            raise web.HTTPUnauthorized(text="the request carries no valid key (Authorization: Bearer).")
        if agent and request.path not in AGENT_ROUTES:
            raise web.HTTPForbidden(text=f"the generation key gives access only to {', '.join(AGENT_ROUTES)}.")

    async def _read[T: Struct](self, request: web.Request, kind: type[T]) -> T:
        """Return the body, decoded by its schema.

        Raises:
            InferenceError: the body is invalid.
            HTTPException: the body is too large, compressed, or did not arrive in time.
        """
        if "Content-Encoding" in request.headers:
            raise web.HTTPUnsupportedMediaType(text="expected a body without Content-Encoding.")
        limit, body = self._limit(kind), bytearray()
        try:
            async with asyncio.timeout(BODY_SECONDS):
                async for data in request.content.iter_any():
                    body += data
                    if len(body) > limit:
                        raise web.HTTPRequestEntityTooLarge(
                            limit, len(body), text=f"expected a body of at most {limit} bytes."
                        )
        except TimeoutError:
            raise web.HTTPRequestTimeout(text=f"expected the whole body within {BODY_SECONDS:g} s.") from None
        except (web.RequestPayloadError, ClientPayloadError, HttpProcessingError) as error:
            raise InferenceError(f"the body cannot be read: {error}.") from error
        return decode(bytes(body), kind, {"sampling_params": SamplingParams})

    def _limit(self, kind: type[Struct]) -> int:
        """Return the limit of a body in bytes: enough for full-context prompts or a list of all parameters."""
        model = self.loop.model
        if kind is Stage:
            return 2**20 + 2**10 * len(self.loop.weights.places)
        image_bytes = IMAGE_BYTES if kind is Generate and model.vision is not None else 0
        return image_bytes + 2**16 + WHOLE_PROMPTS * model.context_length * (len(str(model.vocab_size)) + 2)

    async def health(self, _: web.Request) -> web.Response:
        """Return 200 while requests can be served: the model is loaded and the decode thread makes progress."""
        now = time.monotonic()
        if self.loop.beat != self._last_beat[0]:
            self._last_beat = (self.loop.beat, now)
        silent_seconds = now - self._last_beat[1]
        if silent_seconds > STUCK_SECONDS:
            return _error(503, f"the decode thread has made no progress for {silent_seconds:.0f} s.")
        return web.json_response(
            {"status": "ready", "version": self.loop.weights.version, "open": self._jobs + self._scores}
        )

    async def model_info(self, _: web.Request) -> web.Response:
        """Return the name, model, version, limits and device of the server."""
        model = self.loop.model
        return web.json_response(
            {
                "name": self.loop.weights.holder,
                "instance": self.instance,
                "model_path": self._spec.model_path,
                "weights_dir": self._spec.weights_dir,
                "weight_version": self.loop.weights.version,
                "context_length": model.context_length,
                "vocab_size": model.vocab_size,
                "slots": self.config.max_sequences,
                "dtype": self.config.served_dtype,
                "device": str(model.device),
                "end_token_ids": sorted(model.end_ids),
                "has_tokenizer": model.tokenizer is not None,
            }
        )

    async def stats(self, _: web.Request) -> web.Response:
        """Return the counters of the decode thread."""
        return web.json_response(self.loop.stats())

    async def generate(self, request: web.Request) -> web.StreamResponse:
        """Generate one completion, or one or more per prompt of a batch."""
        body = await self._read(request, Generate)
        jobs = to_jobs(body, self.loop.model, self._max_jobs)
        if refused := self._full(self._jobs + len(jobs)):
            return refused
        self._jobs += len(jobs)
        try:
            if body.images:
                images = await asyncio.get_running_loop().run_in_executor(
                    self._image_threads, read_images, body, self.loop.model
                )
                body.images = []  # their memory is not needed any more
                for job in jobs:
                    job.images = images
            return await self._run(request, body, jobs)
        finally:
            self._jobs -= len(jobs)

    async def _run(self, request: web.Request, body: Generate, jobs: list[GenerationJob]) -> web.StreamResponse:
        """Generate the completions of a request, and send them."""
        logprobs = body.return_logprob
        for job in jobs if not body.stream else ():
            self.loop.submit(job)
        done = asyncio.gather(*(asyncio.wrap_future(job.ended) for job in jobs))
        try:
            if body.stream:
                return await self._stream(request, jobs[0], done, logprobs)
            await asyncio.wait({done})
        finally:
            if not done.done():  # the client went away
                self.loop.abort(lambda job: job in jobs, "the client closed the connection")
        error_reason = next((job.finish_reason for job in jobs if job.finish_reason["type"] == "error"), None)  # type: ignore[index]
        if error_reason:
            return _error(500, error_reason["message"])
        replies = [self._reply(job, 0, logprobs) for job in jobs]
        return web.json_response(replies if is_batch(body) or len(jobs) > 1 else replies[0])

    async def _stream(
        self, request: web.Request, job: GenerationJob, done: asyncio.Future[Any], logprobs: bool
    ) -> web.StreamResponse:
        """Send new tokens as server-sent events, at least every `PROGRESS_SECONDS` seconds.

        While the decode thread is stuck, no event is sent.
        """
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-store"})
        await response.prepare(request)
        self.loop.submit(job)
        sent, last_beat = 0, -1
        while not done.done():
            await asyncio.wait({done}, timeout=PROGRESS_SECONDS)
            if done.done() or self.loop.beat == last_beat:
                continue  # no event if the decode thread is stuck, so that the client notices
            last_beat = self.loop.beat
            reply = self._reply(job, sent, logprobs)
            if reply["meta_info"]["finish_reason"] is None:
                sent += len(reply["output_ids"])
                await _write(request, response, _event(reply))
        assert job.finish_reason is not None
        if job.finish_reason["type"] == "error":
            end = _event({"error": {"message": job.finish_reason["message"]}})
        else:
            end = _event(self._reply(job, sent, logprobs)) + _event("[DONE]")
        await _write(request, response, end)
        await response.write_eof()
        return response

    def _reply(self, job: GenerationJob, start: int, with_logprobs: bool) -> dict[str, Any]:
        return job.to_reply(start, self.loop.model.tokenizer, self.loop.weights.version, with_logprobs)

    async def abort_request(self, request: web.Request) -> web.Response:
        """End a request or a batch (`rid`), or all requests (`abort_all`). Each returns the tokens generated so far."""
        body = await self._read(request, Abort)
        expect(body.abort_all or body.rid is not None, "rid", "a string, or `abort_all: true`", None)
        count = self.loop.abort(lambda job: body.abort_all or body.rid in (job.rid, job.batch), "aborted by request")
        return web.json_response({"aborted": await asyncio.wrap_future(count)})

    async def score(self, request: web.Request) -> web.Response:
        """Return log-probs of given tokens with the served weights.

        With `before`, use the weights served before the last commit.
        """
        body = await self._read(request, Score)
        job = to_score_job(body, self.loop.model)
        if refused := self._full(self._scores + 1):
            return refused
        self._scores += 1
        try:
            async with self._staging if job.before else nullcontext():  # staging overwrites the previous weights
                self.loop.submit_score(job)
                logprobs, version = await asyncio.wrap_future(job.done)
        finally:
            self._scores -= 1
        if not all(map(isfinite, logprobs)):
            return _error(500, f"version {version} of the weights produces log-probs that are not finite.")
        return web.json_response({"logprobs": logprobs, "weight_version": version})

    def _full(self, requests: int) -> web.Response | None:
        """Return the 503 response if `requests` exceeds the number that may wait, else None."""
        if requests <= self._max_jobs:
            return None
        return _error(
            503, f"{requests - 1} requests of this kind are waiting already; try again later.", {"Retry-After": "1"}
        )

    async def stage_weights(self, request: web.Request) -> web.Response:
        """Load a version next to the served one (staged load), and return its receipt."""
        body = await self._read(request, Stage)
        meta = body.update()
        async with self._staging:
            receipt = await asyncio.wrap_future(run_in_thread(lambda: self.loop.weights.stage(meta, body.timeout)))
        return _receipt(receipt)

    async def weight_receipt(self, _: web.Request) -> web.Response:
        """Return the receipt of the served weights, computed from the live tensors."""
        return _receipt(await asyncio.wrap_future(self.loop.run(self.loop.weights.receipt)))

    async def pause_generation(self, request: web.Request) -> web.Response:
        """Stop between two passes, until `/continue_generation` or the end of the lease.

        With `wait`, running completions finish first; the reply is `paused: false` while they run.
        """
        body = await self._read(request, Pause)
        self._end_lease()
        self._lease = asyncio.get_running_loop().call_later(body.lease, self._on_lease_expired, body.lease)
        future = asyncio.wrap_future(self.loop.pause(wait=body.mode == "wait"))
        done, _ = await asyncio.wait({future}, timeout=DRAIN_ANSWER_SECONDS)
        if done:
            future.result()
        return web.json_response({**self.loop.stats(), "paused": bool(done)})

    def _end_lease(self) -> None:
        if self._lease is not None:
            self._lease.cancel()

    def _on_lease_expired(self, seconds: float) -> None:
        logger.warning("pause lease expired after %g s; resuming generation", seconds)
        self.loop.resume()

    async def commit_weights(self, request: web.Request) -> web.Response:
        """Serve the staged version from the next pass."""
        body = await self._read(request, Commit)
        async with self._staging:
            await asyncio.wrap_future(self.loop.commit(body.version, recompute=body.mode == "recompute"))
        return web.json_response({"version": body.version})

    async def continue_generation(self, request: web.Request) -> web.Response:
        """Resume generation after a pause."""
        await self._read(request, Nothing)
        self._end_lease()
        return web.json_response({"paused_seconds": await asyncio.wrap_future(self.loop.resume())})

    async def sleep(self, request: web.Request) -> web.Response:
        """Free the memory of the KV cache of a paused server, until `/wake` or the end of the pause."""
        await self._read(request, Nothing)
        return web.json_response({"freed_bytes": await asyncio.wrap_future(self.loop.sleep())})

    async def wake(self, request: web.Request) -> web.Response:
        """Allocate the KV cache again after `/sleep`; the server stays paused."""
        await self._read(request, Nothing)
        await asyncio.wrap_future(self.loop.wake())
        return web.json_response(self.loop.stats())

    async def shutdown(self, _: web.Request) -> web.Response:
        """End the process; unfinished completions return the tokens generated so far."""
        asyncio.get_running_loop().call_later(0.05, self._shut_down)
        return web.json_response({"status": "stopping"})


async def _write(request: web.Request, response: web.StreamResponse, data: bytes) -> None:
    """Send a chunk of a stream.

    Raises:
        ConnectionResetError: the client does not read.
    """
    try:
        async with asyncio.timeout(UNREAD_SECONDS):
            await response.write(data)
    except TimeoutError:
        if request.transport is not None:
            request.transport.abort()
        raise ConnectionResetError(f"the client has read nothing for {UNREAD_SECONDS:g} s") from None


def _event(value: Any) -> bytes:
    """Encode a server-sent event; strings are sent unchanged."""
    return b"data: " + (value.encode() if isinstance(value, str) else json.dumps(value).encode()) + b"\n\n"


def _receipt(receipt: WeightReceipt) -> web.Response:
    # as strings: checksums have 64 bits, more than a JSON number can represent exactly in all clients
    checksums = {name: str(value) for name, value in receipt.checksums.items()}
    return web.json_response({"holder": receipt.holder, "version": receipt.version, "checksums": checksums})


def _error(status: int, message: str, headers: dict[str, str] | None = None) -> web.Response:
    retry_headers = {name: value for name, value in (headers or {}).items() if name == "Retry-After"}
    return web.json_response({"error": {"message": message}}, status=status, headers=retry_headers)
