"""Workflow, engine and scheduler that the tests share. Only the servers are simulated."""

import sys
from collections.abc import Callable
from itertools import count
from pathlib import Path

import pytest

from rl_contracts.batch.trajectory import from_response
from rl_contracts.config import GenerationConfig
from rl_contracts.data import ModelRequest, WeightUpdateMeta
from rl_contracts.testing import NullInferenceEngine, NullInferenceEngineConfig, SimulatedClock
from rl_contracts.testing.processes import preload
from rl_contracts.workflow import RolloutWorkflow
from rl_workflows import RolloutConfig, RolloutScheduler, StalenessManager

sys.path.insert(0, str(Path(__file__).parent))  # for modules that several test files share
preload("tensordict", "torch.distributed")  # for rollout_process


class Scripted(RolloutWorkflow):
    """Workflow with one completion. `judge(data, first_token)` returns the reward or None, or raises."""

    def __init__(self, judge: Callable = lambda data, token: float(token)) -> None:
        self.judge = judge

    async def arun_episode(self, engine, data):
        generation = GenerationConfig(max_new_tokens=512)
        response = await engine.agenerate(ModelRequest([1 + data["prompt_id"] % 60], generation))
        reward = self.judge(data, response.output_ids[0])
        return None if reward is None else [from_response(response, reward=reward, temperature=1.0)]


async def publish(engine: NullInferenceEngine, version: int) -> None:
    await engine.stage_weights(WeightUpdateMeta("shm", version))
    await engine.commit_weights(version)


def endless_examples():
    return ({"prompt_id": i} for i in count())


@pytest.fixture
def clock():
    return SimulatedClock()


@pytest.fixture
def null_engine(clock):
    """Return an engine with long-tailed completion lengths on the simulated clock."""
    config = NullInferenceEngineConfig(mean_tokens=24, sigma=1.2, seconds_per_token=0.05, read_weights=False)
    return NullInferenceEngine(config, clock=clock)


@pytest.fixture
def make_scheduler(clock, null_engine):
    """Return a function that builds a scheduler.

    Its arguments are `examples`, `judge`, `batch_size`, `engine`, `should_accept`, `seed` and the fields of
    `RolloutConfig`.
    """

    def make(examples=None, judge=None, batch_size=4, engine=None, should_accept=None, seed=0, **settings):
        config = RolloutConfig(**({"group_size": 2, "max_staleness": 1, "stall_timeout": 1e6} | settings))
        manager = StalenessManager(batch_size, config.max_staleness, config.max_concurrent)
        return RolloutScheduler(
            engine or null_engine,
            Scripted(judge) if judge else Scripted(),
            endless_examples() if examples is None else examples,
            manager,
            config,
            clock,
            should_accept,
            seed=seed,
        )

    return make


@pytest.fixture(name="publish")
def publish_fixture():
    return publish
