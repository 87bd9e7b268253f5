"""One scheduler on the simulated clock: batches, staleness, missing episodes, filters, failure budget, alarms."""

import contextlib
import gc
import json

import numpy as np
import pytest

from rl_contracts.batch.trajectory import Trajectory
from rl_contracts.config import GenerationConfig
from rl_contracts.data import ModelRequest
from rl_contracts.errors import DataError, InferenceError, NoServersError, RewardError, RLError, StalledError
from rl_contracts.images import Image
from rl_contracts.runtime.metrics import record
from rl_contracts.workflow import RolloutWorkflow
from rl_workflows.rollout import failure_budget
from rl_workflows.rollout.batches import assemble, groups_from_state, groups_to_state
from rl_workflows.rollout.episode import EpisodeContext, current_episode
from rl_workflows.rollout.groups import FinishedGroup, deep_copy_data, dynamic_sampling, with_ids
from rl_workflows.rollout.staleness import Ticket


async def _batch(scheduler):
    await scheduler.begin_wait()
    groups = await scheduler.fill() and await scheduler.take()
    return groups or []


@pytest.mark.parametrize("staleness", [0, 3])
def test_batches_long_tailed_completions_respect_max_staleness(clock, null_engine, make_scheduler, publish, staleness):
    scheduler = make_scheduler(max_staleness=staleness, group_size=3)
    ages = []

    async def main():
        for version in range(25):
            groups = await _batch(scheduler)
            batch = assemble(groups, version)  # compares the version of each token with the admission of its group
            assert len(groups) == 4
            ages.append(max(version - group.ticket.start for group in groups))
            stamped = batch["versions"][batch["versions"] >= 0]
            assert int(stamped.min()) >= version - staleness
            if staleness == 0:
                assert stamped.eq(version).all(), "exactly on-policy"
            await clock.sleep(0.7)  # training, while generation continues
            await publish(null_engine, version + 1)
            await scheduler.end_step(version + 1)
        await scheduler.close()

    clock.run(main())
    assert max(ages) == staleness, "the allowed staleness was not used"


def test_group_failed_episode_is_left_out_down_to_min_group(clock, make_scheduler, null_engine):
    null_engine.faults.generate = lambda request: (
        InferenceError("injected") if request.request_id.split("-")[2] == "1" else None
    )
    scheduler = make_scheduler(group_size=3, min_group=2)

    async def main():
        groups = await _batch(scheduler)
        assert [[trajectory.episode_id for trajectory in group.trajectories] for group in groups] == [[0, 2]] * 4
        stats = (await scheduler.stats()).results()
        assert stats["episodes/failed/inference"] >= 4
        assert stats["groups/failed"] == 0
        await scheduler.close()

    clock.run(main())


def test_scheduler_without_servers_fails_and_keeps_prompts(clock, make_scheduler, null_engine):
    null_engine.faults.generate = lambda request: NoServersError("injected")
    scheduler = make_scheduler(failure_budget=1.0)

    async def main():
        with pytest.raises(NoServersError, match="injected"):
            await _batch(scheduler)
        assert (await scheduler.stats()).results()["groups/failed"] == 0
        assert len((await scheduler.state_dict())["in_flight"]) == 8
        await scheduler.close()

    clock.run(main())


def test_group_failed_cancels_its_other_episodes(clock, make_scheduler, null_engine):
    null_engine.faults.hang = lambda request: request.request_id == "train-0-1-0"
    null_engine.faults.generate = lambda request: (
        InferenceError("injected") if request.request_id == "train-0-0-0" else None
    )
    scheduler = make_scheduler(examples=iter([{"prompt_id": 0}]), failure_budget=1.0)

    async def main():
        assert await _batch(scheduler) == []
        await clock.sleep(1e-6)  # one iteration of the loop for the cancellation
        assert not scheduler.episodes.running
        await scheduler.close()

    clock.run(main())


