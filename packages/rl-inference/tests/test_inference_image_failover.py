"""Prompts with images when a server dies: another server gets the images again and continues the completion."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
from image_prompts import image_logprobs, noise, prompt_ids, reference_vision_model
from test_inference_failover import client, until_both_running

from rl_contracts.config import GenerationConfig
from rl_contracts.data import ModelRequest
from rl_contracts.images.features import placeholder_id
from rl_contracts.testing.vision_families import make_vision_model
from rl_inference.testing import ServerProcess

pytestmark = pytest.mark.slow
TOKENS = 480
IMAGES = [(noise(24, 32, 1),), (noise(24, 32, 2),), (noise(32, 16, 3), noise(16, 24, 4)), ()]


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return make_vision_model("qwen2_5_vl", tmp_path / "model")


@pytest.fixture
def servers(directory: Path, tmp_path: Path) -> Iterator[list[ServerProcess]]:
    pair = [ServerProcess(directory, tmp_path / f"{i}.log", options={"max_sequences": 4}) for i in range(2)]
    for server in pair:
        server.start()
    for server in pair:
        server.wait_ready()
    yield pair
    for server in pair:
        server.stop()


async def test_agenerate_with_images_continues_on_another_server(servers: list[ServerProcess], directory: Path) -> None:
    model = reference_vision_model(directory)
    generation = GenerationConfig(
        max_new_tokens=TOKENS,
        min_new_tokens=TOKENS,
        stop_token_ids=[placeholder_id(model.config)],  # not sampled before the minimum length
        ignore_eos=True,
    )
    requests = [
        ModelRequest(prompt_ids(directory, images), generation, seed=seed, images=images)
        for seed, images in enumerate(IMAGES * 2)
    ]
    async with client([server.address for server in servers]) as engine:
        completions = [asyncio.create_task(engine.agenerate(request)) for request in requests]
        await until_both_running(servers)

        servers[0].stop()
        finished = await asyncio.gather(*completions)

    assert sum(completion.resubmissions > 0 for completion, images in zip(finished, IMAGES * 2, strict=True) if images)
    for request, completion in zip(requests, finished, strict=True):
        assert completion.input_ids == request.input_ids
        assert len(completion.output_ids) == TOKENS
        expected = image_logprobs(model, directory, request.images, request.input_ids, completion.output_ids)
        assert completion.logprobs == pytest.approx(expected, abs=2e-5)
