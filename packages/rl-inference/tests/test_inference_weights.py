"""Weight updates: staging next to the served weights, receipts, and versions around a commit."""

from __future__ import annotations

import asyncio
import json
import urllib.request
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from rl_contracts.config import ClientConfig, GenerationConfig
from rl_contracts.data import ModelRequest, WeightReceipt, WeightUpdateMeta
from rl_contracts.errors import InferenceError, WeightUpdateError
from rl_contracts.testing import put_weights
from rl_contracts.weights import verify_receipt
from rl_inference import EmbeddedEngine
from rl_inference.testing import ServerProcess, reference_logprobs, reference_model, tiny_model

PROMPT = [5, 17, 40, 33, 21, 90]


@pytest.fixture(scope="module")
def new_model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("new") / "qwen3", seed=1)


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("weights")


@pytest.fixture(scope="module")
def server(model_path: Path, scratch: Path) -> Iterator[ServerProcess]:
    options = {"weights_dir": scratch / "weights", "max_sequences": 8}
    with ServerProcess(model_path, scratch / "server.log", options=options) as server:
        yield server


def served_version(server: ServerProcess) -> int:
    with urllib.request.urlopen(server.address + "/health", timeout=10) as response:
        return int(json.load(response)["version"])


@pytest.fixture
async def engine(server: ServerProcess, model_path: Path, scratch: Path) -> AsyncIterator[EmbeddedEngine]:
    """Yield an engine whose server serves `model_path` under an even version; the next version is free."""
    probe = EmbeddedEngine(client=ClientConfig(progress_timeout=20))
    probe.initialize([server.address])
    current = served_version(server)
    even = current + 2 - current % 2
    meta, _ = publish(reference_model(model_path), scratch, even)
    await probe.stage_weights(meta)
    await probe.commit_weights(even)
    yield probe
    await probe.destroy()


def publish(model: Any, scratch: Path, version: int, route: str = "shm") -> tuple[WeightUpdateMeta, WeightReceipt]:
    """Write the parameters of a model to a route, as a trainer does."""
    tensors = [(name, p.detach()) for name, p in model.named_parameters()]
    return put_weights(scratch / "weights", version, tensors, route)


def request(tokens: int, seed: int = 1) -> ModelRequest:
    return ModelRequest(
        list(PROMPT),
        GenerationConfig(max_new_tokens=tokens, min_new_tokens=tokens, ignore_eos=True),
        seed=seed,
    )


async def wait_for_tokens(engine: EmbeddedEngine, more: int, running: int = 1) -> None:
    """Wait until the server runs at least `running` completions and has generated `more` further tokens."""
    async with asyncio.timeout(30):
        while (await engine.stats())["running"] < running:  # noqa: ASYNC110 - another process
            await asyncio.sleep(0.001)
    target = (await engine.stats())["generated_tokens"] + more
    async with asyncio.timeout(30):
        while (await engine.stats())["generated_tokens"] < target:  # noqa: ASYNC110 - another process
            await asyncio.sleep(0.001)


def switch_position(versions: list[int]) -> int:
    """Return the index at which the version changes; it must change once, upwards."""
    assert versions == sorted(versions)
    assert len(set(versions)) == 2
    return versions.index(versions[-1])


async def test_commit_staged_weights_serves_them(engine: EmbeddedEngine, new_model_path: Path, scratch: Path) -> None:
    new, old = reference_model(new_model_path), engine.version
    meta, sent = publish(new, scratch, old + 1, "disk")

    (receipt,) = await engine.stage_weights(meta)
    before = await engine.agenerate(request(10))
    paused = await engine.commit_weights(old + 1)
    after = await engine.agenerate(request(30))

    verify_receipt(sent, receipt, "disk")
    assert before.versions == [old] * 10
    assert after.versions == [old + 1] * 30
    assert engine.version == old + 1
    assert 0 <= paused < 5
    assert after.logprobs == pytest.approx(reference_logprobs(new, PROMPT, after.output_ids), abs=1e-5)
    expected = [0.0, *reference_logprobs(new, PROMPT[:1], PROMPT[1:])]
    assert await engine.score(PROMPT) == pytest.approx(expected, abs=1e-5)


async def test_commit_recompute_later_logprobs_equal_new_model(
    engine: EmbeddedEngine, model_path: Path, new_model_path: Path, scratch: Path
) -> None:
    old, new = reference_model(model_path), reference_model(new_model_path)
    await engine.stage_weights(publish(new, scratch, engine.version + 1)[0])
    tasks = [asyncio.create_task(engine.agenerate(request(480, i))) for i in range(8)]
    await wait_for_tokens(engine, 100, running=8)

    await engine.commit_weights(engine.version + 1, "recompute")

    for response in await asyncio.gather(*tasks):
        position = switch_position(response.versions)
        head, tail = response.output_ids[:position], response.output_ids[position:]
        assert len(response.output_ids) == 480
        assert response.resubmissions == 0
        assert response.logprobs[:position] == pytest.approx(reference_logprobs(old, PROMPT, head), abs=1e-5)
        assert response.logprobs[position:] == pytest.approx(reference_logprobs(new, PROMPT + head, tail), abs=1e-5)


@pytest.mark.slow
async def test_commit_keep_uses_old_cache_with_new_weights(
    engine: EmbeddedEngine, model_path: Path, new_model_path: Path, scratch: Path
) -> None:
    old, new = reference_model(model_path), reference_model(new_model_path)
    await engine.stage_weights(publish(new, scratch, engine.version + 1)[0])
    task = asyncio.create_task(engine.agenerate(request(480)))
    await wait_for_tokens(engine, 20)

    await engine.commit_weights(engine.version + 1, "keep")

    response = await task
    position = switch_position(response.versions)
    assert response.logprobs == pytest.approx(kept_logprobs(old, new, response.output_ids, position), abs=1e-5)


