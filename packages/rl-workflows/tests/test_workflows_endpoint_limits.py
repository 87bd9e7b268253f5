"""Limits of one session that protect the others: oversized prompts, threads for prompts, and stored messages."""

from __future__ import annotations

import asyncio
import gc
import json
import threading
from typing import Any

import aiohttp
import pytest
from agent_model import ScriptedEngine, served
from test_workflows_endpoint import MESSAGES, Agent, error_message, fixed_message

from rl_contracts.config import GenerationConfig
from rl_contracts.testing.waiting import until
from rl_workflows.agents.endpoint import session as session_module
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


async def test_endpoint_oversized_request_is_rejected_unrendered(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = ScriptedEngine("llama3", fixed_message)
    async with served(engine, max_length=100) as session, aiohttp.ClientSession() as http:
        called: list[str] = []
        for method in ("text", "render", "encode", "renders_tools"):
            monkeypatch.setattr(session.model.renderer, method, lambda *_, method=method, **__: called.append(method))
        for method in ("encode", "apply_chat_template", "__call__"):
            monkeypatch.setattr(session.model.tokenizer, method, lambda *_, method=method, **__: called.append(method))
        for name, (path, body) in OVERSIZED.items():
            status, text = await Agent(session, http).post(path, body)
            assert (status, called) == (400, []), name
            if "messages" not in path:
                assert json.loads(text)["error"]["code"] == "context_length_exceeded", name


async def test_endpoint_oversized_reasoning_is_not_tokenized(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = ScriptedEngine("qwen3", fixed_message)
    body = {"messages": [*MESSAGES, {"role": "assistant", "content": "no", "reasoning_content": LONG}]}
    async with served(engine, max_length=100) as session, aiohttp.ClientSession() as http:
        monkeypatch.setattr(session.model.tokenizer, "encode", lambda *_, **__: pytest.fail("tokenized"))
        status, text = await Agent(session, http).post("/v1/chat/completions", body)
        assert (status, json.loads(text)["error"]["code"]) == (400, "context_length_exceeded")


async def test_endpoint_reasoning_dropped_by_template_is_accepted() -> None:
    engine = ScriptedEngine("qwen3", fixed_message)
    message = {"role": "assistant", "content": "no", "reasoning_content": LONG}
    async with served(engine, max_length=100) as session, aiohttp.ClientSession() as http:
        assert (await Agent(session, http).chat(messages=[*MESSAGES, message, *MESSAGES]))[0] == 200


async def test_endpoint_slow_prompts_do_not_delay_other_sessions() -> None:
    engine, release = ScriptedEngine("llama3", fixed_message), threading.Event()
    endpoint = HttpRolloutEndpoint(engine.tokenizer)
    slow, other = [await endpoint.open(engine, GenerationConfig()) for _ in range(2)]
    prompt, started = slow.prompt, threading.Event()

    def blocked(call: Any) -> Any:
        started.set()
        release.wait(30)
        return prompt(call)

    slow.prompt = blocked  # type: ignore[method-assign]
    async with aiohttp.ClientSession() as http:
        calls = [asyncio.create_task(Agent(slow, http).chat()) for _ in range(3)]
        await asyncio.to_thread(started.wait, 30)
        for path in ("/v1/chat/completions", "/v1/messages/count_tokens"):
            assert (await Agent(other, http).post(path, {"messages": MESSAGES}))[0] == 200
        assert not any(call.done() for call in calls)
        release.set()
        assert [(await call)[0] for call in calls] == [200] * 3
    await endpoint.destroy()


async def test_endpoint_rejection_after_disconnect_logs_nothing(caplog: pytest.LogCaptureFixture) -> None:
    gc.collect()  # otherwise objects of earlier tests may log during this one
    caplog.clear()
    engine, release, started = ScriptedEngine("llama3", fixed_message), threading.Event(), threading.Event()
    async with served(engine) as session, aiohttp.ClientSession() as http:

        def rejected(call: Any) -> Any:
            started.set()
            release.wait(30)
            raise CallError("rejected")

        session.prompt = rejected  # type: ignore[method-assign]
        call = asyncio.create_task(Agent(session, http).chat())
        await asyncio.to_thread(started.wait, 30)
        call.cancel()
        await until(lambda: not session.open_calls, 30)
        release.set()
        await until(lambda: not session.preparing.locked(), 30)
        assert (await Agent(session, http).chat())[0] == 400
    gc.collect()
    assert caplog.records == []


async def _count_accepted(session: Session, http: aiohttp.ClientSession, bodies: list[dict[str, Any]]) -> int:
    """Return the number of calls before the first that exceeds the memory limit."""
    for number, body in enumerate(bodies):
        status, text = await Agent(session, http).post("/v1/responses", body)
        if status == 429:
            assert "bytes of messages and tools" in error_message(text)
            return number
        assert status == 200, text
    return len(bodies)


@pytest.mark.parametrize("store", [True, False])
async def test_session_memory_of_dropped_reasoning_is_bounded(store: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_module, "MAX_MEMORY", 100_000)
    engine = ScriptedEngine("qwen3", fixed_message)
    item = {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "x" * 20_000}]}
    body = {"input": [{"role": "user", "content": "a"}, item, {"role": "user", "content": "b"}]}
    async with served(engine) as session, aiohttp.ClientSession() as http:
        assert await _count_accepted(session, http, [{**body, "store": store}] * 9) == 4
        assert (await Agent(session, http).post("/v1/responses", {"input": "a"}))[0] == 200


async def test_session_memory_counts_repeated_messages_and_tools_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_module, "MAX_MEMORY", 50_000)
    engine = ScriptedEngine("llama3", fixed_message)
    tool = {"type": "function", "name": "add", "description": "y" * 5_000, "parameters": {}}
    history: list[dict[str, Any]] = [{"role": "user", "content": "x" * 20_000}]
    bodies = []
    for _ in range(6):
        bodies.append({"input": list(history), "tools": [tool], "store": False})
        history += [{"role": "assistant", "content": "it"}, {"role": "user", "content": "and?"}]
    async with served(engine) as session, aiohttp.ClientSession() as http:
        assert await _count_accepted(session, http, bodies) == 6
