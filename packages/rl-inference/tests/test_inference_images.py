"""Prompts with images on a real embedded server, compared with transformers."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from image_prompts import image_logprobs, noise, prompt_ids, reference_vision_model

from rl_contracts.config import ClientConfig, GenerationConfig
from rl_contracts.data import ModelRequest, ModelResponse, ServeSpec
from rl_contracts.errors import InferenceError, ModelError
from rl_contracts.images import Image
from rl_contracts.testing.vision_families import make_vision_model
from rl_inference import EmbeddedEngine
from rl_inference.backends.embedded.config import EmbeddedEngineConfig
from rl_inference.embedded_server.model.loading import load_model
from rl_inference.testing import ServerProcess

pytestmark = pytest.mark.slow

FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "idefics3", "internvl", "llava_onevision")


@pytest.fixture(scope="module", params=FAMILIES)
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_vision_model(request.param, tmp_path_factory.mktemp(request.param) / "model")


@pytest.fixture(scope="module")
def server(directory: Path) -> Iterator[ServerProcess]:
    with ServerProcess(directory, directory.parent / "server.log", options={"max_sequences": 8}) as server:
        yield server


@pytest.fixture
async def engine(server: ServerProcess) -> AsyncIterator[EmbeddedEngine]:
    engine = EmbeddedEngine(client=ClientConfig(progress_timeout=20))
    engine.initialize([server.address])
    yield engine
    await engine.destroy()


def request(directory: Path, *images: Image, seed: int = 1) -> ModelRequest:
    generation = GenerationConfig(max_new_tokens=12, min_new_tokens=12, ignore_eos=True)
    return ModelRequest(prompt_ids(directory, images), generation, seed=seed, images=images)


def reference(directory: Path, images: tuple[Image, ...], response: ModelResponse) -> list[float]:
    return image_logprobs(reference_vision_model(directory), directory, images, response.input_ids, response.output_ids)


async def test_images_logprobs_equal_transformers_in_one_batch(engine: EmbeddedEngine, directory: Path) -> None:
    rows = [(noise(24, 32, 0),), (), (noise(32, 16, 1), noise(16, 24, 2)), (noise(9, 40, 3),)]

    responses = await asyncio.gather(
        *(engine.agenerate(request(directory, *row, seed=10 + index)) for index, row in enumerate(rows))
    )

    for row, response in zip(rows, responses, strict=True):
        assert response.logprobs == pytest.approx(reference(directory, row, response), abs=1e-5)


async def test_images_of_equal_size_do_not_share_a_prefix(engine: EmbeddedEngine, directory: Path) -> None:
    first, second = noise(24, 32, 4), noise(24, 32, 5)
    await engine.agenerate(request(directory, first))

    response = await engine.agenerate(request(directory, second))

    assert response.logprobs == pytest.approx(reference(directory, (second,), response), abs=1e-5)


async def test_images_invalid_request_is_rejected_with_its_field(server: ServerProcess, directory: Path) -> None:
    body = {"input_ids": request(directory, noise(24, 32, 6)).input_ids}
    image = base64.b64encode(noise(24, 32, 6).data).decode()
    cases: list[tuple[str, dict[str, Any]]] = [
        ("images[0]", {"images": ["AAAA"]}),
        ("input_ids", {"images": [image, image]}),
        ("input_ids", {"images": [image], "input_ids": [65]}),
        ("input_ids", {}),
        ("images", {"images": [image], "input_ids": [body["input_ids"]]}),
    ]
    async with aiohttp.ClientSession() as http:
        for field, change in cases:
            async with http.post(server.address + "/generate", json=body | change) as response:
                message = (await response.json())["error"]["message"]
                assert (response.status, message.partition(":")[0]) == (400, field)


async def test_score_placeholder_without_image_is_rejected(engine: EmbeddedEngine, directory: Path) -> None:
    assert len(await engine.score([65, 66])) == 2
    with pytest.raises(InferenceError, match="placeholders"):
        await engine.score(request(directory, noise(24, 32, 6)).input_ids)


def test_images_bidirectional_family_is_rejected(tmp_path: Path) -> None:
    directory = make_vision_model("gemma3", tmp_path / "gemma3")
    with pytest.raises(ModelError, match="images"):
        load_model(EmbeddedEngineConfig(), ServeSpec(str(directory), device="cpu"))


def test_load_vision_model_in_deterministic_run_is_rejected(tmp_path: Path) -> None:
    directory = make_vision_model("qwen2_vl", tmp_path / "qwen2_vl")
    with pytest.raises(ModelError, match="deterministic"):
        load_model(EmbeddedEngineConfig(), ServeSpec(str(directory), device="cpu", deterministic=True))
