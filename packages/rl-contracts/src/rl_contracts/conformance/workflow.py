"""What every rollout workflow promises. Subclass `WorkflowConformance`, with `make_workflow` and `rows`.

Episodes run on a `NullInferenceEngine`, so nothing but the workflow itself is needed.
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
    """A null engine that remembers what it answered, and whose version advances with every answer."""

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
        """Override: a workflow whose answers have at most 64 tokens."""
        raise NotImplementedError("override make_workflow")

    def rows(self) -> list[dict[str, Any]]:
        """Override: data rows, at least one of which the workflow does not reject."""
        raise NotImplementedError("override rows")

    def make_engine(self) -> RecordingEngine:
        """The engine; it samples ids 0 to 63, and 2 ends an answer. Override where the tokenizer needs others."""
        return RecordingEngine(
            NullInferenceEngineConfig(mean_tokens=20, sigma=1.0, seconds_per_token=0.0, eos_token_id=2)
        )

    async def run(self, engine: NullInferenceEngine) -> list[Trajectory]:
        """All rows' episodes, one after the other; fails where every one was rejected."""
        workflow, found = self.make_workflow(), []
        for row in self.rows():
            found += await workflow.arun_episode(engine, dict(row)) or []
        assert found, "every row was rejected; give at least one that is not"
        return found

    async def test_episode_rows_stack_to_a_valid_batch(self) -> None:
        rows = await self.run(self.make_engine())
        for number, row in enumerate(rows):
            row.prompt_id = row.group_id = row.episode_id = number

        batch = stack(rows)

        validate(batch)
        assert batch["loss_mask"].any(-1).all()

    async def test_only_generated_tokens_are_trained_and_only_they_carry_logprobs(self) -> None:
        for row in await self.run(self.make_engine()):
            generated = row.versions >= 0
            assert generated[row.loss_mask].all()
            assert (row.logprobs[~generated] == 0).all()
            assert (row.logprobs[generated] <= 0).all()
            assert np.isfinite(row.reward)
            assert row.temperature > 0
            for name, dtype in (("input_ids", np.int64), ("loss_mask", bool), ("logprobs", np.float32)):
                assert getattr(row, name).dtype == dtype, name
                assert len(getattr(row, name)) == len(row), name

    async def test_generated_runs_are_the_engines_answers_token_for_token(self) -> None:
        """Token in, token out: what follows a prompt is what was sampled after exactly that prompt."""
        engine = self.make_engine()
        for row in await self.run(engine):
            edges = np.flatnonzero(np.diff(np.concatenate([[False], row.versions >= 0, [False]]).astype(int)))
            for begin, end in edges.reshape(-1, 2).tolist():
                found = [r for r in engine.responses if r.input_ids == row.input_ids[:begin].tolist()]
                assert found, f"tokens {begin} to {end}: no request had the tokens before them as its prompt"
                assert any(self._is_answer(row, begin, end, response) for response in found)

    async def test_truncated_tells_whether_the_length_limit_ended_the_last_answer(self) -> None:
        engine = self.make_engine()
        for row in await self.run(engine):
            ids = row.input_ids.tolist()
            last = [r for r in engine.responses if ids == (r.input_ids + r.output_ids)[: len(ids)]]
            if last:
                assert row.truncated == (last[-1].stop_reason == StopReason.LENGTH)

    async def test_failing_engine_ends_the_episode_with_its_error(self) -> None:
        engine = self.make_engine()
        engine.faults.generate = lambda request: InferenceError("planted failure")

        for row in self.rows():
            with pytest.raises(RLError, match="planted failure"):
                await self.make_workflow().arun_episode(engine, dict(row))

    async def test_episodes_run_at_the_same_time_without_touching_each_other_or_the_data(self) -> None:
        engine, workflow = self.make_engine(), self.make_workflow()
        engine.config.seconds_per_token = 1e-4
        rows = self.rows() * 8
        before = repr(rows)

        results = await asyncio.gather(*(workflow.arun_episode(engine, row) for row in rows))

        assert repr(rows) == before
        made = [trajectory for result in results for trajectory in result or []]
        assert len({id(trajectory) for trajectory in made}) == len(made) > 0

    async def test_cancelled_episode_ends_with_the_cancellation(self) -> None:
        engine = self.make_engine()
        engine.faults.hang = lambda request: True
        task = asyncio.ensure_future(self.make_workflow().arun_episode(engine, dict(self.rows()[0])))
        async with asyncio.timeout(30):
            while not (await engine.stats())["running"]:  # noqa: ASYNC110 - the contract has no event for it
                await asyncio.sleep(0.002)

        task.cancel()

        with pytest.raises(asyncio.CancelledError):
            await task

    @staticmethod
    def _is_answer(row: Trajectory, begin: int, end: int, response: ModelResponse) -> bool:
        count = end - begin
        return (
            row.input_ids[begin:end].tolist() == response.output_ids[:count]
            and row.versions[begin:end].tolist() == response.versions[:count]
            and bool(np.allclose(row.logprobs[begin:end], response.logprobs[:count], atol=1e-6))
        )
