"""Run the conformance suites on the engines of `rl_contracts.testing`, and on faulty variants that must fail."""

from __future__ import annotations

import dataclasses
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rl_contracts.batch.trajectory import Trajectory, from_response
from rl_contracts.config import GenerationConfig
from rl_contracts.conformance.inference_engine import InferenceEngineConformance
from rl_contracts.conformance.reward import RewardConformance
from rl_contracts.conformance.train_engine import (
    OPTIMIZER,
    STEPS,
    TrainEngineConformance,
)
from rl_contracts.conformance.workflow import WorkflowConformance
from rl_contracts.data import FinetuneSpec, ModelRequest, WeightReceipt, WeightUpdateMeta
from rl_contracts.engine import TrainEngine
from rl_contracts.inference import InferenceEngine
from rl_contracts.testing import (
    NullInferenceEngine,
    NullInferenceEngineConfig,
    ReferenceTrainEngine,
    put_weights,
)
from rl_contracts.workflow import RolloutWorkflow

# ---- train engine


@pytest.mark.slow
class TestReferenceTrainEngine(TrainEngineConformance):
    def make_engine(self) -> TrainEngine:
        return ReferenceTrainEngine()


class MeanOfMeans(ReferenceTrainEngine):
    """Injected fault: the loss of each sequence is divided by its own token count."""

    def _loss(self, batch: Any, loss_fn: Any, loss_weight_fn: Any) -> Any:
        def mean(outputs: Any, packed: Any) -> Any:
            loss, stats = loss_fn(outputs, packed)
            return loss / packed["loss_mask"].sum().clamp(min=1), stats

        return super()._loss(batch, mean, lambda shard: torch.tensor(shard.batch_size[0]))


class Unaligned(ReferenceTrainEngine):
    """Injected fault: entry t comes from the hidden state at t instead of t-1."""

    def forward(self, batch: Any, output_fn: Any) -> torch.Tensor:
        return super().forward(batch, output_fn).roll(-1, 1)


def test_train_suite_rejects_mean_of_means_and_shifted_output(tmp_path: Path) -> None:
    from rl_contracts.testing import make_tiny_model

    suite = TrainEngineConformance()
    path = str(make_tiny_model(tmp_path, hidden=32))

    def start(kind: type[ReferenceTrainEngine], **options: Any) -> ReferenceTrainEngine:
        engine = kind()
        engine.initialize(FinetuneSpec(path, STEPS, optimizer=OPTIMIZER))
        return engine

    def healthy(**options: Any) -> ReferenceTrainEngine:
        return start(ReferenceTrainEngine)

    suite.test_train_batch_result_does_not_depend_on_the_split(healthy, healthy(), "other order")
    with pytest.raises(AssertionError):
        suite.test_train_batch_result_does_not_depend_on_the_split(
            lambda **_: start(MeanOfMeans), healthy(), "other order"
        )
    suite.test_forward_is_causal_and_zero_at_first_token_and_padding(healthy)
    with pytest.raises(AssertionError):
        suite.test_forward_is_causal_and_zero_at_first_token_and_padding(lambda **_: start(Unaligned))


# ---- inference engine


class NullSuite(InferenceEngineConformance):
    kind: type[NullInferenceEngine] = NullInferenceEngine
    context_length = 512

    @pytest.fixture
    async def engine(self) -> AsyncIterator[InferenceEngine]:
        with tempfile.TemporaryDirectory() as folder:
            self.folder = Path(folder)
            config = NullInferenceEngineConfig(
                seconds_per_token=5e-4, commit_seconds=0.01, latency=0.002, context_length=512
            )
            engine = self.kind(config)
            engine.initialize(["http://null:1", "http://null:2"])
            yield engine
            await engine.destroy()

    async def next_weights(self, version: int) -> tuple[WeightUpdateMeta, WeightReceipt]:
        weight = torch.full((3, 4), float(version))
        return put_weights(self.folder, version, [("w", weight)], "disk")


class TestNullInferenceEngine(NullSuite):
    pass


class StampsAtTheEnd(NullInferenceEngine):
    """Injected fault: the client stamps its version on all tokens when the completion arrives."""

    async def agenerate(self, request: ModelRequest) -> Any:
        response = await super().agenerate(request)
        return dataclasses.replace(response, versions=[self.version] * len(response.output_ids))


class WrongTemperature(NullInferenceEngine):
    """Injected fault: log-probs of the logits without division by the temperature."""

    async def agenerate(self, request: ModelRequest) -> Any:
        response = await super().agenerate(request)
        scores = await self.score(response.input_ids + response.output_ids)
        return dataclasses.replace(response, logprobs=scores[len(response.input_ids) :])


