"""Sessions and limits of the endpoint: keys, rewards, deadlines, many calls, engine failures and invalid requests."""

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
from rl_workflows.agents.endpoint import server
from rl_workflows.agents.endpoint import session as session_module
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


def fixed_message(prompt: str) -> dict[str, Any]:
    """Return the same message for every prompt."""
    return {"content": "it"}


class Agent:
    """Client of a session that sends plain HTTP requests."""

    def __init__(self, session: Session, http: aiohttp.ClientSession) -> None:
        self.session, self.http = session, http

    async def post(self, path: str, body: Any, key: str | None = None, **headers: str) -> tuple[int, str]:
        """Return the status and the text of the response."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        headers = {
            "Authorization": f"Bearer {key or self.session.api_key}",
            "Content-Type": "application/json",
        } | headers
        async with self.http.post(self.session.url + path, data=data, headers=headers) as response:
            return response.status, await response.text()

    async def chat(self, **fields: Any) -> tuple[int, str]:
        return await self.post("/v1/chat/completions", {"messages": MESSAGES, **fields})


def error_message(text: str) -> str:
    """Return the message of an error in OpenAI's or Anthropic's format."""
    message = json.loads(text)["error"]["message"]
    assert "Traceback" not in message
    return str(message)


async def test_endpoint_every_route_returns_completion() -> None:
    engine = ScriptedEngine("llama3", fixed_message)
    async with served(engine) as session, aiohttp.ClientSession() as http:
        agent = Agent(session, http)
        for path, body in BODIES.items():
            status, text = await agent.post(path, body)
            assert status == 200, text
            assert "it" in text
        assert len(engine.responses) == 5


async def test_every_route_without_valid_key_returns_401() -> None:
    engine = ScriptedEngine("llama3", fixed_message)
    paths = [*ROUTES, "/v1/messages/count_tokens", "/v1/rewards"]
    async with served(engine) as session, aiohttp.ClientSession() as http:
        agent = Agent(session, http)
        for path in paths:
            async with http.post(session.url + path, json={}) as response:
                assert response.status == 401
                assert "x-api-key" in error_message(await response.text())
            assert (await agent.post(path, {}, key="rl-wrong"))[0] == 401
        for headers in ({}, {"Authorization": "Bearer rl-wrong"}):
            async with http.get(session.url + "/v1/models", headers=headers) as response:
                assert response.status == 401
        await session.close()
        await session.close()
        for path in paths:
            status, text = await agent.post(path, {})
            assert status == 401
            assert "no open session" in error_message(text)
        assert not engine.responses


async def test_sessions_are_isolated_from_each_other() -> None:
    engine = ScriptedEngine("llama3", fixed_message)
    endpoint = HttpRolloutEndpoint(engine.tokenizer)
    first, other = [await endpoint.open(engine, GenerationConfig()) for _ in range(2)]
    async with aiohttp.ClientSession() as http:
        await Agent(first, http).chat()
        await first.close()
        assert (await Agent(other, http).chat(n=2))[0] == 200
    await other.close()
    assert [len(session.trajectories(0.0)) for session in (first, other)] == [1, 2]
    await endpoint.destroy()
    await endpoint.destroy()


async def test_rewards_reported_twice_keep_last_value() -> None:
    engine = ScriptedEngine("llama3", fixed_message)
    async with served(engine, EndpointConfig(credit="turn")) as session, aiohttp.ClientSession() as http:
        agent = Agent(session, http)
        assert session.report.turns is None
        ids = [json.loads((await agent.chat(n=2))[1])["id"]]
        for path in ("/v1/completions", "/v1/responses", "/v1/messages"):
            text = (await agent.post(path, {**BODIES[path], "stream": False}))[1]
            ids.append(json.loads(text)["id"])
        for body in (
            {"call_id": ids[0], "index": 1, "reward": 9},
            {"call_id": ids[0], "index": 1, "reward": 0.25},
            {"call_id": ids[1], "reward": 0.5},
            {"call_id": ids[3], "reward": -1, "metrics": {"tries": 2}},
            {"reward": 7},
            {"reward": 3, "metrics": {"tries": 3}},
            {"metrics": {"depth": 1}},
        ):
            status, text = await agent.post("/v1/rewards", body)
            assert status == 200, text
        await session.close()
        assert session.report == EpisodeReport(3.0, -0.25, {"tries": 3.0, "depth": 1.0})
        trajectories = session.trajectories(3.0)
        assert [trajectory.reward for trajectory in trajectories] == [3.0] * 5
        sums = [float(each.token_rewards.sum()) for each in trajectories if each.token_rewards is not None]
        assert sums == [0, 0.25, 0.5, 0, -1]


async def test_rewards_without_value_or_completion_are_rejected() -> None:
    engine = ScriptedEngine("llama3", fixed_message)
    async with served(engine) as session, aiohttp.ClientSession() as http:
        agent = Agent(session, http)
        call_id = json.loads((await agent.chat())[1])["id"]
        for body, status, message in (
            ({}, 400, "`reward`"),
            ({"call_id": call_id}, 400, "`reward`"),
            ({"reward": "good"}, 400, "reward: expected"),
            ({"reward": 1e9}, 400, "reward: expected"),
            (b'{"reward": NaN}', 400, "as JSON"),
            ({"reward": 1, "call_id": "chatcmpl-1"}, 404, "call_id: expected"),
            ({"reward": 1, "call_id": call_id, "index": 1}, 400, "index: expected"),
            ({"reward": 1, "calls": 1}, 400, "unknown parameter"),
            ({"metrics": {"a b": 1}}, 400, "metrics"),
            ({"metrics": {str(i): i for i in range(65)}}, 400, "at most 64 names"),
        ):
            actual_status, text = await agent.post("/v1/rewards", body)
            assert (actual_status, message in error_message(text)) == (status, True), text
        assert session.report == EpisodeReport()
        assert (await agent.post("/v1/rewards", {"reward": 1}, key="rl-other"))[0] == 401
        await session.close()
        assert (await agent.post("/v1/rewards", {"reward": 1}))[0] == 401


async def test_body_large_malformed_or_compressed_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "MAX_BODY_BYTES", 4096)
    engine = ScriptedEngine("llama3", fixed_message)
    async with served(engine) as session, aiohttp.ClientSession() as http:
        agent = Agent(session, http)
        for body, status, message in (
            (b"{", 400, "as JSON"),
            (b"\xff", 400, "as JSON"),
            (b"[]", 400, "expected object"),
            (b"[" * 4000, 400, ""),
            (json.dumps({"messages": MESSAGES, "mesages": 1}).encode(), 400, "did you mean 'messages'"),
            (b" " * 5000, 413, ""),
        ):
            actual_status, text = await agent.post("/v1/chat/completions", body)
            assert (actual_status, message in error_message(text)) == (status, True), text
        actual_status, text = await agent.post("/v1/chat/completions", b"x", **{"Content-Encoding": "gzip"})
        assert actual_status == 415
        assert (await agent.post("/v1/unknown", {}))[0] == 404
        actual_status, text = await agent.post("/chat/completions", {})
        assert (actual_status, session.base_url in error_message(text)) == (404, True)
        assert (await agent.chat())[0] == 200


@pytest.mark.parametrize(
    ("text", "handling", "status"),
    [(rb"half \ud83d", "reject", 400), (rb"half \ud83d", "replace", 200), (b"half \xff", "replace", 200)],
)
async def test_body_not_utf8_is_rejected_or_replaced(text: bytes, handling: str, status: int) -> None:
    prompts: list[str] = []
    engine = ScriptedEngine("llama3", lambda prompt: prompts.append(prompt) or {"content": "it"})
    body = b'{"messages": [{"role": "user", "content": "' + text + b'"}]}'
    async with served(engine, invalid_text=handling) as session, aiohttp.ClientSession() as http:
        assert (await Agent(session, http).post("/v1/chat/completions", body))[0] == status

    assert ["half \ufffd" in prompt for prompt in prompts] == [True] * (status == 200)


async def test_body_of_100_mb_is_rejected_without_buffering() -> None:
    engine = ScriptedEngine("llama3", fixed_message)
    async with served(engine) as session, aiohttp.ClientSession() as http:
        assert (await Agent(session, http).chat())[0] == 200
        before = psutil.Process().memory_info().rss
        reader, writer = await _send_head(session, 100 * 10**6)
        response_task, sent = asyncio.create_task(reader.readuntil(b"}}")), 0
        while not response_task.done() and sent < 100:
            with suppress(ConnectionError):
                writer.write(b" " * 10**6)
                await writer.drain()
            sent += 1
        response = (await asyncio.wait_for(response_task, 30)).decode()
        writer.close()
        assert response.startswith("HTTP/1.1 413")
        assert str(server.MAX_BODY_BYTES) in response
        assert psutil.Process().memory_info().rss - before < 64 << 20
        assert (await Agent(session, http).chat())[0] == 200


async def test_body_arriving_after_close_generates_nothing() -> None:
    engine = ScriptedEngine("llama3", fixed_message)
    async with served(engine) as session:
        body = json.dumps({"messages": MESSAGES}).encode()
        reader, writer = await _send_head(session, len(body))
        async with asyncio.timeout(30):
            while not session.open_calls:  # noqa: ASYNC110
                await asyncio.sleep(0.002)
        await session.close()
        writer.write(body)
        response = (await asyncio.wait_for(reader.readuntil(b"}}"), 30)).decode()
        writer.close()
        assert response.startswith("HTTP/1.1 401")
        assert "closed" in response
        assert engine.responses == []


async def test_calls_with_unsent_bodies_count_as_concurrent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_module, "MAX_CONCURRENT", 3)
    engine = ScriptedEngine("llama3", fixed_message)
    async with served(engine) as session, aiohttp.ClientSession() as http:
        connections = [await _send_head(session, 10) for _ in range(3)]
        async with asyncio.timeout(30):
            while session.open_calls < 3:  # noqa: ASYNC110
                await asyncio.sleep(0.002)
        status, text = await Agent(session, http).chat()
        assert status == 429
        assert "at most 3 concurrent completions" in error_message(text)
        for _, writer in connections:
            writer.close()
        async with asyncio.timeout(30):
            while (await Agent(session, http).chat())[0] != 200:  # noqa: ASYNC110
                await asyncio.sleep(0.002)


async def _send_head(session: Session, length: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Open a connection and send only the head of a call."""
    url = urlsplit(session.url)
    reader, writer = await asyncio.open_connection(url.hostname, url.port)
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: {url.netloc}\r\ncontent-type: application/json\r\n"
    writer.write(f"{head}authorization: Bearer {session.api_key}\r\ncontent-length: {length}\r\n\r\n".encode())
    await writer.drain()
    return reader, writer