def test_metrics_of_episodes_are_kept_per_group_and_all_counted(clock, make_scheduler):
    def judge(data, token):
        record("prompt", data["prompt_id"])
        if data["prompt_id"] == 1:
            raise ValueError("a bug in the workflow")
        return None if data["prompt_id"] == 2 else 1.0

    scheduler = make_scheduler(judge=judge, examples=iter([{"prompt_id": i} for i in range(5)]), failure_budget=1.0)

    async def main():
        groups = await _batch(scheduler)
        assert [group.metrics.results()["prompt"] for group in groups] == [0.0, 3.0, 4.0]
        stats = (await scheduler.stats()).results()
        assert stats["groups/failed"] == stats["groups/failed/internal"] == 1
        assert stats["groups/rejected"] == stats["groups/rejected/workflow"] == 1
        # the first episode that fails or is rejected cancels the other before it records a metric
        assert stats["prompt"] == pytest.approx((0 * 2 + 1 + 2 + 3 * 2 + 4 * 2) / 8)
        assert (await scheduler.stats()).results()["prompt"] is None
        await scheduler.close()

    clock.run(main())


def test_dynamic_sampling_rejects_equal_rewards_and_fills_batch(clock, make_scheduler):
    scheduler = make_scheduler(
        judge=lambda data, token: 1.0 if data["prompt_id"] % 2 else float(token),
        should_accept=dynamic_sampling,
        group_size=4,
    )

    async def main():
        groups = await _batch(scheduler)
        assert len(groups) == 4
        assert all(group.prompt["prompt_id"] % 2 == 0 for group in groups)
        assert (await scheduler.stats()).results()["groups/rejected/filter"] > 0
        await scheduler.close()

    clock.run(main())


def test_filter_rejecting_all_groups_stops_run(clock, make_scheduler):
    scheduler = make_scheduler(should_accept=lambda trajectories: False, max_rejected_in_row=50)

    async def main():
        with pytest.raises(RLError, match=r"^50 groups .*max_rejected_in_row"):
            await _batch(scheduler)
        await scheduler.close()

    clock.run(main())


def test_filter_exception_fails_group(clock, make_scheduler):
    def broken(trajectories):
        raise ZeroDivisionError("in the filter")

    scheduler = make_scheduler(should_accept=broken)

    async def main():
        with pytest.raises(RLError, match=r"16 of the last 16 groups failed \(internal 16\)") as caught:
            await _batch(scheduler)
        assert "in the filter" in str(caught.value)
        await scheduler.close()

    clock.run(main())


def test_failure_budget_exceeded_stops_run_with_first_trace(clock, make_scheduler):
    def judge(data, token):
        if data["prompt_id"] % 3 == 0:
            raise RewardError("injected: no gold answer")
        return 1.0

    scheduler = make_scheduler(judge=judge, failure_budget=0.1)

    async def ten_steps():
        for _ in range(10):
            await _batch(scheduler)
            await scheduler.end_step(0)

    async def main():
        with pytest.raises(RLError) as caught:
            await ten_steps()
        await scheduler.close()
        return caught.value

    error = clock.run(main())
    assert "groups failed (reward " in str(error)
    assert "in judge" in str(error), "the first failure's trace"
    assert isinstance(error.__cause__, RewardError)


def _failing_from(prompt):
    """Return a judge that fails for all prompts from this one on."""

    def judge(data, token):
        if data["prompt_id"] >= prompt:
            raise RewardError(f"injected at {data['prompt_id']}")
        return 1.0

    return judge


async def _steps_until_the_end(scheduler):
    while True:
        await _batch(scheduler)
        await scheduler.end_step(0)


def test_failure_budget_is_equally_sensitive_late_in_run(clock, make_scheduler, caplog, monkeypatch):
    good = 40  # more groups than the window
    monkeypatch.setattr(failure_budget, "WINDOW", 24)
    scheduler = make_scheduler(judge=_failing_from(good), max_staleness=0, group_size=1, failure_budget=0.5)

    async def main():
        with pytest.raises(RLError, match=r"13 of the last 24 groups failed \(reward 13\)") as caught:
            await _steps_until_the_end(scheduler)
        await scheduler.close()
        return str(caught.value)

    assert f"injected at {good}" in clock.run(main()), "the first failure within the window"
    assert f"prompt {good} (group {good}) failed (reward): injected" in caplog.text


