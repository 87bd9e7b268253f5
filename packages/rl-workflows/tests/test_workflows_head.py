"""One replica head on the simulated clock: batches, staleness, members that are missing, filters, budgets, alarms."""

import contextlib
import gc
import json
import math

import numpy as np
import pytest

from rl_contracts.batch.trajectory import Trajectory
from rl_contracts.config import GenerationConfig
from rl_contracts.data import ModelRequest
from rl_contracts.errors import DataError, InferenceError, NoServersError, RewardError, RLError, StalledError
from rl_contracts.runtime.metrics import record
from rl_contracts.workflow import RolloutWorkflow
from rl_workflows.rollout.batches import assemble, groups_to_state
from rl_workflows.rollout.episode import EpisodeContext, current_episode
from rl_workflows.rollout.groups import FinishedGroup, deep_copy_data, dynamic_sampling, with_ids
from rl_workflows.rollout.staleness import Ticket


async def _batch(head):
    await head.begin_wait()
    groups = await head.fill() and await head.take()
    return groups or []


@pytest.mark.parametrize("staleness", [0, 1, 3])
def test_batches_long_tailed_answers_are_never_older_than_max_staleness(
    clock, null_engine, make_head, publish, staleness
):
    head = make_head(max_staleness=staleness, group_size=3)
    ages = []

    async def main():
        for version in range(25):
            groups = await _batch(head)
            batch = assemble(groups, version)  # compares every token's version with its group's admission
            assert len(groups) == 4
            ages.append(max(version - group.ticket.start for group in groups))
            stamped = batch["versions"][batch["versions"] >= 0]
            assert int(stamped.min()) >= version - staleness
            if staleness == 0:
                assert stamped.eq(version).all(), "exactly on-policy"
            await clock.sleep(0.7)  # training, while generation goes on
            await publish(null_engine, version + 1)
            await head.end_step(version + 1)
        await head.close()

    clock.run(main())
    assert max(ages) == staleness, "asynchrony was not used"


def test_batches_skipped_steps_go_on_at_the_same_version(clock, make_head):
    head = make_head(max_staleness=0)

    async def main():
        for _ in range(5):
            assert len(await _batch(head)) == 4
            await head.end_step(0)
        await head.close()

    clock.run(main())


def test_group_failed_member_goes_on_without_it_down_to_min_group(clock, make_head, null_engine):
    null_engine.faults.generate = lambda request: (
        InferenceError("planted") if request.request_id.split("-")[2] == "1" else None
    )
    head = make_head(group_size=3, min_group=2)

    async def main():
        groups = await _batch(head)
        assert [[row.episode_id for row in group.trajectories] for group in groups] == [[0, 2]] * 4
        stats = (await head.stats()).results()
        assert stats["episodes/failed/inference"] >= 4
        assert stats["groups/failed"] == 0
        await head.close()

    clock.run(main())


def test_group_failed_member_without_min_group_fails_and_is_replaced(clock, make_head, null_engine):
    null_engine.faults.generate = lambda request: (
        InferenceError("planted") if request.request_id == "train-1-0-0" else None
    )
    head = make_head(failure_budget=0.9)

    async def main():
        groups = await _batch(head)
        assert sorted(group.ticket.group_id for group in groups) != [0, 1, 2, 3]
        assert len(groups) == 4
        assert all(len(group.trajectories) == 2 for group in groups)
        stats = (await head.stats()).results()
        assert stats["groups/failed"] == stats["groups/failed/inference"] == 1
        assert head.manager.outstanding <= 8
        await head.close()

    clock.run(main())


def test_head_without_servers_ends_and_keeps_its_prompts(clock, make_head, null_engine):
    null_engine.faults.generate = lambda request: NoServersError("planted")
    head = make_head(failure_budget=1.0)

    async def main():
        with pytest.raises(NoServersError, match="planted"):
            await _batch(head)
        assert (await head.stats()).results()["groups/failed"] == 0
        assert len((await head.state_dict())["in_flight"]) == 8
        await head.close()

    clock.run(main())


