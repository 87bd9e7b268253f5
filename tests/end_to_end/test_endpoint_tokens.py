"""Trained trajectories have the tokens and log-probs of the model, through client, endpoint and a real server.

The conversations have several turns, tools, parallel calls and a branch.
"""

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
"""Size of the largest tokenizer of the chat formats. The ids above the size of a smaller one have no text."""
LONGEST_TRAJECTORY = {"llama3": 8, "gemma3": 8, "qwen3": 4, "qwen3_coder": 4, "mistral": 3}
"""Turns in the longest trajectory, out of 8.

The template of Qwen 3 drops the reasoning of earlier turns, and that of Mistral renders the tools before the last
question. Both change the tokens of earlier turns, so that a new trajectory begins."""
TEMPERATURE = 0.8
ADD: Any = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "adds",
        "parameters": {"type": "object", "properties": {"a": {"type": "number"}, "b": {"type": "number"}}},
    },
}


class PartlyScriptedEngine(EmbeddedEngine):
    """Engine that samples from the server, or returns a scripted text with the log-probs of the server.

    A random model writes no tool calls, so the script has them, partly in unusual tokens of single letters.
    """

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


def gaps(path: Path, trajectories: list[Trajectory]) -> np.ndarray:
    """Return |recorded log-prob - log-prob of the model| of each trained token."""
    model, result = reference_model(path), []
    for trajectory in trajectories:
        ids = torch.from_numpy(trajectory.input_ids)[None]
        with torch.no_grad():
            logprobs = torch.log_softmax(model(input_ids=ids).logits[0].float() / TEMPERATURE, -1)
        expected = logprobs[:-1].gather(1, ids[0, 1:, None])[:, 0].numpy()
        result.append(np.abs(expected - trajectory.logprobs[1:])[trajectory.loss_mask[1:]])
    return np.concatenate(result)


async def _stream(agent: openai.AsyncOpenAI, options: Any) -> tuple[dict[str, Any], list[float]]:
    """Assemble the message and the log-probs of a streamed completion, as agents do."""
    message: dict[str, Any] = {"role": "assistant", "content": ""}
    logprobs: list[float] = []
    async for chunk in await agent.chat.completions.create(**options, stream=True):
        if (chunk_logprobs := chunk.choices[0].logprobs) is not None:
            logprobs += [entry.logprob for entry in chunk_logprobs.content or ()]
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


async def _converse(agent: openai.AsyncOpenAI, messages: list[Any], turns: int, received: list[list[float]]) -> None:
    """Reply to tool calls with sums and to other completions with a question; every other turn is streamed.

    The log-probs of each completion are appended to `received`.
    """
    for turn in range(turns):
        options: Any = {"model": "m", "messages": messages, "tools": [ADD], "logprobs": True}
        if turn % 2:
            message, logprobs = await _stream(agent, options)
        else:
            (choice,) = (await agent.chat.completions.create(**options)).choices
            message = choice.message.model_dump(exclude_none=True)
            assert choice.logprobs is not None
            logprobs = [entry.logprob for entry in choice.logprobs.content or ()]
        received.append(logprobs)
        messages.append(message)
        for call in message.get("tool_calls", ()):
            result = str(sum(json.loads(call["function"]["arguments"]).values()))
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})
        if "tool_calls" not in message:
            messages.append({"role": "user", "content": f"and {turn}?"})


@pytest.mark.guarantee(
    "The trainer trains on exactly the token ids that the server sampled, also over several turns with tools.",
    area="algorithms",
)
@pytest.mark.slow
@pytest.mark.parametrize("name", CHAT_FORMATS)
async def test_conversation_with_tools_and_branch_is_trained_as_sampled(
    name: str, model: Path, server: ServerProcess, record_property: Callable[[str, object], None]
) -> None:
    tokenizer, rng = make_chat_tokenizer(name), random.Random(5)
    special_ids = set(tokenizer.added_tokens_decoder)

    def encode_partly_as_letters(text: str) -> list[int]:
        ids = tokenizer.encode(text, add_special_tokens=False)
        tokens = tokenizer.convert_ids_to_tokens(ids)
        pieces = [[i] if i in special_ids or rng.random() < 0.5 else list(t) for i, t in zip(ids, tokens, strict=True)]
        return [i if isinstance(i, int) else tokenizer.convert_tokens_to_ids(i) for piece in pieces for i in piece]

    def calls(*numbers: int) -> str:
        return format_completion(
            name, calls=[{"name": "add", "arguments": {"a": n, "b": 2}} for n in numbers], reasoning="hm"
        )

    engine = PartlyScriptedEngine()
    engine.initialize([server.address], "key")
    engine.script = [None, calls(1), calls(2, 3, 4), None, calls(5), calls(6, 7), None, None, calls(8, 9), None]
    engine.script += [None] * 4
    engine.encode, engine.responses = encode_partly_as_letters, []
    received: list[list[float]] = []
    endpoint = HttpRolloutEndpoint(tokenizer)
    session = await endpoint.open(engine, GenerationConfig(max_new_tokens=24, temperature=TEMPERATURE), 4096)
    async with openai.AsyncOpenAI(base_url=session.base_url, api_key=session.api_key) as agent:
        messages: list[Any] = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "what is it?"}]
        await _converse(agent, messages, 8, received)
        branch = messages[:4]  # the same first completion, followed by another question
        branch[3] = {"role": "user", "content": "what else?"}
        await _converse(agent, branch, 2, received)
        # two concurrent agents, of which one continues from the first completion
        other = [{"role": "user", "content": "what?"}]
        starts = (other, [*messages[:3], *branch[3:4]])
        await asyncio.gather(*(_converse(agent, start, 2, received) for start in starts))
    await session.close()
    trajectories = session.trajectories(1.0)

    assert sum(int(trajectory.loss_mask.sum()) for trajectory in trajectories) == sum(
        len(r.output_ids) for r in engine.responses
    )
    assert sorted(received) == sorted(response.logprobs for response in engine.responses)
    sampled = [response.input_ids + response.output_ids for response in engine.responses]
    for trajectory in trajectories:  # each trajectory ends with a completion of exactly the prompt before it
        assert trajectory.input_ids.tolist() in sampled
    turns = [trajectory.info["turns"] for trajectory in trajectories]
    assert max(turns) == LONGEST_TRAJECTORY[name]
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
