"""Conformance suite for rollout workflows. Subclass `WorkflowConformance`; override `make_workflow` and `rows`.

Episodes run on a `NullInferenceEngine`, so the tests need no servers and no model.
"""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from rl_contracts.batch.trajectory import Trajectory, stack, validate
from rl_contracts.data import ModelRequest, ModelResponse, StopReason
from rl_contracts.errors import InferenceError, RLError
from rl_contracts.testing import NullInferenceEngine, NullInferenceEngineConfig
from rl_contracts.workflow import RolloutWorkflow

__all__ = ["WorkflowConformance"]


class RecordingEngine(NullInferenceEngine):
    """Null engine that records its responses and increments the version with each of them."""

    def __init__(self, config: NullInferenceEngineConfig) -> None:
        super().__init__(config)
        self.responses: list[ModelResponse] = []

    async def agenerate(self, request: ModelRequest) -> ModelResponse:
        response = await super().agenerate(request)
        response.versions = [len(self.responses) + i // 3 for i in range(len(response.versions))]
        self.responses.append(response)
        return response


@pytest.mark.asyncio
class WorkflowConformance:
    """Tests of the `RolloutWorkflow` contract."""

    def make_workflow(self) -> RolloutWorkflow:
        """Return a workflow whose completions have at most 64 tokens. Subclasses override it."""
        raise NotImplementedError("`make_workflow` is not implemented: override it")

    def rows(self) -> list[dict[str, Any]]:
        """Return examples, at least one of which the workflow accepts. Subclasses override it."""
        raise NotImplementedError("`rows` is not implemented: override it")

    def make_engine(self) -> RecordingEngine:
        """Return an engine that samples token ids 0 to 63, with end token 2. Override it for other tokenizers."""
        return RecordingEngine(
            NullInferenceEngineConfig(mean_tokens=20, sigma=1.0, seconds_per_token=0.0, eos_token_id=2)
        )

    async def run(self, engine: NullInferenceEngine) -> list[Trajectory]:
        """Run an episode for each example in turn and return all trajectories. Fail if every example is rejected."""
        workflow, trajectories = self.make_workflow(), []
        for example in self.rows():
            trajectories += await workflow.arun_episode(engine, dict(example)) or []
        assert trajectories, "the workflow rejected every example; rows() must return at least one that it accepts"
        return trajectories

    async def test_episode_trajectories_stack_to_a_valid_batch(self) -> None:
        trajectories = await self.run(self.make_engine())
        for number, trajectory in enumerate(trajectories):
            trajectory.prompt_id = trajectory.group_id = trajectory.episode_id = number

        batch = stack(trajectories)

        validate(batch)
        assert batch["loss_mask"].any(-1).all()

    async def test_episode_trains_only_on_generated_tokens_with_logprobs(self) -> None:
        for trajectory in await self.run(self.make_engine()):
            generated = trajectory.versions >= 0
            assert generated[trajectory.loss_mask].all()
            assert (trajectory.logprobs[~generated] == 0).all()
            assert (trajectory.logprobs[generated] <= 0).all()
            assert np.isfinite(trajectory.reward)
            assert trajectory.temperature > 0
            for name, dtype in (("input_ids", np.int64), ("loss_mask", bool), ("logprobs", np.float32)):
                assert getattr(trajectory, name).dtype == dtype, name
                assert len(getattr(trajectory, name)) == len(trajectory), name

    async def test_episode_keeps_sampled_token_ids_unchanged(self) -> None:
        """Each generated span equals a completion that the engine sampled for exactly the tokens before the span."""
        engine = self.make_engine()
        for trajectory in await self.run(engine):
            edges = np.flatnonzero(np.diff(np.concatenate([[False], trajectory.versions >= 0, [False]]).astype(int)))
            for begin, end in edges.reshape(-1, 2).tolist():
                matches = [r for r in engine.responses if r.input_ids == trajectory.input_ids[:begin].tolist()]
                assert matches, f"tokens {begin} to {end}: the prompt of no request equals the tokens before them"
                assert any(self._is_completion(trajectory, begin, end, response) for response in matches)

    async def test_episode_truncated_is_set_if_last_completion_hit_the_limit(self) -> None:
        engine = self.make_engine()
        for trajectory in await self.run(engine):
            ids = trajectory.input_ids.tolist()
            matches = [r for r in engine.responses if ids == (r.input_ids + r.output_ids)[: len(ids)]]
            if matches:
                assert trajectory.truncated == (matches[-1].stop_reason == StopReason.LENGTH)

    async def test_episode_engine_error_ends_it_with_this_error(self) -> None:
        engine = self.make_engine()
        engine.faults.generate = lambda request: InferenceError("injected failure")

        for example in self.rows():
            with pytest.raises(RLError, match="injected failure"):
                await self.make_workflow().arun_episode(engine, dict(example))

    async def test_concurrent_episodes_are_independent_and_keep_examples_unchanged(self) -> None:
        engine, workflow = self.make_engine(), self.make_workflow()
        engine.config.seconds_per_token = 1e-4
        examples = self.rows() * 8
        before = repr(examples)

        results = await asyncio.gather(*(workflow.arun_episode(engine, example) for example in examples))

        assert repr(examples) == before
        trajectories = [trajectory for result in results for trajectory in result or []]
        assert len({id(trajectory) for trajectory in trajectories}) == len(trajectories) > 0

    async def test_episode_cancelled_raises_cancelled_error(self) -> None:
        engine = self.make_engine()
        engine.faults.hang = lambda request: True
        task = asyncio.ensure_future(self.make_workflow().arun_episode(engine, dict(self.rows()[0])))
        async with asyncio.timeout(30):
            while not (await engine.stats())["running"]:  # noqa: ASYNC110 - the contract has no event for this
                await asyncio.sleep(0.002)

        task.cancel()

        with pytest.raises(asyncio.CancelledError):
            await task

    @staticmethod
    def _is_completion(trajectory: Trajectory, begin: int, end: int, response: ModelResponse) -> bool:
        count = end - begin
        return (
            trajectory.input_ids[begin:end].tolist() == response.output_ids[:count]
            and trajectory.versions[begin:end].tolist() == response.versions[:count]
            and bool(np.allclose(trajectory.logprobs[begin:end], response.logprobs[:count], atol=1e-6))
        )