def test_group_that_failed_ends_its_other_members(clock, make_head, null_engine):
    null_engine.faults.hang = lambda request: request.request_id == "train-0-1-0"
    null_engine.faults.generate = lambda request: (
        InferenceError("planted") if request.request_id == "train-0-0-0" else None
    )
    head = make_head(rows=iter([{"prompt_id": 0}]), failure_budget=1.0)

    async def main():
        assert await _batch(head) == []
        await clock.sleep(1e-6)  # a turn of the loop for the cancellation
        assert not head.episodes.running
        await head.close()

    clock.run(main())


def test_group_rejected_by_the_workflow_is_counted_and_replaced(clock, make_head):
    head = make_head(judge=lambda data, token: None if data["prompt_id"] < 3 else 1.0)

    async def main():
        groups = await _batch(head)
        assert min(group.prompt["prompt_id"] for group in groups) >= 3
        stats = (await head.stats()).results()
        assert stats["groups/rejected"] == stats["groups/rejected/workflow"] == 3
        await head.close()

    clock.run(main())


def test_groups_keep_what_their_own_episodes_recorded_and_every_episode_counts(clock, make_head):
    def judge(data, token):
        record("prompt", data["prompt_id"])
        if data["prompt_id"] == 1:
            raise ValueError("a defect of the workflow")
        return None if data["prompt_id"] == 2 else 1.0

    head = make_head(judge=judge, rows=iter([{"prompt_id": i} for i in range(5)]), failure_budget=1.0)

    async def main():
        groups = await _batch(head)
        assert [group.figures.results()["prompt"] for group in groups] == [0.0, 3.0, 4.0]
        stats = (await head.stats()).results()
        assert stats["groups/failed"] == stats["groups/rejected"] == 1
        # the first member that fails or is rejected ends the other before it records
        assert stats["prompt"] == pytest.approx((0 * 2 + 1 + 2 + 3 * 2 + 4 * 2) / 8)
        assert (await head.stats()).results()["prompt"] is None
        await head.close()

    clock.run(main())


def test_dynamic_sampling_equal_rewards_are_rejected_and_the_batch_is_full(clock, make_head):
    head = make_head(
        judge=lambda data, token: 1.0 if data["prompt_id"] % 2 else float(token),
        should_accept=dynamic_sampling,
        group_size=4,
    )

    async def main():
        groups = await _batch(head)
        assert len(groups) == 4
        assert all(group.prompt["prompt_id"] % 2 == 0 for group in groups)
        assert (await head.stats()).results()["groups/rejected/filter"] > 0
        await head.close()

    clock.run(main())


def test_filter_that_rejects_everything_ends_the_run_with_advice(clock, make_head):
    head = make_head(should_accept=lambda rows: False, max_rejected_in_row=50)

    async def main():
        with pytest.raises(RLError, match=r"^50 groups .*max_rejected_in_row"):
            await _batch(head)
        await head.close()

    clock.run(main())


def test_filter_that_raises_fails_the_group(clock, make_head):
    def broken(rows):
        raise ZeroDivisionError("in the filter")

    head = make_head(should_accept=broken, failure_min_groups=3)

    async def main():
        with pytest.raises(RLError, match=r"3 of the last 3 groups failed \(internal 3\)") as caught:
            await _batch(head)
        assert "in the filter" in str(caught.value)
        await head.close()

    clock.run(main())


def test_failure_budget_exceeded_ends_the_run_with_the_first_trace_by_boundary(clock, make_head):
    def judge(data, token):
        if data["prompt_id"] % 3 == 0:
            raise RewardError("planted: no gold answer")
        return 1.0

    head = make_head(judge=judge, failure_budget=0.1, failure_min_groups=8)

    async def ten_steps():
        for _ in range(10):
            await _batch(head)
            await head.end_step(0)

    async def main():
        with pytest.raises(RLError) as caught:
            await ten_steps()
        await head.close()
        return caught.value

    error = clock.run(main())
    assert "groups failed (reward " in str(error)
    assert "in judge" in str(error), "the first failure's trace"
    assert isinstance(error.__cause__, RewardError)


