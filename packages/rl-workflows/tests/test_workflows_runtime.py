"""The runtime on the real clock, in one process."""

from itertools import count

import pytest

from rl_contracts.config import GenerationConfig
from rl_contracts.data import ModelRequest
from rl_contracts.testing import NullInferenceConfig, NullInferenceEngine
from rl_contracts.trajectory import from_response, validate
from rl_contracts.workflow import RolloutWorkflow
from rl_workflows import DistRollout, RolloutConfig


class Echo(RolloutWorkflow):
    """Asks with the prompt's id; the reward is the sample's first token."""

    async def arun_episode(self, engine, data):
        response = await engine.agenerate(
            ModelRequest([1 + data["prompt_id"] % 50], GenerationConfig(max_new_tokens=8))
        )
        return [from_response(response, reward=float(response.output_ids[0]), temperature=1.0)]


@pytest.fixture
def engine():
    return NullInferenceEngine(
        NullInferenceConfig(mean_tokens=6, sigma=0.5, seconds_per_token=0.0005, read_weights=False)
    )


def _rows(number=None):
    return ({"prompt_id": i} for i in (count() if number is None else range(number)))


def _rollout(engine, rows, batch_size=4, **settings):
    options = {"max_staleness": 1, "group_size": 2} | settings
    return DistRollout(engine, Echo(), rows, batch_size=batch_size, config=RolloutConfig(**options), minibatches=2)


def test_next_batch_endless_data_gives_valid_batches_of_whole_groups(engine):
    rollout = _rollout(engine, _rows())
    try:
        for _ in range(3):
            batch = rollout.next_batch()
            validate(batch)
            assert batch.batch_size[0] == 8
            assert len(batch["group_ids"].unique()) == 4
            assert batch["episode_ids"].tolist() == [0, 1] * 4
            assert batch["minibatch"].tolist() == [0] * 4 + [1] * 4
            rollout.end_step(0)
        stats = rollout.stats()
    finally:
        rollout.destroy()
    assert stats["groups/accepted"] >= 12
    assert stats["groups/failed"] == stats["groups/rejected"] == 0
    assert stats["tokens/generated"] > 0
    assert stats["server/servers"] == 1


def test_next_batch_finite_data_ends_with_a_smaller_batch_and_every_prompt_once(engine):
    rollout = _rollout(engine, _rows(10))
    prompts = []
    try:
        with pytest.raises(StopIteration):
            while True:
                prompts += rollout.next_batch()["prompt_ids"].unique().tolist()
                rollout.end_step(0)
        with pytest.raises(StopIteration):
            rollout.next_batch()
    finally:
        rollout.destroy()
    assert sorted(prompts) == list(range(10))
