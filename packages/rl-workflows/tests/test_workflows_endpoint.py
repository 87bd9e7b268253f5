"""The endpoint's sessions and bounds: keys, deadlines, floods, failures, and requests that are wrong in every way."""

from __future__ import annotations

import asyncio
import json
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import psutil
import pytest
from agent_model import ScriptedEngine, served

from rl_contracts.config import GenerationConfig
from rl_contracts.endpoint import EpisodeReport
from rl_contracts.errors import AgentError, ConfigError, InferenceError
from rl_contracts.testing import make_tiny_tokenizer
from rl_workflows.agents.endpoint.config import EndpointConfig
from rl_workflows.agents.endpoint.server import ROUTES, HttpRolloutEndpoint
from rl_workflows.agents.endpoint.session import Session

MESSAGES = [{"role": "user", "content": "what is it?"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {
        "messages": [
            {"role": "system", "content": "be brief"},
            {"role": "user", "content": [{"type": "text", "text": "what is it?"}]},
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [{"id": "a", "type": "function", "function": {"name": "add", "arguments": "{}"}}],
            },
            {"role": "tool", "tool_call_id": "a", "content": "12"},
        ],
        "tools": [{"type": "function", "function": {"name": "add", "description": "x", "parameters": {}}}],
        "n": 2,
        "stop": ["x"],
        "max_tokens": 9,
        "stream": False,
        "logprobs": True,
        "temperature": 0.5,
    },
    "/v1/completions": {"prompt": "what", "max_tokens": 9, "logprobs": 1, "n": 1, "stream": True},
    "/v1/responses": {
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "what is it?"}]},
            {"type": "reasoning", "content": []},
            {"type": "function_call", "call_id": "a", "name": "add", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "a", "output": "12"},
        ],
        "instructions": "be brief",
        "tools": [{"type": "function", "name": "add", "parameters": {}}],
        "max_output_tokens": 9,
        "text": {"format": {"type": "text"}},
    },
    "/v1/messages": {
        "messages": [
            {"role": "user", "content": "what is it?"},
            {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "add", "input": {}}]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": "12"}]},
        ],
        "system": "be brief",
        "tools": [{"name": "add", "input_schema": {}}],
        "max_tokens": 9,
        "stop_sequences": ["x"],
        "stream": True,
    },
}


def says_it(prompt: str) -> dict[str, Any]:
    return {"content": "it"}


