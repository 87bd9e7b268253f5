"""Conformance suites of the contracts, run on the components of the sample plugin."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from acme_rl.client import AcmeInferenceEngine, AcmeInferenceEngineConfig
from acme_rl.data import Letters
from acme_rl.engine import AcmeTrainEngine, AcmeTrainEngineConfig
from acme_rl.scheduler import AcmeScheduler
from acme_rl.workflow import SingleTurnWorkflow
from transformers import AutoModelForCausalLM

from rl_contracts.allocation import ParallelStrategy
from rl_contracts.config import ClientConfig, GenerationConfig
from rl_contracts.conformance import inference_engine, reward, scheduler, train_engine, workflow
from rl_contracts.data import FinetuneSpec, ServeSpec, WeightReceipt, WeightUpdateMeta
from rl_contracts.errors import InferenceError
from rl_contracts.scheduler import RUN_KEY_VARIABLE
from rl_contracts.testing import make_batch, make_tiny_model, make_tiny_tokenizer, put_weights

CONTEXT, KEY = 512, "secret"


class TestTrainEngine(train_engine.TrainEngineConformance):
    def make_engine(self) -> AcmeTrainEngine:
        return AcmeTrainEngine()


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("acme")


@pytest.fixture(scope="module")
def model_path(scratch: Path) -> Path:
    return make_tiny_model(scratch / "model", layers=1, hidden=32)


@pytest.fixture(scope="module")
def servers(model_path: Path, scratch: Path) -> Iterator[list[str]]:
    """Two servers, started as a launcher does, with a run key in their environment."""
    spec = ServeSpec(str(model_path), ParallelStrategy(data=2), weights_dir=str(scratch / "weights"))
    job = AcmeInferenceEngine.server_spec(AcmeInferenceEngineConfig(context_length=CONTEXT, slots=32), spec)
    acme_scheduler = AcmeScheduler(scratch / "logs")
    acme_scheduler.create_workers(replace(job, env={RUN_KEY_VARIABLE: KEY}))
    try:
        yield [worker.address for worker in acme_scheduler.wait_ready("rollout")]
    finally:
        acme_scheduler.delete_workers()


class TestInferenceEngine(inference_engine.InferenceEngineConformance):
    context_length = CONTEXT

    @pytest.fixture(autouse=True)
    def _weights(self, model_path: Path, scratch: Path) -> None:
        self.model_path, self.directory = model_path, scratch / "weights"

    @pytest.fixture
    async def engine(self, servers: list[str]) -> AsyncIterator[AcmeInferenceEngine]:
        engine = AcmeInferenceEngine(client=ClientConfig(progress_timeout=20))
        engine.initialize(servers, KEY)
        yield engine
        await engine.destroy()

    async def next_weights(self, version: int) -> tuple[WeightUpdateMeta, WeightReceipt]:
        model = AutoModelForCausalLM.from_pretrained(self.model_path, dtype=torch.float32)
        return put_weights(self.directory, version, [(n, p.detach() * 1.01) for n, p in model.named_parameters()])


class TestScheduler(scheduler.SchedulerConformance):
    restarts_workers = False
    resizes_roles = False

    @pytest.fixture
    def scheduler(self, tmp_path: Path) -> Iterator[AcmeScheduler]:
        instance = AcmeScheduler(tmp_path / "logs")
        yield instance
        instance.delete_workers(grace=0)


class TestWorkflow(workflow.WorkflowConformance):
    def make_workflow(self) -> SingleTurnWorkflow:
        async def short(prompt: str, text: str, *_: Any, answer: str) -> float:
            return 1.0 / (1 + len(text))

        return SingleTurnWorkflow(make_tiny_tokenizer(), GenerationConfig(max_new_tokens=64), short, 512)

    def rows(self) -> list[dict[str, Any]]:
        return list(Letters(rows=3))


class TestReward(reward.RewardConformance):
    target = "vowels"
    right = [("aei", {"answer": "aeiou"}), ("b", {"answer": "bc"})]  # noqa: RUF012
    wrong = [("", {"answer": "aeiou"}), ("xyz", {"answer": "aeiou"}), ("ab", {"answer": "a"})]  # noqa: RUF012


@pytest.mark.parametrize("key", ["", "wrong"])
async def test_request_without_valid_key_is_rejected(servers: list[str], key: str) -> None:
    engine = AcmeInferenceEngine()
    engine.initialize(servers, key)
    with pytest.raises(InferenceError, match="no valid key"):
        await engine.score([1, 2])
    await engine.destroy()


def test_train_step_leaves_frozen_parameters_unchanged(model_path: Path) -> None:
    engine = AcmeTrainEngine(AcmeTrainEngineConfig(freeze=["norm"]))
    engine.initialize(FinetuneSpec(str(model_path), 3))
    before = {name: tensor.clone() for name, tensor in engine.full_parameters()}

    engine.train_batch(make_batch(4), lambda outputs, _: (-outputs.logprobs.sum(), {}), train_engine.trained_tokens)

    changed = {name for name, tensor in engine.full_parameters() if not torch.equal(tensor, before[name])}
    assert changed == {name for name in before if "norm" not in name}
