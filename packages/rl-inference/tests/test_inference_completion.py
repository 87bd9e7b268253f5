"""Tests of features that the client adds for servers with fewer capabilities: seeds, stop strings, versions, probes.

The servers are small scripts with the protocol of the embedded server.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from probes import NEVER

from rl_contracts.config import ClientConfig, GenerationConfig
from rl_contracts.data import ModelRequest, ServeSpec
from rl_contracts.errors import InferenceError
from rl_contracts.inference import Capabilities
from rl_inference import EmbeddedEngine
from rl_inference.backends.embedded.protocol import EmbeddedProtocol
from rl_inference.client.completion import PartialCompletion
from rl_inference.client.protocol import Call, Exchange, GenerationChunk, ServerProtocol, as_object, ignored
from rl_inference.client.stop_strings import StopStrings, tokenizer_of

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@pytest.fixture(scope="module")
def tiny_tokenizer(model_path: Path) -> Any:
    return tokenizer_of(str(model_path))


class LimitedProtocol(EmbeddedProtocol):
    """Protocol of the embedded server with other capabilities. Versions may come in the last message."""

    def __init__(self, **capabilities: Any) -> None:
        self.capabilities = replace(Capabilities(), **capabilities)

    def generate(self, *arguments: Any, **named: Any) -> Call[GenerationChunk | None]:
        call = super().generate(*arguments, **named)
        return (
            replace(call, parse=_move_versions_to_end(call.parse)) if self.capabilities.version_stamps_at_end else call
        )

    def abort(self, rid: str) -> Exchange[None]:
        yield Call("/abort_request", ignored, {"rid": rid})


def _move_versions_to_end(
    parse: Callable[[bytes], GenerationChunk | None],
) -> Callable[[bytes], GenerationChunk | None]:
    stamps: list[int] = []

    def read(line: bytes) -> GenerationChunk | None:
        chunk = parse(line)
        if chunk is None:
            return None
        stamps.extend(chunk.versions)
        return replace(chunk, versions=[], stamps=None if chunk.finish is None else list(stamps))

    return read


class LimitedEngine(EmbeddedEngine):
    capability_values: dict[str, Any] = {}  # noqa: RUF012 - set by `client` before it is read

    def make_protocol(self) -> ServerProtocol:
        return LimitedProtocol(**self.capability_values)


@contextlib.asynccontextmanager
async def client(
    routes: dict[str, Handler], capabilities: dict[str, Any], model: Path | None = None, progress_timeout: float = 5.0
) -> AsyncIterator[LimitedEngine]:
    """Run a server with a handler for each path, and yield a client of it."""
    app = web.Application()
    for path, handler in routes.items():
        app.router.add_route("*", path, handler)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    kind = type("Engine", (LimitedEngine,), {"capability_values": capabilities})
    engine = kind(spec=ServeSpec(str(model or "")), client=ClientConfig(progress_timeout=progress_timeout))
    engine.initialize([f"http://127.0.0.1:{runner.addresses[0][1]}"])
    try:
        yield engine
    finally:
        await engine.destroy()
        await runner.cleanup()


def message(ids: list[int], finish: str | None = None, version: int = 0) -> bytes:
    meta = {
        "finish_reason": None if finish is None else {"type": finish},
        "weight_versions": [{"start": 0, "end": len(ids), "version": version}],
        "output_token_logprobs": [[-1.0, token] for token in ids],
    }
    return b"data: " + json.dumps({"output_ids": ids, "meta_info": meta}).encode() + b"\n\n"


async def healthy(request: web.Request) -> web.Response:
    return web.json_response({"version": 0, "open": 0})


def make_request(**generation: Any) -> ModelRequest:
    return ModelRequest([1, 2], GenerationConfig(**{"max_new_tokens": 8, **generation}), request_id="r", seed=7)


# ---- rejected requests


@pytest.mark.parametrize(
    ("setting", "capability"),
    [
        ({"top_p": 0.9}, {"truncated_logprobs": True}),
        ({"top_k": 5}, {"truncated_logprobs": True}),
        ({"presence_penalty": 1.0}, {"truncated_logprobs": True}),
        ({"repetition_penalty": 1.2}, {"resumes_completions": False}),
    ],
)
def test_next_call_unsupported_setting_raises_with_its_name(
    setting: dict[str, Any], capability: dict[str, bool]
) -> None:
    ((name, value),) = setting.items()
    with pytest.raises(InferenceError, match=rf"found {name}={value}\."):
        PartialCompletion(make_request(**setting), "r").next_call(LimitedProtocol(**capability))
    PartialCompletion(make_request(**setting), "r").next_call(LimitedProtocol())
    PartialCompletion(make_request(top_k=5), "r").next_call(LimitedProtocol(resumes_completions=False))


def test_next_call_with_schema_restarts_after_interruption() -> None:
    request = replace(make_request(), schema={"type": "boolean"})
    with pytest.raises(InferenceError, match=r"schema.*allocation=vllm"):
        PartialCompletion(request, "r").next_call(LimitedProtocol())
    completion = PartialCompletion(request, "r")
    for _ in range(2):
        body = completion.next_call(LimitedProtocol(schemas=True)).body
        assert body is not None
        assert (body["input_ids"], body["sampling_params"]["max_new_tokens"]) == ([1, 2], 8)
        completion.add(GenerationChunk([5, 6, 7], [-1.0] * 3, [0] * 3, "abort"))

    assert (completion.output_ids, completion.versions) == ([5, 6, 7], [0] * 3)


async def test_score_unsupported_raises_before_any_request() -> None:
    async with client({"/health": healthy}, {"any_score_temperature": False}) as engine:
        with pytest.raises(InferenceError, match=r"temperature=0\.7"):
            await engine.score([1, 2, 3], 0.7)
        with pytest.raises(InferenceError, match="weights of an earlier version"):
            await engine.score_previous_weights([1, 2, 3])


# ---- seeds and versions


def test_next_call_seed_changes_with_each_attempt_if_not_by_position() -> None:
    def seeds(protocol: ServerProtocol) -> list[int]:
        completion, sampling_seeds = PartialCompletion(make_request(), "r"), []
        for _ in range(3):
            body = completion.next_call(protocol).body
            assert body is not None
            sampling_seeds.append(body["sampling_params"]["sampling_seed"])
            completion.add(GenerationChunk([5], [-1.0], [0], "abort"))
        return sampling_seeds

    attempt_seeds = seeds(LimitedProtocol(seeds_by_position=False))

    assert seeds(LimitedProtocol()) == [7, 7, 7]
    assert attempt_seeds[0] == 7
    assert len(set(attempt_seeds)) == 3
    assert attempt_seeds == seeds(LimitedProtocol(seeds_by_position=False))
    busy = PartialCompletion(make_request(), "r")  # two servers are busy and return no tokens
    bodies = [busy.next_call(LimitedProtocol(seeds_by_position=False)).body for _ in range(3)]
    assert [body and body["sampling_params"]["sampling_seed"] for body in bodies] == [7, 7, 7]


def test_attempt_id_is_no_prefix_of_another() -> None:
    ids = []
    for rid in ("train-7-0-1", "train-7-0-10", "train-7-0"):
        completion = PartialCompletion(make_request(), rid)
        for _ in range(12):
            completion.next_call(LimitedProtocol())
            ids.append(completion.attempt_id)

    assert not [(one, other) for one in set(ids) for other in set(ids) if one != other and other.startswith(one)]


def test_add_versions_in_last_message_replace_oldest_possible_version() -> None:
    completion = PartialCompletion(make_request(), "r")
    completion.next_call(LimitedProtocol(version_stamps_at_end=True))
    completion.add(GenerationChunk([5, 6], [-1.0, -1.0], [], None), 3)
    completion.next_call(
        LimitedProtocol(version_stamps_at_end=True)
    )  # the server was lost, so its tokens keep the oldest possible version
    completion.add(GenerationChunk([7], [-1.0], [], None), 4)
    completion.add(GenerationChunk([8, 9], [-1.0, -1.0], [], "length", stamps=[4, 5, 5]), 4)

    assert completion.versions == [3, 3, 4, 5, 5]


# ---- stop strings


def test_update_stop_string_before_minimum_length_is_ignored(tiny_tokenizer: Any) -> None:
    ids = tiny_tokenizer.encode("xx ab cd ab")

    without_minimum, with_minimum = (StopStrings(["ab"], minimum, tiny_tokenizer) for minimum in (0, 8))

    assert without_minimum.update(ids)
    assert with_minimum.update(ids)
    assert (without_minimum.end, with_minimum.end) == (5, len(ids))


@pytest.mark.parametrize("at_end", [False, True])
async def test_agenerate_stop_string_across_interruption_ends_completion(
    model_path: Path, tiny_tokenizer: Any, at_end: bool
) -> None:
    ids = tiny_tokenizer.encode("say STOP now, and never more")
    bodies, aborted, ended = [], asyncio.Event(), asyncio.Event()

    async def generate(request: web.Request) -> web.StreamResponse:
        bodies.append(await request.json())
        response = web.StreamResponse()
        await response.prepare(request)
        try:
            if len(bodies) == 1:
                await response.write(message(ids[:6]))  # "say ST"
                await response.write(message([], "abort"))
                return response
            await response.write(message(ids[6:12], version=1))  # "OP now"
            await aborted.wait()  # without an abort, the stream would continue
            await response.write(message(ids[12:14], "abort", version=1))
            return response
        finally:
            if len(bodies) > 1:
                ended.set()

    async def abort(request: web.Request) -> web.Response:
        assert (await request.json())["rid"] == bodies[1]["rid"] == "r-1/"
        aborted.set()
        return web.json_response({})

    routes = {"/generate": generate, "/health": healthy, "/abort_request": abort}
    capabilities = {"resumes_completions": False, "version_stamps_at_end": at_end}
    async with client(routes, capabilities, model_path) as engine, asyncio.timeout(30):
        completion = await engine.agenerate(make_request(max_new_tokens=20, stop=["STOP"]))

    assert tiny_tokenizer.decode(completion.output_ids) == "say STOP"
    assert completion.stop_reason == "stop"
    assert completion.versions == [0] * 6 + [1] * 2
    assert len(completion.logprobs) == 8
    assert aborted.is_set() == at_end
    assert all(body["sampling_params"]["stop"] == [] for body in bodies)
    assert bodies[1]["input_ids"] == [1, 2, *ids[:6]]


async def test_agenerate_stop_string_without_tokenizer_raises() -> None:
    async with client({"/health": healthy}, {"resumes_completions": False}) as engine:
        with pytest.raises(InferenceError, match=r"ServeSpec\.model_path"):
            await engine.agenerate(make_request(stop=["STOP"]))


# ---- silent and busy servers


@pytest.mark.slow
async def test_agenerate_queued_request_survives_one_slow_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    probes, queued = [], asyncio.Event()

    async def health(request: web.Request) -> web.Response:
        probes.append(None)
        if len(probes) == 5:
            queued.set()
        if len(probes) == 3:
            await asyncio.Event().wait()
        return await healthy(request)

    calls = []

    async def generate(request: web.Request) -> web.StreamResponse:
        calls.append(None)
        await queued.wait()
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(message([5, 6], "length"))
        return response

    routes = {"/generate": generate, "/health": health}
    capabilities = {"heartbeats": False}
    monkeypatch.setattr("rl_inference.client.health.PROBE_INTERVAL", NEVER)
    monkeypatch.setattr("rl_inference.client.transport.PROBE_TIMEOUT", 0.2)
    async with client(routes, capabilities, progress_timeout=1) as engine:
        completion = await asyncio.wait_for(engine.agenerate(make_request(max_new_tokens=2)), 30)

    assert completion.output_ids == [5, 6]
    assert len(calls) == 1


@pytest.mark.slow
@pytest.mark.parametrize("paused", [False, True])
async def test_agenerate_healthy_server_without_new_tokens_is_lost(
    paused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LimitedProtocol, "counts_tokens", True)
    polls, resumed = [], asyncio.Event()

    async def stats(_: web.Request) -> web.Response:
        polls.append(None)
        if len(polls) == 8 and paused:
            resumed.set()
        metrics = {"running": 0, "waiting": 1, "generated_tokens": 5, "busy_seconds": 0}
        return web.json_response({"version": 0, "paused": paused, **metrics})

    async def hung(request: web.Request) -> web.StreamResponse:
        await resumed.wait()
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(message([5, 6], "length"))
        return response

    routes = {"/generate": hung, "/health": healthy, "/stats": stats}
    monkeypatch.setattr("rl_inference.client.health.PROBE_INTERVAL", NEVER)
    async with client(routes, {"heartbeats": False}, progress_timeout=1) as engine:
        completing = asyncio.wait_for(engine.agenerate(make_request(max_new_tokens=2)), 30)
        if paused:
            assert (await completing).output_ids == [5, 6]
        else:
            with pytest.raises(InferenceError, match="no token for 1 s"):
                await completing


@pytest.mark.slow
@pytest.mark.parametrize("capabilities", [{}, {"heartbeats": False}])
async def test_agenerate_silent_unhealthy_server_raises(
    monkeypatch: pytest.MonkeyPatch, capabilities: dict[str, Any]
) -> None:
    async def silent(request: web.Request) -> web.Response:
        await asyncio.Event().wait()
        raise AssertionError

    routes = {"/generate": silent, "/health": silent}
    monkeypatch.setattr("rl_inference.client.health.PROBE_INTERVAL", NEVER)
    monkeypatch.setattr("rl_inference.client.transport.PROBE_TIMEOUT", 0.2)
    async with client(routes, capabilities, progress_timeout=1) as engine:
        with pytest.raises(InferenceError, match="no server continues it"):
            await asyncio.wait_for(engine.agenerate(make_request()), 30)


async def test_agenerate_busy_server_gets_request_again() -> None:
    calls = []

    async def generate(request: web.Request) -> web.StreamResponse:
        calls.append(None)
        if len(calls) == 1:
            return web.json_response({"error": {"message": "full"}}, status=429)
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(message([5], "length"))
        return response

    async with client({"/generate": generate, "/health": healthy}, {}) as engine, asyncio.timeout(30):
        completion = await engine.agenerate(make_request(max_new_tokens=1))

    assert completion.output_ids == [5]
    assert len(calls) == 2


# ---- calls


def test_call_has_target_and_method() -> None:
    pause = Call("/pause", ignored, query={"mode": "keep"}, method="POST")

    assert (pause.verb, pause.target) == ("POST", "/pause?mode=keep")
    assert Call("/health", ignored).verb == "GET"
    assert Call("/score", as_object, {}).verb == "POST"
