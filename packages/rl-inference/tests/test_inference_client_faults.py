"""What the client does when a server fails at the worst moment; the servers are small scripts that do exactly that."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest
from aiohttp import web

from rl_contracts.config import ClientConfig, GenerationConfig
from rl_contracts.data import ModelRequest, WeightUpdateMeta
from rl_contracts.errors import InferenceError
from rl_inference import EmbeddedEngine
from rl_inference.client.completion import PartialCompletion
from rl_inference.client.protocol import GenerationChunk
from rl_inference.client.transport import Server, ServerEndedError

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@contextlib.asynccontextmanager
async def serving(routes: dict[str, Handler]) -> AsyncIterator[str]:
    """A server with these handlers by path; its address."""
    app = web.Application()
    for path, handler in routes.items():
        app.router.add_route("*", path, handler)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


@contextlib.asynccontextmanager
async def client(*addresses: str, **config: float) -> AsyncIterator[EmbeddedEngine]:
    engine = EmbeddedEngine(client=ClientConfig(**{"progress_timeout": 5.0, **config}))
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


@pytest.mark.parametrize("finish", ["stop", "length"])
async def test_agenerate_server_lost_right_after_the_last_token_ends_the_answer_there(
    monkeypatch: pytest.MonkeyPatch, finish: str
) -> None:
    asked, complete = [], asyncio.Event()

    def add(answer: PartialCompletion, chunk: GenerationChunk, version: int) -> None:
        original(answer, chunk, version)
        if answer.done:
            complete.set()

    original = PartialCompletion.add
    monkeypatch.setattr(PartialCompletion, "add", add)

    async def generate(request: web.Request) -> web.StreamResponse:
        asked.append((await request.json())["input_ids"])
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(event([7, 8], None))
        await response.write(event([9], finish))
        await complete.wait()  # it has arrived, and then the connection breaks instead of ending
        assert request.transport is not None
        request.transport.abort()
        return response

    async with serving({"/generate": generate, "/health": healthy}) as address, client(address) as engine:
        async with asyncio.timeout(20):
            answer = await engine.agenerate(ModelRequest([1, 2], GenerationConfig(max_new_tokens=3)))

    assert answer.output_ids == [7, 8, 9]
    assert answer.stop_reason == finish
    assert asked == [[1, 2]], "a complete answer must not be continued"


async def test_agenerate_of_a_server_that_ended_goes_on_elsewhere_with_the_tokens_that_had_come(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked, arrived = [], asyncio.Event()

    def add(answer: PartialCompletion, chunk: GenerationChunk, version: int) -> None:
        original(answer, chunk, version)
        arrived.set()

    original = PartialCompletion.add
    monkeypatch.setattr(PartialCompletion, "add", add)

    async def generate(request: web.Request) -> web.StreamResponse:
        body = await request.json()
        asked.append((body["input_ids"], body["sampling_params"]["max_new_tokens"]))
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(event([7, 8] if len(asked) == 1 else [9], None if len(asked) == 1 else "length"))
        if len(asked) == 1:
            await arrived.wait()
            assert request.transport is not None
            request.transport.abort()
        return response

    routes: dict[str, Handler] = {"/generate": generate, "/health": healthy}
    async with serving(routes) as one, serving(routes) as other, client(one, other) as engine:
        async with asyncio.timeout(20):
            answer = await engine.agenerate(ModelRequest([1, 2], GenerationConfig(max_new_tokens=3)))

    assert asked == [([1, 2], 3), ([1, 2, 7, 8], 1)]
    assert (answer.output_ids, answer.resubmissions) == ([7, 8, 9], 1)


async def test_agenerate_busy_server_is_not_asked_in_a_loop_while_another_has_room() -> None:
    refused, answered = [], []

    async def full(request: web.Request) -> web.Response:
        refused.append(None)
        return web.json_response({"error": {"message": "full"}}, status=503)

    async def generate(request: web.Request) -> web.StreamResponse:
        answered.append(None)
        response = web.StreamResponse()
        await response.prepare(request)
        await asyncio.sleep(0.3)  # so that it has more open requests than the one that refuses all
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
            answers = await asyncio.gather(*(engine.agenerate(request) for request in requests))

    assert len(answers) == len(answered) == 16
    assert len(refused) <= 2 * 16, "each request may learn once or twice that the server is full"


@pytest.mark.slow
@pytest.mark.parametrize("hangs", [True, False])
async def test_stage_server_that_comes_back_gets_a_moment_and_no_more(
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
        """A server that says which version it committed last."""
        committed = [0]

        async def health(request: web.Request) -> web.Response:
            return web.json_response({"status": "ready", "version": committed[0], "open": 0})

        async def commit(request: web.Request) -> web.Response:
            committed[0] = (await request.json())["version"]
            return await control(request)

        parts = {"/stage_weights": stage, "/health": health, "/weight_receipt": receipt, "/commit_weights": commit}
        return parts | dict.fromkeys(("/pause_generation", "/continue_generation", "/wake"), control)

    async with (
        serving(good()) as first,
        serving(good() | {"/stage_weights": stage_slowly}) as second,
        client(first, second, update_timeout=30.0, rejoin_timeout=60.0) as engine,
    ):
        engine._router.evict(engine._router.servers[1], "was planted to be lost")
        async with asyncio.timeout(20):
            await engine.stage_weights(meta(1))
            await engine.commit_weights(1)  # from now on the lost one has to be brought to version 1
            await returning.wait()

        async with asyncio.timeout(5):
            receipts = await engine.stage_weights(meta(2))

    assert [receipt.version for receipt in receipts] == ([2] if hangs else [2, 2])


async def test_stage_names_the_deadline_of_the_client() -> None:
    asked: list[object] = []

    async def stage(request: web.Request) -> web.Response:
        asked.append((await request.json())["timeout"])
        return web.json_response({"holder": "good", "version": 1, "checksums": {}})

    async with (
        serving({"/stage_weights": stage, "/health": healthy}) as address,
        client(address, update_timeout=7.5) as engine,
        asyncio.timeout(20),
    ):
        await engine.stage_weights(WeightUpdateMeta("disk", 1))

    assert asked == [7.5]


async def control(request: web.Request) -> web.Response:
    return web.json_response({"paused": True, "generated_tokens": 0, "paused_seconds": 0.0, "version": 1})


async def test_commit_only_server_lost_at_its_resume_waits_for_it_to_come_back(tmp_path: Path) -> None:
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
        if lost < 2:  # a broken connection is tried once more
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


async def test_probe_learns_how_many_requests_of_others_a_server_works_on() -> None:
    asked = asyncio.Event()

    async def health(request: web.Request) -> web.Response:
        if server.others:
            asked.set()
        return web.json_response({"version": 0, "status": "ready", "open": 5})

    async with serving({"/health": health}) as address, client(address, probe_interval=0.05) as engine:
        server = engine._router.servers[0]
        server.open = 2
        engine._monitor.start()
        async with asyncio.timeout(30):
            await asked.wait()

        assert (server.others, server.load) == (3, 5)


async def test_server_that_is_away_is_asked_several_times_as_often_as_one_that_is_well() -> None:
    asked, enough = {"well": 0, "away": 0}, asyncio.Event()

    async def well(request: web.Request) -> web.Response:
        asked["well"] += 1
        return await healthy(request)

    async def away(request: web.Request) -> web.Response:
        asked["away"] += 1
        if asked["away"] == 24:
            enough.set()
        return web.json_response({"error": {"message": "the model is being loaded"}}, status=503)

    async with (
        serving({"/health": well}) as one,
        serving({"/health": away}) as other,
        client(one, other, probe_interval=0.2) as engine,
    ):
        lost = next(server for server in engine._router.servers if server.address == other)
        engine._router.evict(lost, "planted")
        engine._monitor.start()
        async with asyncio.timeout(30):
            await enough.wait()

    assert 3 <= asked["well"] <= 8  # a quarter of them are 6; each hurry asks everybody


@pytest.mark.slow
async def test_probes_of_many_clients_are_together_about_as_many_as_those_of_one() -> None:
    async def seconds_for_probes(count: int, clients: int) -> float:
        seen, enough = [], asyncio.Event()

        async def health(request: web.Request) -> web.Response:
            seen.append(None)
            if len(seen) == count:
                enough.set()
            return await healthy(request)

        config = ClientConfig(probe_interval=0.1, progress_timeout=60.0).shared_by(clients)
        async with serving({"/health": health}) as address, contextlib.AsyncExitStack() as stack:
            begin = time.monotonic()
            for _ in range(clients):
                (await stack.enter_async_context(client(address, **vars(config))))._monitor.start()
            async with asyncio.timeout(60):
                await enough.wait()
            return time.monotonic() - begin

    # 20 at one per 0.1 s take 2 s, and twelve clients that each asked so often would need 0.2 s
    assert await seconds_for_probes(20, clients=12) > 1.0
    assert await seconds_for_probes(20, clients=1) > 1.0


async def test_probes_come_from_one_place_and_a_client_that_nobody_asks_opens_no_connection() -> None:
    probed, generating, enough, end = [], [], asyncio.Event(), asyncio.Event()

    def count(seen: list[None]) -> None:
        seen.append(None)
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
        client(address, probe_interval=0.02) as engine,
        asyncio.timeout(20),
    ):
        assert (engine.servers, engine.version) == ([address], 0)
        assert monitors() == 0
        assert engine._transport._session is None
        answers = [asyncio.create_task(engine.agenerate(ModelRequest([1], GenerationConfig()))) for _ in range(30)]
        await enough.wait()
        assert monitors() == 1
        end.set()
        await asyncio.wait(answers)


@pytest.mark.parametrize(("told", "asked"), [("nothing, they end", 2), ("abort, as those told to end do", 4)])
async def test_request_whose_servers_each_give_a_token_and_end_is_given_up_at_the_second_death(
    monkeypatch: pytest.MonkeyPatch, told: str, asked: int
) -> None:
    addresses = [f"http://127.0.0.1:{port}" for port in range(1, 5)]
    seen: list[str] = []

    async def stream(server: Server, call: object) -> AsyncIterator[GenerationChunk]:
        seen.append(server.address)
        finish = "length" if len(seen) == 4 else "abort" if told.startswith("abort") else None
        yield GenerationChunk([7], [-1.0], [0], finish)
        if finish is None:
            raise ServerEndedError("planted")

    async with client(*addresses, probe_interval=0.0) as engine, asyncio.timeout(20):
        monkeypatch.setattr(engine._transport, "stream", stream)
        asking = engine.agenerate(ModelRequest([1], GenerationConfig(max_new_tokens=4)))
        if asked == 4:
            assert (await asking).output_ids == [7] * 4
        else:
            with pytest.raises(InferenceError, match=r"2 servers ended.*planted"):
                await asking

    assert len(seen) == asked


@pytest.mark.parametrize("stamped", ["by the token", "at the end"])
async def test_agenerate_server_behind_the_one_before_is_out_and_its_tokens_do_not_count(
    monkeypatch: pytest.MonkeyPatch, stamped: str
) -> None:
    """Another client published version 2 without the second server, which this one knew already."""
    addresses = [f"http://127.0.0.1:{port}" for port in range(1, 4)]
    served, asked = [2, 1, 2], list[str]()

    async def stream(server: Server, call: object) -> AsyncIterator[GenerationChunk]:
        version = served[len(asked)]
        asked.append(server.address)
        finish, ids = ("abort" if len(asked) == 1 else "length"), [len(asked)] * 2
        if stamped == "by the token":
            yield GenerationChunk(ids, [-1.0] * 2, [version] * 2, finish)
        else:
            yield GenerationChunk(ids, [-1.0] * 2)
            yield GenerationChunk(finish=finish, stamps=[version] * 2)

    async with client(*addresses, probe_interval=0.0) as engine, asyncio.timeout(20):
        monkeypatch.setattr(engine._transport, "stream", stream)
        monkeypatch.setattr(engine._router, "choose", lambda group: engine._router.servers[len(asked)])
        for server in engine._router.servers:
            server.version = 1

        answer = await engine.agenerate(ModelRequest([1], GenerationConfig(max_new_tokens=4)))

        assert (answer.output_ids, answer.versions) == ([1, 1, 3, 3], [2, 2, 2, 2])
        assert engine.servers == [addresses[0], addresses[2]]
        assert "serves version 1, but earlier tokens have version 2" in str(engine._router.servers[1].evicted)


@pytest.mark.parametrize(("lives", "deaths"), [(("a", "a"), 1), (("a", "b"), 2), (("", ""), 2)])
async def test_hold_against_counts_each_life_of_a_server_once(lives: tuple[str, str], deaths: int) -> None:
    """A life whose name the client never learned is nobody else's."""
    server, ended = Server("http://a", version=0), list[tuple[str, str]]()
    engine, error = EmbeddedEngine(), ServerEndedError("planted")
    given_up = pytest.raises(InferenceError, match="a request is abandoned: 2 servers ended")

    for life, expected in zip(lives, (contextlib.nullcontext(), given_up if deaths == 2 else None), strict=True):
        server.instance = life
        with expected or contextlib.nullcontext():
            await engine._record_failure("a request", ended, server, server.life, error)

    assert len(ended) == deaths