def test_failure_budget_not_exceeded_goes_on(clock, make_head):
    def judge(data, token):
        if data["prompt_id"] == 5:
            raise ValueError("a defect of the workflow")
        return 1.0

    head = make_head(judge=judge, failure_budget=0.2)

    async def main():
        for _ in range(6):
            await _batch(head)
            await head.end_step(0)
        assert (await head.stats()).results()["groups/failed/internal"] == 1
        await head.close()

    clock.run(main())


def _failing_from(prompt):
    """Prompts from this one on fail."""

    def judge(data, token):
        if data["prompt_id"] >= prompt:
            raise RewardError(f"planted at {data['prompt_id']}")
        return 1.0

    return judge


async def _steps_until_the_end(head):
    while True:
        await _batch(head)
        await head.end_step(0)


@pytest.mark.parametrize("good", [40, pytest.param(4000, marks=pytest.mark.slow)])
def test_failure_budget_stops_as_soon_late_in_a_run_as_early(clock, make_head, good, caplog):
    limits = {"failure_budget": 0.5, "failure_window": 24, "failure_min_groups": 8, "max_failed_in_row": 1000}
    head = make_head(judge=_failing_from(good), max_staleness=0, group_size=1, **limits)

    async def main():
        with pytest.raises(RLError, match=r"13 of the last 24 groups failed \(reward 13\)") as caught:
            await _steps_until_the_end(head)
        await head.close()
        return str(caught.value)

    assert f"planted at {good}" in clock.run(main()), "the first failure of those that count"
    assert f"prompt {good} (group {good}) failed (reward): planted" in caplog.text


def test_failures_in_a_row_stop_the_run_whatever_the_budget(clock, make_head):
    head = make_head(judge=_failing_from(100), group_size=1, failure_budget=1.0, max_failed_in_row=7)

    async def main():
        with pytest.raises(
            RLError, match=r"7 groups in a row failed \(reward 7\), more than rollout.max_failed_in_row=7"
        ):
            await _steps_until_the_end(head)
        await head.close()

    clock.run(main())


def test_failure_budget_is_the_same_after_resuming(clock, make_head):
    limits = {"failure_budget": 0.5, "failure_window": 24, "failure_min_groups": 8, "max_failed_in_row": 100}

    def judge(data, token):
        if data["prompt_id"] % 4 == 3 or data["prompt_id"] >= 30:
            raise RewardError(f"planted at {data['prompt_id']}")
        return 1.0

    def make():
        rows = iter([{"prompt_id": i} for i in range(1000)])
        return make_head(judge=judge, rows=rows, max_staleness=0, group_size=1, batch_size=1, **limits)

    async def run(resumes):
        head = make()
        for _ in range(22):  # to prompt 28, with seven failures on the way
            await _batch(head)
            await head.end_step(0)
        if resumes:
            state = await head.state_dict()
            await head.close()
            groups = state.pop("groups")
            head = make()
            await head.load_state_dict(json.loads(json.dumps(state)) | {"groups": groups})
        with pytest.raises(RLError) as caught:
            await _steps_until_the_end(head)
        await head.close()
        return str(caught.value)

    unbroken = clock.run(run(resumes=False))
    assert unbroken.startswith("13 of the last 24 groups failed")
    assert clock.run(run(resumes=True)) == unbroken