async def test_inference_suite_rejects_client_stamps_and_wrong_temperature(tmp_path: Path) -> None:
    suite = NullSuite()
    suite.folder = tmp_path
    config = NullInferenceEngineConfig(seconds_per_token=5e-4)

    await suite.test_agenerate_returns_aligned_logprobs_and_versions(NullInferenceEngine(config), 0.6)
    with pytest.raises(AssertionError):
        await suite.test_agenerate_returns_aligned_logprobs_and_versions(WrongTemperature(config), 0.6)
    await suite.test_commit_weights_stamps_new_version_on_later_tokens_only(NullInferenceEngine(config), "keep")
    with pytest.raises(AssertionError):
        await suite.test_commit_weights_stamps_new_version_on_later_tokens_only(StampsAtTheEnd(config), "keep")


# ---- reward


@pytest.fixture(scope="module", autouse=True)
def _suite_rewards(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    folder = tmp_path_factory.mktemp("suite-rewards")
    (folder / "suite_rewards.py").write_text(
        "from rl_contracts.errors import RewardError\n"
        "def same(prompt, completions, prompt_ids, completion_ids, answer=None, **data):\n"
        "    if not answer:\n"
        "        raise RewardError('no gold answer')\n"
        "    return float(completions.strip() == answer)\n"
        "async def same_async(*args, **data):\n"
        "    return same(*args, **data)\n"
        "def zero_if_missing(prompt, completions, prompt_ids, completion_ids, answer=None, **data):\n"
        "    return float(completions == answer)\n"
    )
    sys.path.insert(0, str(folder))
    yield
    sys.path.remove(str(folder))


class TestPlainReward(RewardConformance):
    target = "suite_rewards:same"
    right = [("4", {"answer": "4"}), (" 4\n", {"answer": "4"})]  # noqa: RUF012
    wrong = [("5", {"answer": "4"}), ("", {"answer": "4"})]  # noqa: RUF012


class TestAsyncReward(TestPlainReward):
    target = "suite_rewards:same_async"


def test_reward_suite_rejects_zero_for_missing_gold_answer() -> None:
    class Silent(TestPlainReward):
        target = "suite_rewards:zero_if_missing"

    with pytest.raises(pytest.fail.Exception, match="DID NOT RAISE"):
        Silent().test_reward_missing_gold_answer_raises()


# ---- workflow


class TwoTurns(RolloutWorkflow):
    """Generate a completion, append three feedback tokens, generate again. Reject examples with `reject` set."""

    mask_feedback = True

    async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> list[Trajectory] | None:
        generation = GenerationConfig(max_new_tokens=20, stop_token_ids=[2])
        first = await engine.agenerate(ModelRequest(list(data["ids"]), generation))
        prompt = [*first.input_ids, *first.output_ids, 7, 8, 9]
        second = await engine.agenerate(ModelRequest(prompt, generation))
        if data.get("reject"):
            return None
        trajectory = from_response(second, reward=1.0, temperature=1.0)
        begin, end = len(first.input_ids), len(first.input_ids) + len(first.output_ids)
        trajectory.loss_mask[begin:end] = True
        trajectory.loss_mask[end : end + 3] = not self.mask_feedback
        trajectory.logprobs[begin:end], trajectory.versions[begin:end] = first.logprobs, first.versions
        return [trajectory]


class TestTwoTurnWorkflow(WorkflowConformance):
    def make_workflow(self) -> RolloutWorkflow:
        return TwoTurns()

    def rows(self) -> list[dict[str, Any]]:
        return [{"ids": [11, 12]}, {"ids": [5], "reject": True}, {"ids": [40, 41, 42]}]


class TrainsOnFeedback(TwoTurns):
    """Injected fault: the loss mask includes the feedback tokens, which the model did not generate."""

    mask_feedback = False


class Retokenizes(TwoTurns):
    """Injected fault: the first generated token id of each trajectory is changed."""

    async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> list[Trajectory] | None:
        trajectories = await super().arun_episode(engine, data)
        for trajectory in trajectories or []:
            position = int(np.flatnonzero(trajectory.versions >= 0)[0])
            trajectory.input_ids[position] = (trajectory.input_ids[position] + 1) % 64
        return trajectories


async def test_workflow_suite_rejects_trained_feedback_and_changed_token_ids() -> None:
    class Suite(TestTwoTurnWorkflow):
        kind: type[RolloutWorkflow] = TwoTurns

        def make_workflow(self) -> RolloutWorkflow:
            return self.kind()

    suite = Suite()
    suite.kind = TrainsOnFeedback
    with pytest.raises(AssertionError):
        await suite.test_episode_trains_only_on_generated_tokens_with_logprobs()
    suite.kind = Retokenizes
    with pytest.raises(AssertionError):
        await suite.test_episode_keeps_sampled_token_ids_unchanged()
