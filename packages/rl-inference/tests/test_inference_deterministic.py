"""A deterministic server: an answer is the same whatever else is served, and its log-probs are those of `score`."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from rl_contracts.config import ClientConfig, GenerationConfig
from rl_contracts.data import ModelRequest, ModelResponse, ServeSpec
from rl_inference import EmbeddedEngine, EmbeddedEngineConfig
from rl_inference.backends.embedded.config import parse
from rl_inference.testing import ServerProcess

PROMPTS = [[5, 17, 40, 33], [9, 8, 7], [5, 17, 40, 33], [60, 61, 62, 63, 64, 65, 66]]


async def answers(address: str, together: bool, order: list[int]) -> list[ModelResponse]:
    """The answers to all prompts, each with a seed of its own, asked in an order and at once or one by one."""
    engine = EmbeddedEngine(client=ClientConfig(progress_timeout=20))
    engine.initialize([address])
    generation = GenerationConfig(max_new_tokens=24, temperature=1.3, ignore_eos=True)
    requests = [ModelRequest(prompt, generation, seed=seed) for seed, prompt in enumerate(PROMPTS)]
    try:
        if together:
            found = await asyncio.gather(*(engine.agenerate(requests[i]) for i in order))
        else:
            found = [await engine.agenerate(requests[i]) for i in order]
        by_request = dict(zip(order, found, strict=True))
        scores = [await engine.score(a.input_ids + a.output_ids, 1.3) for a in by_request.values()]
    finally:
        await engine.destroy()
    for answer, score in zip(by_request.values(), scores, strict=True):
        assert answer.logprobs == score[len(answer.input_ids) :], "log-probs are those of one pass over the answer"
        assert len(answer.versions) == len(answer.output_ids)
    return [by_request[i] for i in range(len(PROMPTS))]


@pytest.mark.slow
async def test_deterministic_server_answers_do_not_depend_on_what_else_is_served(
    model_path: Path, tmp_path: Path
) -> None:
    options = {"deterministic": "true", "slots": 16}
    with ServerProcess(model_path, tmp_path / "server.log", options=options) as server:
        alone = await answers(server.address, together=False, order=[0, 1, 2, 3])
        among = await answers(server.address, together=True, order=[3, 2, 1, 0])

    assert [a.output_ids for a in alone] == [a.output_ids for a in among]
    assert [a.logprobs for a in alone] == [a.logprobs for a in among]


def test_deterministic_server_takes_one_sequence_on_one_thread() -> None:
    given = parse(["--model", "m", "--port", "1", "--slots", "64", "--deterministic", "true"])
    assert (given.config.slots, given.spec.cpus) == (1, 1)
    assert not parse(["--model", "m", "--port", "1"]).spec.deterministic


def test_client_hands_the_setting_on_to_its_servers() -> None:
    command = EmbeddedEngine.server_spec(EmbeddedEngineConfig(), ServeSpec("m", deterministic=True)).command
    arguments = command[command.index("--deterministic") : command.index("--deterministic") + 2]
    assert list(arguments) == ["--deterministic", "true"]


def test_parse_switch_that_is_neither_on_nor_off_is_refused() -> None:
    with pytest.raises(SystemExit):
        parse(["--model", "m", "--port", "1", "--deterministic", "perhaps"])