class Agent:
    """Speaks plain HTTP."""

    def __init__(self, session: Session, http: aiohttp.ClientSession) -> None:
        self.session, self.http = session, http

    async def post(self, path: str, body: Any, key: str | None = None, **headers: str) -> tuple[int, str]:
        """Status and text of an answer."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        headers = {
            "Authorization": f"Bearer {key or self.session.api_key}",
            "Content-Type": "application/json",
        } | headers
        async with self.http.post(self.session.url + path, data=data, headers=headers) as response:
            return response.status, await response.text()

    async def ask(self, **more: Any) -> tuple[int, str]:
        return await self.post("/v1/chat/completions", {"messages": MESSAGES, **more})


def sentence(text: str) -> str:
    """The message of an error in either form."""
    said = json.loads(text)["error"]["message"]
    assert "Traceback" not in said
    return str(said)


async def test_every_route_answers_its_request() -> None:
    engine = ScriptedEngine("llama3", says_it)
    async with served(engine) as session, aiohttp.ClientSession() as http:
        agent = Agent(session, http)
        for path, body in BODIES.items():
            status, text = await agent.post(path, body)
            assert status == 200, text
            assert "it" in text
        assert len(engine.responses) == 5


@pytest.mark.parametrize("path", [*ROUTES, "/v1/messages/count_tokens", "/v1/rewards"])
async def test_key_that_is_missing_wrong_or_of_a_closed_session_is_refused(path: str) -> None:
    engine = ScriptedEngine("llama3", says_it)
    async with served(engine) as session, aiohttp.ClientSession() as http:
        agent = Agent(session, http)
        async with http.post(session.url + path, json={}) as response:
            assert response.status == 401
            assert "x-api-key" in sentence(await response.text())
        assert (await agent.post(path, {}, key="rl-wrong"))[0] == 401
        await session.close()
        await session.close()
        status, text = await agent.post(path, {})
        assert status == 401
        assert "no open session" in sentence(text)


async def test_key_is_asked_for_by_what_is_only_read_too() -> None:
    engine = ScriptedEngine("llama3", says_it)
    async with served(engine) as session, aiohttp.ClientSession() as http:
        for headers in ({}, {"Authorization": "Bearer rl-wrong"}):
            async with http.get(session.url + "/v1/models", headers=headers) as response:
                assert response.status == 401
        assert not engine.responses


async def test_sessions_see_nothing_of_each_other() -> None:
    engine = ScriptedEngine("llama3", says_it)
    endpoint = HttpRolloutEndpoint(engine.tokenizer)
    one, other = [await endpoint.open(engine, GenerationConfig()) for _ in range(2)]
    async with aiohttp.ClientSession() as http:
        await Agent(one, http).ask()
        await one.close()
        assert (await Agent(other, http).ask(n=2))[0] == 200
    await other.close()
    assert [len(session.trajectories(0.0)) for session in (one, other)] == [1, 2]
    await endpoint.destroy()
    await endpoint.destroy()


async def test_rewards_of_answers_and_of_the_episode_are_kept_and_the_last_said_counts() -> None:
    engine = ScriptedEngine("llama3", says_it)
    async with served(engine, EndpointConfig(credit="turn")) as session, aiohttp.ClientSession() as http:
        agent = Agent(session, http)
        assert session.report.turns is None
        ids = [json.loads((await agent.ask(n=2))[1])["id"]]
        for path in ("/v1/completions", "/v1/responses", "/v1/messages"):
            text = (await agent.post(path, {**BODIES[path], "stream": False}))[1]
            ids.append(json.loads(text)["id"])
        for said in (
            {"call_id": ids[0], "index": 1, "reward": 9},
            {"call_id": ids[0], "index": 1, "reward": 0.25},
            {"call_id": ids[1], "reward": 0.5},
            {"call_id": ids[3], "reward": -1, "figures": {"tries": 2}},
            {"reward": 7},
            {"reward": 3, "figures": {"tries": 3}},
            {"figures": {"depth": 1}},
        ):
            status, text = await agent.post("/v1/rewards", said)
            assert status == 200, text
        await session.close()
        assert session.report == EpisodeReport(3.0, -0.25, {"tries": 3.0, "depth": 1.0})
        rows = session.trajectories(3.0)
        assert [row.reward for row in rows] == [3.0] * 5
        earned = [float(row.token_rewards.sum()) for row in rows if row.token_rewards is not None]
        assert earned == [0, 0.25, 0.5, 0, -1]


async def test_rewards_that_are_none_or_of_nothing_are_refused() -> None:
    engine = ScriptedEngine("llama3", says_it)
    async with served(engine) as session, aiohttp.ClientSession() as http:
        agent = Agent(session, http)
        call = json.loads((await agent.ask())[1])["id"]
        for said, status, message in (
            ({}, 400, "`reward`"),
            ({"call_id": call}, 400, "`reward`"),
            ({"reward": "good"}, 400, "reward: expected"),
            ({"reward": 1e9}, 400, "reward: expected"),
            (b'{"reward": NaN}', 400, "not JSON"),
            ({"reward": 1, "call_id": "chatcmpl-1"}, 404, "call_id: expected"),
            ({"reward": 1, "call_id": call, "index": 1}, 400, "index: expected"),
            ({"reward": 1, "calls": 1}, 400, "unknown parameter"),
            ({"figures": {"a b": 1}}, 400, "figures"),
            ({"figures": {str(i): i for i in range(65)}}, 400, "at most 64 names"),
        ):
            found, text = await agent.post("/v1/rewards", said)
            assert (found, message in sentence(text)) == (status, True), text
        assert session.report == EpisodeReport()
        assert (await agent.post("/v1/rewards", {"reward": 1}, key="rl-other"))[0] == 401
        await session.close()
        assert (await agent.post("/v1/rewards", {"reward": 1}))[0] == 401


async def test_body_that_is_too_large_malformed_or_compressed_is_refused() -> None:
    engine = ScriptedEngine("llama3", says_it)
    async with served(engine, EndpointConfig(max_body_bytes=4096)) as session, aiohttp.ClientSession() as http:
        agent = Agent(session, http)
        for body, status, said in (
            (b"{", 400, "not JSON"),
            (b"\xff", 400, "not JSON"),
            (b"[]", 400, "expected object"),
            (b"[" * 4000, 400, ""),
            (json.dumps({"messages": MESSAGES, "mesages": 1}).encode(), 400, "did you mean 'messages'"),
            (b" " * 5000, 413, ""),
        ):
            found, text = await agent.post("/v1/chat/completions", body)
            assert (found, said in sentence(text)) == (status, True), text
        found, text = await agent.post("/v1/chat/completions", b"x", **{"Content-Encoding": "gzip"})
        assert found == 415
        assert (await agent.post("/v1/unknown", {}))[0] == 404
        assert (await agent.ask())[0] == 200


@pytest.mark.parametrize("text", [rb"half \ud83d", b"half \xff"])
@pytest.mark.parametrize(("handling", "status"), [("reject", 400), ("replace", 200)])
async def test_body_that_is_not_utf8_is_rejected_or_replaced(text: bytes, handling: str, status: int) -> None:
    prompts: list[str] = []
    engine = ScriptedEngine("llama3", lambda prompt: prompts.append(prompt) or {"content": "it"})
    body = b'{"messages": [{"role": "user", "content": "' + text + b'"}]}'
    async with served(engine, invalid_text=handling) as session, aiohttp.ClientSession() as http:
        assert (await Agent(session, http).post("/v1/chat/completions", body))[0] == status

    assert ["half \ufffd" in prompt for prompt in prompts] == [True] * (status == 200)


async def test_body_of_100_mb_is_refused_before_it_is_held() -> None:
    engine = ScriptedEngine("llama3", says_it)
    async with served(engine) as session, aiohttp.ClientSession() as http:
        assert (await Agent(session, http).ask())[0] == 200
        before = psutil.Process().memory_info().rss
        reader, writer = await _begun(session, 100 * 10**6)
        answer, sent = asyncio.create_task(reader.readuntil(b"}}")), 0
        while not answer.done() and sent < 100:
            with suppress(ConnectionError):
                writer.write(b" " * 10**6)
                await writer.drain()
            sent += 1
        said = (await asyncio.wait_for(answer, 30)).decode()
        writer.close()
        assert said.startswith("HTTP/1.1 413")
        assert "8388608" in said  # of endpoint.max_body_bytes
        assert psutil.Process().memory_info().rss - before < 64 << 20
        assert (await Agent(session, http).ask())[0] == 200


async def test_body_that_comes_after_its_session_was_closed_asks_for_nothing() -> None:
    engine = ScriptedEngine("llama3", says_it)
    async with served(engine) as session:
        body = json.dumps({"messages": MESSAGES}).encode()
        reader, writer = await _begun(session, len(body))
        async with asyncio.timeout(30):
            while not session.calling:  # noqa: ASYNC110
                await asyncio.sleep(0.002)
        await session.close()
        writer.write(body)
        said = (await asyncio.wait_for(reader.readuntil(b"}}"), 30)).decode()
        writer.close()
        assert said.startswith("HTTP/1.1 401")
        assert "closed" in said
        assert engine.responses == []


async def test_calls_whose_bodies_are_still_to_come_count() -> None:
    engine = ScriptedEngine("llama3", says_it)
    async with served(engine, EndpointConfig(max_concurrent=3)) as session, aiohttp.ClientSession() as http:
        slow = [await _begun(session, 10) for _ in range(3)]
        async with asyncio.timeout(30):
            while session.calling < 3:  # noqa: ASYNC110
                await asyncio.sleep(0.002)
        status, text = await Agent(session, http).ask()
        assert status == 429
        assert "endpoint.max_concurrent" in sentence(text)
        for _, writer in slow:
            writer.close()
        async with asyncio.timeout(30):
            while (await Agent(session, http).ask())[0] != 200:  # noqa: ASYNC110
                await asyncio.sleep(0.002)


async def _begun(session: Session, length: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A call of which only the head was sent."""
    url = urlsplit(session.url)
    reader, writer = await asyncio.open_connection(url.hostname, url.port)
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: {url.netloc}\r\ncontent-type: application/json\r\n"
    writer.write(f"{head}authorization: Bearer {session.api_key}\r\ncontent-length: {length}\r\n\r\n".encode())
    await writer.drain()
    return reader, writer


