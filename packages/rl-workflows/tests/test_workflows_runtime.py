"""Rollout runtime on the real clock, in one process."""

import asyncio
import contextlib
import threading
import time
from itertools import count

import pytest
import torch

from rl_contracts.batch.parallel import ParallelContext
from rl_contracts.batch.trajectory import from_response, validate
from rl_contracts.config import GenerationConfig
from rl_contracts.data import ModelRequest, WeightUpdateMeta
from rl_contracts.errors import ConfigError, InferenceError, RLError, StalledError, StopRequestedError
from rl_contracts.testing import NullInferenceEngine, NullInferenceEngineConfig
from rl_contracts.workflow import RolloutWorkflow
from rl_workflows import DistRollout, RolloutConfig


class Echo(RolloutWorkflow):
    """Workflow with the prompt id as prompt and the first token of the completion as reward."""

    async def arun_episode(self, engine, data):
        response = await engine.agenerate(
            ModelRequest([1 + data["prompt_id"] % 50], GenerationConfig(max_new_tokens=8))
        )
        return [from_response(response, reward=float(response.output_ids[0]), temperature=1.0)]


@pytest.fixture
def engine():
    return NullInferenceEngine(
        NullInferenceEngineConfig(mean_tokens=6, sigma=0.5, seconds_per_token=0.0005, read_weights=False)
    )


def _examples(number=None):
    return ({"prompt_id": i} for i in (count() if number is None else range(number)))


def _rollout(engine, examples, batch_size=4, **settings):
    options = {"max_staleness": 1, "group_size": 2} | settings
    return DistRollout(engine, Echo(), examples, batch_size=batch_size, config=RolloutConfig(**options), minibatches=2)


def test_next_batch_endless_data_returns_batches_of_whole_groups(engine):
    rollout = _rollout(engine, _examples())
    try:
        for _ in range(3):
            batch = rollout.next_batch()
            validate(batch)
            assert batch.batch_size[0] == 8
            assert len(batch["group_ids"].unique()) == 4
            assert batch["episode_ids"].tolist() == [0, 1] * 4
            assert batch["minibatch"].tolist() == [0] * 4 + [1] * 4
            rollout.end_step(0)
        stats = rollout.stats().results()
    finally:
        rollout.destroy()
    assert stats["groups/accepted"] >= 12
    assert stats["groups/failed"] == stats["groups/rejected"] == 0
    assert stats["tokens/generated"] > 0
    assert stats["server/servers"] == 1


def _to_the_end(rollout):
    """Return the prompt ids of each batch, until the data is exhausted."""
    prompts = []
    while True:
        try:
            batch = rollout.next_batch()
        except StopIteration:
            return prompts
        prompts.append(sorted(batch["prompt_ids"].unique().tolist()))
        rollout.end_step(0)


class Stateful:
    """Iterator over examples with a state, like a data loader."""

    def __init__(self, examples):
        self.examples, self.at = examples, 0

    def __iter__(self):
        return self

    def __next__(self):
        if self.at == len(self.examples):
            raise StopIteration
        self.at += 1
        return self.examples[self.at - 1]

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


@pytest.mark.parametrize("kind", [iter, Stateful])
def test_finite_data_ends_with_smaller_batch_also_after_resuming(engine, kind):
    first, second = (_rollout(engine, kind(list(_examples(10)))) for _ in range(2))
    try:
        prompts = _to_the_end(first)
        assert [len(batch) for batch in prompts] == [4, 4, 2]
        assert sorted(prompt for batch in prompts for prompt in batch) == list(range(10))
        second.load_state_dict(first.state_dict())
        for rollout in (first, second, second):
            with pytest.raises(StopIteration):
                rollout.next_batch()
    finally:
        first.destroy()
        second.destroy()


def test_return_batch_state_has_its_groups_and_no_outcome(engine):
    rollout, resumed = (_rollout(engine, _examples(12)) for _ in range(2))
    try:
        rollout.next_batch()
        rollout.end_step(0)
        assert len(rollout.outcomes()) == 4
        taken = rollout.next_batch()
        rollout.return_batch()
        resumed.load_state_dict(rollout.state_dict())
        assert resumed.outcomes() == []
        repeated = resumed.next_batch()
        for name in ("prompt_ids", "group_ids", "input_ids", "rewards"):
            torch.testing.assert_close(repeated[name], taken[name])
        resumed.end_step(0)
        assert len(_to_the_end(resumed)) == 1
    finally:
        rollout.destroy()
        resumed.destroy()


def test_return_batch_after_last_batch_raises(engine):
    rollout = _rollout(engine, _examples(2))
    try:
        rollout.next_batch()
        with pytest.raises(RLError, match=r"no batch to return \(0 groups given"):
            rollout.return_batch()
    finally:
        rollout.destroy()


