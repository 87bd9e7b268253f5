"""What the client does itself where servers cannot: seeds, stop strings, stamps, refusals, silence. The servers are the
embedded one's protocol with fewer capabilities, over small scripts."""

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

from rl_contracts.config import ClientConfig, GenerationConfig
from rl_contracts.data import ModelRequest, ServeSpec
from rl_contracts.errors import InferenceError
from rl_contracts.inference import Capabilities
from rl_inference import EmbeddedEngine
from rl_inference.backends.embedded.protocol import EmbeddedProtocol
from rl_inference.client.completion import PartialCompletion
from rl_inference.client.protocol import Call, Exchange, GenerationChunk, ServerProtocol, as_object, expand, ignored
from rl_inference.client.stop_strings import StopStrings, completed, tokenizer_of

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@pytest.fixture(scope="module")
def tiny_tokenizer(model_path: Path) -> Any:
    return tokenizer_of(str(model_path))


class Limited(EmbeddedProtocol):
    """The embedded protocol with other capabilities, and stamps in the last message where they come there."""

    def __init__(self, **able: Any) -> None:
        self.capabilities = replace(Capabilities(), **able)

    def generate(self, *arguments: Any, **named: Any) -> Call[GenerationChunk | None]:
        call = super().generate(*arguments, **named)
        return replace(call, parse=_at_end(call.parse)) if self.capabilities.version_stamps_at_end else call

    def abort(self, rid: str) -> Exchange[None]:
        yield Call("/abort_request", ignored, {"rid": rid})


def _at_end(parse: Callable[[bytes], GenerationChunk | None]) -> Callable[[bytes], GenerationChunk | None]:
    stamps: list[int] = []

    def read(line: bytes) -> GenerationChunk | None:
        chunk = parse(line)
        if chunk is None:
            return None
        stamps.extend(chunk.versions)
        return replace(chunk, versions=[], stamps=None if chunk.finish is None else list(stamps))

    return read


class LimitedEngine(EmbeddedEngine):
    able: dict[str, Any] = {}  # noqa: RUF012 - set by `client` before it is read

    def make_protocol(self) -> ServerProtocol:
        return Limited(**self.able)


@contextlib.asynccontextmanager
async def client(
    routes: dict[str, Handler], able: dict[str, Any], model: Path | None = None, **config: float
) -> AsyncIterator[LimitedEngine]:
    """A client of one server with these handlers."""
    app = web.Application()
    for path, handler in routes.items():
        app.router.add_route("*", path, handler)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    kind = type("Engine", (LimitedEngine,), {"able": able})
    engine = kind(spec=ServeSpec(str(model or "")), client=ClientConfig(**{"progress_timeout": 5.0, **config}))
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


def asked(**generation: Any) -> ModelRequest:
    return ModelRequest([1, 2], GenerationConfig(**{"max_new_tokens": 8, **generation}), request_id="mine", seed=7)


# ---- refusals


@pytest.mark.parametrize("setting", [{"top_p": 0.9}, {"top_k": 5}, {"min_p": 0.1}, {"presence_penalty": 1.0}])
def test_next_call_what_would_change_the_log_probs_is_refused_by_name(setting: dict[str, Any]) -> None:
    with pytest.raises(InferenceError, match=rf"found {next(iter(setting))}={next(iter(setting.values()))}\."):
        PartialCompletion(asked(**setting), "mine").next_call(Limited(truncated_logprobs=True))
    PartialCompletion(asked(**setting), "mine").next_call(Limited())


def test_next_call_penalties_of_servers_that_forget_them_are_refused() -> None:
    with pytest.raises(InferenceError, match=r"expected no penalties.*repetition_penalty=1\.2"):
        PartialCompletion(asked(repetition_penalty=1.2), "mine").next_call(Limited(resumes_completions=False))
    PartialCompletion(asked(top_k=5), "mine").next_call(Limited(resumes_completions=False))


def test_next_call_an_interrupted_answer_that_is_kept_to_a_schema_begins_anew() -> None:
    request = replace(asked(), schema={"type": "boolean"})
    with pytest.raises(InferenceError, match=r"schema.*allocation=vllm"):
        PartialCompletion(request, "mine").next_call(Limited())
    answer = PartialCompletion(request, "mine")
    for _ in range(2):
        body = answer.next_call(Limited(schemas=True)).body
        assert body is not None
        assert (body["input_ids"], body["sampling_params"]["max_new_tokens"]) == ([1, 2], 8)
        answer.add(GenerationChunk([5, 6, 7], [-1.0] * 3, [0] * 3, "abort"))

    assert (answer.output_ids, answer.versions) == ([5, 6, 7], [0] * 3)