def test_failure_budget_is_unchanged_after_resuming(clock, make_scheduler, monkeypatch):
    monkeypatch.setattr(failure_budget, "WINDOW", 24)

    def judge(data, token):
        if data["prompt_id"] % 4 == 3 or data["prompt_id"] >= 30:
            raise RewardError(f"injected at {data['prompt_id']}")
        return 1.0

    def make():
        examples = iter([{"prompt_id": i} for i in range(1000)])
        return make_scheduler(
            judge=judge, examples=examples, max_staleness=0, group_size=1, batch_size=1, failure_budget=0.5
        )

    async def run(resumes):
        scheduler = make()
        for _ in range(22):  # up to prompt 28, with seven failures
            await _batch(scheduler)
            await scheduler.end_step(0)
        if resumes:
            state = await scheduler.state_dict()
            await scheduler.close()
            groups = state.pop("groups")
            scheduler = make()
            await scheduler.load_state_dict(json.loads(json.dumps(state)) | {"groups": groups})
        with pytest.raises(RLError) as caught:
            await _steps_until_the_end(scheduler)
        await scheduler.close()
        return str(caught.value)

    unbroken = clock.run(run(resumes=False))
    assert unbroken.startswith("13 of the last 24 groups failed")
    assert clock.run(run(resumes=True)) == unbroken


@pytest.mark.parametrize("missing_key", ["budget", "recent", "failed_in_row", "rejected_in_row"])
def test_load_state_dict_without_budget_counts_no_failures(clock, make_scheduler, missing_key, monkeypatch):
    monkeypatch.setattr(failure_budget, "MAX_FAILED_IN_ROW", 6)

    def make():
        examples = iter([{"prompt_id": i} for i in range(1000)])
        return make_scheduler(
            judge=_failing_from(2), examples=examples, max_staleness=0, group_size=1, batch_size=1, failure_budget=1.0
        )

    async def main():
        scheduler = make()
        for _ in range(2):
            await _batch(scheduler)
            await scheduler.end_step(0)
        scheduler.budget.failed(RewardError("before the save"))
        state = await scheduler.state_dict()
        await scheduler.close()
        state.pop(missing_key, None)
        state.get("budget", {}).pop(missing_key, None)
        scheduler = make()
        await scheduler.load_state_dict(state)
        with pytest.raises(RLError) as caught:
            await _batch(scheduler)
        await scheduler.close()
        return str(caught.value)

    failed = clock.run(main())
    assert failed.startswith("6 groups in a row failed")
    assert ("before the save" in failed) == (missing_key == "rejected_in_row")


def test_data_iterator_error_is_raised_with_its_cause(clock, make_scheduler):
    def examples():
        yield {"prompt_id": 0}
        raise OSError("disk error")

    scheduler = make_scheduler(examples=examples())

    async def main():
        with pytest.raises(RLError, match="OSError: disk error") as caught:
            await _batch(scheduler)
        assert isinstance(caught.value.__cause__, OSError)
        await scheduler.close()

    clock.run(main())


def test_example_without_prompt_id_raises_and_names_its_keys(clock, make_scheduler):
    scheduler = make_scheduler(examples=iter([{"question": "1 + 1"}]))

    async def main():
        with pytest.raises(DataError, match=r"`prompt_id`.*\['question'\]"):
            await _batch(scheduler)
        await scheduler.close()

    clock.run(main())


def test_stall_silent_server_is_reported_as_generation(clock, make_scheduler, null_engine, publish):
    null_engine.faults.hang = lambda request: request.group == "train-2"
    scheduler = make_scheduler(stall_timeout=30.0)

    async def main():
        for _ in range(50):
            await _batch(scheduler)
            version = scheduler.manager.version + 1
            await publish(null_engine, version)
            await scheduler.end_step(version)

    with pytest.raises(
        StalledError, match=r"stuck stage: generation, for .* of prompt 2 \(group 2, sample 0\)"
    ) as caught:
        clock.run(main())
    assert "rollout.stall_timeout=30" in str(caught.value)
    assert "running" in str(caught.value)


def test_slow_completion_with_server_progress_is_no_stall(clock, make_scheduler, null_engine):
    null_engine.config.mean_tokens, null_engine.config.sigma = 400, 0.0
    null_engine.config.seconds_per_token = 1.0

    async def growing():
        return {"generated_tokens": clock.now()}

    null_engine.stats = growing
    scheduler = make_scheduler(stall_timeout=30.0)

    async def main():
        assert len(await _batch(scheduler)) == 4
        await scheduler.close()

    clock.run(main())
    assert clock.now() > 300