@torch.no_grad()
def kept_logprobs(old: Any, new: Any, output: list[int], at: int) -> list[float]:
    """Return the log-probs under `keep`: `old` reads the tokens before `output[at - 1]`, `new` reads the rest."""
    ids, first = torch.tensor([PROMPT + output]), len(PROMPT) + at - 1
    before = old(input_ids=ids[:, :first], use_cache=True)
    after = new(input_ids=ids[:, first:-1], past_key_values=before.past_key_values)
    logits = torch.cat([before.logits[0, len(PROMPT) - 1 :], after.logits[0]])
    chosen: list[float] = torch.log_softmax(logits, -1).gather(1, torch.tensor(output)[:, None])[:, 0].tolist()
    return chosen


@pytest.mark.slow
async def test_commit_wait_ends_running_completions_and_delays_new_ones(
    engine: EmbeddedEngine, new_model_path: Path, scratch: Path
) -> None:
    old = engine.version
    await engine.stage_weights(publish(reference_model(new_model_path), scratch, old + 1)[0])
    running = [asyncio.create_task(engine.agenerate(request(300 + i, i))) for i in range(8)]
    await wait_for_tokens(engine, 20, running=8)
    commit = asyncio.create_task(engine.commit_weights(old + 1, "wait"))
    await wait_for_tokens(engine, 20)
    delayed = asyncio.create_task(engine.agenerate(request(5)))

    await commit

    assert all(response.versions == [old] * len(response.output_ids) for response in await asyncio.gather(*running))
    assert (await delayed).versions == [old + 1] * 5


async def test_commit_while_paused_stays_paused(engine: EmbeddedEngine, new_model_path: Path, scratch: Path) -> None:
    await engine.stage_weights(publish(reference_model(new_model_path), scratch, engine.version + 1)[0])
    await engine.pause()

    await engine.commit_weights(engine.version + 1)
    task = asyncio.create_task(engine.agenerate(request(5)))
    before = await engine.stats()
    async with asyncio.timeout(30):
        while (await engine.stats())["waiting"] == 0:  # noqa: ASYNC110 - another process's event
            await asyncio.sleep(0.01)

    assert (await engine.stats())["generated_tokens"] == before["generated_tokens"]
    await engine.resume()
    assert (await task).versions == [engine.version] * 5


def flip_bit(path: Path) -> None:
    """Flip a bit of the last parameter in the file."""
    with path.open("r+b") as file:
        file.seek(-64, 2)
        byte = file.read(1)
        file.seek(-64, 2)
        file.write(bytes([byte[0] ^ 1]))


async def test_stage_changed_tensor_gives_different_receipt(
    engine: EmbeddedEngine, new_model_path: Path, scratch: Path
) -> None:
    meta, sent = publish(reference_model(new_model_path), scratch, engine.version + 1)
    flip_bit(Path(meta.parts[0].location))

    (receipt,) = await engine.stage_weights(meta)

    with pytest.raises(WeightUpdateError, match=f"parameter '{meta.params[-1].name}' differs"):
        verify_receipt(sent, receipt, "shm")


async def test_stage_outside_weights_directory_or_by_link_is_rejected(
    engine: EmbeddedEngine, new_model_path: Path, scratch: Path, tmp_path: Path
) -> None:
    new, version = reference_model(new_model_path), engine.version + 1
    outside, _ = publish(new, tmp_path, version)
    linked, _ = publish(new, scratch, version, "disk")
    (file := Path(linked.parts[0].location) / "model.safetensors").rename(tmp_path / "elsewhere")
    file.symlink_to(tmp_path / "elsewhere")

    for meta in (outside, linked):
        with pytest.raises(WeightUpdateError, match="outside the server's weights directory"):
            await engine.stage_weights(meta)


async def test_commit_tied_weights_stay_tied(engine: EmbeddedEngine, new_model_path: Path, scratch: Path) -> None:
    new = reference_model(new_model_path)
    tensors = list(new.state_dict().items())  # also contains the tied `lm_head`
    assert "lm_head.weight" in dict(tensors)
    meta, sent = put_weights(scratch / "weights", engine.version + 1, tensors)

    (receipt,) = await engine.stage_weights(meta)
    await engine.commit_weights(meta.version)
    response = await engine.agenerate(request(20))

    verify_receipt(sent, receipt, "shm")
    assert response.logprobs == pytest.approx(reference_logprobs(new, PROMPT, response.output_ids), abs=1e-5)


async def test_score_previous_weights_works_until_next_version_is_staged(
    engine: EmbeddedEngine, model_path: Path, new_model_path: Path, scratch: Path
) -> None:
    old, ids = engine.version, [*PROMPT, 7, 9]
    meta, _ = publish(reference_model(new_model_path), scratch, old + 1)
    before = await engine.score(ids)
    await engine.stage_weights(meta)
    await engine.commit_weights(old + 1)

    assert await engine.score_previous_weights(ids) == before
    expected = reference_logprobs(reference_model(new_model_path), PROMPT, ids[len(PROMPT) :])
    assert (await engine.score(ids))[len(PROMPT) :] == pytest.approx(expected, abs=1e-4)

    meta, _ = publish(reference_model(model_path), scratch, old + 2)
    await engine.stage_weights(meta)
    with pytest.raises(InferenceError, match="no earlier weights"):
        await engine.score_previous_weights(ids)
