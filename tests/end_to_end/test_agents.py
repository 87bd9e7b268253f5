"""Episodes of agents, from the calls at the endpoint to the trained trajectories."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest

from rl_contracts.batch.parallel import ParallelContext
from rl_contracts.batch.trajectory import stack
from rl_contracts.config import GenerationConfig
from rl_contracts.conformance.workflow import WorkflowConformance
from rl_contracts.errors import AgentError, InferenceError
from rl_contracts.runtime.clock import SystemClock
from rl_contracts.testing import NullInferenceEngine, NullInferenceEngineConfig, make_tiny_tokenizer
from rl_contracts.testing.chat_formats import format_completion, make_chat_tokenizer
from rl_contracts.workflow import AgentWorkflow
from rl_trainers.algorithms.config import AdvantageConfig, AlgorithmConfig
from rl_trainers.algorithms.credit import assign_credit
from rl_workflows import AgentEpisodeWorkflow, Ticket
from rl_workflows.agents.endpoint.config import EndpointConfig
from rl_workflows.agents.endpoint.server import HttpRolloutEndpoint
from rl_workflows.rollout.episode import Episodes
from rl_workflows.rollout.groups import run_group

ROW = {"messages": [{"role": "user", "content": "what is 2 + 3?"}], "answer": "5", "prompt_id": 0}
TOKENIZER = make_chat_tokenizer("llama3")


class TwoTurns(AgentWorkflow):
    """Agent that makes two calls and returns `result`."""

    def __init__(self, result: Any = 1.0) -> None:
        self.result = result

    async def run(self, data: dict[str, Any], *, base_url: str, api_key: str, http_client: Any) -> Any:
        async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
            messages: list[Any] = list(data["messages"])
            for _ in range(2):
                completion = await client.chat.completions.create(model="policy", messages=messages)
                messages += [completion.choices[0].message, {"role": "user", "content": "sure?"}]
        return self.result


class Reports(AgentWorkflow):
    """Agent that reports a reward per call and per episode at the endpoint, and returns `result`."""

    def __init__(self, outcome: float | None = None, result: Any = None) -> None:
        self.outcome, self.result = outcome, result

    async def run(self, data: dict[str, Any], *, base_url: str, api_key: str, http_client: Any) -> Any:
        async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
            messages: list[Any] = list(data["messages"])
            for reward in (0.25, 0.5):
                completion = await client.chat.completions.create(model="policy", messages=messages)
                messages += [completion.choices[0].message, {"role": "user", "content": "sure?"}]
                report: dict[str, Any] = {"call_id": completion.id, "reward": reward}
                await client.post("/rewards", body=report, cast_to=object)
            if self.outcome is not None:
                report = {"reward": self.outcome, "metrics": {"tools": 3}}
                await client.post("/rewards", body=report, cast_to=object)
        return self.result


class Hangs(TwoTurns):
    async def run(self, data: dict[str, Any], **options: Any) -> Any:
        await super().run(data, **options)
        await asyncio.Event().wait()


class Raises(TwoTurns):
    async def run(self, data: dict[str, Any], **options: Any) -> Any:
        await super().run(data, **options)
        raise KeyError("injected")


class MakesNoCall(TwoTurns):
    async def run(self, data: dict[str, Any], **options: Any) -> Any:
        return 1.0


@pytest.fixture
async def endpoint() -> AsyncIterator[HttpRolloutEndpoint]:
    endpoint = HttpRolloutEndpoint(TOKENIZER)
    yield endpoint
    await endpoint.destroy()


def make_engine() -> NullInferenceEngine:
    ids = TOKENIZER.encode(format_completion("llama3", "it is 5"), add_special_tokens=False)
    config = NullInferenceEngineConfig(seconds_per_token=0.0, vocab_size=len(TOKENIZER))
    return NullInferenceEngine(config, answer=lambda request: ids)


async def run_agent(
    agent: AgentWorkflow, endpoint: HttpRolloutEndpoint, engine: NullInferenceEngine, **more: Any
) -> Any:
    workflow = AgentEpisodeWorkflow(agent, endpoint, GenerationConfig(max_new_tokens=32, temperature=0.7), 400, **more)
    return await run_group(Episodes(workflow, engine, SystemClock(), seed=1), ROW, Ticket(0, 3), 4, 1)


class TestConformance(WorkflowConformance):
    endpoints: list[HttpRolloutEndpoint]

    @pytest.fixture(autouse=True)
    async def _destroyed(self) -> AsyncIterator[None]:
        self.endpoints = []
        yield
        for endpoint in self.endpoints:
            await endpoint.destroy()

    def make_workflow(self) -> AgentEpisodeWorkflow:
        self.endpoints.append(HttpRolloutEndpoint(make_tiny_tokenizer()))
        return AgentEpisodeWorkflow(TwoTurns(), self.endpoints[-1], GenerationConfig(max_new_tokens=64), 400)

    def rows(self) -> list[dict[str, Any]]:
        return [ROW, {**ROW, "prompt_id": 1}]


async def test_agent_group_records_ids_seeds_and_metrics(endpoint: HttpRolloutEndpoint) -> None:
    engine, seeds = make_engine(), []
    engine.faults.generate = lambda request: seeds.append(request.seed)
    group = await run_agent(TwoTurns({"reward": 0.5, "tools": 3}), endpoint, engine)

    assert group.error is None
    assert [(row.group_id, row.episode_id, row.reward) for row in group.trajectories] == [
        (3, sample, 0.5) for sample in range(4)
    ]
    assert [row.info["turns"] for row in group.trajectories] == [2] * 4
    assert group.trajectories[0].temperature == pytest.approx(0.7)
    assert len(set(seeds)) == 8
    assert group.metrics.results() == {"agent/tools": 3.0, "agent/rows": 1.0}


@pytest.mark.parametrize(
    ("credit", "discount", "expected"),
    [
        ("episode", 0.5, [1.5, 1.5]),
        ("turn", 1.0, [2.75, 2.5]),
        ("turn", 0.5, [1.5, 2.5]),
    ],
)
async def test_agent_rewards_per_call_become_episode_or_turn_rewards(
    credit: str, discount: float, expected: list[float]
) -> None:
    endpoint = HttpRolloutEndpoint(TOKENIZER, EndpointConfig(credit=credit, discount=discount))
    group = await run_agent(Reports(2.0), endpoint, make_engine())
    await endpoint.destroy()

    assert group.error is None
    assert group.metrics.results() == {"agent/tools": 3.0, "agent/turn_rewards": 0.75, "agent/rows": 1.0}
    batch, config = stack(group.trajectories), AlgorithmConfig(advantage=AdvantageConfig(kind="return"))
    assign_credit(batch, config, ParallelContext())
    mask = batch["loss_mask"]
    turn = (mask & ~mask.roll(1, 1)).cumsum(1)
    for i, value in enumerate(expected):
        assert batch["advantages"][mask & (turn == i + 1)].unique().tolist() == [value]


async def test_agent_without_outcome_sums_rewards_of_calls(endpoint: HttpRolloutEndpoint) -> None:
    group = await run_agent(Reports(), endpoint, make_engine())

    assert [row.reward for row in group.trajectories] == [0.75] * 4


async def test_agent_per_call_makes_one_trajectory_per_call(endpoint: HttpRolloutEndpoint) -> None:
    group = await run_agent(TwoTurns(), endpoint, make_engine(), per="call")

    tokens = len(TOKENIZER.encode(format_completion("llama3", "it is 5"), add_special_tokens=False))
    assert [int(row.loss_mask.sum()) for row in group.trajectories] == [tokens] * 8


@pytest.mark.parametrize(
    ("agent", "message"),
    [
        (Raises(), "Raises.run raised KeyError: 'injected'"),
        (Hangs(), "Hangs.run did not end within 0.5 s"),
        (MakesNoCall(), "without a completion to train on"),
        (TwoTurns("good"), "expected a finite number"),
        (TwoTurns(float("nan")), "expected a finite number"),
        (TwoTurns({"tools": 3}), "expected `reward` among them"),
        (TwoTurns(None), "reported no reward"),
        (Reports(1.0, 0.5), "returned the reward 0.5 and reported the reward 1.0"),
    ],
)
async def test_agent_failure_becomes_agent_error(
    endpoint: HttpRolloutEndpoint, agent: AgentWorkflow, message: str
) -> None:
    group = await run_agent(agent, endpoint, make_engine(), deadline=0.5 if isinstance(agent, Hangs) else 30.0)

    assert isinstance(group.error, AgentError)
    assert message in str(group.error)
    assert group.trajectories == []


async def test_agent_with_failing_engine_records_inference_error(endpoint: HttpRolloutEndpoint) -> None:
    engine = make_engine()
    engine.faults.generate = lambda request: InferenceError("injected failure")

    group = await run_agent(TwoTurns(), endpoint, engine)

    assert isinstance(group.error, InferenceError)
    assert str(group.error) == "injected failure"
