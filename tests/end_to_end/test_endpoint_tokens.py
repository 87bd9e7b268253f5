"""Through client, endpoint and a real server: the rows that are trained have the tokens and log-probs that the model
itself gives, over several turns with tools, parallel calls and a branch."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
import torch

from rl_contracts.batch.trajectory import Trajectory
from rl_contracts.config import GenerationConfig
from rl_contracts.data import ModelRequest, ModelResponse, StopReason
from rl_contracts.testing.chat_formats import CHAT_FORMATS, format_completion, make_chat_tokenizer
from rl_inference import EmbeddedEngine
from rl_inference.testing import ServerProcess, reference_model, tiny_model
from rl_workflows.agents.endpoint.server import HttpRolloutEndpoint

VOCABULARY = 347
"""The largest of the formats' tokenizers; of the others some ids have no text."""
LONGEST = {"llama3": 8, "gemma3": 8, "qwen3": 4, "qwen3_coder": 4, "mistral": 3}
"""Answers of the longest branch, of 8 turns: Qwen 3's template drops the reasoning of answers once a question follows,
and Mistral's shows the tools before the last question, so that a further one rewrites what was before it."""
TEMPERATURE = 0.8
ADD: Any = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "adds",
        "parameters": {"type": "object", "properties": {"a": {"type": "number"}, "b": {"type": "number"}}},
    },
}


class HalfScripted(EmbeddedEngine):
    """Samples from the server, but for the calls of tools, which no random model writes: those are given, in tokens of
    single letters here and there, with the log-probs that the server says they have."""

    script: list[str | None]
    encode: Callable[[str], list[int]]
    responses: list[ModelResponse]

    async def agenerate(self, request: ModelRequest) -> ModelResponse:
        text = self.script.pop(0)
        if text is None:
            response = await super().agenerate(request)
        else:
            ids = self.encode(text)
            scores = await self.score([*request.input_ids, *ids], request.generation.temperature)
            logprobs = scores[len(request.input_ids) :]
            response = ModelResponse(request.input_ids, ids, logprobs, [self.version] * len(ids), StopReason.STOP)
        self.responses.append(response)
        return response


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "tiny"
    return tiny_model(path, vocab_size=VOCABULARY, eos_token_id=VOCABULARY - 1, max_position_embeddings=4096)


@pytest.fixture(scope="module")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with ServerProcess(model, tmp_path_factory.mktemp("logs") / "server.log", key="key") as server:
        yield server


def gaps(path: Path, rows: list[Trajectory]) -> np.ndarray:
    """|recorded log-prob - the model's own| of every trained token."""
    model, found = reference_model(path), []
    for row in rows:
        ids = torch.from_numpy(row.input_ids)[None]
        with torch.no_grad():
            logprobs = torch.log_softmax(model(input_ids=ids).logits[0].float() / TEMPERATURE, -1)
        own = logprobs[:-1].gather(1, ids[0, 1:, None])[:, 0].numpy()
        found.append(np.abs(own - row.logprobs[1:])[row.loss_mask[1:]])
    return np.concatenate(found)


async def _streamed(agent: openai.AsyncOpenAI, options: Any) -> tuple[dict[str, Any], list[float]]:
    """The message of a stream and its log-probs, put together as agents do."""
    message: dict[str, Any] = {"role": "assistant", "content": ""}
    logprobs: list[float] = []
    async for chunk in await agent.chat.completions.create(**options, stream=True):
        if (told := chunk.choices[0].logprobs) is not None:
            logprobs += [entry.logprob for entry in told.content or ()]
        for name, value in chunk.choices[0].delta.model_dump(exclude_none=True).items():
            if name in ("content", "reasoning_content"):
                message[name] = message.get(name, "") + value
            for part in value if name == "tool_calls" else ():
                calls = message.setdefault("tool_calls", [])
                if part["index"] == len(calls):
                    calls.append({"id": part["id"], "type": "function", "function": {**part["function"]}})
                else:
                    calls[part["index"]]["function"]["arguments"] += part["function"]["arguments"]
    return message, logprobs


