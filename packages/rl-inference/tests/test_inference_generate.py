"""Generation through the client and a real server, compared with transformers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from rl_contracts.config import GenerationConfig
from rl_contracts.data import ModelRequest, StopReason
from rl_inference import EmbeddedEngine, InferenceConfig
from rl_inference.testing import ServerProcess, reference_logprobs, reference_model

KEY = "a key for tests"
PROMPT = [5, 17, 40, 33, 21, 90]


@pytest.fixture(scope="module")
def server(model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    log = tmp_path_factory.mktemp("logs") / "server.log"
    with ServerProcess(model_path, log, key=KEY, options={"slots": 16}) as server:
        yield server


@pytest.fixture
async def engine(server: ServerProcess) -> AsyncIterator[EmbeddedEngine]:
    engine = EmbeddedEngine(InferenceConfig(progress_timeout=20))
    engine.initialize([server.address], KEY)
    yield engine
    await engine.destroy()


def request(prompt: list[int], seed: int = 1, **settings: Any) -> ModelRequest:
    return ModelRequest(list(prompt), GenerationConfig(**settings), seed=seed)


async def test_generate_greedy_equals_transformers(engine: EmbeddedEngine, model_path: Path) -> None:
    model = reference_model(model_path)

    response = await engine.agenerate(request(PROMPT, temperature=0.0, max_new_tokens=40))

    ids = torch.tensor([PROMPT])
    expected = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=40)
    assert response.output_ids == expected[0, len(PROMPT) :].tolist()


@pytest.mark.parametrize("temperature", [1.0, 0.7])
async def test_generate_logprobs_equal_transformers_forward(
    engine: EmbeddedEngine, model_path: Path, temperature: float
) -> None:
    model = reference_model(model_path)
    settings = {"temperature": temperature, "max_new_tokens": 50, "ignore_eos": True, "min_new_tokens": 50}
    prompts = [[*PROMPT[:1 + i % 6], 30 + i] for i in range(24)]

    responses = await asyncio.gather(
        *(engine.agenerate(request(p, i, **settings)) for i, p in enumerate(prompts))
    )

    for prompt, response in zip(prompts, responses, strict=True):
        expected = reference_logprobs(model, prompt, response.output_ids, temperature)
        assert response.logprobs == pytest.approx(expected, abs=1e-5)
        assert response.versions == [0] * 50
        assert response.stop_reason is StopReason.LENGTH