@pytest.mark.slow
async def test_session_at_deadline_closes_and_keeps_completions() -> None:
    engine = ScriptedEngine("llama3", fixed_message)
    async with served(engine, EndpointConfig(session_seconds=2)) as session, aiohttp.ClientSession() as http:
        agent = Agent(session, http)
        assert (await agent.chat())[0] == 200
        engine.faults.hang = lambda request: True
        status, text = await agent.chat()
        assert status == 401
        assert "closed" in error_message(text)
        assert session.expired
        assert (await agent.chat())[0] == 401
        assert len(session.trajectories(0.0)) == 1
        assert (await engine.stats())["running"] == 0


async def test_close_cancels_running_calls() -> None:
    engine = ScriptedEngine("llama3", fixed_message)
    engine.faults.hang = lambda request: True
    async with served(engine) as session, aiohttp.ClientSession() as http:
        call = asyncio.create_task(Agent(session, http).chat(stream=True))
        async with asyncio.timeout(30):
            while not (await engine.stats())["running"]:  # noqa: ASYNC110 - the contract has no event for it
                await asyncio.sleep(0.002)
        with pytest.raises(AgentError, match="still open"):
            session.trajectories(0.0)
        await session.close()
        assert (await call)[0] == 401
        assert session.trajectories(0.0) == []


