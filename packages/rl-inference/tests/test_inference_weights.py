"""Weight updates: staged beside the served weights, receipts, versions at a switch."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from rl_contracts.config import GenerationConfig
from rl_contracts.data import ModelRequest, ParamSpec, WeightReceipt, WeightUpdateMeta
from rl_contracts.weights import staged_location, verify_receipt, write_weights
from rl_inference import EmbeddedEngine, InferenceConfig
from rl_inference.testing import ServerProcess, reference_logprobs, reference_model, tiny_model

PROMPT = [5, 17, 40, 33, 21, 90]


@pytest.fixture(scope="module")
def new_model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("new") / "qwen3", seed=1)


@contextlib.asynccontextmanager
async def serving(
    model: Path, scratch: Path, count: int = 1, **config: Any
) -> AsyncIterator[tuple[Any, ...]]:
    """An engine over fresh servers, the servers after it."""
    with contextlib.ExitStack() as stack:
        options = {"weights_dir": scratch / "weights", "slots": 8}
        servers = [
            ServerProcess(model, scratch / f"server-{i}.log", options=options).start() for i in range(count)
        ]
        for server in servers:
            stack.callback(server.stop)
        for server in servers:
            server.wait_ready()
        engine = EmbeddedEngine(InferenceConfig(**{"progress_timeout": 20, **config}))
        engine.initialize([server.address for server in servers])
        yield engine, *servers
        await engine.destroy()


def publish(
    model: Any, scratch: Path, version: int, route: str = "shm", drop: str = ""
) -> tuple[WeightUpdateMeta, WeightReceipt]:
    """Write a model's parameters onto a route, as a trainer does."""
    tensors = [(name, p.detach()) for name, p in model.named_parameters() if name != drop]
    specs = tuple(ParamSpec(name, tuple(p.shape), "float32") for name, p in tensors)
    location = staged_location(scratch / "weights", route, version)
    return write_weights(WeightUpdateMeta(route, version, location, specs), tensors)


def request(tokens: int, seed: int = 1) -> ModelRequest:
    return ModelRequest(
        list(PROMPT),
        GenerationConfig(max_new_tokens=tokens, min_new_tokens=tokens, ignore_eos=True),
        seed=seed,
    )


@pytest.mark.parametrize("route", ["shm", "disk"])
async def test_commit_staged_weights_serves_them(
    model_path: Path, new_model_path: Path, tmp_path: Path, route: str
) -> None:
    new = reference_model(new_model_path)
    async with serving(model_path, tmp_path) as (engine, _):
        meta, sent = publish(new, tmp_path, 3, route)

        (receipt,) = await engine.stage_weights(meta)
        before = await engine.agenerate(request(10))
        paused = await engine.commit_weights(3)
        after = await engine.agenerate(request(30))

        verify_receipt(sent, receipt, route)
        assert before.versions == [0] * 10
        assert after.versions == [3] * 30
        assert engine.version == 3
        assert 0 <= paused < 5
        assert after.logprobs == pytest.approx(reference_logprobs(new, PROMPT, after.output_ids), abs=1e-5)
        assert await engine.score(PROMPT) == pytest.approx(
            [0.0, *reference_logprobs(new, PROMPT[:1], PROMPT[1:])], abs=1e-5
        )