async def test_score_at_another_temperature_than_servers_can_is_refused_before_they_are_asked() -> None:
    async with client({"/health": healthy}, {"any_score_temperature": False}) as engine:
        with pytest.raises(InferenceError, match=r"temperature=0\.7"):
            await engine.score([1, 2, 3], 0.7)
        with pytest.raises(InferenceError, match="weights of an earlier version"):
            await engine.score_previous_weights([1, 2, 3])


# ---- seeds, stamps


def test_next_call_seed_of_a_later_attempt_is_another_where_numbers_begin_anew() -> None:
    def seeds(protocol: ServerProtocol) -> list[int]:
        answer, found = PartialCompletion(asked(), "mine"), []
        for _ in range(3):
            body = answer.next_call(protocol).body
            assert body is not None
            found.append(body["sampling_params"]["sampling_seed"])
            answer.add(GenerationChunk([5], [-1.0], [0], "abort"))
        return found

    anew = seeds(Limited(seeds_by_position=False))

    assert seeds(Limited()) == [7, 7, 7]
    assert anew[0] == 7
    assert len(set(anew)) == 3
    assert anew == seeds(Limited(seeds_by_position=False))


def test_next_call_attempt_that_brought_no_token_leaves_the_seed_as_it_was() -> None:
    protocol, answer = Limited(seeds_by_position=False), PartialCompletion(asked(), "mine")

    found = [answer.next_call(protocol).body for _ in range(3)]  # the first two were busy

    assert [body and body["sampling_params"]["sampling_seed"] for body in found] == [7, 7, 7]


def test_attempt_id_begins_no_other() -> None:
    ids = []
    for rid in ("train-7-0-1", "train-7-0-10", "train-7-0"):
        answer = PartialCompletion(asked(), rid)
        for _ in range(12):
            answer.next_call(Limited())
            ids.append(answer.attempt_id)

    assert not [(one, other) for one in set(ids) for other in set(ids) if one != other and other.startswith(one)]


def test_add_stamps_in_the_last_message_replace_the_oldest_possible_version() -> None:
    answer = PartialCompletion(asked(), "mine")
    answer.next_call(Limited(version_stamps_at_end=True))
    answer.add(GenerationChunk([5, 6], [-1.0, -1.0], [], None), 3)
    answer.next_call(Limited(version_stamps_at_end=True))  # lost: what it had made counts as old as it can be
    answer.add(GenerationChunk([7], [-1.0], [], None), 4)
    answer.add(GenerationChunk([8, 9], [-1.0, -1.0], [], "length", stamps=[4, 5, 5]), 4)

    assert answer.versions == [3, 3, 4, 5, 5]


def test_expand_spans_give_a_version_per_token_and_default_is_the_first() -> None:
    spans = [{"version": "default", "start": 0, "end": 2}, {"version": "4", "start": 2, "end": 3}]

    assert expand(spans, 1) == [1, 1, 4]


# ---- stop strings


def test_completed_agrees_with_a_search_of_the_whole_text(tiny_tokenizer: Any) -> None:
    ids = tiny_tokenizer.encode("a long answer, and then STOP it goes on")

    found = [n for n in range(1, len(ids) + 1) if completed(["STOP", "zz"], ids[:n], tiny_tokenizer)]

    assert [tiny_tokenizer.decode(ids[:n])[-4:] for n in found] == ["STOP"]


def test_look_minimum_length_leaves_an_earlier_string_where_it_is(tiny_tokenizer: Any) -> None:
    ids = tiny_tokenizer.encode("xx ab cd ab")

    first, held = (StopStrings(["ab"], least, tiny_tokenizer) for least in (0, 8))

    assert first.update(ids)
    assert held.update(ids)
    assert (first.end, held.end) == (5, len(ids))


