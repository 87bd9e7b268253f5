"""The conformance suites on the implementations of `rl_contracts.testing`, and on faulty ones that they must catch."""

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
    policy_loss,
    trained_tokens,
)
from rl_contracts.conformance.workflow import WorkflowConformance
from rl_contracts.data import FinetuneSpec, ModelRequest, WeightReceipt, WeightUpdateMeta
from rl_contracts.engine import TrainEngine
from rl_contracts.inference import InferenceEngine
from rl_contracts.testing import (
    NullInferenceEngine,
    NullInferenceEngineConfig,
    ReferenceTrainEngine,
    make_batch,
    put_weights,
)
from rl_contracts.workflow import RolloutWorkflow

# ---- train engine


@pytest.mark.slow
class TestReferenceTrainEngine(TrainEngineConformance):
    def make_engine(self) -> TrainEngine:
        return ReferenceTrainEngine()


class MeanOfMeans(ReferenceTrainEngine):
    """Planted fault: divides each row by its own count."""

    def _loss(self, batch: Any, loss_fn: Any, loss_weight_fn: Any) -> Any:
        def mean(outputs: Any, packed: Any) -> Any:
            loss, stats = loss_fn(outputs, packed)
            return loss / packed["loss_mask"].sum().clamp(min=1), stats

        return super()._loss(batch, mean, lambda share: torch.tensor(share.batch_size[0]))


class Unaligned(ReferenceTrainEngine):
    """Planted fault: entry t comes from the hidden state at t."""

    def forward(self, batch: Any, output_fn: Any) -> torch.Tensor:
        return super().forward(batch, output_fn).roll(-1, 1)


def test_train_suite_catches_a_mean_of_means_and_a_shifted_output(tmp_path: Path) -> None:
    from rl_contracts.testing import make_tiny_model

    suite = TrainEngineConformance()
    path = str(make_tiny_model(tmp_path, hidden=32))

    def start(kind: type[ReferenceTrainEngine], **options: Any) -> ReferenceTrainEngine:
        engine = kind()
        engine.initialize(FinetuneSpec(path, STEPS, optimizer=OPTIMIZER))
        return engine

    def healthy(**options: Any) -> ReferenceTrainEngine:
        return start(ReferenceTrainEngine)

    suite.test_train_batch_is_the_same_for_every_split(healthy, healthy(), "other order")
    with pytest.raises(AssertionError):
        suite.test_train_batch_is_the_same_for_every_split(lambda **_: start(MeanOfMeans), healthy(), "other order")
    suite.test_forward_entry_0_and_padding_are_0_and_entry_t_sees_tokens_up_to_t(healthy)
    with pytest.raises(AssertionError):
        suite.test_forward_entry_0_and_padding_are_0_and_entry_t_sees_tokens_up_to_t(lambda **_: start(Unaligned))


def test_policy_loss_of_the_suite_is_an_unnormalised_sum() -> None:
    engine = ReferenceTrainEngine(model=torch.nn.Embedding(256, 256))
    engine.model.forward = lambda input_ids: torch.nn.functional.embedding(input_ids, engine.model.weight)
    engine.initialize(FinetuneSpec("", 1))
    batch = make_batch(4)

    both = engine.eval_batch(batch, policy_loss, trained_tokens)["loss"] * int(batch["loss_mask"].sum())
    each = [
        engine.eval_batch(batch[i : i + 1], policy_loss, trained_tokens)["loss"] * int(batch["loss_mask"][i].sum())
        for i in range(4)
        if batch["loss_mask"][i].any()
    ]

    assert both == pytest.approx(sum(each), rel=1e-5)


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
    """Planted fault: the client stamps the version when the answer arrives."""

    async def agenerate(self, request: ModelRequest) -> Any:
        response = await super().agenerate(request)
        return dataclasses.replace(response, versions=[self.version] * len(response.output_ids))