class Hanging(Echo):
    """Workflow that never finishes."""

    def __init__(self):
        self.begun = threading.Event()

    async def arun_episode(self, engine, data):
        self.begun.set()
        await asyncio.Event().wait()


def test_next_batch_stop_requested_raises_and_state_is_resumable(engine):
    workflow = Hanging()
    hanging = DistRollout(
        engine, workflow, _examples(10), batch_size=4, config=RolloutConfig(group_size=2), stop=workflow.begun.is_set
    )
    resumed = _rollout(engine, _examples(10))
    try:
        with pytest.raises(StopRequestedError):
            hanging.next_batch()
        state = hanging.state_dict()
        assert [prompt["prompt_id"] for prompt in state["in_flight"]] == list(range(8))
        resumed.load_state_dict(state)
        first = resumed.next_batch()  # the four groups that finish first
        assert first["group_ids"].tolist() == first["prompt_ids"].tolist(), "the ids assigned by the stopped run"
        resumed.end_step(0)
        batches = [first["prompt_ids"].unique().tolist(), *_to_the_end(resumed)]
        assert sorted(prompt for batch in batches for prompt in batch) == list(range(10)), "each prompt once"
    finally:
        hanging.destroy()
        resumed.destroy()


def test_state_dict_converts_groups_outside_event_loop(engine):
    rollout = _rollout(engine, _examples())
    try:
        rollout.next_batch()
        rollout.end_step(0)
        threads = []

        def recording_len(self, *arguments):
            threads.append(threading.current_thread().name)
            return 4

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("rl_contracts.batch.trajectory.Trajectory.__len__", recording_len)
            _fill(rollout, 1)
            rollout.state_dict()
        assert set(threads) == {threading.current_thread().name}
    finally:
        rollout.destroy()


def _fill(rollout, groups):
    """Wait until this number of groups is accepted, without taking them."""
    deadline = time.monotonic() + 20
    while rollout.scheduler.manager.accepted < groups:
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_next_batch_on_policy_is_independent_of_server_speed(engine):
    def batches(seconds_per_token):
        engine = NullInferenceEngine(
            NullInferenceEngineConfig(mean_tokens=6, sigma=1.0, seconds_per_token=seconds_per_token, read_weights=False)
        )
        rollout = _rollout(engine, _examples(12), max_staleness=0)
        try:
            result = []
            for _ in range(3):
                result.append(rollout.next_batch())
                rollout.end_step(0)
            return result
        finally:
            rollout.destroy()

    for fast, slow in zip(batches(0.0), batches(0.001), strict=True):
        for key in sorted(fast.keys()):
            assert torch.equal(fast[key], slow[key]), key


def test_on_completions_receives_batches_and_rejections_with_reason(engine):
    class Picky(Echo):
        async def arun_episode(self, engine, data):
            if data["prompt_id"] == 5:
                raise ValueError("injected")
            if data["prompt_id"] != 2:  # prompt 2 is rejected before the first batch and reported with its step
                while all(reason is None for *_, reason in seen):  # noqa: ASYNC110
                    await asyncio.sleep(0)
            return await super().arun_episode(engine, data)

    seen = []
    rollout = DistRollout(
        engine,
        Picky(),
        _examples(12),
        batch_size=4,
        config=RolloutConfig(group_size=2, failure_budget=1.0),
        should_accept=lambda trajectories: trajectories[0].prompt_id != 2,
        on_completions=lambda step, trajectories, reason: seen.append(
            (step, [trajectory.prompt_id for trajectory in trajectories], reason)
        ),
    )
    try:
        prompts = _to_the_end(rollout)
        metrics, outcomes = rollout.stats().results(), rollout.outcomes()
        assert rollout.outcomes() == []
    finally:
        rollout.destroy()
    reported = {(outcome["prompt_id"], outcome["outcome"], outcome["reason"]) for outcome in outcomes}
    unsuccessful = {(2, "rejected", "filter"), (5, "failed", "internal: injected")}
    assert reported == unsuccessful | {(prompt, "trained", None) for prompt in set(range(12)) - {2, 5}}
    assert len(outcomes) == 12
    assert len({outcome["group_id"] for outcome in outcomes}) == 12
    trained = [(step, sorted(set(prompt_ids))) for step, prompt_ids, reason in seen if reason is None]
    assert trained == list(enumerate(prompts, start=1))
    assert [(step, prompt_ids) for step, prompt_ids, reason in seen if reason is not None] == [(1, [2, 2])]
    assert len(prompts) == 3
    assert sum(map(len, prompts)) == 10
    assert 0 < metrics["finished/length_mean"] <= 8
    assert 0 <= metrics["finished/truncated_fraction"] <= 1


