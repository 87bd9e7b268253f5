"""What one session may cost the others: prompts that cannot fit, threads that prepare prompts, and kept messages."""

from __future__ import annotations

import asyncio
import gc
import json
import threading
from typing import Any

import aiohttp
import pytest
from agent_model import ScriptedEngine, served
from test_workflows_endpoint import MESSAGES, Agent, says_it, sentence

from rl_contracts.config import GenerationConfig
from rl_contracts.testing.waiting import until
from rl_workflows.agents.endpoint.config import EndpointConfig
from rl_workflows.agents.endpoint.server import HttpRolloutEndpoint
from rl_workflows.agents.endpoint.session import RENDERED_CHARACTERS, CallError, Session

LONG = "x" * (RENDERED_CHARACTERS + 1)
TOOL = {"type": "function", "function": {"name": "add", "parameters": {}}}
OVERSIZED: dict[str, tuple[str, dict[str, Any]]] = {
    "text": ("/v1/chat/completions", {"messages": [{"role": "user", "content": LONG}]}),
    "messages": ("/v1/chat/completions", {"messages": MESSAGES * 101}),
    "tools": ("/v1/chat/completions", {"messages": MESSAGES, "tools": [TOOL] * 101}),
    "schema": (
        "/v1/chat/completions",
        {"messages": MESSAGES, "tools": [{"type": "function", "function": {"name": "a", "parameters": {LONG: 1}}}]},
    ),
    "ids": ("/v1/completions", {"prompt": [5] * 101}),
    "completion": ("/v1/completions", {"prompt": LONG}),
    "instructions": ("/v1/responses", {"input": "what?", "instructions": LONG}),
    "count": ("/v1/messages/count_tokens", {"messages": [{"role": "user", "content": LONG}]}),
}


@pytest.mark.parametrize("name", OVERSIZED)
async def test_endpoint_oversized_request_is_rejected_unrendered(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = ScriptedEngine("llama3", says_it)
    async with served(engine, max_length=100) as session, aiohttp.ClientSession() as http:
        used: list[str] = []
        for method in ("text", "render", "encode", "renders_tools"):
            monkeypatch.setattr(session.model.renderer, method, lambda *_, method=method, **__: used.append(method))
        for method in ("encode", "apply_chat_template", "__call__"):
            monkeypatch.setattr(session.model.tokenizer, method, lambda *_, method=method, **__: used.append(method))
        path, body = OVERSIZED[name]
        status, text = await Agent(session, http).post(path, body)
        assert (status, used) == (400, [])
        if "messages" not in path:
            assert json.loads(text)["error"]["code"] == "context_length_exceeded"


async def test_endpoint_oversized_reasoning_is_not_tokenized(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = ScriptedEngine("qwen3", says_it)
    body = {"messages": [*MESSAGES, {"role": "assistant", "content": "no", "reasoning_content": LONG}]}
    async with served(engine, max_length=100) as session, aiohttp.ClientSession() as http:
        monkeypatch.setattr(session.model.tokenizer, "encode", lambda *_, **__: pytest.fail("tokenized"))
        status, text = await Agent(session, http).post("/v1/chat/completions", body)
        assert (status, json.loads(text)["error"]["code"]) == (400, "context_length_exceeded")


async def test_endpoint_reasoning_that_the_template_drops_is_accepted() -> None:
    engine = ScriptedEngine("qwen3", says_it)
    message = {"role": "assistant", "content": "no", "reasoning_content": LONG}
    async with served(engine, max_length=100) as session, aiohttp.ClientSession() as http:
        assert (await Agent(session, http).ask(messages=[*MESSAGES, message, *MESSAGES]))[0] == 200


async def test_endpoint_slow_prompts_of_a_session_do_not_delay_others() -> None:
    engine, go = ScriptedEngine("llama3", says_it), threading.Event()
    endpoint = HttpRolloutEndpoint(engine.tokenizer)
    slow, other = [await endpoint.open(engine, GenerationConfig()) for _ in range(2)]
    prompt, started = slow.prompt, threading.Event()

    def blocked(call: Any) -> Any:
        started.set()
        go.wait(30)
        return prompt(call)

    slow.prompt = blocked  # type: ignore[method-assign]
    async with aiohttp.ClientSession() as http:
        calls = [asyncio.create_task(Agent(slow, http).ask()) for _ in range(3)]
        await asyncio.to_thread(started.wait, 30)
        for path in ("/v1/chat/completions", "/v1/messages/count_tokens"):
            assert (await Agent(other, http).post(path, {"messages": MESSAGES}))[0] == 200
        assert not any(call.done() for call in calls)
        go.set()
        assert [(await call)[0] for call in calls] == [200] * 3
    await endpoint.destroy()


async def test_endpoint_rejection_without_its_agent_leaves_no_traceback(caplog: pytest.LogCaptureFixture) -> None:
    engine, go, started = ScriptedEngine("llama3", says_it), threading.Event(), threading.Event()
    async with served(engine) as session, aiohttp.ClientSession() as http:

        def rejected(call: Any) -> Any:
            started.set()
            go.wait(30)
            raise CallError("rejected")

        session.prompt = rejected  # type: ignore[method-assign]
        call = asyncio.create_task(Agent(session, http).ask())
        await asyncio.to_thread(started.wait, 30)
        call.cancel()
        await until(lambda: not session.calling, 30)
        go.set()
        await until(lambda: not session.preparing.locked(), 30)
        assert (await Agent(session, http).ask())[0] == 400
    gc.collect()
    assert caplog.records == []


async def _accepted(session: Session, http: aiohttp.ClientSession, bodies: list[dict[str, Any]]) -> int:
    """The number of calls before the first that is rejected for its memory."""
    for number, body in enumerate(bodies):
        status, text = await Agent(session, http).post("/v1/responses", body)
        if status == 429:
            assert "endpoint.max_memory" in sentence(text)
            return number
        assert status == 200, text
    return len(bodies)


@pytest.mark.parametrize("store", [True, False])
async def test_session_memory_of_dropped_reasoning_is_bounded(store: bool) -> None:
    engine = ScriptedEngine("qwen3", says_it)
    item = {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "x" * 20_000}]}
    body = {"input": [{"role": "user", "content": "a"}, item, {"role": "user", "content": "b"}]}
    async with served(engine, EndpointConfig(max_memory=100_000)) as session, aiohttp.ClientSession() as http:
        assert await _accepted(session, http, [{**body, "store": store}] * 9) == 4
        assert (await Agent(session, http).post("/v1/responses", {"input": "a"}))[0] == 200


async def test_session_memory_counts_repeated_messages_and_tools_once() -> None:
    engine = ScriptedEngine("llama3", says_it)
    tool = {"type": "function", "name": "add", "description": "y" * 5_000, "parameters": {}}
    history: list[dict[str, Any]] = [{"role": "user", "content": "x" * 20_000}]
    bodies = []
    for _ in range(6):
        bodies.append({"input": list(history), "tools": [tool], "store": False})
        history += [{"role": "assistant", "content": "it"}, {"role": "user", "content": "and?"}]
    async with served(engine, EndpointConfig(max_memory=50_000)) as session, aiohttp.ClientSession() as http:
        assert await _accepted(session, http, bodies) == 6