@pytest.mark.parametrize("at_end", [False, True])
async def test_agenerate_stop_string_over_an_interruption_ends_the_answer(
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
            await aborted.wait()  # it would go on
            await response.write(message(ids[12:14], "abort", version=1))
            return response
        finally:
            if len(bodies) > 1:
                ended.set()

    async def abort(request: web.Request) -> web.Response:
        assert (await request.json())["rid"] == bodies[1]["rid"] == "mine-1/"
        aborted.set()
        return web.json_response({})

    routes = {"/generate": generate, "/health": healthy, "/abort_request": abort}
    able = {"resumes_completions": False, "version_stamps_at_end": at_end}
    async with client(routes, able, model_path) as engine, asyncio.timeout(30):
        answer = await engine.agenerate(asked(max_new_tokens=20, stop=["STOP"]))

    assert tiny_tokenizer.decode(answer.output_ids) == "say STOP"
    assert answer.stop_reason == "stop"
    assert answer.versions == [0] * 6 + [1] * 2
    assert len(answer.logprobs) == 8
    assert aborted.is_set() == at_end
    assert all(body["sampling_params"]["stop"] == [] for body in bodies)
    assert bodies[1]["input_ids"] == [1, 2, *ids[:6]]


async def test_agenerate_stop_string_without_a_tokenizer_is_refused() -> None:
    async with client({"/health": healthy}, {"resumes_completions": False}) as engine:
        with pytest.raises(InferenceError, match=r"ServeSpec\.model_path"):
            await engine.agenerate(asked(stop=["STOP"]))


# ---- silence, business


async def test_agenerate_silent_server_that_is_well_keeps_its_requests() -> None:
    asked_health, calls = asyncio.Event(), []

    async def health(request: web.Request) -> web.Response:
        asked_health.set()
        return await healthy(request)

    async def generate(request: web.Request) -> web.StreamResponse:
        calls.append(None)
        await asked_health.wait()  # paused: not even headers come
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(message([5, 6], "length"))
        return response

    routes = {"/generate": generate, "/health": health}
    async with client(routes, {"heartbeats": False}, progress_timeout=1, probe_interval=0) as engine:
        async with asyncio.timeout(30):
            answer = await engine.agenerate(asked(max_new_tokens=2))

    assert answer.output_ids == [5, 6]
    assert len(calls) == 1


@pytest.mark.slow
async def test_agenerate_queued_request_outlives_one_slow_look() -> None:
    looks, queued = [], asyncio.Event()

    async def health(request: web.Request) -> web.Response:
        looks.append(None)
        if len(looks) == 5:
            queued.set()
        if len(looks) == 3:
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
    able = {"heartbeats": False}
    async with client(routes, able, progress_timeout=1, probe_timeout=0.2, probe_interval=0) as engine:
        answer = await asyncio.wait_for(engine.agenerate(asked(max_new_tokens=2)), 30)

    assert answer.output_ids == [5, 6]
    assert len(calls) == 1


@pytest.mark.slow
@pytest.mark.parametrize("paused", [False, True])
async def test_agenerate_server_that_says_it_is_well_and_makes_no_token_is_lost(
    paused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Limited, "counts_tokens", True)
    looks, resumed = [], asyncio.Event()

    async def stats(_: web.Request) -> web.Response:
        looks.append(None)
        if len(looks) == 8 and paused:
            resumed.set()
        figures = {"running": 0, "waiting": 1, "generated_tokens": 5, "busy_seconds": 0}
        return web.json_response({"version": 0, "paused": paused, **figures})

    async def hung(request: web.Request) -> web.StreamResponse:
        await resumed.wait()
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(message([5, 6], "length"))
        return response

    routes = {"/generate": hung, "/health": healthy, "/stats": stats}
    async with client(routes, {"heartbeats": False}, progress_timeout=1, probe_interval=0) as engine:
        asking = asyncio.wait_for(engine.agenerate(asked(max_new_tokens=2)), 30)
        if paused:
            assert (await asking).output_ids == [5, 6]
        else:
            with pytest.raises(InferenceError, match="no token for 1 s"):
                await asking


@pytest.mark.slow
@pytest.mark.parametrize("able", [{}, {"heartbeats": False}])
async def test_agenerate_silent_server_that_is_not_well_is_given_up(able: dict[str, Any]) -> None:
    async def silent(request: web.Request) -> web.Response:
        await asyncio.Event().wait()
        raise AssertionError

    routes = {"/generate": silent, "/health": silent}
    async with client(routes, able, progress_timeout=1, probe_timeout=0.2, probe_interval=0) as engine:
        with pytest.raises(InferenceError, match="no server continues it"):
            await asyncio.wait_for(engine.agenerate(asked()), 30)


@pytest.mark.parametrize("status", [429, 503])
async def test_agenerate_busy_server_is_asked_again(status: int) -> None:
    calls = []

    async def generate(request: web.Request) -> web.StreamResponse:
        calls.append(None)
        if len(calls) == 1:
            return web.json_response({"error": {"message": "full"}}, status=status)
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(message([5], "length"))
        return response

    async with client({"/generate": generate, "/health": healthy}, {}) as engine, asyncio.timeout(30):
        answer = await engine.agenerate(asked(max_new_tokens=1))

    assert answer.output_ids == [5]
    assert len(calls) == 2


# ---- calls


def test_call_query_and_method() -> None:
    pause = Call("/pause", ignored, query={"mode": "keep"}, method="POST")

    assert (pause.verb, pause.target) == ("POST", "/pause?mode=keep")
    assert Call("/health", ignored).verb == "GET"
    assert Call("/score", as_object, {}).verb == "POST"