@pytest.mark.slow
async def test_session_that_is_not_closed_ends_at_its_deadline_with_what_it_has() -> None:
    engine = ScriptedEngine("llama3", says_it)
    async with served(engine, EndpointConfig(session_seconds=2)) as session, aiohttp.ClientSession() as http:
        agent = Agent(session, http)
        assert (await agent.ask())[0] == 200
        engine.faults.hang = lambda request: True
        status, text = await agent.ask()
        assert status == 401
        assert "closed" in sentence(text)
        assert session.expired
        assert (await agent.ask())[0] == 401
        assert len(session.trajectories(0.0)) == 1
        assert (await engine.stats())["running"] == 0


async def test_close_ends_calls_that_run() -> None:
    engine = ScriptedEngine("llama3", says_it)
    engine.faults.hang = lambda request: True
    async with served(engine) as session, aiohttp.ClientSession() as http:
        call = asyncio.create_task(Agent(session, http).ask(stream=True))
        async with asyncio.timeout(30):
            while not (await engine.stats())["running"]:  # noqa: ASYNC110 - the contract has no event for it
                await asyncio.sleep(0.002)
        with pytest.raises(AgentError, match="still open"):
            session.trajectories(0.0)
        await session.close()
        assert (await call)[0] == 401
        assert session.trajectories(0.0) == []


