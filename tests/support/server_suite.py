"""Tests for every real server: conformance of its inference engine, and log-probs across weight updates.

`test_servers_vllm.py` and `test_servers_sglang.py` define the fixtures `models`, `weights_dir` and `engine` (one
server). `test_servers_split.py` runs only the tests of updates, on a server with two tensor-parallel ranks.
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path

import openai
import pytest
import torch
from real_servers import CONTEXT, SHARED, Models, aborted_and_resumed, make_request, publish, until_stats

from rl_contracts.config import GenerationConfig
from rl_contracts.conformance import inference_engine as suite
from rl_contracts.data import WeightReceipt, WeightUpdateMeta
from rl_contracts.errors import InferenceError, WeightUpdateError
from rl_contracts.testing import make_tiny_tokenizer, put_weights
from rl_workflows.agents.endpoint.server import HttpRolloutEndpoint

TOLERANCE = 1e-4


class UpdateSuite:
    """Tests that log-probs match transformers at the version of each token, for each route of the weights."""

    @pytest.fixture(autouse=True)
    def _inputs(self, models: Models, weights_dir: Path) -> None:
        self.models, self.weights_dir = models, weights_dir

    @pytest.mark.parametrize("route", ["shm", "disk", "broadcast"])
    async def test_update_over_route_serves_log_probs_of_transformers(self, engine, route):
        """A long prompt is served before the update, so that a stale prefix cache would be noticed."""
        before = await engine.agenerate(make_request([*SHARED, 7], 1, temperature=0.7))

        for _ in range(2):
            version = await publish(engine, self.models, self.weights_dir, route)
            requests = [make_request([*SHARED, 7 + i], i, temperature=0.7) for i in range(8)]
            after = await asyncio.gather(*map(engine.agenerate, requests))

            assert {v for response in after for v in response.versions} == {version}
            assert max(self.models.difference(response, 0.7) for response in after) < TOLERANCE
            scores = await engine.score([*SHARED, 5])
            assert scores == pytest.approx(self.models.logprobs(version, [*SHARED, 5]), abs=TOLERANCE)
        assert self.models.difference(before, 0.7) < TOLERANCE


class ServerSuite(UpdateSuite, suite.InferenceEngineConformance):
    """Conformance suite of inference engines, with tests of updates during generation."""

    logprob_tolerance = TOLERANCE
    context_length = CONTEXT
    drains = True
    """True if `interrupt=wait` completes queued requests too, before the version changes."""

    async def next_weights(self, version: int) -> tuple[WeightUpdateMeta, WeightReceipt]:
        return put_weights(self.weights_dir, version, self.models.tensors(version))

    @pytest.mark.parametrize("interrupt", ["keep", "recompute", "wait"])
    async def test_requests_across_three_updates_keep_all_tokens(self, engine, interrupt):
        """Each token has the log-prob of its recorded version, for 64 concurrent requests."""
        await engine.stats()
        first = engine.version
        requests = [make_request([*SHARED[: 300 + i], 9], i, tokens=48 + i % 32) for i in range(64)]
        running = [asyncio.ensure_future(engine.agenerate(request)) for request in requests]
        for _ in range(3):
            await until_stats(engine, lambda stats: stats["running"] >= 1 or all(task.done() for task in running))
            await publish(engine, self.models, self.weights_dir, "shm", interrupt)
        responses = await asyncio.gather(*running)
        later = await engine.agenerate(make_request([*SHARED, 9], 0))

        assert [len(each.output_ids) for each in responses] == [each.generation.max_new_tokens for each in requests]
        assert all(each.versions == sorted(each.versions) for each in responses)
        assert {v for each in responses for v in each.versions} <= set(range(first, first + 4))
        if interrupt == "wait" and self.drains:
            assert all(len(set(each.versions)) == 1 for each in responses)
        assert set(later.versions) == {first + 3}
        assert max(self.models.difference(each) for each in (*responses, later)) < TOLERANCE

    async def test_aborted_completion_resumes_with_its_tokens(self, engine):
        resumed = await aborted_and_resumed(engine)

        assert (resumed.resubmissions, len(resumed.output_ids)) == (1, 300)
        assert self.models.difference(resumed) < TOLERANCE

    async def test_schema_constrains_completion_and_malformed_schema_raises(self, engine):
        request = make_request(SHARED, 1, tokens=32, ignore_eos=False)
        unconstrained = await engine.agenerate(request)
        constrained = await engine.agenerate(replace(request, schema={"type": "string", "enum": ["yes", "no"]}))
        with pytest.raises(InferenceError, match="nonsense"):
            await engine.agenerate(replace(request, schema={"type": "nonsense"}))

        tokenizer = make_tiny_tokenizer()
        assert json.loads(tokenizer.decode(constrained.output_ids, skip_special_tokens=True)) in ("yes", "no")
        assert constrained.stop_reason == "stop"
        assert constrained.output_ids != unconstrained.output_ids
        assert self.models.difference(unconstrained) < TOLERANCE

    async def test_agent_conversation_across_updates_records_versions_per_token(self, engine):
        """Three turns at the endpoint, with an update after each."""
        endpoint, generation = HttpRolloutEndpoint(make_tiny_tokenizer()), GenerationConfig(12, temperature=0.7)
        await engine.stats()
        first = engine.version
        try:
            session = await endpoint.open(engine, generation, CONTEXT)
            async with openai.AsyncOpenAI(base_url=session.base_url, api_key=session.api_key) as agent:
                messages = [{"role": "user", "content": "what is it?"}]
                for turn in range(3):
                    completion = await agent.chat.completions.create(model="policy", messages=messages)
                    messages.append(completion.choices[0].message.model_dump(exclude_none=True))
                    messages.append({"role": "user", "content": f"and {turn}?"})
                    await publish(engine, self.models, self.weights_dir, "shm")
            await session.close()
            trajectories = session.trajectories(1.0)
        finally:
            await endpoint.destroy()

        assert {int(v) for trajectory in trajectories for v in trajectory.versions[trajectory.loss_mask]} == {
            first,
            first + 1,
            first + 2,
        }
        for trajectory in trajectories:
            ids = trajectory.input_ids.tolist()
            by_version = {v: self.models.logprobs(v, ids, 0.7) for v in range(first, first + 3)}
            for index in trajectory.loss_mask.nonzero()[0].tolist():
                expected = by_version[int(trajectory.versions[index])][index]
                assert trajectory.logprobs[index] == pytest.approx(expected, abs=TOLERANCE)

    async def test_invalid_weights_are_rejected_and_old_version_stays_served(self, engine):
        await engine.stats()
        version = engine.version + 1
        tensors = self.models.tensors(version)
        incomplete, _ = put_weights(self.weights_dir, version, tensors[1:])
        with pytest.raises(WeightUpdateError, match="1 parameters were not sent"):
            await engine.stage_weights(incomplete)
        nan, _ = put_weights(self.weights_dir, version, [(name, t * torch.nan) for name, t in tensors])
        with pytest.raises(WeightUpdateError, match="expected finite numbers"):
            await engine.stage_weights(nan)

        response = await engine.agenerate(make_request(SHARED, 3))

        assert set(response.versions) == {version - 1}
        assert self.models.difference(response) < TOLERANCE
