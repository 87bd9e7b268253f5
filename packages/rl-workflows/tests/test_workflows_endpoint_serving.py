"""Calls outside of episodes, with the official `openai` client."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import openai
import pytest
from agent_model import ScriptedEngine

from rl_contracts.chat.rendering import ChatRenderer
from rl_contracts.config import GenerationConfig
from rl_contracts.data import ModelRequest, ModelResponse
from rl_contracts.testing.chat_formats import CHAT_FORMATS, format_completion, make_chat_tokenizer
from rl_workflows.agents.endpoint.chat import ChatCompletion
from rl_workflows.agents.endpoint.chat_stream import chat_stream
from rl_workflows.agents.endpoint.config import EndpointConfig
from rl_workflows.agents.endpoint.server import HttpRolloutEndpoint
from rl_workflows.agents.message_parsing import MessageParser

QUESTION: Any = [{"role": "user", "content": "what is it?"}]
GENERATION = GenerationConfig(max_new_tokens=512, top_k=7)


@pytest.fixture
async def engine() -> AsyncIterator[ScriptedEngine]:
    async with ScriptedEngine("llama3", lambda prompt: {"content": "it is 12"}) as engine:
        yield engine


@asynccontextmanager
async def serving(engine: ScriptedEngine, key: str = "", **settings: Any) -> AsyncIterator[openai.AsyncOpenAI]:
    """Yield a client of an endpoint that serves the engine."""
    endpoint = HttpRolloutEndpoint(engine.processor, EndpointConfig(**settings))
    endpoint.serve(engine, GENERATION, 1024, "my-model", key)
    try:
        async with openai.AsyncOpenAI(base_url=f"{endpoint.url}/v1", api_key=key or "none") as client:
            yield client
    finally:
        await endpoint.destroy()


async def test_serving_applies_the_sampling_parameters_of_each_call(engine: ScriptedEngine) -> None:
    async with serving(engine) as client:
        await client.chat.completions.create(
            model="m", messages=QUESTION, temperature=0.2, top_p=0.9, seed=5, n=2, presence_penalty=1, max_tokens=40
        )
        await client.completions.create(model="m", prompt="it", frequency_penalty=0.5)

    first, second, third = engine.requests
    expected = {"temperature": 0.2, "top_p": 0.9, "top_k": 7, "presence_penalty": 1, "frequency_penalty": 0}
    assert {name: getattr(first.generation, name) for name in expected} == expected
    assert first.generation.max_new_tokens == 40
    assert [first.seed, second.seed, third.seed] == [5, 6, None]
    assert (third.generation.temperature, third.generation.frequency_penalty) == (1.0, 0.5)


class GradualEngine(ScriptedEngine):
    """Engine that shows half of each completion, and finishes it after `finish` is set."""

    finish: asyncio.Event

    async def agenerate(self, request: ModelRequest) -> ModelResponse:
        response = await super().agenerate(request)
        if request.on_tokens is not None:
            request.on_tokens(response.output_ids[: len(response.output_ids) // 2])
            await self.finish.wait()
        return response


async def test_serving_streams_text_before_the_completion_is_finished() -> None:
    content = "it is 12 and " * 30
    async with GradualEngine("llama3", lambda prompt: {"content": content}) as engine, serving(engine) as client:
        engine.finish = asyncio.Event()
        chunks = await client.chat.completions.create(
            model="m", messages=QUESTION, n=2, stream=True, stream_options={"include_usage": True}
        )
        received = [await anext(chunks) for _ in range(2)]
        engine.finish.set()
        received += [chunk async for chunk in chunks]

    choices = [choice for chunk in received for choice in chunk.choices]
    for index in (0, 1):
        deltas = [choice.delta for choice in choices if choice.index == index]
        assert "".join(delta.content or "" for delta in deltas) == content
        assert [delta.role for delta in deltas if delta.role] == ["assistant"]
    assert len({chunk.id for chunk in received}) == 1
    assert [choice.finish_reason for choice in choices if choice.finish_reason] == ["stop", "stop"]
    assert received[-1].usage.completion_tokens == sum(len(response.output_ids) for response in engine.responses)


@pytest.mark.parametrize("name", CHAT_FORMATS)
def test_chat_stream_of_growing_completion_adds_up_to_its_message(name: str) -> None:
    tokenizer = make_chat_tokenizer(name)
    renderer = ChatRenderer(tokenizer)
    parser = MessageParser(tokenizer, stop_ids=renderer.stop_ids)
    text = format_completion(name, content="it is <b>é</b> STOP " * 8, reasoning="2 and < 3, é " * 20)
    ids = renderer.encode(text)
    body = ChatCompletion(messages=QUESTION, stream=True, stop=["END"])
    stream, events = chat_stream(body), []
    assert stream is not None
    for length in range(1, len(ids)):
        stream.update(0, parser.message([1], renderer.generation_prompt, ids[:length]))
        events += stream.take()
    early = len(events)
    message = parser.message([1], renderer.generation_prompt, ids)

    choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": "stop"}
    events += stream.rest({"id": "a", "created": 1, "model": "m", "choices": [choice], "usage": {}})

    deltas = [event["choices"][0]["delta"] for _, event in events if event != "[DONE]"]
    for field in ("reasoning_content", "content"):
        assert "".join(delta.get(field) or "" for delta in deltas) == message.get(field, "")
    assert early > 10


async def test_serving_rejects_a_sampling_parameter_out_of_range(engine: ScriptedEngine) -> None:
    async with serving(engine) as client:
        with pytest.raises(openai.BadRequestError, match="top_p"):
            await client.chat.completions.create(model="m", messages=QUESTION, top_p=0)


async def test_serving_has_no_limit_of_calls_and_names_its_model(engine: ScriptedEngine) -> None:
    async with serving(engine, max_calls=2) as client:
        replies = [await client.chat.completions.create(model="m", messages=QUESTION) for _ in range(4)]
        names = [model.id async for model in client.models.list()]

    assert [reply.choices[0].message.content for reply in replies] == ["it is 12"] * 4
    assert names == ["my-model"]


@pytest.mark.parametrize("headers", [{}, {"Authorization": "Bearer wrong"}, {"x-api-key": "sécret"}])
async def test_serving_with_a_key_rejects_other_keys(engine: ScriptedEngine, headers: dict[str, str]) -> None:
    async with serving(engine, key="secret") as client, aiohttp.ClientSession() as session:
        assert (await client.chat.completions.create(model="m", messages=QUESTION)).choices
        async with session.get(f"{client.base_url}models", headers=headers) as response:
            assert response.status == 401