@pytest.mark.parametrize("lost", ["budget", "recent", "failed_in_row", "rejected_in_row"])
def test_state_of_a_version_that_saved_no_budget_resumes_with_one_that_remembers_nothing(clock, make_head, lost):
    def make():
        rows = iter([{"prompt_id": i} for i in range(1000)])
        limits = {"failure_budget": 1.0, "max_failed_in_row": 6}
        return make_head(judge=_failing_from(2), rows=rows, max_staleness=0, group_size=1, batch_size=1, **limits)

    async def main():
        head = make()
        for _ in range(2):
            await _batch(head)
            await head.end_step(0)
        head.budget.failed(RewardError("before the point"))
        state = await head.state_dict()
        await head.close()
        state.pop(lost, None)
        state.get("budget", {}).pop(lost, None)
        head = make()
        await head.load_state_dict(state)
        with pytest.raises(RLError) as caught:
            await _batch(head)
        await head.close()
        return str(caught.value)

    failed = clock.run(main())
    assert failed.startswith("6 groups in a row failed")
    assert ("before the point" in failed) == (lost == "rejected_in_row")


def test_data_iterator_that_dies_ends_the_wait_with_its_cause(clock, make_head):
    def rows():
        yield {"prompt_id": 0}
        raise OSError("the disk is gone")

    head = make_head(rows=rows())

    async def main():
        with pytest.raises(RLError, match="OSError: the disk is gone") as caught:
            await _batch(head)
        assert isinstance(caught.value.__cause__, OSError)
        await head.close()

    clock.run(main())


def test_row_without_prompt_id_ends_the_wait_and_names_its_keys(clock, make_head):
    head = make_head(rows=iter([{"question": "1 + 1"}]))

    async def main():
        with pytest.raises(DataError, match=r"`prompt_id`.*\['question'\]"):
            await _batch(head)
        await head.close()

    clock.run(main())


def test_server_that_never_answers_raises_the_alarm_and_names_the_stage(clock, make_head, null_engine, publish):
    null_engine.faults.hang = lambda request: request.group == "train-2"
    head = make_head(stall_timeout=30.0)

    async def main():
        for _ in range(50):
            await _batch(head)
            version = head.manager.version + 1
            await publish(null_engine, version)
            await head.end_step(version)

    with pytest.raises(
        StalledError, match=r"stuck stage: generation, for .* of prompt 2 \(group 2, sample 0\)"
    ) as caught:
        clock.run(main())
    assert "rollout.stall_timeout=30" in str(caught.value)
    assert "running" in str(caught.value)


def test_slow_answer_that_still_grows_on_the_server_is_no_stall(clock, make_head, null_engine):
    null_engine.config.mean_tokens, null_engine.config.sigma = 400, 0.0
    null_engine.config.seconds_per_token = 1.0

    async def growing():
        return {"generated_tokens": clock.now()}

    null_engine.stats = growing
    head = make_head(stall_timeout=30.0)

    async def main():
        assert len(await _batch(head)) == 4
        await head.close()

    clock.run(main())
    assert clock.now() > 300


def test_paused_runtime_that_is_waited_for_raises_the_alarm(clock, make_head):
    head = make_head(stall_timeout=5.0)

    async def main():
        await head.set_paused(True)
        with pytest.raises(StalledError, match="Is the runtime paused"):
            await _batch(head)
        await head.close()

    clock.run(main())


def test_pause_admits_nothing_until_resume(clock, make_head):
    head = make_head()

    async def main():
        await _batch(head)
        await head.set_paused(True)
        admitted = head.manager.outstanding
        await head.end_step(0)
        assert head.manager.outstanding == admitted - 4
        await head.set_paused(False)
        assert len(await _batch(head)) == 4
        await head.close()

    clock.run(main())


def test_server_that_serves_an_older_version_than_committed_is_refused(clock, make_head):
    head = make_head(max_staleness=0)

    async def main():
        await _batch(head)
        await head.end_step(1)  # claims a commit that the servers never made
        with pytest.raises(InferenceError, match="admitted at version 1 and .* tokens of versions 0 to 0"):
            assemble(await _batch(head), head.manager.version)
        await head.close()

    clock.run(main())


