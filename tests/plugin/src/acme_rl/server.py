"""`python -m acme_rl.server`: HTTP server of the decoder, with bodies in JSON."""

from __future__ import annotations

import argparse
import asyncio
import hmac
import json
import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import torch
from aiohttp import web

from acme_rl.decoding import Decoder
from rl_contracts.config import GenerationConfig
from rl_contracts.data import STORED_ROUTES, WeightUpdateMeta
from rl_contracts.errors import InferenceError, WeightUpdateError
from rl_contracts.scheduler import RUN_KEY_VARIABLE

HEARTBEAT_SECONDS = 0.5
"""Seconds between two empty lines that show the client that its request is running."""

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Server:
    """HTTP routes of the server.

    Args:
        decoder: the model.
        weights_dir: directory that must contain all published weights.
        name: name of this server in responses and receipts.
        key: run key that requests must carry, or empty to accept all.
    """

    def __init__(self, decoder: Decoder, weights_dir: str, name: str, key: str) -> None:
        self.decoder, self.name, self._key = decoder, name, key
        self._weights_dir = Path(weights_dir).resolve()
        self.app = web.Application(client_max_size=2**26, middlewares=[self._guard])
        self.app.add_routes([web.get("/health", self.health), web.get("/stats", self.stats)])
        for handler in (self.generate, self.score, self.stage, self.pause, self.commit, self.resume):
            self.app.add_routes([web.post(f"/{handler.__name__}", handler)])

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        if self._key and request.path != "/health":
            header = request.headers.get("Authorization", "").encode()
            if not hmac.compare_digest(header, f"Bearer {self._key}".encode()):
                return web.json_response({"error": "the request has no valid key; send the run key."}, status=401)
        try:
            return await handler(request)
        except InferenceError as error:
            return web.json_response({"error": str(error)}, status=400)
        except WeightUpdateError as error:
            return web.json_response({"error": str(error)}, status=409)

    async def health(self, _: web.Request) -> web.Response:
        return web.json_response({"name": self.name, "version": self.decoder.version})

    async def stats(self, _: web.Request) -> web.Response:
        return web.json_response({**self.decoder.stats(), "name": self.name, "version": self.decoder.version})

    async def generate(self, request: web.Request) -> web.StreamResponse:
        """Stream an empty line per `HEARTBEAT_SECONDS` during decoding, then the completion as one line of JSON."""
        body = await request.json()
        finished, loop = asyncio.Event(), asyncio.get_running_loop()
        generation = GenerationConfig(**body["generation"])
        completion = self.decoder.submit(
            body["input_ids"], generation, body["seed"], lambda: loop.call_soon_threadsafe(finished.set)
        )
        response = web.StreamResponse()
        try:
            await response.prepare(request)
            while not finished.is_set():
                try:
                    await asyncio.wait_for(finished.wait(), HEARTBEAT_SECONDS)
                except TimeoutError:
                    await response.write(b"\n")
        finally:
            if not finished.is_set():  # the client disconnected
                self.decoder.cancel(completion)
        value = {
            "output_ids": completion.output,
            "logprobs": completion.logprobs,
            "versions": completion.versions,
            "stop_reason": completion.stop_reason,
        }
        await response.write(json.dumps(value).encode() + b"\n")
        await response.write_eof()
        return response

    async def score(self, request: web.Request) -> web.Response:
        body = await request.json()
        logprobs = self.decoder.call(lambda: self.decoder.score(body["input_ids"], body["temperature"]))
        return web.json_response({"logprobs": await asyncio.wrap_future(logprobs)})

    async def stage(self, request: web.Request) -> web.Response:
        meta = WeightUpdateMeta.from_json(await request.json())
        if meta.route not in STORED_ROUTES:
            raise WeightUpdateError(f"route {meta.route}: this server supports only {' and '.join(STORED_ROUTES)}.")
        for part in meta.parts:
            if not Path(part.location).resolve().is_relative_to(self._weights_dir):
                raise WeightUpdateError(f"{part.location} is outside {self._weights_dir}; publish to that directory.")
        try:
            checksums = await asyncio.to_thread(self.decoder.stage, meta)
        except OSError as error:
            raise WeightUpdateError(f"version {meta.version} cannot be read: {error}") from error
        receipt: dict[str, Any] = {"holder": self.name, "version": meta.version}
        return web.json_response({**receipt, "checksums": {name: str(value) for name, value in checksums.items()}})

    async def pause(self, request: web.Request) -> web.Response:
        await asyncio.wrap_future(self.decoder.pause((await request.json())["drain"]))
        return web.json_response({})

    async def commit(self, request: web.Request) -> web.Response:
        body = await request.json()
        committed = self.decoder.call(lambda: self.decoder.commit(body["version"], body["recompute"]))
        await asyncio.wrap_future(committed)
        return web.json_response({"version": self.decoder.version})

    async def resume(self, _: web.Request) -> web.Response:
        return web.json_response({"seconds": await asyncio.wrap_future(self.decoder.call(self.decoder.resume))})


def main() -> None:
    """Load the model and serve it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--weights-dir", required=True)
    parser.add_argument("--context-length", type=int, required=True)
    parser.add_argument("--slots", type=int, required=True)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    decoder = Decoder(arguments.model, arguments.context_length, arguments.slots)
    name = f"{arguments.host}:{arguments.port}"
    server = Server(decoder, arguments.weights_dir, name, os.environ.get(RUN_KEY_VARIABLE, ""))
    web.run_app(server.app, host=arguments.host, port=arguments.port, access_log=None, handler_cancellation=True)


if __name__ == "__main__":
    main()
