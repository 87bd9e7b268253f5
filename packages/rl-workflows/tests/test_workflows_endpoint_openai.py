"""The official `openai` client against the endpoint: what agents commonly do."""

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
        "strict": True,  # older clients stream the calls of strict tools only
        "parameters": {"type": "object", "properties": {"a": {"type": "number"}, "b": {"type": "number"}}},
    },
}
CALL = {"name": "add", "arguments": {"a": 1, "b": 2}}
OTHER = {"name": "add", "arguments": {"a": 3, "b": 4}}
QUESTION: Any = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "what is it?"}]


def calls_then_says(prompt: str) -> dict[str, Any]:
    """Two calls at once; after their results, what they are."""
    if "result" not in prompt:
        return {"calls": [CALL, OTHER], "reasoning": "hm"}
    return {"content": "it is 12"}


@asynccontextmanager
async def asking(engine: ScriptedEngine, **options: Any) -> AsyncIterator[tuple[Session, openai.AsyncOpenAI]]:
    """A session over an engine, and a client of it."""
    async with (
        served(engine, **options) as session,
        openai.AsyncOpenAI(base_url=session.base_url, api_key=session.api_key) as agent,
    ):
        yield session, agent


async def test_chat_answer_has_text_usage_and_the_reason_of_its_end() -> None:
    engine = ScriptedEngine("llama3", lambda prompt: {"content": "it is é 12"})
    async with asking(engine) as (_, agent):
        made = await agent.chat.completions.create(model="policy", messages=QUESTION, temperature=0.2, seed=1)

        (choice,) = made.choices
        assert choice.message.content == "it is é 12"
        assert choice.finish_reason == "stop"
        assert made.model == "policy"
        assert made.usage is not None
        (response,) = engine.responses
        assert made.usage.prompt_tokens == len(response.input_ids)
        assert made.usage.completion_tokens == len(response.output_ids)
        assert engine.tokenizer.decode(response.input_ids) == engine.renderer.text(QUESTION)


async def test_chat_several_answers_with_logprobs_of_every_sampled_token() -> None:
    engine = ScriptedEngine("llama3", lambda prompt: {"content": "it is 12"})
    async with asking(engine) as (session, agent):
        made = await agent.chat.completions.create(model="m", messages=QUESTION, n=3, logprobs=True)

        assert [choice.index for choice in made.choices] == [0, 1, 2]
        for choice in made.choices:
            assert choice.logprobs is not None
            assert choice.logprobs.content is not None
            assert "".join(entry.token for entry in choice.logprobs.content) == "it is 12<|eot_id|>"
            assert [entry.logprob for entry in choice.logprobs.content] == engine.responses[0].logprobs
        await session.close()
        assert len(session.trajectories(0.0)) == 3


@pytest.mark.parametrize("name", CHAT_FORMATS)
@pytest.mark.parametrize("stream", [False, True])
async def test_chat_parallel_tool_calls_and_their_results_are_one_row(name: str, stream: bool) -> None:
    engine = ScriptedEngine(name, calls_then_says)
    async with asking(engine) as (session, agent):
        messages = list(QUESTION)
        while True:
            if stream:
                async with agent.chat.completions.stream(model="m", messages=messages, tools=[ADD]) as chunks:
                    async for _ in chunks:
                        pass
                    message = (await chunks.get_final_completion()).choices[0].message
            else:
                made = await agent.chat.completions.create(model="m", messages=messages, tools=[ADD])  # type: ignore[list-item]
                message = made.choices[0].message
            messages.append(message)
            if not message.tool_calls:
                break
            for call in message.tool_calls:
                given = json.loads(call.function.arguments)
                result = f"result {sum(given.values())}"
                messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
        await session.close()

        assert str(message.content).strip() == "it is 12"
        (row,) = session.trajectories(1.0)
        first, second = engine.responses
        assert second.input_ids[: len(first.input_ids + first.output_ids)] == first.input_ids + first.output_ids
        assert row.input_ids.tolist() == second.input_ids + second.output_ids
        assert row.loss_mask.sum() == len(first.output_ids) + len(second.output_ids)
        assert "result 7" in engine.tokenizer.decode(second.input_ids)
        assert row.reward == 1.0