def test_stats_finished_metrics_include_rejected_groups(engine):
    class Graded(Echo):
        async def arun_episode(self, engine, data):
            trajectories = await super().arun_episode(engine, data)
            trajectories[0].reward = float(data["prompt_id"] % 2 == 0 or engine._context.sample)
            return trajectories

    rollout = DistRollout(
        engine, Graded(), _examples(8), batch_size=4, config=RolloutConfig(group_size=2, dynamic_sampling=True)
    )
    try:
        batch = rollout.next_batch()
        assert batch["rewards"].mean() == 0.5, "only groups with different rewards"
        assert rollout.stats().results()["finished/reward_mean"] == 0.75
    finally:
        rollout.destroy()


def test_evaluate_and_next_batch_report_progress(engine, monkeypatch):
    reports = []
    for module in ("evaluation", "scheduler"):
        monkeypatch.setattr(f"rl_workflows.rollout.{module}.report_progress", lambda *items: reports.append(items))
    rollout = _rollout(engine, _examples())
    try:
        batch = rollout.next_batch()
        groups = len(set(batch["group_ids"].tolist()))
        assert reports[groups - 1] == (groups, groups)
        reports.clear()
        rollout.pause()
        rollout.evaluate([{"prompt_id": i} for i in range(5)], GenerationConfig(max_new_tokens=5), n=2)
    finally:
        rollout.destroy()
    assert reports == [(done, 5) for done in range(1, 6)]


