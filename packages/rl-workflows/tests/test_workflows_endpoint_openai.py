"""Typical requests of agents with the official `openai` client."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import openai
import pytest
from agent_model import ScriptedEngine, served

from rl_contracts.config import GenerationConfig
from rl_contracts.data import ModelRequest
from rl_contracts.errors import InferenceError
from rl_contracts.testing.chat_formats import CHAT_FORMATS
from rl_workflows.agents.endpoint.session import Session

ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "adds",
        "strict": True,  # older clients support streamed calls of strict tools only
        "parameters": {"type": "object", "properties": {"a": {"type": "number"}, "b": {"type": "number"}}},
    },
}
CALL = {"name": "add", "arguments": {"a": 1, "b": 2}}
OTHER = {"name": "add", "arguments": {"a": 3, "b": 4}}
QUESTION: Any = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "what is it?"}]


def calls_then_text(prompt: str) -> dict[str, Any]:
    """Return two tool calls, or text if the prompt contains their results."""
    if "result" not in prompt:
        return {"calls": [CALL, OTHER], "reasoning": "hm"}
    return {"content": "it is 12"}


@asynccontextmanager
async def connect(engine: ScriptedEngine, **options: Any) -> AsyncIterator[tuple[Session, openai.AsyncOpenAI]]:
    """Yield a session and a client for it."""
    async with (
        served(engine, **options) as session,
        openai.AsyncOpenAI(base_url=session.base_url, api_key=session.api_key) as agent,
    ):
        yield session, agent


async def test_chat_response_has_text_usage_and_finish_reason() -> None:
    engine = ScriptedEngine("llama3", lambda prompt: {"content": "it is é 12"})
    async with connect(engine) as (_, agent):
        reply = await agent.chat.completions.create(model="policy", messages=QUESTION, temperature=0.2, seed=1)

        (choice,) = reply.choices
        assert choice.message.content == "it is é 12"
        assert choice.finish_reason == "stop"
        assert reply.model == "policy"
        assert reply.usage is not None
        (response,) = engine.responses
        assert reply.usage.prompt_tokens == len(response.input_ids)
        assert reply.usage.completion_tokens == len(response.output_ids)
        assert engine.tokenizer.decode(response.input_ids) == engine.renderer.text(QUESTION)


async def test_chat_n_completions_have_logprobs_of_every_token() -> None:
    engine = ScriptedEngine("llama3", lambda prompt: {"content": "it is 12"})
    async with connect(engine) as (session, agent):
        response = await agent.chat.completions.create(model="m", messages=QUESTION, n=3, logprobs=True)

        assert [choice.index for choice in response.choices] == [0, 1, 2]
        for choice in response.choices:
            assert choice.logprobs is not None
            assert choice.logprobs.content is not None
            assert "".join(entry.token for entry in choice.logprobs.content) == "it is 12<|eot_id|>"
            assert [entry.logprob for entry in choice.logprobs.content] == engine.responses[0].logprobs
        await session.close()
        assert len(session.trajectories(0.0)) == 3


@pytest.mark.parametrize(("name", "stream"), [(name, number % 2 == 1) for number, name in enumerate(CHAT_FORMATS)])
async def test_chat_parallel_tool_calls_become_one_sequence(name: str, stream: bool) -> None:
    engine = ScriptedEngine(name, calls_then_text)
    async with connect(engine) as (session, agent):
        messages = list(QUESTION)
        while True:
            if stream:
                async with agent.chat.completions.stream(model="m", messages=messages, tools=[ADD]) as chunks:
                    async for _ in chunks:
                        pass
                    message = (await chunks.get_final_completion()).choices[0].message
            else:
                response = await agent.chat.completions.create(model="m", messages=messages, tools=[ADD])  # type: ignore[list-item]
                message = response.choices[0].message
            messages.append(message)
            if not message.tool_calls:
                break
            for call in message.tool_calls:
                arguments = json.loads(call.function.arguments)
                result = f"result {sum(arguments.values())}"
                messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
        await session.close()

        assert str(message.content).strip() == "it is 12"
        (trajectory,) = session.trajectories(1.0)
        first, second = engine.responses
        assert second.input_ids[: len(first.input_ids + first.output_ids)] == first.input_ids + first.output_ids
        assert trajectory.input_ids.tolist() == second.input_ids + second.output_ids
        assert trajectory.loss_mask.sum() == len(first.output_ids) + len(second.output_ids)
        assert "result 7" in engine.tokenizer.decode(second.input_ids)
        assert trajectory.reward == 1.0


async def test_chat_stream_sends_pieces_then_usage() -> None:
    engine = ScriptedEngine("llama3", lambda prompt: {"content": "it is " * 40})
    async with connect(engine) as (_, agent):
        chunks = await agent.chat.completions.create(
            model="m", messages=QUESTION, stream=True, n=2, stream_options={"include_usage": True}
        )
        texts, finish_reasons, usage = ["", ""], {}, None
        async for chunk in chunks:
            for choice in chunk.choices:
                texts[choice.index] += choice.delta.content or ""
                if choice.finish_reason:
                    finish_reasons[choice.index] = choice.finish_reason
            usage = chunk.usage or usage

        assert texts == ["it is " * 40] * 2
        assert finish_reasons == {0: "stop", 1: "stop"}
        assert usage is not None
        assert usage.completion_tokens == sum(len(response.output_ids) for response in engine.responses)


async def test_chat_reasoning_is_separate_and_can_be_sent_back() -> None:
    first_message: Any = {"calls": [CALL], "reasoning": "hm"}
    engine = ScriptedEngine("qwen3", lambda prompt: first_message if "result" not in prompt else {"content": "12"})
    async with connect(engine) as (session, agent):
        response = await agent.chat.completions.create(model="m", messages=QUESTION, tools=[ADD])  # type: ignore[list-item]
        message = response.choices[0].message
        assert message.reasoning_content == "hm"  # type: ignore[attr-defined]
        assert message.tool_calls
        result: Any = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "result"}
        await agent.chat.completions.create(model="m", messages=[*QUESTION, message, result], tools=[ADD])  # type: ignore[list-item]
        await session.close()

        assert [trajectory.info["turns"] for trajectory in session.trajectories(0.0)] == [2]


async def test_chat_max_tokens_and_stop_of_agent_apply() -> None:
    engine = ScriptedEngine("llama3", lambda prompt: "it is 12\nand more" if "what" in prompt else "it\n")
    async with connect(engine) as (session, agent):
        limited = await agent.chat.completions.create(model="m", messages=QUESTION, max_completion_tokens=2)
        assert limited.choices[0].finish_reason == "length"
        assert len(engine.responses[0].output_ids) == 2
        stopped = await agent.chat.completions.create(
            model="m", messages=[{"role": "user", "content": "say"}], stop=["\n"]
        )
        assert stopped.choices[0].message.content == "it"
        await session.close()
        assert [trajectory.truncated for trajectory in session.trajectories(0.0)] == [True, False]


async def test_chat_context_length_bounds_prompt_and_completion() -> None:
    engine = ScriptedEngine("llama3", lambda prompt: {"content": "it is " * (400 if "much" in prompt else 1)})
    async with connect(engine, max_length=120) as (session, agent):
        response = await agent.chat.completions.create(model="m", messages=QUESTION)
        longer: Any = [*QUESTION, response.choices[0].message, {"role": "user", "content": "what? " * 60}]
        with pytest.raises(openai.BadRequestError, match="maximum context length is 120 tokens") as refused:
            await agent.chat.completions.create(model="m", messages=longer)
        assert refused.value.code == "context_length_exceeded"
        cut = await agent.chat.completions.create(model="m", messages=[{"role": "user", "content": "how much?"}])
        assert cut.choices[0].finish_reason == "length"
        assert cut.usage is not None
        assert cut.usage.total_tokens == 120
        await session.close()
        assert len(session.trajectories(0.0)) == 2


async def test_completions_prompt_continues_sampled_tokens() -> None:
    engine = ScriptedEngine("llama3", lambda prompt: "it is 12\n" if prompt.endswith("answer: ") else "no")
    async with connect(engine) as (session, agent):
        response = await agent.completions.create(model="m", prompt="the question\nanswer: ", max_tokens=20, logprobs=1)
        text = "the question\nanswer: " + response.choices[0].text
        await agent.completions.create(model="m", prompt=text + "sure?", max_tokens=20)
        last = engine.responses[-1]
        again = await agent.completions.create(model="m", prompt=[*last.input_ids, *last.output_ids, 9], stream=True)
        async for _ in again:
            pass
        await session.close()

        assert response.choices[0].text == "it is 12\n"
        assert response.choices[0].logprobs is not None
        assert response.choices[0].logprobs.token_logprobs == engine.responses[0].logprobs
        assert [trajectory.info["turns"] for trajectory in session.trajectories(0.0)] == [3]


@pytest.mark.parametrize("stream", [False, True])
async def test_responses_tool_calls_and_reasoning_are_one_sequence(stream: bool) -> None:
    first_message: Any = {"calls": [CALL, OTHER], "reasoning": "hm"}
    engine = ScriptedEngine(
        "qwen3", lambda prompt: first_message if "result" not in prompt else {"content": "it is 12"}
    )
    tools: Any = [{"type": "function", **ADD["function"]}]  # type: ignore[dict-item]
    async with connect(engine) as (session, agent):
        items: list[Any] = [{"role": "user", "content": "what is it?"}]
        while True:
            options: Any = {"model": "m", "input": items, "tools": tools, "instructions": "be brief"}
            if stream:
                async with agent.responses.stream(**options) as events:
                    async for _ in events:
                        pass
                    response = await events.get_final_response()
            else:
                response = await agent.responses.create(**options)
            items += [item.model_dump(exclude_none=True) for item in response.output]
            calls = [item for item in response.output if item.type == "function_call"]
            if not calls:
                break
            for call in calls:
                result = f"result {sum(json.loads(call.arguments).values())}"
                items.append({"type": "function_call_output", "call_id": call.call_id, "output": result})
        await session.close()

        assert response.output_text == "it is 12"
        assert response.status == "completed"
        (trajectory,) = session.trajectories(0.0)
        assert trajectory.info["turns"] == 2
        assert "result 7" in trajectory.info["completion"]
        assert "hm" in trajectory.info["completion"]


async def test_responses_continue_stored_response_with_logprobs() -> None:
    first_message: Any = {"calls": [CALL, OTHER], "reasoning": "hm"}
    engine = ScriptedEngine(
        "qwen3", lambda prompt: first_message if "result" not in prompt else {"content": "it is 12"}
    )
    tools: Any = [{"type": "function", **ADD["function"]}]  # type: ignore[dict-item]
    options: Any = {"model": "m", "tools": tools, "instructions": "be brief"}
    options["include"] = ["message.output_text.logprobs"]
    async with connect(engine) as (session, agent):
        first = await agent.responses.create(input="what is it?", **options)
        results: Any = [
            {"type": "function_call_output", "call_id": item.call_id, "output": "result 7"}
            for item in first.output
            if item.type == "function_call"
        ]
        last = await agent.responses.create(input=results, previous_response_id=first.id, store=False, **options)
        for missing in (last.id, "resp_1"):
            with pytest.raises(openai.BadRequestError, match="previous_response_id") as refused:
                await agent.responses.create(input="and?", previous_response_id=missing, **options)
            assert refused.value.code == "previous_response_not_found"
        await session.close()

        assert len(results) == 2
        assert last.output_text == "it is 12"
        assert last.previous_response_id == first.id
        part = last.output[-1].content[0]  # type: ignore[union-attr, index]
        assert [entry.logprob for entry in part.logprobs] == engine.responses[-1].logprobs  # type: ignore[union-attr]
        (trajectory,) = session.trajectories(0.0)
        assert trajectory.info["turns"] == 2
        assert trajectory.info["prompt"].count("be brief") == 1


SCHEMA: Any = {"type": "object", "properties": {"fine": {"type": "boolean"}}, "required": ["fine"]}


@pytest.mark.parametrize("api", ["chat", "responses"])
async def test_constrained_completions_reach_agent_and_are_not_learned(api: str) -> None:
    engine = ScriptedEngine("llama3", lambda prompt: {"content": '{"fine": true}' if "judge" in prompt else "it is 12"})
    engine.schemas = True
    requests: list[ModelRequest] = []
    engine.faults.generate = lambda request: requests.append(request) or None  # type: ignore[func-returns-value]
    judging: Any = [*QUESTION, {"role": "assistant", "content": "it is 12"}, {"role": "user", "content": "judge it"}]
    async with connect(engine) as (session, agent):
        await agent.chat.completions.create(model="m", messages=QUESTION)
        if api == "chat":
            form: Any = {"type": "json_schema", "json_schema": {"name": "verdict", "schema": SCHEMA, "strict": True}}
            response = await agent.chat.completions.create(model="m", messages=judging, response_format=form)
            content = response.choices[0].message.content
        else:
            text: Any = {"format": {"type": "json_schema", "name": "verdict", "schema": SCHEMA}}
            content = (await agent.responses.create(model="m", input=judging, text=text)).output_text
        await session.close()
        (trajectory,) = session.trajectories(0.0)

    assert content == '{"fine": true}'
    assert [request.schema for request in requests] == [None, SCHEMA]
    assert engine.tokenizer.decode(trajectory.input_ids[trajectory.loss_mask]) == "it is 12<|eot_id|>"


async def test_chat_format_rejected_by_server_is_no_session_failure() -> None:
    engine = ScriptedEngine("llama3", lambda prompt: {"content": "it is 12"})
    engine.schemas = True
    engine.faults.generate = lambda request: request.schema and InferenceError("no such type")  # type: ignore[assignment, return-value]
    async with connect(engine) as (session, agent):
        with pytest.raises(
            openai.BadRequestError, match=r"response_format \(Responses API: text.format\): no such type"
        ):
            await agent.chat.completions.create(model="m", messages=QUESTION, response_format={"type": "json_object"})
        await agent.chat.completions.create(model="m", messages=QUESTION)
        await session.close()

        assert session.failure is None
        assert len(session.trajectories(0.0)) == 1


async def test_responses_unsupported_request_is_rejected() -> None:
    cases: list[tuple[Any, str]] = [
        ({"text": {"format": {"type": "json_object"}}}, r"text.format\): expected text"),
        ({"text": {"format": {"type": "json_schema", "schema": 3}}}, "text.format.schema: expected"),
        ({"include": ["file_search_call.results"]}, "include: expected .* found 'file_search_call.results'"),
        ({"tools": [{"type": "web_search"}]}, "tools: expected .* found type 'web_search'"),
        ({"tool_choice": "required"}, "tool_choice: expected"),
        ({"parallel_tool_calls": False}, "parallel_tool_calls"),
        ({"truncation": "auto"}, "truncation: expected"),
        ({"background": True}, "unknown parameter 'background'"),
    ]
    engine = ScriptedEngine("llama3", lambda prompt: {"content": "it"})
    async with connect(engine) as (_, agent):
        for fields, message in cases:
            with pytest.raises(openai.BadRequestError, match=message):
                await agent.responses.create(**{"model": "m", "input": "what is it?", **fields})
        assert not engine.responses


async def test_chat_unsupported_request_is_rejected() -> None:
    image = {"type": "image_url", "image_url": {"url": "x"}}
    cases: list[tuple[Any, str]] = [
        ({"response_format": {"type": "json_object"}}, "response_format .*: expected text"),
        ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format.schema: expected"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema: expected"),
        ({"response_format": {"type": "grammar"}}, "response_format.type: expected"),
        ({"tools": [ADD], "tool_choice": {"type": "function", "function": {"name": "add"}}}, "tool_choice: expected"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"every": 3}}, "unknown parameter 'every'"),
        ({"parallel_tool_calls": False}, "parallel_tool_calls"),
        ({"logprobs": True, "top_logprobs": 3}, "top_logprobs"),
        ({"tools": [{"type": "web_search"}]}, "tools: expected .* found type 'web_search'"),
        ({"extra_body": {"best_of": 2}}, "unknown parameter 'best_of'"),
        ({"messages": [{"role": "user", "content": [image]}]}, "image_url"),
        ({"messages": []}, "at least one"),
        ({"messages": [{"role": "ghost", "content": "x"}]}, "found 'ghost'"),
        ({"n": 1000}, "n: expected"),
        ({"stop": ""}, "stop"),
    ]
    engine = ScriptedEngine("llama3", lambda prompt: {"content": "it"})
    async with connect(engine) as (session, agent):
        for fields, message in cases:
            with pytest.raises(openai.BadRequestError, match=message):
                await agent.chat.completions.create(**{"model": "m", "messages": QUESTION, **fields})
        assert not engine.responses
        assert session.rejected_calls == len(cases)
        assert session.failure is None


async def test_chat_sampling_uses_settings_of_run() -> None:
    engine = ScriptedEngine("llama3", lambda prompt: {"content": "it"})
    generations = []
    engine.faults.generate = lambda request: generations.append(request.generation) or None  # type: ignore[func-returns-value]
    async with connect(engine, generation=GenerationConfig(max_new_tokens=7, temperature=0.7)) as (_, agent):
        await agent.chat.completions.create(
            model="m", messages=QUESTION, temperature=0, top_p=0.1, max_tokens=100, frequency_penalty=1
        )
    (generation,) = generations
    assert (generation.temperature, generation.top_p, generation.max_new_tokens) == (0.7, 1.0, 7)
    assert generation.frequency_penalty == 0
