"""The runtime on the real clock, in one process."""

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
    """Asks with the prompt's id; the reward is the sample's first token."""

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
        stats = rollout.stats().results()
    finally:
        rollout.destroy()
    assert stats["groups/accepted"] >= 12
    assert stats["groups/failed"] == stats["groups/rejected"] == 0
    assert stats["tokens/generated"] > 0
    assert stats["server/servers"] == 1


def _to_the_end(rollout):
    """Prompts of every batch until the data ends."""
    prompts = []
    while True:
        try:
            batch = rollout.next_batch()
        except StopIteration:
            return prompts
        prompts.append(sorted(batch["prompt_ids"].unique().tolist()))
        rollout.end_step(0)


def test_next_batch_finite_data_ends_with_a_smaller_batch_and_every_prompt_once(engine):
    rollout = _rollout(engine, _rows(10))
    try:
        prompts = _to_the_end(rollout)
        assert [len(batch) for batch in prompts] == [4, 4, 2]
        assert sorted(prompt for batch in prompts for prompt in batch) == list(range(10))
        with pytest.raises(StopIteration):
            rollout.next_batch()
    finally:
        rollout.destroy()


class Stateful:
    """Rows that can be saved, as a loader's can."""

    def __init__(self, rows):
        self.rows, self.at = rows, 0

    def __iter__(self):
        return self

    def __next__(self):
        if self.at == len(self.rows):
            raise StopIteration
        self.at += 1
        return self.rows[self.at - 1]

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


@pytest.mark.parametrize("kind", [iter, Stateful])
def test_state_after_the_last_smaller_batch_resumes_at_the_end_of_the_data(engine, kind):
    first, second = (_rollout(engine, kind(list(_rows(10)))) for _ in range(2))
    try:
        assert len(_to_the_end(first)) == 3
        second.load_state_dict(first.state_dict())
        for _ in range(2):
            with pytest.raises(StopIteration):
                second.next_batch()
    finally:
        first.destroy()
        second.destroy()


def test_return_batch_state_has_its_groups_and_no_ending(engine):
    rollout, after = (_rollout(engine, _rows(12)) for _ in range(2))
    try:
        rollout.next_batch()
        rollout.end_step(0)
        assert len(rollout.outcomes()) == 4
        taken = rollout.next_batch()
        rollout.return_batch()
        after.load_state_dict(rollout.state_dict())
        assert after.outcomes() == []
        again = after.next_batch()
        for name in ("prompt_ids", "group_ids", "input_ids", "rewards"):
            torch.testing.assert_close(again[name], taken[name])
        after.end_step(0)
        assert len(_to_the_end(after)) == 1
    finally:
        rollout.destroy()
        after.destroy()


def test_return_batch_of_the_last_smaller_batch_raises(engine):
    rollout = _rollout(engine, _rows(2))
    try:
        rollout.next_batch()
        with pytest.raises(RLError, match="no batch of 0 groups"):
            rollout.return_batch()
    finally:
        rollout.destroy()


class Hanging(Echo):
    """Never answers."""

    def __init__(self):
        self.begun = threading.Event()

    async def arun_episode(self, engine, data):
        self.begun.set()
        await asyncio.Event().wait()


def test_next_batch_asked_to_stop_while_it_waits_ends_between_two_steps(engine):
    workflow = Hanging()
    hanging = DistRollout(
        engine, workflow, _rows(10), batch_size=4, config=RolloutConfig(group_size=2), stop=workflow.begun.is_set
    )
    after = _rollout(engine, _rows(10))
    try:
        with pytest.raises(StopRequestedError):
            hanging.next_batch()
        state = hanging.state_dict()
        assert [row["prompt_id"] for row in state["in_flight"]] == list(range(8))
        after.load_state_dict(state)
        first = after.next_batch()  # the four groups that finish first
        assert first["group_ids"].tolist() == first["prompt_ids"].tolist(), "the ids that the stopped run gave them"
        after.end_step(0)
        batches = [first["prompt_ids"].unique().tolist(), *_to_the_end(after)]
        assert sorted(prompt for batch in batches for prompt in batch) == list(range(10)), "each prompt once"
    finally:
        hanging.destroy()
        after.destroy()


def test_state_of_thousands_of_groups_does_not_hold_up_the_loop(engine):
    """The loop hands the groups out as they are; tensors are made of them in the caller's thread."""
    rollout = _rollout(engine, _rows())
    try:
        rollout.next_batch()
        rollout.end_step(0)
        threads = []

        def noted(self, *arguments):
            threads.append(threading.current_thread().name)
            return 4

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("rl_contracts.batch.trajectory.Trajectory.__len__", noted)
            _fill(rollout, 1)
            rollout.state_dict()
        assert set(threads) == {threading.current_thread().name}
    finally:
        rollout.destroy()


