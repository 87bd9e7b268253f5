"""The embedded server without HTTP: conformance suite, routes without files, and the end of its decode thread."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from rl_contracts.conformance import inference_engine as suite
from rl_contracts.conformance.inference_engine import request
from rl_contracts.data import ParamSpec, ServeSpec, WeightReceipt, WeightUpdateMeta
from rl_contracts.errors import ConfigError, InferenceError
from rl_contracts.testing import put_weights
from rl_contracts.testing.waiting import until
from rl_contracts.weights import open_sender, verify_receipt
from rl_inference import EmbeddedEngineConfig, InProcessEngine
from rl_inference.testing import reference_logprobs, reference_model


def make_engine(model_path: Path, weights_dir: Path) -> InProcessEngine:
    return InProcessEngine(
        EmbeddedEngineConfig(max_sequences=16), ServeSpec(str(model_path), weights_dir=str(weights_dir))
    )


def scaled(model_path: Path, factor: float) -> Any:
    """Return the tiny model with all weights times a factor."""
    model = reference_model(model_path)
    for parameter in model.parameters():
        parameter.data *= factor
    return model


class TestInProcessEngine(suite.InferenceEngineConformance):
    logprob_tolerance = 1e-5
    context_length = 512

    @pytest.fixture
    async def engine(self, model_path: Path, tmp_path: Path) -> AsyncIterator[InProcessEngine]:
        self.model_path, self.scratch = model_path, tmp_path
        engine = make_engine(model_path, tmp_path)
        yield engine
        await engine.destroy()

    async def next_weights(self, version: int) -> tuple[WeightUpdateMeta, WeightReceipt]:
        return put_weights(self.scratch, version, scaled(self.model_path, 1.01).named_parameters())


@pytest.fixture
async def engine(model_path: Path, tmp_path: Path) -> AsyncIterator[InProcessEngine]:
    engine = make_engine(model_path, tmp_path)
    yield engine
    await engine.destroy()


async def test_in_process_engine_broadcast_update_serves_sent_tensors(
    engine: InProcessEngine, model_path: Path
) -> None:
    model = scaled(model_path, 1.2)
    tensors = [(name, parameter.detach()) for name, parameter in model.named_parameters()]
    sender = open_sender("broadcast", "tcp://127.0.0.1:0?timeout=30")

    meta = sender.begin(1, tuple(ParamSpec(name, tuple(t.shape), "float32") for name, t in tensors))
    staging = asyncio.create_task(engine.stage_weights(meta))
    sums = await asyncio.to_thread(sender.send, iter(tensors))
    verify_receipt(WeightReceipt("trainer", 1, sums), (await staging)[0], "broadcast")
    await engine.commit_weights(1)
    response = await engine.agenerate(request())
    sender.close()

    assert set(response.versions) == {1}
    expected = reference_logprobs(model, response.input_ids, response.output_ids)
    assert response.logprobs == pytest.approx(expected, abs=2e-5)


async def test_in_process_engine_commit_while_paused_stays_paused(engine: InProcessEngine, model_path: Path) -> None:
    meta, _ = put_weights(engine.spec.weights_dir, 1, scaled(model_path, 1.01).named_parameters())
    await engine.pause()
    waiting = asyncio.create_task(engine.agenerate(request()))

    await engine.stage_weights(meta)
    await engine.commit_weights(1, "wait")

    assert engine._loop.stats()["paused"]
    await engine.resume()
    assert set((await waiting).versions) == {1}


async def test_in_process_engine_decode_thread_crash_fails_requests(engine: InProcessEngine) -> None:
    pending = asyncio.create_task(engine.agenerate(request(max_new_tokens=400)))
    await until(lambda: engine._loop.stats()["running"] == 1)

    engine._loop._inbox.put(lambda: 1 / 0)  # type: ignore[arg-type, return-value]

    for call in (pending, engine.agenerate(request()), engine.score([5, 6])):
        with pytest.raises(InferenceError):
            await asyncio.wait_for(call, 60)


def test_in_process_engine_in_a_run_is_rejected() -> None:
    with pytest.raises(ConfigError, match="embedded"):
        InProcessEngine.server_spec(EmbeddedEngineConfig(), ServeSpec())