def test_stall_waiting_for_paused_runtime_raises(clock, make_scheduler):
    scheduler = make_scheduler(stall_timeout=5.0)

    async def main():
        await scheduler.set_paused(True)
        with pytest.raises(StalledError, match="Is the runtime paused"):
            await _batch(scheduler)
        await scheduler.close()

    clock.run(main())


def test_pause_admits_no_groups_until_resume(clock, make_scheduler):
    scheduler = make_scheduler()

    async def main():
        await _batch(scheduler)
        await scheduler.set_paused(True)
        admitted = scheduler.manager.outstanding
        await scheduler.end_step(0)
        assert scheduler.manager.outstanding == admitted - 4
        await scheduler.set_paused(False)
        assert len(await _batch(scheduler)) == 4
        await scheduler.close()

    clock.run(main())


def test_assemble_tokens_older_than_admission_are_rejected(clock, make_scheduler):
    scheduler = make_scheduler(max_staleness=0)

    async def main():
        await _batch(scheduler)
        await scheduler.end_step(1)  # reports a commit that never happened on the servers
        with pytest.raises(InferenceError, match=r"admitted at version 1 and .* tokens of versions 0 to 0"):
            assemble(await _batch(scheduler), scheduler.manager.version)
        await scheduler.close()

    clock.run(main())


def test_seeds_depend_on_seed_and_prompt_and_not_on_order(clock, make_scheduler, null_engine):
    seen = []
    generate = null_engine.agenerate

    async def recording(request):
        seen.append((request.group, request.input_ids[0], request.seed))
        return await generate(request)

    null_engine.agenerate = recording

    async def main(examples, seed=0):
        scheduler = make_scheduler(examples=iter(examples), batch_size=2, seed=seed)
        await _batch(scheduler)
        await scheduler.close()

    examples = [{"prompt_id": 7}, {"prompt_id": 8}]
    clock.run(main(examples))
    expected = {(prompt, seed) for _, prompt, seed in seen}
    seen.clear()
    clock.run(main(examples[::-1]))
    assert {(prompt, seed) for _, prompt, seed in seen} == expected
    assert len({seed for _, seed in expected}) == 4
    seen.clear()
    clock.run(main([{**example, "epoch": 1} for example in examples]))
    assert not {(prompt, seed) for _, prompt, seed in seen} & expected
    seen.clear()
    clock.run(main(examples, seed=1))
    assert not {(prompt, seed) for _, prompt, seed in seen} & expected


def test_workflow_editing_its_example_does_not_affect_others(clock, make_scheduler):
    seen = []

    def judge(data, token):
        seen.append(len(data["messages"]))
        data["messages"].append({"role": "assistant", "content": "mine"})
        return float(token)

    async def main():
        scheduler = make_scheduler(
            examples=iter([{"prompt_id": i, "messages": [{"role": "user"}]} for i in range(20)]), judge=judge
        )
        await _batch(scheduler)
        await scheduler.end_step(0)
        await clock.sleep(1.0)
        state = await scheduler.state_dict()
        await scheduler.close()
        return [*state["in_flight"], *(group.prompt for group in state["groups"])]

    examples = clock.run(main())

    assert set(seen) == {1}
    assert examples
    assert all(len(example["messages"]) == 1 for example in examples)


def test_deep_copy_data_copies_containers_and_shares_arrays():
    image = np.zeros((2, 2))
    example = {"prompt_id": 3, "messages": [{"role": "user", "content": [{"type": "image", "image": image}]}]}

    copied = deep_copy_data(example)
    copied["messages"][0]["content"][0]["type"] = "text"
    copied["messages"][0]["content"].append({})

    assert copied["messages"][0]["content"][0]["image"] is image
    assert example["messages"][0]["content"] == [{"type": "image", "image": image}]


def _trajectory(**values):
    arrays = {"input_ids": np.arange(2), "loss_mask": np.ones(2, bool)}
    return Trajectory(**arrays, logprobs=np.zeros(2, np.float32), versions=np.zeros(2, np.int32), **values)


def test_groups_from_state_has_the_images_of_each_trajectory():
    red, blue = Image(b"red", 4, 5), Image(b"blue", 6, 7)
    trajectories = [_trajectory(images=images) for images in ((red, blue), (), (blue,))]
    groups = [FinishedGroup(Ticket(0, 0), {"prompt_id": 1}, trajectories)]

    (restored,) = groups_from_state(groups_to_state(groups))

    assert [each.images for each in restored.trajectories] == [(red, blue), (), (blue,)]
    assert restored.trajectories[2].images[0].data == b"blue"