async def test_chat_stream_comes_in_pieces_with_usage_at_the_end() -> None:
    engine = ScriptedEngine("llama3", lambda prompt: {"content": "it is " * 40})
    async with asking(engine) as (_, agent):
        chunks = await agent.chat.completions.create(
            model="m", messages=QUESTION, stream=True, n=2, stream_options={"include_usage": True}
        )
        texts, ends, usage = ["", ""], {}, None
        async for chunk in chunks:
            for choice in chunk.choices:
                texts[choice.index] += choice.delta.content or ""
                if choice.finish_reason:
                    ends[choice.index] = choice.finish_reason
            usage = chunk.usage or usage

        assert texts == ["it is " * 40] * 2
        assert ends == {0: "stop", 1: "stop"}
        assert usage is not None
        assert usage.completion_tokens == sum(len(response.output_ids) for response in engine.responses)


async def test_chat_reasoning_is_told_apart_and_comes_back_with_the_message() -> None:
    says: Any = {"calls": [CALL], "reasoning": "hm"}
    engine = ScriptedEngine("qwen3", lambda prompt: says if "result" not in prompt else {"content": "12"})
    async with asking(engine) as (session, agent):
        made = await agent.chat.completions.create(model="m", messages=QUESTION, tools=[ADD])  # type: ignore[list-item]
        message = made.choices[0].message
        assert message.reasoning_content == "hm"  # type: ignore[attr-defined]
        assert message.tool_calls
        result: Any = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "result"}
        await agent.chat.completions.create(model="m", messages=[*QUESTION, message, result], tools=[ADD])  # type: ignore[list-item]
        await session.close()

        assert [row.info["turns"] for row in session.trajectories(0.0)] == [2]


async def test_chat_limit_of_tokens_and_stop_strings_of_the_agent_hold() -> None:
    engine = ScriptedEngine("llama3", lambda prompt: "it is 12\nand more" if "what" in prompt else "it\n")
    async with asking(engine) as (session, agent):
        cut = await agent.chat.completions.create(model="m", messages=QUESTION, max_completion_tokens=2)
        assert cut.choices[0].finish_reason == "length"
        assert len(engine.responses[0].output_ids) == 2
        stopped = await agent.chat.completions.create(
            model="m", messages=[{"role": "user", "content": "say"}], stop=["\n"]
        )
        assert stopped.choices[0].message.content == "it"
        await session.close()
        assert [row.truncated for row in session.trajectories(0.0)] == [True, False]


async def test_chat_prompt_without_room_is_refused_as_openai_does_and_the_rest_stays() -> None:
    engine = ScriptedEngine("llama3", lambda prompt: {"content": "it is 12"})
    async with asking(engine, max_length=120) as (session, agent):
        made = await agent.chat.completions.create(model="m", messages=QUESTION)
        longer: Any = [*QUESTION, made.choices[0].message, {"role": "user", "content": "what? " * 60}]
        with pytest.raises(openai.BadRequestError, match="maximum context length is 120 tokens") as refused:
            await agent.chat.completions.create(model="m", messages=longer)
        assert refused.value.code == "context_length_exceeded"
        await session.close()
        assert len(session.trajectories(0.0)) == 1


async def test_chat_answer_ends_at_the_end_of_the_context() -> None:
    engine = ScriptedEngine("llama3", lambda prompt: {"content": "it is " * 400})
    async with asking(engine, max_length=100) as (_, agent):
        made = await agent.chat.completions.create(model="m", messages=QUESTION)
        assert made.choices[0].finish_reason == "length"
        assert made.usage is not None
        assert made.usage.total_tokens == 100


async def test_completions_of_text_and_tokens_go_on_with_what_was_sampled() -> None:
    engine = ScriptedEngine("llama3", lambda prompt: "it is 12\n" if prompt.endswith("answer: ") else "no")
    async with asking(engine) as (session, agent):
        made = await agent.completions.create(model="m", prompt="the question\nanswer: ", max_tokens=20, logprobs=1)
        text = "the question\nanswer: " + made.choices[0].text
        await agent.completions.create(model="m", prompt=text + "sure?", max_tokens=20)
        last = engine.responses[-1]
        again = await agent.completions.create(model="m", prompt=[*last.input_ids, *last.output_ids, 9], stream=True)
        async for _ in again:
            pass
        await session.close()

        assert made.choices[0].text == "it is 12\n"
        assert made.choices[0].logprobs is not None
        assert made.choices[0].logprobs.token_logprobs == engine.responses[0].logprobs
        assert [row.info["turns"] for row in session.trajectories(0.0)] == [3]


