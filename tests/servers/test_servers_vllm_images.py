"""Prompts with images on the real vLLM on a CPU, compared with transformers before and after a weight update.

The tests need the environment of `infra/servers/build.py vllm`. It has no torchvision, which the processors of most
families need; the processor of Idefics3 does not.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image as Picture
from real_servers import CONTEXT, KEY, interpreter_of, until_stats
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForImageTextToText, Idefics3ImageProcessorPil

from rl_contracts.config import ClientConfig, GenerationConfig
from rl_contracts.data import ModelRequest, ModelResponse, ServeSpec
from rl_contracts.errors import InferenceError
from rl_contracts.images import Image, read_image
from rl_contracts.images.features import ImageProcessor, placeholder_id
from rl_contracts.testing import put_weights
from rl_contracts.testing.vision_families import make_vision_model
from rl_contracts.weights import verify_receipt
from rl_inference import VLLMEngine, VLLMEngineConfig
from rl_inference.testing import JobProcess

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]

TOLERANCE = 1e-4
Images = tuple[Image, ...]


class VisionModels:
    """Two random models of the same shape, one for each version of the weights."""

    def __init__(self, directory: Path) -> None:
        # vLLM's attention on a CPU needs heads of at least 32 dimensions
        self.paths = [make_vision_model("idefics3", directory / str(seed), seed, head_dim=32) for seed in range(2)]
        self.placeholder = placeholder_id(AutoConfig.from_pretrained(self.paths[0]))
        for path in self.paths:
            self._embed_placeholder_as_token_0(path)
        load = AutoModelForImageTextToText.from_pretrained
        self.models: list[Any] = [load(path, attn_implementation="eager").eval() for path in self.paths]
        self.processor = ImageProcessor(str(self.paths[0]))
        # scaled images would differ from those of torchvision by one of 256 levels
        self.processor.processor.image_processor = Idefics3ImageProcessorPil.from_pretrained(self.paths[0])

    def _embed_placeholder_as_token_0(self, path: Path) -> None:
        """Change a model so that transformers can read a sampled placeholder as token 0, not as an image."""
        tensors = {name: tensor.clone() for name, tensor in load_file(path / "model.safetensors").items()}
        embeddings = tensors["model.text_model.embed_tokens.weight"]
        embeddings[self.placeholder] = embeddings[0]
        save_file(tensors, path / "model.safetensors", {"format": "pt"})

    def request(self, *images: Image, seed: int = 1, tokens: int = 12) -> ModelRequest:
        image_ids = self.processor.features(images).input_ids if images else []
        generation = GenerationConfig(max_new_tokens=tokens, ignore_eos=True)
        return ModelRequest([65, 66, *image_ids, 70, 71], generation, seed=seed, images=images)

    @torch.no_grad()
    def difference(self, images: Images, response: ModelResponse) -> float:
        """Return the largest difference from the log-probs of each token's recorded version."""
        ids = torch.tensor([response.input_ids + response.output_ids])
        read = [0 if token == self.placeholder else token for token in response.output_ids]
        inputs = torch.tensor([response.input_ids + read])
        features = self.processor.features(images).tensors if images else {}
        expected = []
        for model in self.models:
            logits = model(input_ids=inputs[:, :-1], use_cache=False, **features).logits[0]
            logprobs = logits.log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
            expected.append(logprobs[len(response.input_ids) - 1 :].tolist())
        pairs = zip(response.versions, response.logprobs, strict=True)
        return max(abs(expected[version][index] - logprob) for index, (version, logprob) in enumerate(pairs))


def noise(width: int, height: int, seed: int) -> Image:
    pixels = random.Random(seed).randbytes(3 * width * height)
    return read_image(Picture.frombytes("RGB", (width, height), pixels))


