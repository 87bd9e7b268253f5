"""Images in decode slots: runs of the vision encoder, chunked prefill, prefix cache and weight updates."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from image_prompts import image_logprobs, noise, prompt_ids, reference_vision_model
from test_inference_decoding import decoding, versions

from rl_contracts.config import GenerationConfig
from rl_contracts.errors import InferenceError
from rl_contracts.images import Image
from rl_contracts.images.features import placeholder_id
from rl_contracts.testing import put_weights
from rl_contracts.testing.vision_families import make_vision_model
from rl_contracts.testing.waiting import wait_until
from rl_inference.embedded_server.job import GenerationJob
from rl_inference.embedded_server.loop import DecodeLoop
from rl_inference.embedded_server.model import vision as vision_module
from rl_inference.embedded_server.model.pages import BLOCK

pytestmark = pytest.mark.slow
TOLERANCE = 2e-5
FIRST, SECOND = noise(24, 32, 1), noise(24, 32, 2)


@pytest.fixture(scope="module", params=["qwen3_vl", pytest.param("idefics3", marks=pytest.mark.nightly)])
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_vision_model(request.param, tmp_path_factory.mktemp(request.param) / "model")


@pytest.fixture
def loop(directory: Path, tmp_path: Path) -> Iterator[DecodeLoop]:
    with decoding(directory, tmp_path) as loop:
        yield loop


def job(loop: DecodeLoop, directory: Path, images: Sequence[Image], seed: int = 0, tokens: int = 12) -> GenerationJob:
    vision, prompt = loop.model.vision, prompt_ids(directory, images)
    assert vision is not None
    generation = GenerationConfig(max_new_tokens=tokens, min_new_tokens=tokens)
    prepared = vision.prepare(prompt, tuple(images)) if images else None
    blocked = frozenset([placeholder_id(loop.model.model.config)])  # transformers would need an image for it
    return GenerationJob(f"job-{seed}", prompt, generation, seed, frozenset(), blocked, images=prepared)


def complete(loop: DecodeLoop, each: GenerationJob) -> GenerationJob:
    """Run a job to its end."""
    loop.submit(each)
    each.ended.result(60)
    return each


def count_encodings(loop: DecodeLoop, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, ...]]:
    """Record the images of each later run of the vision encoder in the returned list."""
    vision, runs = loop.model.vision, list[tuple[str, ...]]()
    assert vision is not None
    encode = vision._encode
    monkeypatch.setattr(vision, "_encode", lambda prompt: runs.append(prompt.keys) or encode(prompt))
    return runs


def worst_error(model: Any, directory: Path, images: Sequence[Image], each: GenerationJob) -> float:
    """Return the largest error of a log-prob of a completion."""
    expected = image_logprobs(model, directory, images, each.prompt, each.output_ids)
    return max(abs(one - other) for one, other in zip(each.logprobs, expected, strict=True))


def commit_other_weights(loop: DecodeLoop, model: Any, scratch: Path, version: int, recompute: bool) -> None:
    """Change all weights of a reference model, and publish them while generation is paused."""
    for parameter in model.parameters():
        parameter.data.mul_(1.1)
    loop.pause(wait=False).result(30)
    tensors = [(name, parameter.detach()) for name, parameter in model.named_parameters()]
    loop.weights.stage(put_weights(scratch, version, tensors, "disk")[0])
    loop.commit(version, recompute).result(30)
    loop.resume().result(30)


def test_encoder_runs_once_per_images_and_weights(
    loop: DecodeLoop, directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs, rows = count_encodings(loop, monkeypatch), [(FIRST,), (FIRST, SECOND), (SECOND, FIRST), ()]
    model = reference_vision_model(directory)

    jobs = [job(loop, directory, row, seed) for seed, row in enumerate(rows * 2)]
    for each in jobs:
        loop.submit(each)
    for each, row in zip(jobs, rows * 2, strict=True):
        each.ended.result(60)
        assert worst_error(model, directory, row, each) < TOLERANCE
    assert sorted(runs) == sorted(tuple(image.key for image in row) for row in rows if row)

    # the same version number, as after a resume from an older step
    commit_other_weights(loop, model, tmp_path, version=0, recompute=False)
    for seed in range(2):
        assert worst_error(model, directory, (FIRST,), complete(loop, job(loop, directory, (FIRST,), seed))) < TOLERANCE
    assert runs[3:] == [(FIRST.key,)]


def test_encodings_above_the_limit_are_computed_again(
    loop: DecodeLoop, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vision_module, "CACHE_BYTES", 1)
    runs, model = count_encodings(loop, monkeypatch), reference_vision_model(directory)

    for seed, image in enumerate((FIRST, SECOND, FIRST)):
        loop.run(loop.table._clear_prefixes).result(30)
        assert worst_error(model, directory, (image,), complete(loop, job(loop, directory, (image,), seed))) < TOLERANCE

    assert runs == [(FIRST.key,), (SECOND.key,), (FIRST.key,)]


@pytest.mark.parametrize("prefill_tokens", [1, 5])
def test_images_prefilled_in_chunks_equal_transformers(loop: DecodeLoop, directory: Path, prefill_tokens: int) -> None:
    loop.table._prefill_tokens = prefill_tokens
    rows, model = [(FIRST, noise(32, 16, 3)), (SECOND,), ()], reference_vision_model(directory)

    jobs = [job(loop, directory, row, seed) for seed, row in enumerate(rows)]
    for each in jobs:
        loop.submit(each)

    for each, row in zip(jobs, rows, strict=True):
        each.ended.result(60)
        assert worst_error(model, directory, row, each) < TOLERANCE


def test_prefix_is_shared_only_with_the_same_images(loop: DecodeLoop, directory: Path) -> None:
    first, second = noise(40, 40, 1), noise(40, 40, 2)
    model, shared = reference_vision_model(directory), []
    for seed, row in enumerate([(first, second), (first, second), (second, first), (first, first)]):
        before = loop.stats()["prefix_tokens"]
        each = complete(loop, job(loop, directory, row, seed))
        shared.append(loop.stats()["prefix_tokens"] - before)
        assert worst_error(model, directory, row, each) < TOLERANCE

    assert shared[1] >= len(prompt_ids(directory, (first, second))) // BLOCK * BLOCK > 0
    assert (shared[0], *shared[2:]) == (0, 0, 0)


@pytest.mark.parametrize("recompute", [True, False])
def test_images_of_running_job_follow_weight_update(
    loop: DecodeLoop, directory: Path, tmp_path: Path, recompute: bool
) -> None:
    model = reference_vision_model(directory)
    running = job(loop, directory, (FIRST,), tokens=300)
    loop.submit(running)
    wait_until(lambda: len(running.output_ids) > 20, 60)
    commit_other_weights(loop, model, tmp_path, version=1, recompute=recompute)
    running.ended.result(60)

    count = versions(running).count(1)
    expected = image_logprobs(model, directory, (FIRST,), running.prompt, running.output_ids)[-count:]
    errors = [abs(one - other) for one, other in zip(running.logprobs[-count:], expected, strict=True)]
    assert 0 < count < 300
    assert (max(errors) < TOLERANCE) == recompute
    assert worst_error(model, directory, (FIRST,), complete(loop, job(loop, directory, (FIRST,), 1))) < TOLERANCE


def test_prepare_placeholders_in_other_runs_are_rejected(loop: DecodeLoop, directory: Path) -> None:
    vision, ids, image = loop.model.vision, prompt_ids(directory, (FIRST,)), placeholder_id(loop.model.model.config)
    assert vision is not None
    ids.remove(image)

    with pytest.raises(InferenceError, match="placeholders"):
        vision.prepare([image, *ids], (FIRST,))
