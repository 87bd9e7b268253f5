"""Tests of the client with scripted servers that fail at critical moments."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from probes import NEVER
from scripted_server import Handler, serving

from rl_contracts.config import ClientConfig, GenerationConfig
from rl_contracts.data import ModelRequest, ServeSpec, WeightUpdateMeta
from rl_contracts.errors import InferenceError
from rl_inference import EmbeddedEngine
from rl_inference.client.completion import PartialCompletion
from rl_inference.client.protocol import GenerationChunk
from rl_inference.client.transport import Server, ServerEndedError


@contextlib.asynccontextmanager
async def client(*addresses: str, progress_timeout: float = 5.0, **spec: Any) -> AsyncIterator[EmbeddedEngine]:
    engine = EmbeddedEngine(spec=ServeSpec(**spec), client=ClientConfig(progress_timeout=progress_timeout))
    engine.initialize(list(addresses))
    try:
        yield engine
    finally:
        await engine.destroy()


def event(ids: list[int], finish: str | None) -> bytes:
    meta = {
        "finish_reason": None if finish is None else {"type": finish},
        "weight_versions": [{"start": 0, "end": len(ids), "version": 0}],
        "output_token_logprobs": [[-1.0, token] for token in ids],
    }
    return b"data: " + json.dumps({"output_ids": ids, "meta_info": meta}).encode() + b"\n\n"


async def healthy(request: web.Request) -> web.Response:
    return web.json_response({"version": 0, "status": "ready", "open": 0})


async def test_agenerate_server_lost_after_last_token_returns_completion(monkeypatch: pytest.MonkeyPatch) -> None:
    prompts, complete = [], asyncio.Event()

    def add(completion: PartialCompletion, chunk: GenerationChunk, version: int) -> None:
        original(completion, chunk, version)
        if completion.done:
            complete.set()

    original = PartialCompletion.add
    monkeypatch.setattr(PartialCompletion, "add", add)

    async def generate(request: web.Request) -> web.StreamResponse:
        prompts.append((await request.json())["input_ids"])
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(event([7, 8], None))
        await response.write(event([9], "stop"))
        await complete.wait()  # break the connection after the client received everything
        assert request.transport is not None
        request.transport.abort()
        return response

    async with serving({"/generate": generate, "/health": healthy}) as address, client(address) as engine:
        async with asyncio.timeout(20):
            completion = await engine.agenerate(ModelRequest([1, 2], GenerationConfig(max_new_tokens=3)))

    assert completion.output_ids == [7, 8, 9]
    assert completion.stop_reason == "stop"
    assert prompts == [[1, 2]], "a finished completion must not be resumed"


async def test_agenerate_busy_server_gets_few_requests_while_another_is_free() -> None:
    rejected, completed = [], []

    async def full(request: web.Request) -> web.Response:
        rejected.append(None)
        return web.json_response({"error": {"message": "full"}}, status=503)

    async def generate(request: web.Request) -> web.StreamResponse:
        completed.append(None)
        response = web.StreamResponse()
        await response.prepare(request)
        await asyncio.sleep(0.3)  # so that this server has more open requests than the first
        await response.write(event([5], "length"))
        await response.write_eof()
        return response

    async with (
        serving({"/generate": full, "/health": healthy}) as first,
        serving({"/generate": generate, "/health": healthy}) as second,
        client(first, second) as engine,
    ):
        requests = [ModelRequest([1], GenerationConfig(max_new_tokens=1), seed=i) for i in range(16)]
        async with asyncio.timeout(20):
            responses = await asyncio.gather(*(engine.agenerate(request) for request in requests))

    assert len(responses) == len(completed) == 16
    assert len(rejected) <= 2 * 16, "each request may be rejected at most twice"


@pytest.mark.slow
@pytest.mark.parametrize("hangs", [True, False])
async def test_stage_waits_briefly_for_rejoining_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hangs: bool
) -> None:
    monkeypatch.setattr("rl_inference.client.weight_update._REJOIN_SECONDS", 0.5 if hangs else 10.0)
    returning = asyncio.Event()

    async def stage(request: web.Request) -> web.Response:
        version = (await request.json())["meta"]["version"]
        return web.json_response({"holder": "good", "version": version, "checksums": {"weight": "1"}})

    async def stage_slowly(request: web.Request) -> web.Response:
        returning.set()
        await asyncio.sleep(60 if hangs else 0.3)
        return await stage(request)

    async def receipt(request: web.Request) -> web.Response:
        return web.json_response({"holder": "good", "version": 1, "checksums": {"weight": "1"}})

    def meta(version: int) -> WeightUpdateMeta:
        return WeightUpdateMeta("disk", version)

    def good() -> dict[str, Handler]:
        """Return the handlers of a server that reports the version that it committed last."""
        committed = [0]

        async def health(request: web.Request) -> web.Response:
            return web.json_response({"status": "ready", "version": committed[0], "open": 0})

        async def commit(request: web.Request) -> web.Response:
            committed[0] = (await request.json())["version"]
            return await control(request)

        handlers = {"/stage_weights": stage, "/health": health, "/weight_receipt": receipt, "/commit_weights": commit}
        return handlers | dict.fromkeys(("/pause_generation", "/continue_generation", "/wake"), control)

    async with (
        serving(good()) as first,
        serving(good() | {"/stage_weights": stage_slowly}) as second,
        client(first, second, update_timeout=30.0, rejoin_timeout=60.0) as engine,
    ):
        engine._router.evict(engine._router.servers[1], "was evicted by the test")
        async with asyncio.timeout(20):
            await engine.stage_weights(meta(1))
            await engine.commit_weights(1)  # the evicted server must now load version 1 to rejoin
            await returning.wait()

        async with asyncio.timeout(5):
            receipts = await engine.stage_weights(meta(2))

    assert [receipt.version for receipt in receipts] == ([2] if hangs else [2, 2])


async def test_stage_sends_update_timeout() -> None:
    timeouts: list[object] = []

    async def stage(request: web.Request) -> web.Response:
        timeouts.append((await request.json())["timeout"])
        return web.json_response({"holder": "good", "version": 1, "checksums": {}})

    async with (
        serving({"/stage_weights": stage, "/health": healthy}) as address,
        client(address, update_timeout=7.5) as engine,
        asyncio.timeout(20),
    ):
        await engine.stage_weights(WeightUpdateMeta("disk", 1))

    assert timeouts == [7.5]


async def control(request: web.Request) -> web.Response:
    return web.json_response({"paused": True, "generated_tokens": 0, "paused_seconds": 0.0, "version": 1})


async def test_commit_single_server_lost_at_resume_waits_for_rejoin(tmp_path: Path) -> None:
    version, lost = 0, 0

    async def receipt(request: web.Request) -> web.Response:
        return web.json_response({"holder": "good", "version": 1, "checksums": {"weight": "1"}})

    async def health(request: web.Request) -> web.Response:
        return web.json_response({"version": version, "status": "ready", "open": 0})

    async def commit(request: web.Request) -> web.Response:
        nonlocal version
        version = 1
        return await control(request)

    async def resume(request: web.Request) -> web.Response:
        nonlocal lost
        if lost < 2:  # the client retries once after a broken connection
            lost += 1
            assert request.transport is not None
            request.transport.abort()
        return await control(request)

    routes: dict[str, Handler] = {"/stage_weights": receipt, "/weight_receipt": receipt, "/health": health}
    routes |= {
        "/pause_generation": control,
        "/commit_weights": commit,
        "/continue_generation": resume,
        "/wake": control,
    }
    meta = WeightUpdateMeta("disk", 1)
    async with serving(routes) as address, client(address, rejoin_timeout=60.0) as engine:
        async with asyncio.timeout(30):
            await engine.stage_weights(meta)
            await engine.commit_weights(1)

        assert (lost, engine.version, len(engine._router.live)) == (2, 1, 1)


async def test_monitor_probes_evicted_server_several_times_as_often(monkeypatch: pytest.MonkeyPatch) -> None:
    probes, enough = {"live": 0, "evicted": 0}, asyncio.Event()

    async def live(request: web.Request) -> web.Response:
        probes["live"] += 1
        return await healthy(request)

    async def evicted(request: web.Request) -> web.Response:
        probes["evicted"] += 1
        if probes["evicted"] == 24:
            enough.set()
        return web.json_response({"error": {"message": "the model is being loaded"}}, status=503)

    monkeypatch.setattr("rl_inference.client.health.PROBE_INTERVAL", 0.2)
    async with (
        serving({"/health": live}) as live_address,
        serving({"/health": evicted}) as evicted_address,
        client(live_address, evicted_address) as engine,
    ):
        evicted_server = next(server for server in engine._router.servers if server.address == evicted_address)
        engine._router.evict(evicted_server, "was evicted by the test")
        engine._monitor.start()
        async with asyncio.timeout(30):
            await enough.wait()

    assert 3 <= probes["live"] <= 8  # a quarter of 24 is 6; `check_now` probes all servers


@pytest.mark.slow
async def test_many_clients_probe_about_as_often_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rl_inference.client.health.PROBE_INTERVAL", 0.1)

    async def seconds_for_probes(count: int, clients: int) -> float:
        probes, enough = [], asyncio.Event()

        async def health(request: web.Request) -> web.Response:
            probes.append(None)
            if len(probes) == count:
                enough.set()
            return await healthy(request)

        async with serving({"/health": health}) as address, contextlib.AsyncExitStack() as stack:
            start = time.monotonic()
            for _ in range(clients):
                engine = await stack.enter_async_context(client(address, progress_timeout=60.0, clients=clients))
                engine._monitor.start()
            async with asyncio.timeout(60):
                await enough.wait()
            return time.monotonic() - start

    # 20 probes at one per 0.1 s take 2 s; twelve clients without longer intervals would take 0.2 s
    assert await seconds_for_probes(20, clients=12) > 1.0
    assert await seconds_for_probes(20, clients=1) > 1.0


async def test_monitor_starts_once_and_only_with_the_first_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rl_inference.client.health.PROBE_INTERVAL", 0.02)
    probed, generating, enough, end = [], [], asyncio.Event(), asyncio.Event()

    def count(calls: list[None]) -> None:
        calls.append(None)
        if len(probed) >= 3 and len(generating) == 30:
            enough.set()

    async def health(request: web.Request) -> web.Response:
        count(probed)
        return await healthy(request)

    async def generate(request: web.Request) -> web.StreamResponse:
        count(generating)
        await end.wait()
        return web.json_response({"error": {"message": "enough"}}, status=400)

    def monitors() -> int:
        return sum(task.get_name() == "server-monitor" for task in asyncio.all_tasks())

    async with (
        serving({"/generate": generate, "/health": health}) as address,
        client(address) as engine,
        asyncio.timeout(20),
    ):
        assert (engine.servers, engine.version) == ([address], 0)
        assert monitors() == 0
        assert engine._transport._session is None
        tasks = [asyncio.create_task(engine.agenerate(ModelRequest([1], GenerationConfig()))) for _ in range(30)]
        await enough.wait()
        assert monitors() == 1
        end.set()
        await asyncio.wait(tasks)


@pytest.mark.parametrize(("outcome", "calls"), [("crash", 2), ("abort", 4)])
async def test_agenerate_is_abandoned_after_second_server_crash_not_after_aborts(
    monkeypatch: pytest.MonkeyPatch, outcome: str, calls: int
) -> None:
    """Each server returns one token and then crashes, or aborts the stream as after SIGTERM."""
    addresses = [f"http://127.0.0.1:{port}" for port in range(1, 5)]
    called: list[str] = []

    async def stream(server: Server, call: object) -> AsyncIterator[GenerationChunk]:
        called.append(server.address)
        finish = "length" if len(called) == 4 else "abort" if outcome.startswith("abort") else None
        yield GenerationChunk([7], [-1.0], [0], finish)
        if finish is None:
            raise ServerEndedError("injected")

    monkeypatch.setattr("rl_inference.client.health.PROBE_INTERVAL", NEVER)
    async with client(*addresses) as engine, asyncio.timeout(20):
        monkeypatch.setattr(engine._transport, "stream", stream)
        completing = engine.agenerate(ModelRequest([1], GenerationConfig(max_new_tokens=4)))
        if calls == 4:
            assert (await completing).output_ids == [7] * 4
        else:
            with pytest.raises(InferenceError, match=r"2 servers ended.*injected"):
                await completing

    assert len(called) == calls


@pytest.mark.guarantee(
    "The versions of the tokens of one completion never decrease, even if it continues on another server.",
    area="staleness",
)
@pytest.mark.parametrize("stamped", ["per token", "at the end"])
async def test_agenerate_server_with_older_version_is_evicted_and_tokens_dropped(
    monkeypatch: pytest.MonkeyPatch, stamped: str
) -> None:
    """Another client published version 2, but did not know the second server."""
    addresses = [f"http://127.0.0.1:{port}" for port in range(1, 4)]
    served, called = [2, 1, 2], list[str]()

    async def stream(server: Server, call: object) -> AsyncIterator[GenerationChunk]:
        version = served[len(called)]
        called.append(server.address)
        finish, ids = ("abort" if len(called) == 1 else "length"), [len(called)] * 2
        if stamped == "per token":
            yield GenerationChunk(ids, [-1.0] * 2, [version] * 2, finish)
        else:
            yield GenerationChunk(ids, [-1.0] * 2)
            yield GenerationChunk(finish=finish, stamps=[version] * 2)

    monkeypatch.setattr("rl_inference.client.health.PROBE_INTERVAL", NEVER)
    async with client(*addresses) as engine, asyncio.timeout(20):
        monkeypatch.setattr(engine._transport, "stream", stream)
        monkeypatch.setattr(engine._router, "choose", lambda group: engine._router.servers[len(called)])
        for server in engine._router.servers:
            server.version = 1

        completion = await engine.agenerate(ModelRequest([1], GenerationConfig(max_new_tokens=4)))

        assert (completion.output_ids, completion.versions) == ([1, 1, 3, 3], [2, 2, 2, 2])
        assert engine.servers == [addresses[0], addresses[2]]
        assert "serves version 1, but earlier tokens have version 2" in str(engine._router.servers[1].reason)


@pytest.mark.parametrize(("instances", "count"), [(("a", "a"), 1), (("a", "b"), 2), (("", ""), 2)])
async def test_record_failure_counts_each_server_process_once(instances: tuple[str, str], count: int) -> None:
    """Processes with an unknown id count as different ones."""
    server, recorded = Server("http://a", version=0), list[tuple[str, str]]()
    engine, error = EmbeddedEngine(), ServerEndedError("injected")
    abandoned = pytest.raises(InferenceError, match="a request is abandoned: 2 servers ended")

    for instance, expected in zip(
        instances, (contextlib.nullcontext(), abandoned if count == 2 else None), strict=True
    ):
        server.instance = instance
        with expected or contextlib.nullcontext():
            await engine._record_failure("a request", recorded, server, server.life, error)

    assert len(recorded) == count