async def test_agent_that_goes_away_ends_its_call() -> None:
    engine = ScriptedEngine("llama3", says_it)
    engine.faults.hang = lambda request: True
    async with served(engine) as session, aiohttp.ClientSession() as http:
        call = asyncio.create_task(Agent(session, http).ask())
        async with asyncio.timeout(30):
            while not (await engine.stats())["running"]:  # noqa: ASYNC110
                await asyncio.sleep(0.002)
            call.cancel()
            while (await engine.stats())["running"]:  # noqa: ASYNC110
                await asyncio.sleep(0.002)


async def test_calls_beyond_each_limit_are_refused_and_the_others_stay() -> None:
    engine = ScriptedEngine("llama3", says_it)
    config = EndpointConfig(max_calls=5, max_concurrent=3)
    async with served(engine, config) as session, aiohttp.ClientSession() as http:
        agent = Agent(session, http)
        status, text = await agent.ask(n=4)
        assert status == 429
        assert "endpoint.max_concurrent" in sentence(text)
        assert [(await agent.ask())[0] for _ in range(7)] == [200] * 5 + [429] * 2
        assert session.refused == 3
        await session.close()
        assert len(session.trajectories(0.0)) == 5
    engine = ScriptedEngine("llama3", says_it)
    async with served(engine, EndpointConfig(max_tokens=100)) as session, aiohttp.ClientSession() as http:
        statuses = [(await Agent(session, http).ask())[0] for _ in range(9)]
        assert statuses == sorted(statuses)
        assert {200, 429} == set(statuses)


@pytest.mark.nightly
async def test_flood_of_10_000_calls_is_bounded_and_another_session_is_served() -> None:
    engine = ScriptedEngine("llama3", says_it)
    endpoint = HttpRolloutEndpoint(engine.tokenizer, EndpointConfig(max_calls=64))
    flood, other = [await endpoint.open(engine, GenerationConfig()) for _ in range(2)]
    async with aiohttp.ClientSession() as http:
        ends = asyncio.Semaphore(64)

        async def one() -> int:
            async with ends:
                return (await Agent(flood, http).ask())[0]

        statuses = [
            task.result() for task in (await asyncio.wait([asyncio.create_task(one()) for _ in range(10_000)]))[0]
        ]
        assert (await Agent(other, http).ask())[0] == 200
    assert sorted(set(statuses)) == [200, 429]
    assert statuses.count(200) <= 64
    await endpoint.destroy()


