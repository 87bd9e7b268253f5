"""Typical requests of agents with the official `anthropic` client."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anthropic
import pytest
from agent_model import ScriptedEngine, served

from rl_workflows.agents.endpoint.session import Session

ADD: Any = {
    "name": "add",
    "description": "adds",
    "input_schema": {"type": "object", "properties": {"a": {"type": "number"}, "b": {"type": "number"}}},
}
QUESTION: Any = [{"role": "user", "content": "what is it?"}]
CALLS = [{"name": "add", "arguments": {"a": 1, "b": 2}}, {"name": "add", "arguments": {"a": 3, "b": 4}}]


def calls_then_text(prompt: str) -> dict[str, Any]:
    """Return two tool calls, or text if the prompt contains their results."""
    if "result" not in prompt:
        return {"calls": CALLS, "reasoning": "hm"}
    return {"content": "it is 12"}


@asynccontextmanager
async def connect(
    engine: ScriptedEngine, root: bool = False
) -> AsyncIterator[tuple[Session, anthropic.AsyncAnthropic]]:
    """Yield a session and a client for it. With `root` the base URL of the client has no `/v1`."""
    async with served(engine) as session:
        url = session.base_url.removesuffix("/v1") if root else session.base_url
        async with anthropic.AsyncAnthropic(base_url=url, api_key=session.api_key) as agent:
            yield session, agent


async def test_messages_response_has_text_usage_and_stop_reason() -> None:
    engine = ScriptedEngine("gemma3", lambda prompt: {"content": "it is é 12"})
    async with connect(engine, root=True) as (_, agent):
        blocks: Any = [{"type": "text", "text": "be brief", "cache_control": {"type": "ephemeral"}}]
        message = await agent.messages.create(model="m", max_tokens=100, system=blocks, messages=QUESTION)
        counted = await agent.messages.count_tokens(model="m", system="be brief", messages=QUESTION)

        assert [block.model_dump(exclude_none=True) for block in message.content] == [
            {"type": "text", "text": "it is é 12"}
        ]
        assert (message.stop_reason, message.role) == ("end_turn", "assistant")
        (response,) = engine.responses
        assert message.usage.input_tokens == counted.input_tokens == len(response.input_ids)
        assert message.usage.output_tokens == len(response.output_ids)
        system = {"role": "system", "content": "be brief"}
        assert engine.tokenizer.decode(response.input_ids) == engine.renderer.text([system, *QUESTION])


@pytest.mark.parametrize(("name", "stream"), [("qwen3", False), ("mistral", True)])
async def test_messages_parallel_tool_calls_become_one_sequence(name: str, stream: bool) -> None:
    engine = ScriptedEngine(name, calls_then_text)
    async with connect(engine) as (session, agent):
        messages = list(QUESTION)
        while True:
            options: Any = {"model": "m", "max_tokens": 300, "messages": messages, "tools": [ADD], "system": "be brief"}
            if stream:
                async with agent.messages.stream(**options) as events:
                    async for _ in events:
                        pass
                    message = await events.get_final_message()
            else:
                message = await agent.messages.create(**options)
            messages.append({"role": "assistant", "content": message.content})
            tool_uses = [block for block in message.content if block.type == "tool_use"]
            if not tool_uses:
                break
            assert message.stop_reason == "tool_use"
            assert [block.input for block in tool_uses] == [call["arguments"] for call in CALLS]
            results = [
                {"type": "tool_result", "tool_use_id": block.id, "content": f"result {sum(block.input.values())}"}
                for block in tool_uses
            ]
            messages.append({"role": "user", "content": results})
        await session.close()

        assert message.content[-1].text.strip() == "it is 12"
        (trajectory,) = session.trajectories(1.0)
        first, second = engine.responses
        assert trajectory.input_ids.tolist() == second.input_ids + second.output_ids
        assert second.input_ids[: len(first.input_ids + first.output_ids)] == first.input_ids + first.output_ids
        assert "result 7" in trajectory.info["completion"]


async def test_messages_stream_sends_text_and_thinking_in_pieces() -> None:
    engine = ScriptedEngine("qwen3", lambda prompt: {"content": "it is " * 40, "reasoning": "hm " * 40})
    async with connect(engine) as (_, agent):
        texts = []
        async with agent.messages.stream(model="m", max_tokens=400, messages=QUESTION) as events:
            async for text in events.text_stream:
                texts.append(text)
            message = await events.get_final_message()

        assert len(texts) > 1
        assert "".join(texts) == "it is " * 40
        assert [block.type for block in message.content] == ["thinking", "text"]
        assert message.usage.output_tokens == len(engine.responses[0].output_ids)


async def test_messages_limit_and_stop_sequence_set_stop_reason() -> None:
    engine = ScriptedEngine("gemma3", lambda prompt: "it\n" if "say" in prompt else {"content": "it is 12"})
    async with connect(engine) as (_, agent):
        cut = await agent.messages.create(model="m", max_tokens=2, messages=QUESTION)
        say: Any = [{"role": "user", "content": "say"}]
        stopped = await agent.messages.create(model="m", max_tokens=9, messages=say, stop_sequences=["x", "\n"])

        assert cut.stop_reason == "max_tokens"
        assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "\n")


async def test_messages_unsupported_or_unauthenticated_request_is_rejected() -> None:
    cases: list[tuple[Any, str]] = [
        ({"messages": [*QUESTION, {"role": "assistant", "content": "it"}]}, "messages: expected"),
        ({"messages": []}, "at least one"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "type 'image'"),
        ({"tools": [ADD], "tool_choice": {"type": "any"}}, "tool_choice: expected"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "bash_20250124"),
    ]
    engine = ScriptedEngine("gemma3", lambda prompt: {"content": "it"})
    async with connect(engine) as (_, agent):
        for fields, message in cases:
            with pytest.raises(anthropic.BadRequestError, match=message):
                await agent.messages.create(**{"model": "m", "max_tokens": 9, "messages": QUESTION, **fields})
        with pytest.raises(anthropic.AuthenticationError, match="no open session"):
            await agent.with_options(api_key="another").messages.create(model="m", max_tokens=9, messages=QUESTION)
