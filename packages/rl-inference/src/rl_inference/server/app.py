"""The HTTP side: SGLang's `/generate` and its neighbours, as far as this server has them."""

from __future__ import annotations

import asyncio
import hmac
import json
import secrets
import time
from collections.abc import Awaitable, Callable
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from aiohttp import web

from rl_contracts.data import WeightReceipt, WeightUpdateMeta
from rl_contracts.errors import InferenceError, RLError, WeightUpdateError
from rl_inference.config import ServerOptions
from rl_inference.protocol import EmbeddedProtocol
from rl_inference.server.job import GenerationJob, expect, is_batch, parse_ids, parse_jobs

if TYPE_CHECKING:
    from rl_inference.server.loop import DecodeLoop

PROGRESS_SECONDS = 0.5
"""Longest silence of a stream while the decode thread is alive."""
DRAIN_ANSWER_SECONDS = 0.5
"""After which `/pause_generation` with `wait` answers that it is not there yet; the client asks again."""
MODES = ("keep", "recompute", "wait")

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class ServerApp:
    """The routes and what they share.

    Args:
        options: settings of the process.
        key: what `Authorization: Bearer` must carry; empty: nothing is asked for.
        shut_down: called by `/shutdown`.
    """

    def __init__(self, options: ServerOptions, key: str, shut_down: Callable[[], None]) -> None:
        self.config, self._model_path = options.config, options.spec.model_path
        self._key = key.encode()
        self._shut_down = shut_down
        self._loop: DecodeLoop | None = None
        self._jobs = 0
        self._staging = asyncio.Lock()
        self._beat = (-1, 0.0)
        self.instance = secrets.token_hex(8)
        self.app = web.Application(client_max_size=self.config.max_request_bytes, middlewares=[self._guard])
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
                web.post("/shutdown", self.shutdown),
            ]
        )
        self.app.on_response_prepare.append(self._sign)

    async def _sign(self, _: web.Request, response: web.StreamResponse) -> None:
        response.headers[EmbeddedProtocol.instance_header] = self.instance

    def serve(self, loop: DecodeLoop) -> None:
        """Begin to answer: the model is there."""
        self._loop = loop

    @property
    def loop(self) -> DecodeLoop:
        """The decode thread.

        Raises:
            HTTPServiceUnavailable: the model is still being loaded.
        """
        if self._loop is None:
            raise web.HTTPServiceUnavailable(text="the model is being loaded", headers={"Retry-After": "1"})
        return self._loop

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Check the key, and turn errors into JSON with one sentence."""
        if self._key and request.path != "/health":
            given = request.headers.get("Authorization", "").encode()
            if not hmac.compare_digest(given, b"Bearer " + self._key):
                return _error(401, "the request carries no valid key (Authorization: Bearer).")
        try:
            return await handler(request)
        except WeightUpdateError as error:
            return _error(409, str(error))
        except InferenceError as error:
            return _error(400, str(error))
        except web.HTTPException as error:
            return _error(error.status, error.text or error.reason, dict(error.headers))
        except RLError as error:
            return _error(500, str(error))

    async def health(self, _: web.Request) -> web.Response:
        """200 once requests can be served, and as long as the decode thread turns."""
        now = time.monotonic()
        if self.loop.beat != self._beat[0]:
            self._beat = (self.loop.beat, now)
        still = now - self._beat[1]
        if still > self.config.stuck_seconds:
            return _error(503, f"the decode thread has not moved for {still:.0f} s.")
        return web.json_response({"status": "ready", "version": self.loop.weights.version, "open": self._jobs})

    async def model_info(self, _: web.Request) -> web.Response:
        """What is served."""
        model = self.loop.model
        return web.json_response(
            {
                "name": self.loop.weights.holder,
                "instance": self.instance,
                "model_path": self._model_path,
                "weight_version": self.loop.weights.version,
                "context_length": model.context_length,
                "vocab_size": model.vocab_size,
                "slots": self.config.slots,
                "dtype": self.config.dtype,
                "device": str(model.device),
                "end_token_ids": sorted(model.end_ids),
                "has_tokenizer": model.tokenizer is not None,
            }
        )

    async def stats(self, _: web.Request) -> web.Response:
        """Counters of the decode thread."""
        return web.json_response(self.loop.stats())

    async def generate(self, request: web.Request) -> web.StreamResponse:
        """Generate one answer, or one per prompt of a batch."""
        body = await _json(request)
        streamed = bool(body.get("stream"))
        batch = is_batch(body)
        expect(not (streamed and batch), "stream", "false, for a batch cannot be streamed; send one request each", True)
        jobs = parse_jobs(body, self.loop.model)
        if self._jobs + len(jobs) > self.config.slots + self.config.max_waiting:
            return _error(503, f"{self._jobs} requests are waiting already.", {"Retry-After": "1"})
        logprobs = bool(body.get("return_logprob"))
        for job in jobs:
            self.loop.submit(job)
        done = asyncio.gather(*(asyncio.wrap_future(job.ended) for job in jobs))
        self._jobs += len(jobs)
        try:
            if streamed:
                return await self._stream(request, jobs[0], done, logprobs)
            await asyncio.wait({done})
        finally:
            self._jobs -= len(jobs)
            if not done.done():  # the client went away
                self.loop.abort(lambda job: job in jobs, "the client closed the connection")
        failed = next((job.finish_reason for job in jobs if job.finish_reason["type"] == "error"), None)  # type: ignore[index]
        if failed:
            return _error(500, failed["message"])
        answers = [self._answer(job, 0, logprobs) for job in jobs]
        return web.json_response(answers if batch else answers[0])

    async def _stream(
        self, request: web.Request, job: GenerationJob, done: asyncio.Future[Any], logprobs: bool
    ) -> web.StreamResponse:
        """Server-sent events with what is new, at least every `PROGRESS_SECONDS` as long as the decode thread
        lives."""
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-store"})
        await response.prepare(request)
        sent, beat = 0, -1
        while not done.done():
            await asyncio.wait({done}, timeout=PROGRESS_SECONDS)
            if done.done() or self.loop.beat == beat:
                continue  # a stuck decode thread must look stuck
            beat = self.loop.beat
            part = self._answer(job, sent, logprobs)
            if part["meta_info"]["finish_reason"] is None:
                sent += len(part["output_ids"])
                await response.write(_event(part))
        assert job.finish_reason is not None
        if job.finish_reason["type"] == "error":
            await response.write(_event({"error": {"message": job.finish_reason["message"]}}))
        else:
            await response.write(_event(self._answer(job, sent, logprobs)) + _event("[DONE]"))
        await response.write_eof()
        return response

    def _answer(self, job: GenerationJob, start: int, logprobs: bool) -> dict[str, Any]:
        return job.told(start, self.loop.model.tokenizer, self.loop.weights.version, logprobs)

    async def abort_request(self, request: web.Request) -> web.Response:
        """End one request (`rid`) or all (`abort_all`); they answer with the tokens they have."""
        body = await _json(request)
        rid, everything = body.get("rid"), body.get("abort_all") is True
        expect(everything or isinstance(rid, str), "rid", "a string, or `abort_all: true`", rid)
        count = self.loop.abort(lambda job: everything or job.rid == rid, "aborted by request")
        return web.json_response({"aborted": await asyncio.wrap_future(count)})

    async def score(self, request: web.Request) -> web.Response:
        """Log-probs of given tokens at the served weights, or (`before`) at those served before the last commit."""
        body = await _json(request)
        ids = parse_ids(body.get("input_ids"), self.loop.model)
        temperature = body.get("temperature", 1.0)
        valid = isinstance(temperature, (int, float)) and temperature >= 0
        expect(valid, "temperature", "a number of at least 0", temperature)
        loop = self.loop
        before = bool(body.get("before"))

        def work() -> tuple[list[float], int]:
            with loop.weights.before() if before else nullcontext():
                return loop.model.score(ids, float(temperature)), loop.weights.version

        async with self._staging if before else nullcontext():  # staging writes over the weights before
            logprobs, version = await asyncio.wrap_future(loop.run(work))
        return web.json_response({"logprobs": logprobs, "weight_version": version})

    async def stage_weights(self, request: web.Request) -> web.Response:
        """Load a version beside the served one; answers with its receipt."""
        body = await _json(request)
        try:
            meta = WeightUpdateMeta.from_json(body["meta"])
        except (KeyError, TypeError, ValueError) as error:
            raise InferenceError(f"stage_weights: `meta` is not a weight update: {error!r}.") from error
        async with self._staging:
            receipt = await asyncio.to_thread(self.loop.weights.stage, meta)
        return _receipt(receipt)

    async def weight_receipt(self, _: web.Request) -> web.Response:
        """The receipt of the served weights, from the live tensors."""
        return _receipt(await asyncio.wrap_future(self.loop.run(self.loop.weights.receipt)))

    async def pause_generation(self, request: web.Request) -> web.Response:
        """Stop between two passes. With `wait`, running answers are finished first; answers `paused: false`
        while that lasts."""
        future = asyncio.wrap_future(self.loop.pause(wait=_mode(await _json(request)) == "wait"))
        done, _ = await asyncio.wait({future}, timeout=DRAIN_ANSWER_SECONDS)
        if done:
            future.result()
        return web.json_response({**self.loop.stats(), "paused": bool(done)})

    async def commit_weights(self, request: web.Request) -> web.Response:
        """Serve the staged version from the next pass on."""
        body = await _json(request)
        version: Any = body.get("version")
        recompute = _mode(body) == "recompute"
        expect(type(version) is int, "version", "an integer", version)
        async with self._staging:
            await asyncio.wrap_future(self.loop.commit(version, recompute=recompute))
        return web.json_response({"version": version})

    async def continue_generation(self, _: web.Request) -> web.Response:
        """Undo a pause."""
        return web.json_response({"paused_seconds": await asyncio.wrap_future(self.loop.resume())})

    async def shutdown(self, _: web.Request) -> web.Response:
        """End the process; unfinished answers return what they have."""
        asyncio.get_running_loop().call_later(0.05, self._shut_down)
        return web.json_response({"status": "stopping"})


def _mode(body: dict[str, Any]) -> str:
    mode = body.get("mode", "keep")
    expect(mode in MODES, "mode", f"one of {', '.join(MODES)}", mode)
    return str(mode)


async def _json(request: web.Request) -> dict[str, Any]:
    try:
        body = json.loads(await request.read() or b"{}")
    except ValueError as error:
        raise InferenceError(f"the body is not JSON: {error}.") from error
    expect(isinstance(body, dict), "body", "a JSON object", body)
    return body  # type: ignore[no-any-return]


def _event(value: Any) -> bytes:
    """A server-sent event; strings go as they are."""
    return b"data: " + (value.encode() if isinstance(value, str) else json.dumps(value).encode()) + b"\n\n"


def _receipt(receipt: WeightReceipt) -> web.Response:
    # as text: checksums have 64 bits, more than a JSON number safely carries
    checksums = {name: str(value) for name, value in receipt.checksums.items()}
    return web.json_response({"holder": receipt.holder, "version": receipt.version, "checksums": checksums})


def _error(status: int, message: str, headers: dict[str, str] | None = None) -> web.Response:
    kept = {name: value for name, value in (headers or {}).items() if name == "Retry-After"}
    return web.json_response({"error": {"message": message}}, status=status, headers=kept)