async def test_engine_that_fails_is_the_sessions_failure_and_no_client_tries_again() -> None:
    engine = ScriptedEngine("llama3", says_it)
    engine.faults.generate = lambda request: InferenceError("planted failure")
    async with served(engine) as session, aiohttp.ClientSession() as http:
        for stream in (False, True):
            status, text = await Agent(session, http).ask(stream=stream, n=2)
            assert status == 500
            assert sentence(text) == "planted failure"
        assert isinstance(session.failure, InferenceError)
        assert session.refused == 0
        headers = {"x-api-key": session.api_key}
        async with http.post(session.url + "/v1/messages", json={"messages": MESSAGES}, headers=headers) as response:
            assert json.loads(await response.text())["error"] == {"type": "api_error", "message": "planted failure"}
            assert response.headers["x-should-retry"] == "false"


async def test_engine_that_raises_what_is_no_error_of_ours_is_the_sessions_failure_too() -> None:
    engine = ScriptedEngine("llama3", says_it)
    engine.faults.generate = lambda request: KeyError("planted")
    async with served(engine) as session, aiohttp.ClientSession() as http:
        status, text = await Agent(session, http).ask()
        assert status == 500
        assert sentence(text) == "the engine raised KeyError: 'planted'"
        assert isinstance(session.failure, InferenceError)


async def test_stream_of_an_answer_that_takes_long_shows_that_it_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    from rl_workflows.agents.endpoint import server

    monkeypatch.setattr(server, "IDLE_SECONDS", 0.02)
    engine = ScriptedEngine("llama3", says_it, latency=0.2)
    async with served(engine) as session, aiohttp.ClientSession() as http:
        status, text = await Agent(session, http).ask(stream=True)
        assert status == 200
        assert text.startswith(": the answer is not there yet\n\n")
        assert text.endswith("data: [DONE]\n\n")
        engine.faults.generate = lambda request: InferenceError("planted failure")
        status, text = await Agent(session, http).ask(stream=True)
        assert status == 200
        assert "event: error\n" in text
        assert "planted failure" in text


async def test_sessions_beyond_their_number_and_addresses_in_use_are_refused() -> None:
    engine = ScriptedEngine("llama3", says_it)
    endpoint = HttpRolloutEndpoint(engine.tokenizer, EndpointConfig(max_sessions=1))
    first = await endpoint.open(engine, GenerationConfig())
    with pytest.raises(AgentError, match=r"endpoint.max_sessions"):
        await endpoint.open(engine, GenerationConfig())
    await first.close()
    await endpoint.open(engine, GenerationConfig())
    with pytest.raises(ConfigError, match=r"rollout\.endpoint\.port"):
        HttpRolloutEndpoint(engine.tokenizer, EndpointConfig(port=int(endpoint.url.rpartition(":")[2])))
    await endpoint.destroy()


async def test_endpoint_on_all_addresses_tells_one_that_reaches_it() -> None:
    engine = ScriptedEngine("llama3", says_it)
    async with served(engine, EndpointConfig(host="0.0.0.0")) as session, aiohttp.ClientSession() as http:
        assert "0.0.0.0" not in session.base_url
        assert (await Agent(session, http).ask())[0] == 200
    async with served(engine, EndpointConfig(host="127.0.0.1", url="http://seen:99/")) as session:
        assert session.base_url == "http://seen:99/v1"


async def test_tools_of_a_model_whose_calls_cannot_be_read_are_refused() -> None:
    engine = ScriptedEngine("llama3", says_it)
    engine.tokenizer = make_tiny_tokenizer()
    async with served(engine) as session, aiohttp.ClientSession() as http:
        status, text = await Agent(session, http).ask(tools=BODIES["/v1/chat/completions"]["tools"])
        assert status == 400
        assert "endpoint.tool_calls" in sentence(text)
    async with served(engine, EndpointConfig(tool_calls="hermes")) as session, aiohttp.ClientSession() as http:
        status, text = await Agent(session, http).ask(tools=BODIES["/v1/chat/completions"]["tools"])
        assert status == 400
        assert "chat template" in sentence(text)