def _fill(rollout, groups):
    """Wait until so many groups are accepted, without taking them."""
    deadline = time.monotonic() + 20
    while rollout.scheduler.manager.accepted < groups:
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_next_batch_deterministic_when_on_policy_whatever_the_speed(engine):
    def batches(seconds_per_token):
        engine = NullInferenceEngine(
            NullInferenceEngineConfig(mean_tokens=6, sigma=1.0, seconds_per_token=seconds_per_token, read_weights=False)
        )
        rollout = _rollout(engine, _rows(12), max_staleness=0, seed=5)
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


def test_on_answers_gets_every_batch_with_its_step_and_what_is_not_trained_on_with_the_reason(engine):
    class Picky(Echo):
        async def arun_episode(self, engine, data):
            if data["prompt_id"] == 5:
                raise ValueError("planted")
            if data["prompt_id"] != 2:  # which is rejected before the first batch is there, in whose step it is told
                while all(reason is None for *_, reason in seen):  # noqa: ASYNC110
                    await asyncio.sleep(0)
            return await super().arun_episode(engine, data)

    seen = []
    rollout = DistRollout(
        engine,
        Picky(),
        _rows(12),
        batch_size=4,
        config=RolloutConfig(group_size=2, failure_budget=1.0),
        should_accept=lambda rows: rows[0].prompt_id != 2,
        on_answers=lambda step, rows, reason: seen.append((step, [row.prompt_id for row in rows], reason)),
    )
    try:
        prompts = _to_the_end(rollout)
        figures, endings = rollout.stats().results(), rollout.outcomes()
        assert rollout.outcomes() == []
    finally:
        rollout.destroy()
    told = {(e["prompt_id"], e["ending"], e["reason"]) for e in endings}
    bad = {(2, "rejected", "filter"), (5, "failed", "internal: planted")}
    assert told == bad | {(prompt, "trained", None) for prompt in set(range(12)) - {2, 5}}
    assert len(endings) == 12
    assert len({e["group_id"] for e in endings}) == 12
    trained = [(step, sorted(set(rows))) for step, rows, reason in seen if reason is None]
    assert trained == list(enumerate(prompts, start=1))
    assert [(step, rows) for step, rows, reason in seen if reason is not None] == [(1, [2, 2])]
    assert len(prompts) == 3
    assert sum(map(len, prompts)) == 10
    assert 0 < figures["finished/length_mean"] <= 8
    assert 0 <= figures["finished/truncated_fraction"] <= 1


def test_figures_of_finished_groups_also_speak_of_those_that_are_not_trained_on(engine):
    class Graded(Echo):
        async def arun_episode(self, engine, data):
            rows = await super().arun_episode(engine, data)
            rows[0].reward = float(data["prompt_id"] % 2 == 0 or engine._context.sample)
            return rows

    rollout = DistRollout(
        engine, Graded(), _rows(8), batch_size=4, config=RolloutConfig(group_size=2, dynamic_sampling=True)
    )
    try:
        batch = rollout.next_batch()
        assert batch["rewards"].mean() == 0.5, "of the groups with different rewards alone"
        assert rollout.stats().results()["finished/reward_mean"] == 0.75
    finally:
        rollout.destroy()


