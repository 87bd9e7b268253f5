"""Small inference servers for tests, with fault injection.

The HTTP API follows the embedded server. The model is a table: the logits after a sequence are the row of its last
token plus the mean of the rows of all its tokens. The prefix cache holds the mean. The weights are one tensor, `table`
[V, V].
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from aiohttp import web
from safetensors.numpy import load_file

from rl_contracts.data import WeightReceipt, WeightUpdateMeta
from rl_contracts.inference import Capabilities
from rl_contracts.weights.checksums import checksum
from rl_inference import EmbeddedEngine, ServerProtocol
from rl_inference.backends.embedded.protocol import EmbeddedProtocol
from rl_inference.client.protocol import Call, Exchange, GenerationChunk, ignored

VOCAB = 64
STEP = 0.002
"""Seconds per token."""


def logprobs_after(ids: list[int], table: np.ndarray, mean: np.ndarray, temperature: float = 1.0) -> np.ndarray:
    """Return the log-probs of the token after `ids`, [V].

    Args:
        ids: tokens so far.
        table: weights, [V, V].
        mean: mean of the rows of `ids`, [V].
        temperature: divisor of the logits.
    """
    logits = (table[ids[-1]] + mean) / temperature
    return logits - np.log(np.exp(logits).sum())


def scores_of(ids: list[int], table: np.ndarray) -> list[float]:
    """Return the correct scores of `ids`."""
    means = table[ids].cumsum(0) / np.arange(1, len(ids) + 1)[:, None]
    scores = [logprobs_after(ids[:n], table, means[n - 1])[ids[n]] for n in range(1, len(ids))]
    return [0.0, *map(float, scores)]


@dataclass
class TableServer:
    """Server whose faults are attributes."""

    table: np.ndarray
    version: int = 0
    loads: bool = True
    """True if a load or commit changes the weights; if False, it is only acknowledged."""
    flushes: bool = True
    """True if a commit clears the prefix cache."""
    fails: bool = False
    """True if a load fails and leaves a server that cannot generate."""
    rejects: tuple[str, ...] = ()
    """Names of the requests to reject: `sleep`, `wake`."""
    slow: float = 0.0
    """Seconds that a score takes."""
    broken: bool = False
    """True if a load has failed."""
    staged: np.ndarray | None = None
    """Staged weights."""
    paused: str = ""
    """Mode of the pause; empty while not paused."""
    checksums: dict[str, int] = field(default_factory=dict)
    """Checksums of the weights that were staged last."""
    log: list[str] = field(default_factory=list)
    """Control requests in order, and `generate N` for each completion with a prompt of N tokens."""
    generated: int = 0
    """Number of generated tokens."""
    running: int = 0
    """Number of completions in generation."""
    address: str = ""
    _cache: dict[tuple[int, ...], np.ndarray] = field(default_factory=dict)
    _changed: asyncio.Condition = field(default_factory=asyncio.Condition)

    async def generate(self, request: web.Request) -> web.StreamResponse:
        if self.broken:
            return web.json_response({"error": {"message": "no weights"}}, status=500)
        body = await request.json()
        sampling, ids = body["sampling_params"], list(body["input_ids"])
        if not ids:
            return web.json_response({"error": {"message": "no prompt"}}, status=400)
        self.log.append(f"generate {len(ids)}")
        rng = np.random.default_rng(sampling.get("sampling_seed"))
        response = web.StreamResponse()
        await response.prepare(request)
        stamps: list[int] = []
        try:
            await self._complete(response, ids, sampling, rng, stamps)
        finally:
            self.running -= bool(stamps)
        return response

    async def _complete(
        self, response: web.StreamResponse, ids: list[int], sampling: Any, rng: Any, stamps: list[int]
    ) -> None:
        prompt = len(ids)
        while True:
            async with self._changed:  # with "wait" and "recompute", running completions are not held back
                await self._changed.wait_for(lambda: not self.paused or (stamps and self.paused != "keep"))
            if self.paused == "recompute":
                return await self._send(response, [], [], "abort", stamps)
            logprobs = logprobs_after(ids, self.table, self._mean(ids), sampling["temperature"] or 1.0)
            below_minimum = len(stamps) < sampling["min_new_tokens"]
            probabilities = np.exp(logprobs)
            if below_minimum:
                probabilities[sampling["stop_token_ids"]] = 0
            greedy = not sampling["temperature"]
            token = int(probabilities.argmax() if greedy else rng.choice(VOCAB, p=probabilities / probabilities.sum()))
            ids.append(token)
            self.running += not stamps
            stamps.append(self.version)
            self.generated += 1
            finish = "length" if len(ids) - prompt == sampling["max_new_tokens"] else None
            finish = "stop" if token in sampling["stop_token_ids"] and not below_minimum else finish
            await self._send(response, [token], [float(logprobs[token])], finish, stamps)
            if finish:
                return None
            await asyncio.sleep(STEP)

    async def _send(
        self, response: web.StreamResponse, ids: list[int], logprobs: list[float], finish: str | None, stamps: list[int]
    ) -> None:
        message = {"ids": ids, "logprobs": logprobs, "finish": finish, "stamps": stamps if finish else None}
        await response.write(b"data: " + json.dumps(message).encode() + b"\n\n")

    def _mean(self, ids: list[int]) -> np.ndarray:
        key = tuple(ids)
        if key not in self._cache:
            cached = self._cache.get(key[:-1])
            row_sum = self.table[ids].sum(0) if cached is None else cached * (len(ids) - 1) + self.table[ids[-1]]
            self._cache[key] = row_sum / len(ids)
        return self._cache[key]

    async def score(self, request: web.Request) -> web.Response:
        if self.broken:
            return web.json_response({"error": {"message": "no weights"}}, status=500)
        await asyncio.sleep(self.slow)
        return web.json_response({"logprobs": scores_of((await request.json())["input_ids"], self.table)})

    async def health(self, _: web.Request) -> web.Response:
        return web.json_response({"version": self.version, "open": self.running})

    async def stats(self, _: web.Request) -> web.Response:
        metrics = {"version": self.version, "paused": bool(self.paused), "running": self.running, "waiting": 0}
        return web.json_response({**metrics, "generated_tokens": self.generated, "busy_seconds": self.generated * STEP})

    async def pause(self, request: web.Request) -> web.Response:
        mode = (await request.json())["mode"]
        self.log.append(f"pause {mode}")
        self.paused = mode
        await self._notify()
        while mode != "keep" and self.running:  # noqa: ASYNC110 - one loop, no event for it
            await asyncio.sleep(STEP)
        self.paused = "keep"
        return web.json_response({"paused": True})

    async def load(self, request: web.Request) -> web.Response:
        assert self.paused, "weights must not be loaded during generation"
        self.log.append("load")
        files = sorted(Path((await request.json())["path"]).glob("*.safetensors"))
        if self.fails:
            self.broken = True
            return web.json_response({"error": {"message": "could not load"}}, status=500)
        if self.loads:
            (table,) = (load_file(file)["table"] for file in files)
            self.table = table.astype(np.float64)
        return web.json_response({})

    async def stage(self, request: web.Request) -> web.Response:
        self.log.append("stage")
        (table,) = (load_file(Path(part) / "model.safetensors")["table"] for part in (await request.json())["parts"])
        self.staged = table.astype(np.float64)
        self.checksums = {"table": checksum(torch.from_numpy(table))}
        return self._receipt()

    def _receipt(self) -> web.Response:
        return web.json_response({"holder": self.address, "version": self.version, "checksums": self.checksums})

    async def receipt(self, _: web.Request) -> web.Response:
        if not self.checksums:
            return web.json_response({"error": {"message": "no update was loaded"}}, status=400)
        return self._receipt()

    async def commit(self, request: web.Request) -> web.Response:
        if self.staged is not None and self.loads:
            self.table = self.staged
        self.version = (await request.json())["version"]
        self.log.append(f"commit {self.version}")
        if self.flushes:
            self._cache.clear()
        return web.json_response({})

    async def resume(self, _: web.Request) -> web.Response:
        self.log.append("resume")
        self.paused = ""
        await self._notify()
        return web.json_response({})

    async def sleep(self, _: web.Request) -> web.Response:
        assert self.paused
        assert not self.running
        self.log.append("sleep")
        if "sleep" in self.rejects:
            return web.json_response({"error": {"message": "cannot sleep"}}, status=400)
        return web.json_response({})

    async def wake(self, _: web.Request) -> web.Response:
        self.log.append("wake")
        if "wake" in self.rejects:
            return web.json_response({"error": {"message": "cannot wake"}}, status=400)
        return web.json_response({})

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    @contextlib.asynccontextmanager
    async def serving(self, port: int = 0) -> AsyncIterator[TableServer]:
        """Serve on the loopback interface."""
        app = web.Application()
        posts = {
            "/generate": self.generate,
            "/score": self.score,
            "/pause_generation": self.pause,
            "/load": self.load,
            "/stage": self.stage,
            "/sleep": self.sleep,
            "/wake": self.wake,
            "/commit_weights": self.commit,
            "/continue_generation": self.resume,
        }
        for path, handler in posts.items():
            app.router.add_post(path, handler)
        app.router.add_get("/health", self.health)
        app.router.add_get("/stats", self.stats)
        app.router.add_get("/receipt", self.receipt)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", port).start()
        self.address = f"http://127.0.0.1:{runner.addresses[0][1]}"
        try:
            yield self
        finally:
            await runner.cleanup()


class TableProtocol(EmbeddedProtocol):
    """Protocol of servers that load in place."""

    capabilities = Capabilities(
        routes=("disk",),
        staged_load=False,
        checksums=False,
        version_stamps_at_end=True,
        any_score_temperature=False,
        seeds_by_position=False,
        resumes_completions=False,
        keeps_cache=False,
        heartbeats=False,
    )

    def generate(self, *arguments: Any, **named: Any) -> Call[GenerationChunk | None]:
        call = super().generate(*arguments, **named)
        return Call(call.path, _chunk, call.body)

    def load(self, meta: WeightUpdateMeta, timeout: float) -> Exchange[WeightReceipt | None]:
        yield Call("/load", ignored, {"path": meta.parts[0].location})
        return None

    def pause(self, mode: str, lease: float) -> Exchange[float | None]:
        yield Call("/pause_generation", ignored, {"mode": mode})
        return None

    def resume(self) -> Exchange[float | None]:
        yield Call("/continue_generation", ignored, {})
        return None


def _chunk(line: bytes) -> GenerationChunk | None:
    if not line.startswith(b"data:"):
        return None
    message = json.loads(line[5:])
    return GenerationChunk(message["ids"], message["logprobs"], [], message["finish"], stamps=message["stamps"])


class StagedProtocol(TableProtocol):
    """Protocol of servers with staged loads but without checksums."""

    capabilities = replace(TableProtocol.capabilities, staged_load=True, sleeps=True)

    def load(self, meta: WeightUpdateMeta, timeout: float) -> Exchange[WeightReceipt | None]:
        yield Call("/stage", ignored, {"parts": [part.location for part in meta.parts]})
        return None

    def sleep(self) -> Exchange[float]:
        yield Call("/sleep", ignored, {})
        return 0.0

    def wake(self) -> Exchange[None]:
        yield Call("/wake", ignored, {})


class ChecksumProtocol(StagedProtocol):
    """Protocol of servers with staged loads and checksums."""

    capabilities = replace(StagedProtocol.capabilities, checksums=True)

    def load(self, meta: WeightUpdateMeta, timeout: float) -> Exchange[WeightReceipt | None]:
        return (yield Call("/stage", _receipt_of, {"parts": [part.location for part in meta.parts]}))

    def receipt(self) -> Exchange[WeightReceipt]:
        return (yield Call("/receipt", _receipt_of))


def _receipt_of(body: bytes) -> WeightReceipt:
    return WeightReceipt(**json.loads(body))


class ChecksumEngine(EmbeddedEngine):
    def make_protocol(self) -> ServerProtocol:
        return ChecksumProtocol()


class StagedEngine(EmbeddedEngine):
    def make_protocol(self) -> ServerProtocol:
        return StagedProtocol()


class TableEngine(EmbeddedEngine):
    def make_protocol(self) -> ServerProtocol:
        return TableProtocol()