def test_evaluate_returns_order_and_keeps_training_counters(engine):
    rollout = _rollout(engine, _examples())
    examples = [{"prompt_id": 100 + i} for i in range(7)]
    try:
        rollout.next_batch()
        rollout.stats()
        rollout.pause()
        before = rollout.scheduler.manager.outstanding
        trajectories = rollout.evaluate(examples, GenerationConfig(max_new_tokens=5, temperature=0.0), n=2)
        rollout.resume()
        assert [trajectory.prompt_id for trajectory in trajectories] == [100 + i // 2 for i in range(14)]
        assert [trajectory.episode_id for trajectory in trajectories] == [0, 1] * 7
        assert {trajectory.temperature for trajectory in trajectories} == {1.0}, (
            "greedy log-probs ignore the temperature"
        )
        assert max(len(trajectory) for trajectory in trajectories) <= 6, "the evaluation's own length limit"
        assert rollout.scheduler.manager.outstanding <= before
        assert rollout.stats().results()["groups/accepted"] <= 4, "training groups only"
        rollout.end_step(0)
        rollout.next_batch()
    finally:
        rollout.destroy()


def test_evaluate_with_another_workflow_uses_it_only_once(engine):
    class Other(Echo):
        async def arun_episode(self, engine, data):
            trajectories = await super().arun_episode(engine, data)
            trajectories[0].reward = 7.0
            return trajectories

    rollout = _rollout(engine, ())
    try:
        rewards = [
            rollout.evaluate([{"prompt_id": 0}], GenerationConfig(max_new_tokens=3), 1, workflow)[0].reward
            for workflow in (Other(), None)
        ]
    finally:
        rollout.destroy()
    assert (rewards[0], rewards[1] == 7.0) == (7.0, False)


def test_evaluate_keeps_stop_ids_of_workflow(engine):
    seen = []
    generate = engine.agenerate

    async def recording(request):
        seen.append(request.generation)
        return await generate(request)

    class Stopping(Echo):
        async def arun_episode(self, engine, data):
            generation = GenerationConfig(max_new_tokens=8, stop_token_ids=[11])
            response = await engine.agenerate(ModelRequest([1], generation))
            return [from_response(response, reward=0.0, temperature=1.0)]

    engine.agenerate = recording
    rollout = DistRollout(engine, Stopping(), _examples(), batch_size=1, config=RolloutConfig(group_size=1))
    try:
        rollout.evaluate([{"prompt_id": 0}], GenerationConfig(max_new_tokens=3, temperature=0.5, stop_token_ids=[7]))
    finally:
        rollout.destroy()
    assert [(g.max_new_tokens, g.temperature, g.stop_token_ids) for g in seen] == [(3, 0.5, [7, 11])]


def test_evaluate_during_publish_raises(engine, monkeypatch):
    monkeypatch.setattr("rl_workflows.rollout.evaluation.CONCURRENT_EPISODES", 1)

    class Publishing(Echo):
        async def arun_episode(self, handle, data):
            if data["prompt_id"] == 3:
                await engine.stage_weights(WeightUpdateMeta("shm", 1))
                await engine.commit_weights(1)
            return await super().arun_episode(handle, data)

    rollout = DistRollout(engine, Publishing(), _examples(), batch_size=1, config=RolloutConfig(group_size=1))
    try:
        with pytest.raises(InferenceError, match=r"versions \[0, 1\]"):
            rollout.evaluate([{"prompt_id": i} for i in range(6)], GenerationConfig(max_new_tokens=4))
    finally:
        rollout.destroy()


def test_evaluate_all_episodes_failed_raises(engine):
    engine.faults.generate = lambda request: InferenceError("injected")
    rollout = _rollout(engine, _examples())
    try:
        with pytest.raises(RLError, match="groups failed \\(inference"):
            rollout.evaluate([{"prompt_id": 0}], GenerationConfig())
    finally:
        rollout.destroy()


def test_evaluate_most_episodes_rejected_raises(engine):
    class Picky(Echo):
        async def arun_episode(self, engine, data):
            return None if data["prompt_id"] % 4 else await super().arun_episode(engine, data)

    rollout = DistRollout(engine, Picky(), _examples(), batch_size=1, config=RolloutConfig(group_size=1))
    try:
        with pytest.raises(RLError, match="workflow returned None"):
            rollout.evaluate([{"prompt_id": i} for i in range(8)], GenerationConfig(max_new_tokens=4))
    finally:
        rollout.destroy()


def test_evaluate_early_failures_count_despite_later_successes(engine, monkeypatch):
    monkeypatch.setattr("rl_workflows.rollout.evaluation.CONCURRENT_EPISODES", 1)
    first = iter([InferenceError("injected")] * 3)
    engine.faults.generate = lambda request: next(first, None)
    config = RolloutConfig(group_size=1, failure_budget=0.1)
    rollout = DistRollout(engine, Echo(), _examples(), batch_size=1, config=config)
    try:
        with pytest.raises(RLError, match="3 of the last 20 groups failed"):
            rollout.evaluate([{"prompt_id": i} for i in range(20)], GenerationConfig(max_new_tokens=2))
    finally:
        rollout.destroy()


def test_evaluate_episode_ignoring_cancellation_does_not_delay_stall(engine, monkeypatch):
    released = threading.Event()

    class IgnoresCancellation(Echo):
        async def arun_episode(self, engine, data):
            while not released.is_set():
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.sleep(0.05)

    monkeypatch.setattr("rl_workflows.rollout.evaluation.CLOSE_SECONDS", 0.3)
    rollout = DistRollout(
        engine, IgnoresCancellation(), _examples(), batch_size=1, config=RolloutConfig(group_size=1, stall_timeout=0.5)
    )
    try:
        with pytest.raises(StalledError):
            rollout.evaluate([{"prompt_id": 0}], GenerationConfig())
    finally:
        released.set()
        rollout.destroy()


@pytest.mark.nightly
def test_next_batch_blocked_loop_raises_with_stack(engine):
    class Blocking(Echo):
        async def arun_episode(self, engine, data):
            time.sleep(2)  # noqa: ASYNC251 - injected fault
            return await super().arun_episode(engine, data)

    rollout = DistRollout(
        engine, Blocking(), _examples(), batch_size=1, config=RolloutConfig(group_size=1, stall_timeout=0.5)
    )
    try:
        with pytest.raises(StalledError, match=r"has been blocked for more than 0.5 s[\s\S]*in arun_episode"):
            rollout.next_batch()
    finally:
        rollout.destroy()


def test_destroy_twice_with_running_episodes_succeeds(engine):
    engine.faults.hang = lambda request: True
    rollout = _rollout(engine, _examples())
    rollout.evaluate([], GenerationConfig())
    rollout.loop.run(rollout.scheduler.begin_wait(), 5)
    rollout.destroy()
    rollout.destroy()

    assert not rollout.scheduler.episodes.running


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"batch_size": 3}, "data.batch_size=3 .*2; use 2 or 4"),
        ({"batch_size": 2, "minibatches": 5}, "actor.minibatches: expected 1 to 4"),
    ],
)
def test_rollout_indivisible_sizes_are_rejected(engine, settings, message):
    with pytest.raises(ConfigError, match=message):
        DistRollout(
            engine,
            Echo(),
            _examples(),
            config=RolloutConfig(group_size=2),
            parallel=ParallelContext(dp_size=2, world_size=2),
            **settings,
        )


def test_load_state_dict_other_layout_is_rejected(engine):
    rollout = _rollout(engine, _examples())
    try:
        state = rollout.state_dict()
        state["layout"]["heads"] = 2
        with pytest.raises(ConfigError, match=r"'heads': 2.*load_states"):
            rollout.load_state_dict(state)
    finally:
        rollout.destroy()