def test_groups_to_state_converts_numpy_values_to_json():
    trajectory = _trajectory(reward=np.float32(0.5), truncated=np.bool_(True), temperature=np.float64(0.7))

    groups = groups_to_state([FinishedGroup(Ticket(0, 0), {"prompt_id": 1}, [trajectory])])["groups"]

    assert json.loads(json.dumps(groups)) == groups
    assert (groups[0]["trajectories"][0]["reward"], groups[0]["trajectories"][0]["truncated"]) == (0.5, True)


def test_with_ids_non_numeric_reward_is_rejected(clock):
    with pytest.raises(ValueError, match="float"):
        with_ids([_trajectory(reward="good")], EpisodeContext(0, 0, 0, 0, {}, clock))


def test_with_ids_different_rewards_in_episode_are_rejected(clock):
    context = EpisodeContext(0, 0, 0, 0, {}, clock)
    with pytest.raises(DataError, match=r"Turns\.arun_episode returned 2 .* \[0.0, 1.0\].*token_rewards"):
        with_ids([_trajectory(reward=0), _trajectory(reward=1)], context, "Turns")
    assert len(with_ids([_trajectory(reward=1), _trajectory(reward=1.0)], context, "Turns")) == 2


@pytest.mark.slow
def test_unsuccessful_episodes_create_no_reference_cycles(clock, make_scheduler, null_engine):
    null_engine.faults.generate = lambda request: (
        InferenceError("injected") if request.request_id.split("-")[2] == "1" else None
    )
    filter_calls = []

    def fail_every_third(trajectories):
        filter_calls.append(None)
        if len(filter_calls) % 3 == 0:
            raise ValueError("injected")
        return True

    scheduler = make_scheduler(group_size=4, min_group=3, failure_budget=1.0, should_accept=fail_every_third)

    async def main():
        for _ in range(2):
            await _batch(scheduler)
            await scheduler.end_step(0)
        gc.collect()
        gc.disable()
        try:
            for _ in range(12):
                await _batch(scheduler)
                await scheduler.end_step(0)
            unreachable = gc.collect()
        finally:
            gc.enable()
        await scheduler.close()
        return unreachable

    assert clock.run(main()) < 12 * 4, "some objects per batch, not per group"


def test_stage_after_failed_generation_is_restored(clock, make_scheduler, null_engine):
    stages = []

    class Tries(RolloutWorkflow):
        async def arun_episode(self, engine, data):
            with contextlib.suppress(InferenceError):
                await engine.agenerate(ModelRequest([1], GenerationConfig(max_new_tokens=4)))
            stages.append(current_episode().stage)

    null_engine.faults.generate = lambda request: InferenceError("injected")
    scheduler = make_scheduler(examples=iter([{"prompt_id": 0}]))
    scheduler.episodes.workflow = Tries()

    async def main():
        await _batch(scheduler)
        await scheduler.close()

    clock.run(main())
    assert set(stages) == {"workflow"}


@pytest.mark.parametrize(
    ("rewards", "expected"),
    [([0.3, 0.1 + 0.2], False), ([0.3, 0.3001], True), ([1e6, 1e6 + 0.5], False), ([0.0], False)],
)
def test_dynamic_sampling_nearly_equal_rewards_count_as_equal(rewards, expected):
    trajectories = [_trajectory(reward=reward, episode_id=index) for index, reward in enumerate(rewards)]

    assert dynamic_sampling(trajectories) is expected


@pytest.mark.parametrize("reward", [1e39, -1e39, float("nan")])
def test_with_ids_reward_not_finite_in_float32_is_rejected(clock, reward):
    with pytest.raises(DataError, match="float32"):
        with_ids([_trajectory(reward=reward)], EpisodeContext(0, 0, 0, 0, {}, clock))


def test_dynamic_sampling_equal_sums_of_different_components_are_kept():
    trajectories = [
        _trajectory(reward=1.0, reward_components=components, episode_id=i)
        for i, components in enumerate([{"a": 1, "b": 0}, {"a": 0, "b": 1}])
    ]

    assert dynamic_sampling(trajectories)