async def _agent(agent: openai.AsyncOpenAI, messages: list[Any], turns: int, told: list[list[float]]) -> None:
    """Answers calls of the tool with sums, and everything else with a question; every other turn is a stream. What it
    was told of log-probs is put to `told`."""
    for turn in range(turns):
        options: Any = {"model": "m", "messages": messages, "tools": [ADD], "logprobs": True}
        if turn % 2:
            message, logprobs = await _streamed(agent, options)
        else:
            (choice,) = (await agent.chat.completions.create(**options)).choices
            message = choice.message.model_dump(exclude_none=True)
            assert choice.logprobs is not None
            logprobs = [entry.logprob for entry in choice.logprobs.content or ()]
        told.append(logprobs)
        messages.append(message)
        for call in message.get("tool_calls", ()):
            result = str(sum(json.loads(call["function"]["arguments"]).values()))
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})
        if "tool_calls" not in message:
            messages.append({"role": "user", "content": f"and {turn}?"})


@pytest.mark.slow
@pytest.mark.parametrize("name", CHAT_FORMATS)
async def test_eight_turns_with_tools_and_a_branch_are_trained_as_sampled(
    name: str, model: Path, server: ServerProcess, record_property: Callable[[str, object], None]
) -> None:
    tokenizer, chance = make_chat_tokenizer(name), random.Random(5)
    whole = set(tokenizer.added_tokens_decoder)

    def odd(text: str) -> list[int]:
        ids = tokenizer.encode(text, add_special_tokens=False)
        pieces = tokenizer.convert_ids_to_tokens(ids)
        cut = [[i] if i in whole or chance.random() < 0.5 else list(p) for i, p in zip(ids, pieces, strict=True)]
        return [i if isinstance(i, int) else tokenizer.convert_tokens_to_ids(i) for part in cut for i in part]

    def calls(*numbers: int) -> str:
        return format_completion(
            name, calls=[{"name": "add", "arguments": {"a": n, "b": 2}} for n in numbers], reasoning="hm"
        )

    engine = HalfScripted()
    engine.initialize([server.address], "key")
    engine.script = [None, calls(1), calls(2, 3, 4), None, calls(5), calls(6, 7), None, None, calls(8, 9), None]
    engine.script += [None] * 4
    engine.encode, engine.responses = odd, []
    told: list[list[float]] = []
    endpoint = HttpRolloutEndpoint(tokenizer)
    session = await endpoint.open(engine, GenerationConfig(max_new_tokens=24, temperature=TEMPERATURE), 4096)
    async with openai.AsyncOpenAI(base_url=session.base_url, api_key=session.api_key) as agent:
        messages: list[Any] = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "what is it?"}]
        await _agent(agent, messages, 8, told)
        branch = messages[:4]  # the first answer stays, the question after it is another
        branch[3] = {"role": "user", "content": "what else?"}
        await _agent(agent, branch, 2, told)
        # two agents at the same time, one of which goes on from the first answer
        other = [{"role": "user", "content": "what?"}]
        await asyncio.gather(*(_agent(agent, begin, 2, told) for begin in (other, [*messages[:3], *branch[3:4]])))
    await session.close()
    rows = session.trajectories(1.0)

    assert sum(int(row.loss_mask.sum()) for row in rows) == sum(len(r.output_ids) for r in engine.responses)
    assert sorted(told) == sorted(response.logprobs for response in engine.responses)
    asked = [(r.input_ids + r.output_ids, r.versions) for r in engine.responses]
    for row in rows:  # a row ends with an answer to exactly the prompt before it
        assert any(row.input_ids.tolist() == ids for ids, _ in asked)
    turns = [row.info["turns"] for row in rows]
    assert max(turns) == LONGEST[name]
    if name in ("llama3", "gemma3"):
        assert turns == [8, 3, *turns[2:]]
        assert sorted(turns[2:]) == [2, 3]
    for per in ("branch", "call"):
        gap = gaps(model, session.trajectories(1.0, per))
        record_property(f"gap_mean_{per}", float(gap.mean()))
        record_property(f"gap_max_{per}", float(gap.max()))
        assert gap.mean() <= 1e-5
        assert gap.max() <= 1e-4
    await endpoint.destroy()
    await engine.destroy()