FIRST, SECOND, LARGE = noise(32, 16, 0), noise(32, 16, 1), noise(90, 40, 2)
ROWS: list[Images] = [(FIRST,), (), (FIRST, LARGE), (FIRST, SECOND), (LARGE,)]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> VisionModels:
    return VisionModels(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def weights_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("weights")


@pytest.fixture(scope="module")
def server(models: VisionModels, weights_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[JobProcess]:
    config = VLLMEngineConfig(python=str(interpreter_of("vllm")), context_length=CONTEXT, max_sequences=8)
    spec = ServeSpec(model_path=str(models.paths[0]), device="cpu", weights_dir=str(weights_dir))
    log = tmp_path_factory.mktemp("logs") / "vllm.log"
    with JobProcess(models.paths[0], log, key=KEY, job=VLLMEngine.server_spec(config, spec)) as process:
        yield process


@pytest.fixture
async def engine(
    server: JobProcess, models: VisionModels, weights_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[VLLMEngine]:
    monkeypatch.setattr("rl_inference.client.transport.PROBE_TIMEOUT", 60.0)  # a server on a busy CPU is slow
    spec = ServeSpec(model_path=str(models.paths[0]), weights_dir=str(weights_dir))
    engine = VLLMEngine(VLLMEngineConfig(context_length=CONTEXT), spec, ClientConfig(progress_timeout=120))
    engine.initialize([server.address], KEY)
    yield engine
    await engine.destroy()


async def completions(engine: VLLMEngine, models: VisionModels, rows: list[Images]) -> list[ModelResponse]:
    """Return a completion of each row, generated in one batch."""
    requests = [models.request(*row, seed=10 + index) for index, row in enumerate(rows)]
    return await asyncio.gather(*map(engine.agenerate, requests))


async def test_images_logprobs_equal_transformers_in_one_batch(engine, models):
    responses = await completions(engine, models, ROWS)

    assert max(map(models.difference, ROWS, responses)) < TOLERANCE


async def test_swapped_images_change_only_their_rows(engine, models):
    before = await completions(engine, models, ROWS)

    after = await completions(engine, models, [*ROWS[:3], (SECOND, FIRST), ROWS[4]])

    assert models.difference((SECOND, FIRST), after[3]) < TOLERANCE
    assert before[3].logprobs[0] != pytest.approx(after[3].logprobs[0], abs=TOLERANCE)
    for index in (0, 1, 2, 4):
        assert after[index].output_ids == before[index].output_ids
        assert after[index].logprobs == pytest.approx(before[index].logprobs, abs=TOLERANCE)


async def test_prompt_that_does_not_match_its_images_is_rejected(engine, models):
    one, two = models.request(FIRST), models.request(FIRST, SECOND)
    unexpanded = replace(one, input_ids=[65, models.placeholder, 70])
    for request, message in (
        (replace(two, images=(FIRST,)), "images: expected 12 placeholders for the images of the prompt, found 24"),
        (replace(models.request(), images=(FIRST,)), "expected as many placeholders as images"),
        (unexpanded, "expected vLLM to use the 3 tokens of the prompt"),
    ):
        with pytest.raises(InferenceError, match=message):
            await engine.agenerate(request)
    assert models.difference((FIRST,), await engine.agenerate(one)) < TOLERANCE


async def test_update_changes_images_in_cache_and_in_running_completions(engine, models, weights_dir):
    """All parameters change, also those of the vision encoder, whose outputs vLLM keeps."""
    await completions(engine, models, ROWS)
    meta, sent = put_weights(weights_dir, 1, [(name, p.detach()) for name, p in models.models[1].named_parameters()])
    for receipt in await engine.stage_weights(meta):
        verify_receipt(sent, receipt, meta.route)
    requests = [models.request(FIRST, SECOND, seed=seed, tokens=900) for seed in range(4)]
    running = [asyncio.create_task(engine.agenerate(request)) for request in requests]
    await until_stats(engine, lambda stats: stats["running"] >= 1)

    await engine.commit_weights(1, "keep")

    after = await completions(engine, models, ROWS)
    assert {version for response in after for version in response.versions} == {1}
    assert max(map(models.difference, ROWS, after)) < TOLERANCE
    interrupted = await asyncio.gather(*running)
    assert {version for response in interrupted for version in response.versions} == {0, 1}
    assert max(models.difference((FIRST, SECOND), response) for response in interrupted) < TOLERANCE