async def test_agent_disconnect_cancels_its_call() -> None:
    engine = ScriptedEngine("llama3", fixed_message)
    engine.faults.hang = lambda request: True
    async with served(engine) as session, aiohttp.ClientSession() as http:
        call = asyncio.create_task(Agent(session, http).chat())
        async with asyncio.timeout(30):
            while not (await engine.stats())["running"]:  # noqa: ASYNC110
                await asyncio.sleep(0.002)
            call.cancel()
            while (await engine.stats())["running"]:  # noqa: ASYNC110
                await asyncio.sleep(0.002)


async def test_calls_beyond_limit_return_429_and_others_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_module, "MAX_CONCURRENT", 3)
    engine = ScriptedEngine("llama3", fixed_message)
    async with served(engine, EndpointConfig(max_calls=5)) as session, aiohttp.ClientSession() as http:
        agent = Agent(session, http)
        status, text = await agent.chat(n=4)
        assert status == 429
        assert "at most 3 concurrent completions" in error_message(text)
        assert [(await agent.chat())[0] for _ in range(7)] == [200] * 5 + [429] * 2
        assert session.rejected_calls == 3
        await session.close()
        assert len(session.trajectories(0.0)) == 5
    monkeypatch.setattr(session_module, "MAX_TOKENS", 100)
    engine = ScriptedEngine("llama3", fixed_message)
    async with served(engine) as session, aiohttp.ClientSession() as http:
        statuses = [(await Agent(session, http).chat())[0] for _ in range(9)]
        assert statuses == sorted(statuses)
        assert {200, 429} == set(statuses)