@pytest.mark.parametrize("stream", [False, True])
async def test_responses_with_tools_reasoning_and_their_results(stream: bool) -> None:
    says: Any = {"calls": [CALL, OTHER], "reasoning": "hm"}
    engine = ScriptedEngine("qwen3", lambda prompt: says if "result" not in prompt else {"content": "it is 12"})
    tools: Any = [{"type": "function", **ADD["function"]}]  # type: ignore[dict-item]
    async with asking(engine) as (session, agent):
        items: list[Any] = [{"role": "user", "content": "what is it?"}]
        while True:
            options: Any = {"model": "m", "input": items, "tools": tools, "instructions": "be brief"}
            if stream:
                async with agent.responses.stream(**options) as events:
                    async for _ in events:
                        pass
                    made = await events.get_final_response()
            else:
                made = await agent.responses.create(**options)
            items += [item.model_dump(exclude_none=True) for item in made.output]
            calls = [item for item in made.output if item.type == "function_call"]
            if not calls:
                break
            for call in calls:
                result = f"result {sum(json.loads(call.arguments).values())}"
                items.append({"type": "function_call_output", "call_id": call.call_id, "output": result})
        await session.close()

        assert made.output_text == "it is 12"
        assert made.status == "completed"
        (row,) = session.trajectories(0.0)
        assert row.info["turns"] == 2
        assert "result 7" in row.info["completion"]
        assert "hm" in row.info["completion"]


async def test_responses_go_on_from_a_stored_one_and_have_log_probs() -> None:
    says: Any = {"calls": [CALL, OTHER], "reasoning": "hm"}
    engine = ScriptedEngine("qwen3", lambda prompt: says if "result" not in prompt else {"content": "it is 12"})
    tools: Any = [{"type": "function", **ADD["function"]}]  # type: ignore[dict-item]
    options: Any = {"model": "m", "tools": tools, "instructions": "be brief"}
    options["include"] = ["message.output_text.logprobs"]
    async with asking(engine) as (session, agent):
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
        (row,) = session.trajectories(0.0)
        assert row.info["turns"] == 2
        assert row.info["prompt"].count("be brief") == 1


SCHEMA: Any = {"type": "object", "properties": {"fine": {"type": "boolean"}}, "required": ["fine"]}


@pytest.mark.parametrize("api", ["chat", "responses"])
async def test_answers_kept_to_a_format_reach_the_agent_and_are_context_alone(api: str) -> None:
    engine = ScriptedEngine("llama3", lambda prompt: {"content": '{"fine": true}' if "judge" in prompt else "it is 12"})
    engine.schemas = True
    asked: list[ModelRequest] = []
    engine.faults.generate = lambda request: asked.append(request) or None  # type: ignore[func-returns-value]
    judging: Any = [*QUESTION, {"role": "assistant", "content": "it is 12"}, {"role": "user", "content": "judge it"}]
    async with asking(engine) as (session, agent):
        await agent.chat.completions.create(model="m", messages=QUESTION)
        if api == "chat":
            form: Any = {"type": "json_schema", "json_schema": {"name": "verdict", "schema": SCHEMA, "strict": True}}
            made = await agent.chat.completions.create(model="m", messages=judging, response_format=form)
            said = made.choices[0].message.content
        else:
            text: Any = {"format": {"type": "json_schema", "name": "verdict", "schema": SCHEMA}}
            said = (await agent.responses.create(model="m", input=judging, text=text)).output_text
        await session.close()
        (row,) = session.trajectories(0.0)

    assert said == '{"fine": true}'
    assert [request.schema for request in asked] == [None, SCHEMA]
    assert engine.tokenizer.decode(row.input_ids[row.loss_mask]) == "it is 12<|eot_id|>"