def test_evaluate_answers_in_order_and_leaves_training_counters_alone(engine):
    rollout = _rollout(engine, _rows())
    rows = [{"prompt_id": 100 + i} for i in range(7)]
    try:
        rollout.next_batch()
        rollout.stats()
        rollout.pause()
        before = rollout.scheduler.manager.outstanding
        answers = rollout.evaluate(rows, GenerationConfig(max_new_tokens=5, temperature=0.0), n=2)
        rollout.resume()
        assert [row.prompt_id for row in answers] == [100 + i // 2 for i in range(14)]
        assert [row.episode_id for row in answers] == [0, 1] * 7
        assert {row.temperature for row in answers} == {1.0}, "greedy log-probs are those of the undivided logits"
        assert max(len(row) for row in answers) <= 6, "the evaluation's own length limit"
        assert rollout.scheduler.manager.outstanding <= before
        assert rollout.stats().results()["groups/accepted"] <= 4, "training groups only"
        rollout.end_step(0)
        rollout.next_batch()
    finally:
        rollout.destroy()


def test_evaluate_keeps_the_workflows_own_stop_ids(engine):
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
    rollout = DistRollout(engine, Stopping(), _rows(), batch_size=1, config=RolloutConfig(group_size=1))
    try:
        rollout.evaluate([{"prompt_id": 0}], GenerationConfig(max_new_tokens=3, temperature=0.5, stop_token_ids=[7]))
    finally:
        rollout.destroy()
    assert [(g.max_new_tokens, g.temperature, g.stop_token_ids) for g in seen] == [(3, 0.5, [7, 11])]


def test_evaluate_during_a_publication_is_refused(engine):
    class Publishing(Echo):
        async def arun_episode(self, handle, data):
            if data["prompt_id"] == 3:
                await engine.stage_weights(WeightUpdateMeta("shm", 1))
                await engine.commit_weights(1)
            return await super().arun_episode(handle, data)

    rollout = DistRollout(
        engine, Publishing(), _rows(), batch_size=1, config=RolloutConfig(group_size=1, eval_concurrent=1)
    )
    try:
        with pytest.raises(InferenceError, match=r"versions \[0, 1\]"):
            rollout.evaluate([{"prompt_id": i} for i in range(6)], GenerationConfig(max_new_tokens=4))
    finally:
        rollout.destroy()


def test_evaluate_where_every_episode_fails_is_an_error_and_no_accuracy(engine):
    engine.faults.generate = lambda request: InferenceError("planted")
    rollout = _rollout(engine, _rows())
    try:
        with pytest.raises(RLError, match="groups failed \\(inference"):
            rollout.evaluate([{"prompt_id": 0}], GenerationConfig())
    finally:
        rollout.destroy()


def test_evaluate_where_most_episodes_are_rejected_is_an_error_and_no_accuracy_of_the_rest(engine):
    class Picky(Echo):
        async def arun_episode(self, engine, data):
            return None if data["prompt_id"] % 4 else await super().arun_episode(engine, data)

    rollout = DistRollout(engine, Picky(), _rows(), batch_size=1, config=RolloutConfig(group_size=1))
    try:
        with pytest.raises(RLError, match="workflow returned None"):
            rollout.evaluate([{"prompt_id": i} for i in range(8)], GenerationConfig(max_new_tokens=4))
    finally:
        rollout.destroy()


def test_evaluate_early_failures_count_although_later_episodes_succeed(engine):
    first = iter([InferenceError("planted")] * 3)
    engine.faults.generate = lambda request: next(first, None)
    config = RolloutConfig(group_size=1, failure_budget=0.1, failure_min_groups=10, eval_concurrent=1)
    rollout = DistRollout(engine, Echo(), _rows(), batch_size=1, config=config)
    try:
        with pytest.raises(RLError, match="3 of the last 20 groups failed"):
            rollout.evaluate([{"prompt_id": i} for i in range(20)], GenerationConfig(max_new_tokens=2))
    finally:
        rollout.destroy()


def test_evaluate_episode_that_ignores_its_cancellation_does_not_hold_back_the_alarm(engine, monkeypatch):
    released = threading.Event()

    class Deaf(Echo):
        async def arun_episode(self, engine, data):
            while not released.is_set():
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.sleep(0.05)

    monkeypatch.setattr("rl_workflows.rollout.evaluation.CLOSE_SECONDS", 0.3)
    rollout = DistRollout(engine, Deaf(), _rows(), batch_size=1, config=RolloutConfig(group_size=1, stall_timeout=0.5))
    try:
        with pytest.raises(StalledError):
            rollout.evaluate([{"prompt_id": 0}], GenerationConfig())
    finally:
        released.set()
        rollout.destroy()


@pytest.mark.nightly
def test_next_batch_reward_that_blocks_the_loop_is_named_with_its_stack(engine):
    class Blocking(Echo):
        async def arun_episode(self, engine, data):
            time.sleep(2)  # noqa: ASYNC251 - the planted fault
            return await super().arun_episode(engine, data)

    rollout = DistRollout(
        engine, Blocking(), _rows(), batch_size=1, config=RolloutConfig(group_size=1, stall_timeout=0.5)
    )
    try:
        with pytest.raises(StalledError, match=r"is blocked for more than 0.5 s[\s\S]*in arun_episode"):
            rollout.next_batch()
    finally:
        rollout.destroy()


def test_destroy_twice_and_with_running_episodes_ends_quietly(engine):
    engine.faults.hang = lambda request: True
    rollout = _rollout(engine, _rows())
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
def test_sizes_that_do_not_divide_are_refused_with_the_numbers(engine, settings, message):
    with pytest.raises(ConfigError, match=message):
        DistRollout(
            engine,
            Echo(),
            _rows(),
            config=RolloutConfig(group_size=2),
            parallel=ParallelContext(dp_size=2, world_size=2),
            **settings,
        )


def test_load_state_dict_of_another_layout_is_refused(engine):
    rollout = _rollout(engine, _rows())
    try:
        state = rollout.state_dict()
        state["layout"]["heads"] = 2
        with pytest.raises(ConfigError, match="'heads': 2.*load_states"):
            rollout.load_state_dict(state)
    finally:
        rollout.destroy()