class WrongTemperature(NullInferenceEngine):
    """Planted fault: log-probs of the undivided logits."""

    async def agenerate(self, request: ModelRequest) -> Any:
        response = await super().agenerate(request)
        scores = await self.score(response.input_ids + response.output_ids)
        return dataclasses.replace(response, logprobs=scores[len(response.input_ids) :])


async def test_inference_suite_catches_client_stamps_and_a_wrong_temperature(tmp_path: Path) -> None:
    suite = NullSuite()
    suite.folder = tmp_path
    config = NullInferenceEngineConfig(seconds_per_token=5e-4)

    await suite.test_agenerate_logprobs_and_versions_belong_to_the_tokens(NullInferenceEngine(config), 0.6)
    with pytest.raises(AssertionError):
        await suite.test_agenerate_logprobs_and_versions_belong_to_the_tokens(WrongTemperature(config), 0.6)
    await suite.test_commit_stamps_the_new_version_on_later_tokens_only(NullInferenceEngine(config), "keep")
    with pytest.raises(AssertionError):
        await suite.test_commit_stamps_the_new_version_on_later_tokens_only(StampsAtTheEnd(config), "keep")


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


def test_reward_suite_catches_a_silent_zero() -> None:
    class Silent(TestPlainReward):
        target = "suite_rewards:zero_if_missing"

    with pytest.raises(pytest.fail.Exception, match="DID NOT RAISE"):
        Silent().test_missing_gold_answer_raises_and_is_no_reward()


# ---- workflow


class TwoTurns(RolloutWorkflow):
    """Answers, gets three tokens of feedback, answers again; a row with `reject` is rejected."""

    mask_feedback = True

    async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> list[Trajectory] | None:
        generation = GenerationConfig(max_new_tokens=20, stop_token_ids=[2])
        first = await engine.agenerate(ModelRequest(list(data["ids"]), generation))
        prompt = [*first.input_ids, *first.output_ids, 7, 8, 9]
        second = await engine.agenerate(ModelRequest(prompt, generation))
        if data.get("reject"):
            return None
        row = from_response(second, reward=1.0, temperature=1.0)
        begin, end = len(first.input_ids), len(first.input_ids) + len(first.output_ids)
        row.loss_mask[begin:end] = True
        row.loss_mask[end : end + 3] = not self.mask_feedback
        row.logprobs[begin:end], row.versions[begin:end] = first.logprobs, first.versions
        return [row]


class TestTwoTurnWorkflow(WorkflowConformance):
    def make_workflow(self) -> RolloutWorkflow:
        return TwoTurns()

    def rows(self) -> list[dict[str, Any]]:
        return [{"ids": [11, 12]}, {"ids": [5], "reject": True}, {"ids": [40, 41, 42]}]


class TrainsOnFeedback(TwoTurns):
    """Planted fault: learns from tokens that the model did not write."""

    mask_feedback = False


class Retokenizes(TwoTurns):
    """Planted fault: the first answer comes back with another id in its middle."""

    async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> list[Trajectory] | None:
        rows = await super().arun_episode(engine, data)
        for row in rows or []:
            position = int(np.flatnonzero(row.versions >= 0)[0])
            row.input_ids[position] = (row.input_ids[position] + 1) % 64
        return rows


async def test_workflow_suite_catches_training_on_feedback_and_other_tokens() -> None:
    class Suite(TestTwoTurnWorkflow):
        kind: type[RolloutWorkflow] = TwoTurns

        def make_workflow(self) -> RolloutWorkflow:
            return self.kind()

    suite = Suite()
    suite.kind = TrainsOnFeedback
    with pytest.raises(AssertionError):
        await suite.test_only_generated_tokens_are_trained_and_only_they_carry_logprobs()
    suite.kind = Retokenizes
    with pytest.raises(AssertionError):
        await suite.test_generated_runs_are_the_engines_answers_token_for_token()