def test_seeds_depend_on_what_is_asked_and_not_on_when(clock, make_head, null_engine):
    seen = []
    generate = null_engine.agenerate

    async def recording(request):
        seen.append((request.group, request.input_ids[0], request.seed))
        return await generate(request)

    null_engine.agenerate = recording

    async def main(rows):
        head = make_head(rows=iter(rows), batch_size=2)
        await _batch(head)
        await head.close()

    rows = [{"prompt_id": 7}, {"prompt_id": 8}]
    clock.run(main(rows))
    forward = {(prompt, seed) for _, prompt, seed in seen}
    seen.clear()
    clock.run(main(rows[::-1]))
    assert {(prompt, seed) for _, prompt, seed in seen} == forward
    assert len({seed for _, seed in forward}) == 4
    seen.clear()
    clock.run(main([{**row, "epoch": 1} for row in rows]))
    assert not {(prompt, seed) for _, prompt, seed in seen} & forward


def test_state_lost_process_resumes_with_nothing_lost_or_repeated(clock, make_head):
    async def first():
        head = make_head(rows=iter([{"prompt_id": i} for i in range(20)]), max_staleness=2)
        used = [group.prompt["prompt_id"] for group in await _batch(head)]
        await head.end_step(0)
        await clock.sleep(1.0)
        assert head.manager.accepted > 0
        assert head.manager.running > 0
        state = await head.state_dict()
        await _batch(head)  # lost with the process
        await head.close()
        return used, state

    async def second(state):
        head = make_head(rows=iter([{"prompt_id": i} for i in range(20)]), max_staleness=2)
        await head.load_state_dict(state)
        used = []
        while groups := await _batch(head):
            used += [group.prompt["prompt_id"] for group in groups]
            assert all(math.isfinite(row.reward) and len(row) for group in groups for row in group.trajectories)
            await head.end_step(0)
        await head.close()
        return used

    used, state = clock.run(first())
    assert sorted(used + clock.run(second(state))) == list(range(20))


def test_workflow_that_edits_its_row_changes_neither_the_groups_nor_the_saved_one(clock, make_head):
    seen = []

    def judge(data, token):
        seen.append(len(data["messages"]))
        data["messages"].append({"role": "assistant", "content": "mine"})
        return float(token)

    async def main():
        head = make_head(rows=iter([{"prompt_id": i, "messages": [{"role": "user"}]} for i in range(20)]), judge=judge)
        await _batch(head)
        await head.end_step(0)
        await clock.sleep(1.0)
        state = await head.state_dict()
        await head.close()
        return [*state["in_flight"], *(group.prompt for group in state["groups"])]

    rows = clock.run(main())

    assert set(seen) == {1}
    assert rows
    assert all(len(row["messages"]) == 1 for row in rows)


def test_own_copy_copies_lists_and_dictionaries_at_any_depth_and_shares_the_rest():
    image = np.zeros((2, 2))
    row = {"prompt_id": 3, "messages": [{"role": "user", "content": [{"type": "image", "image": image}]}]}

    copied = deep_copy_data(row)
    copied["messages"][0]["content"][0]["type"] = "text"
    copied["messages"][0]["content"].append({})

    assert copied["messages"][0]["content"][0]["image"] is image
    assert row["messages"][0]["content"] == [{"type": "image", "image": image}]


def _row(**values):
    arrays = {"input_ids": np.arange(2), "loss_mask": np.ones(2, bool)}
    return Trajectory(**arrays, logprobs=np.zeros(2, np.float32), versions=np.zeros(2, np.int32), **values)


def test_state_holds_json_where_a_workflow_gave_numpy_values():
    row = _row(reward=np.float32(0.5), truncated=np.bool_(True), temperature=np.float64(0.7))

    groups = groups_to_state([FinishedGroup(Ticket(0, 0), {"prompt_id": 1}, [row])])["groups"]

    assert json.loads(json.dumps(groups)) == groups
    assert (groups[0]["trajectories"][0]["reward"], groups[0]["trajectories"][0]["truncated"]) == (0.5, True)