@pytest.mark.nightly
async def test_flood_of_10_000_calls_leaves_other_session_served() -> None:
    engine = ScriptedEngine("llama3", fixed_message)
    endpoint = HttpRolloutEndpoint(engine.tokenizer, EndpointConfig(max_calls=64))
    flood, other = [await endpoint.open(engine, GenerationConfig()) for _ in range(2)]
    async with aiohttp.ClientSession() as http:
        semaphore = asyncio.Semaphore(64)

        async def call_flooded_session() -> int:
            async with semaphore:
                return (await Agent(flood, http).chat())[0]

        statuses = [
            task.result()
            for task in (await asyncio.wait([asyncio.create_task(call_flooded_session()) for _ in range(10_000)]))[0]
        ]
        assert (await Agent(other, http).chat())[0] == 200
    assert sorted(set(statuses)) == [200, 429]
    assert statuses.count(200) <= 64
    await endpoint.destroy()


async def test_engine_error_is_session_failure_and_not_retried() -> None:
    engine = ScriptedEngine("llama3", fixed_message)
    engine.faults.generate = lambda request: InferenceError("injected failure")
    async with served(engine) as session, aiohttp.ClientSession() as http:
        for stream in (False, True):
            status, text = await Agent(session, http).chat(stream=stream, n=2)
            assert status == 500
            assert error_message(text) == "injected failure"
        assert isinstance(session.failure, InferenceError)
        assert session.rejected_calls == 0
        headers = {"x-api-key": session.api_key}
        async with http.post(session.url + "/v1/messages", json={"messages": MESSAGES}, headers=headers) as response:
            assert json.loads(await response.text())["error"] == {"type": "api_error", "message": "injected failure"}
            assert response.headers["x-should-retry"] == "false"


async def test_engine_foreign_exception_is_session_failure() -> None:
    engine = ScriptedEngine("llama3", fixed_message)
    engine.faults.generate = lambda request: KeyError("injected")
    async with served(engine) as session, aiohttp.ClientSession() as http:
        status, text = await Agent(session, http).chat()
        assert status == 500
        assert error_message(text) == "the engine raised KeyError: 'injected'"
        assert isinstance(session.failure, InferenceError)


async def test_stream_of_slow_completion_sends_comments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "IDLE_SECONDS", 0.02)
    engine = ScriptedEngine("llama3", fixed_message, latency=0.2)
    async with served(engine) as session, aiohttp.ClientSession() as http:
        status, text = await Agent(session, http).chat(stream=True)
        assert status == 200
        assert text.startswith(": the completion is not finished yet\n\n")
        assert text.endswith("data: [DONE]\n\n")
        engine.faults.generate = lambda request: InferenceError("injected failure")
        status, text = await Agent(session, http).chat(stream=True)
        assert status == 200
        assert "event: error\n" in text
        assert "injected failure" in text


async def test_endpoint_extra_session_and_used_port_are_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "MAX_SESSIONS", 1)
    engine = ScriptedEngine("llama3", fixed_message)
    endpoint = HttpRolloutEndpoint(engine.tokenizer)
    first = await endpoint.open(engine, GenerationConfig())
    with pytest.raises(AgentError, match=r"1 open sessions"):
        await endpoint.open(engine, GenerationConfig())
    await first.close()
    await endpoint.open(engine, GenerationConfig())
    with pytest.raises(ConfigError, match=r"rollout\.endpoint\.port"):
        HttpRolloutEndpoint(engine.tokenizer, EndpointConfig(port=int(endpoint.url.rpartition(":")[2])))
    await endpoint.destroy()


async def test_endpoint_on_all_addresses_has_reachable_url() -> None:
    engine = ScriptedEngine("llama3", fixed_message)
    async with served(engine, EndpointConfig(host="0.0.0.0")) as session, aiohttp.ClientSession() as http:
        assert "0.0.0.0" not in session.base_url
        assert (await Agent(session, http).chat())[0] == 200
    async with served(engine, EndpointConfig(host="127.0.0.1", url="http://seen:99/")) as session:
        assert session.base_url == "http://seen:99/v1"


async def test_tools_of_unknown_format_or_not_rendered_are_rejected() -> None:
    engine = ScriptedEngine("llama3", fixed_message)
    engine.processor = make_tiny_tokenizer()
    async with served(engine) as session, aiohttp.ClientSession() as http:
        status, text = await Agent(session, http).chat(tools=BODIES["/v1/chat/completions"]["tools"])
        assert status == 400
        assert "endpoint.tool_calls" in error_message(text)
    async with served(engine, EndpointConfig(tool_calls="hermes")) as session, aiohttp.ClientSession() as http:
        status, text = await Agent(session, http).chat(tools=BODIES["/v1/chat/completions"]["tools"])
        assert status == 400
        assert "chat template" in error_message(text)