async def test_a_format_that_servers_refuse_is_refused_to_the_agent_and_is_no_failure_of_the_run() -> None:
    engine = ScriptedEngine("llama3", lambda prompt: {"content": "it is 12"})
    engine.schemas = True
    engine.faults.generate = lambda request: request.schema and InferenceError("no such type")  # type: ignore[assignment, return-value]
    async with asking(engine) as (session, agent):
        with pytest.raises(openai.BadRequestError, match="response_format: no such type"):
            await agent.chat.completions.create(model="m", messages=QUESTION, response_format={"type": "json_object"})
        await agent.chat.completions.create(model="m", messages=QUESTION)
        await session.close()

        assert session.failure is None
        assert len(session.trajectories(0.0)) == 1


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"text": {"format": {"type": "json_object"}}}, "response_format: expected text"),
        ({"text": {"format": {"type": "json_schema", "schema": 3}}}, "text.format.schema: expected"),
        ({"text": {"format": {"type": "grammar"}}}, "text.format.type: expected"),
        ({"include": ["file_search_call.results"]}, "include: expected .* found 'file_search_call.results'"),
        ({"tools": [{"type": "web_search"}]}, "tools: expected .* found type 'web_search'"),
        ({"tool_choice": "required"}, "tool_choice: expected"),
        ({"parallel_tool_calls": False}, "parallel_tool_calls"),
        ({"truncation": "auto"}, "truncation: expected"),
        ({"background": True}, "unknown parameter 'background'"),
    ],
)
async def test_responses_what_the_endpoint_has_not_is_refused_in_a_sentence(asked: Any, message: str) -> None:
    engine = ScriptedEngine("llama3", lambda prompt: {"content": "it"})
    async with asking(engine) as (_, agent):
        with pytest.raises(openai.BadRequestError, match=message):
            await agent.responses.create(**{"model": "m", "input": "what is it?", **asked})
        assert not engine.responses


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"response_format": {"type": "json_object"}}, "response_format: expected text"),
        ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format.schema: expected"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema: expected"),
        ({"response_format": {"type": "grammar"}}, "response_format.type: expected"),
        ({"tools": [ADD], "tool_choice": {"type": "function", "function": {"name": "add"}}}, "tool_choice: expected"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"every": 3}}, "unknown parameter 'every'"),
        ({"tools": [ADD], "tool_choice": "required"}, "tool_choice: expected"),
        ({"tools": [ADD], "parallel_tool_calls": False}, "parallel_tool_calls"),
        ({"logprobs": True, "top_logprobs": 3}, "top_logprobs"),
        ({"tools": [{"type": "web_search"}]}, "tools: expected .* found type 'web_search'"),
        ({"extra_body": {"best_of": 2}}, "unknown parameter 'best_of'"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, "image_url"),
        ({"messages": []}, "at least one"),
        ({"messages": [{"role": "ghost", "content": "x"}]}, "found 'ghost'"),
        ({"n": 1000}, "n: expected"),
    ],
)
async def test_chat_what_the_endpoint_has_not_is_refused_in_a_sentence(asked: Any, message: str) -> None:
    engine = ScriptedEngine("llama3", lambda prompt: {"content": "it"})
    async with asking(engine) as (session, agent):
        with pytest.raises(openai.BadRequestError, match=message):
            await agent.chat.completions.create(**{"model": "m", "messages": QUESTION, **asked})
        assert not engine.responses
        assert session.refused == 1


async def test_chat_sampling_is_the_runs_whatever_the_agent_asks() -> None:
    engine = ScriptedEngine("llama3", lambda prompt: {"content": "it"})
    asked = []
    engine.faults.generate = lambda request: asked.append(request.generation) or None  # type: ignore[func-returns-value]
    async with asking(engine, generation=GenerationConfig(max_new_tokens=7, temperature=0.7)) as (_, agent):
        await agent.chat.completions.create(
            model="m", messages=QUESTION, temperature=0, top_p=0.1, max_tokens=100, frequency_penalty=1
        )
    (generation,) = asked
    assert (generation.temperature, generation.top_p, generation.max_new_tokens) == (0.7, 1.0, 7)
    assert generation.frequency_penalty == 0