@pytest.mark.parametrize("reward", ["good", None])
def test_reward_that_is_no_number_is_refused_where_its_episode_ends(clock, reward):
    with pytest.raises((TypeError, ValueError), match="float"):
        with_ids([_row(reward=reward)], EpisodeContext(0, 0, 0, 0, {}, clock))


def test_episode_of_several_rows_has_one_reward_and_differing_ones_are_refused_by_the_workflows_name(clock):
    context = EpisodeContext(0, 0, 0, 0, {}, clock)
    with pytest.raises(DataError, match=r"Turns\.arun_episode returned 2 .* \[0.0, 1.0\].*token_rewards"):
        with_ids([_row(reward=0), _row(reward=1)], context, "Turns")
    assert len(with_ids([_row(reward=1), _row(reward=1.0)], context, "Turns")) == 2


def test_rewards_of_an_episode_that_differ_fail_its_group_and_end_the_run_in_the_budget(clock, make_head):
    head = make_head(failure_min_groups=1)

    class Turns(RolloutWorkflow):
        async def arun_episode(self, engine, data):
            return [_row(reward=0.0), _row(reward=1.0)]

    head.episodes.workflow = Turns()
    with pytest.raises(RLError, match=r"Turns\.arun_episode returned 2"):
        clock.run(_batch(head))


@pytest.mark.slow
def test_failed_rejected_and_cancelled_episodes_leave_nothing_to_the_garbage_collector(clock, make_head, null_engine):
    null_engine.faults.generate = lambda request: (
        InferenceError("planted") if request.request_id.split("-")[2] == "1" else None
    )
    asked = []

    def refuse_some(rows):
        asked.append(None)
        if len(asked) % 3 == 0:
            raise ValueError("planted")
        return True

    head = make_head(group_size=4, min_group=3, failure_budget=1.0, should_accept=refuse_some)

    async def main():
        for _ in range(2):
            await _batch(head)
            await head.end_step(0)
        gc.collect()
        gc.disable()
        try:
            for _ in range(12):
                await _batch(head)
                await head.end_step(0)
            found = gc.collect()
        finally:
            gc.enable()
        await head.close()
        return found

    assert clock.run(main()) < 12 * 4, "some objects per batch, not per group"


def test_stage_of_an_episode_whose_generation_failed_is_what_it_was_before(clock, make_head, null_engine):
    stages = []

    class Tries(RolloutWorkflow):
        async def arun_episode(self, engine, data):
            with contextlib.suppress(InferenceError):
                await engine.agenerate(ModelRequest([1], GenerationConfig(max_new_tokens=4)))
            stages.append(current_episode().stage)

    null_engine.faults.generate = lambda request: InferenceError("planted")
    head = make_head(rows=iter([{"prompt_id": 0}]))
    head.episodes.workflow = Tries()

    async def main():
        await _batch(head)
        await head.close()

    clock.run(main())
    assert set(stages) == {"workflow"}


@pytest.mark.parametrize(
    ("rewards", "expected"),
    [([0.3, 0.1 + 0.2], False), ([0.3, 0.3001], True), ([1e6, 1e6 + 0.5], False), ([0.0], False)],
)
def test_dynamic_sampling_nearly_equal_rewards_count_as_equal(rewards, expected):
    rows = [_row(reward=reward, episode_id=index) for index, reward in enumerate(rewards)]

    assert dynamic_sampling(rows) is expected


@pytest.mark.parametrize("reward", [1e39, float("nan"), float("-inf")])
def test_reward_that_float32_cannot_hold_is_refused_where_its_episode_ends(clock, reward):
    with pytest.raises(DataError, match="float32"):
        with_ids([_row(reward=reward)], EpisodeContext(0, 0, 0, 0, {}, clock))


def test_dynamic_sampling_equal_sums_of_different_parts_are_kept():
    rows = [
        _row(reward=1.0, reward_components=parts, episode_id=i)
        for i, parts in enumerate([{"a": 1, "b": 0}, {"a": 0, "b": 1}])
    ]

    assert dynamic_sampling(rows)
