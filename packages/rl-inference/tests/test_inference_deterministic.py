"""Deterministic server: a completion does not depend on other requests, and its log-probs are those of `score`."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from rl_contracts.config import ClientConfig, GenerationConfig
from rl_contracts.data import ModelRequest, ModelResponse
from rl_inference import EmbeddedEngine
from rl_inference.backends.embedded.config import parse
from rl_inference.testing import ServerProcess

PROMPTS = [[5, 17, 40, 33], [9, 8, 7], [5, 17, 40, 33], [60, 61, 62, 63, 64, 65, 66]]


async def generate_all(address: str, concurrent: bool, order: list[int]) -> list[ModelResponse]:
    """Return the completions of all prompts, each with its own seed, requested in `order`.

    The requests run concurrently or one by one.
    """
    engine = EmbeddedEngine(client=ClientConfig(progress_timeout=20))
    engine.initialize([address])
    generation = GenerationConfig(max_new_tokens=24, temperature=1.3, ignore_eos=True)
    requests = [ModelRequest(prompt, generation, seed=seed) for seed, prompt in enumerate(PROMPTS)]
    try:
        if concurrent:
            responses = await asyncio.gather(*(engine.agenerate(requests[i]) for i in order))
        else:
            responses = [await engine.agenerate(requests[i]) for i in order]
        by_request = dict(zip(order, responses, strict=True))
        scores = [await engine.score(response.input_ids + response.output_ids, 1.3) for response in by_request.values()]
    finally:
        await engine.destroy()
    for response, score in zip(by_request.values(), scores, strict=True):
        assert response.logprobs == score[len(response.input_ids) :], (
            "log-probs must equal those of one pass over the sequence"
        )
        assert len(response.versions) == len(response.output_ids)
    return [by_request[i] for i in range(len(PROMPTS))]


@pytest.mark.slow
async def test_deterministic_server_completions_ignore_other_requests(model_path: Path, tmp_path: Path) -> None:
    options = {"deterministic": "true", "max_sequences": 16}
    with ServerProcess(model_path, tmp_path / "server.log", options=options) as server:
        alone = await generate_all(server.address, concurrent=False, order=[0, 1, 2, 3])
        concurrent = await generate_all(server.address, concurrent=True, order=[3, 2, 1, 0])

    assert [response.output_ids for response in alone] == [response.output_ids for response in concurrent]
    assert [response.logprobs for response in alone] == [response.logprobs for response in concurrent]


def test_parse_deterministic_sets_one_sequence_on_one_thread() -> None:
    options = parse(["--model", "m", "--port", "1", "--deterministic", "true"])

    assert (options.config.max_sequences, options.spec.cpus) == (1, 1)


def test_parse_help_shows_the_default_of_a_setting(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(["--help"])

    assert "(default: 64)" in " ".join(capsys.readouterr().out.split())


def test_parse_invalid_boolean_is_rejected() -> None:
    with pytest.raises(SystemExit):
        parse(["--model", "m", "--port", "1", "--deterministic", "perhaps"])
