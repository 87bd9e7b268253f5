"""Planted faults of the runtime's own machinery: each alarm names its cause."""

import asyncio
import gc
import re
import subprocess
import sys
import threading
import time
import weakref
from itertools import count, pairwise

import pytest
import torch

from rl_contracts.batch.trajectory import from_response
from rl_contracts.config import GenerationConfig
from rl_contracts.data import ModelRequest
from rl_contracts.errors import ConfigError, InferenceError, RewardError, RLError, StalledError
from rl_contracts.reward_worker import AsyncRewardWrapper
from rl_contracts.testing import NullInferenceEngine, NullInferenceEngineConfig
from rl_contracts.workflow import RolloutWorkflow
from rl_workflows import DistRollout, RolloutConfig
from rl_workflows.rollout.episode import stage
from rl_workflows.rollout.failure_budget import FailureBudget
from rl_workflows.rollout.runtime import GC_THRESHOLDS
from rl_workflows.rollout.watchdog import STACKS_SHOWN, run_with_timeout


class Scored(RolloutWorkflow):
    """One answer; `score(data)` gives the reward."""

    def __init__(self, score=None):
        self.score = score

    async def arun_episode(self, engine, data):
        response = await engine.agenerate(
            ModelRequest([1 + data["prompt_id"] % 50], GenerationConfig(max_new_tokens=8))
        )
        with stage("reward"):
            reward = 1.0 if self.score is None else await self.score(data)
        return [from_response(response, reward=reward, temperature=1.0)]


def _rollout(workflow=None, batch_size=2, engine=None, **options):
    settings = {name: options.pop(name) for name in list(options) if hasattr(RolloutConfig, name)}
    config = RolloutConfig(**({"group_size": 2, "stall_timeout": 30.0} | settings))
    engine = engine or NullInferenceEngine(NullInferenceEngineConfig(mean_tokens=4, seconds_per_token=0.0005))
    rows = ({"prompt_id": i} for i in count())
    return DistRollout(engine, workflow or Scored(), rows, batch_size=batch_size, config=config, **options)


@pytest.fixture
def head_with(make_head):
    """A head on the simulated clock whose workflow is `Scored(score)`."""

    def make(score, **settings):
        head = make_head(**settings)
        head.episodes.workflow = Scored(score)
        return head

    return make


@pytest.mark.parametrize("name", ["reward", "environment", "workflow"])
def test_episode_that_hangs_raises_the_alarm_with_stage_age_and_stack(clock, head_with, caplog, name):
    async def waits_for_ever():
        await asyncio.Event().wait()

    async def score(data):
        with stage(name):
            await waits_for_ever()

    head = head_with(score, stall_timeout=30.0)

    async def main():
        await head.begin_wait()
        with pytest.raises(StalledError) as caught:
            await head.fill()
        await head.close()
        return str(caught.value)

    message = clock.run(main())
    assert f"stuck stage: {name}, for 3" in message
    assert "of prompt 0 (group 0, sample 0)" in message
    assert "in waits_for_ever" in message, "the whole chain of awaits of that episode"
    assert message.index("in arun_episode") < message.index("in score") < message.index("in waits_for_ever")
    assert caplog.text.count("in waits_for_ever") == STACKS_SHOWN, "the log shows other episodes before anything else"


def test_stuck_episode_while_the_servers_give_no_figures_still_raises_the_alarm(clock, head_with, null_engine):
    async def silent():
        await asyncio.Event().wait()

    async def score(data):
        await asyncio.Event().wait()

    null_engine.stats = silent
    head = head_with(score, stall_timeout=60.0)

    async def main():
        await head.begin_wait()
        with pytest.raises(StalledError, match="stuck stage: reward"):
            await head.fill()
        assert (await head.stats()).results(), "without the servers' own"
        await head.close()

    clock.run(main())
    assert clock.now() < 120


@pytest.mark.parametrize("how", ["its own task", "an inner task"])
def test_cancelled_error_out_of_a_workflow_is_a_failed_episode_and_not_the_end_of_the_run(clock, head_with, how):
    async def score(data):
        if data["prompt_id"] == 3 and how == "its own task":
            asyncio.current_task().cancel()
            await asyncio.sleep(0)
        elif data["prompt_id"] == 3:
            inner = asyncio.create_task(asyncio.sleep(1))
            inner.cancel()
            await inner
        return 1.0

    head = head_with(score, failure_budget=0.5)
    trained = []

    async def main():
        for _ in range(3):
            await head.begin_wait()
            await head.fill()
            trained.extend(group.prompt["prompt_id"] for group in await head.take())
            await head.end_step(0)
        stats = (await head.stats()).results()
        assert stats["groups/failed"] == stats["groups/failed/internal"] == 1
        assert head.manager.outstanding <= 8, "the place of the failed group is free again"
        await head.close()

    clock.run(main())
    assert 3 not in trained
    assert len(trained) == 12


def test_group_task_that_is_killed_ends_the_wait(clock, head_with):
    async def score(data):
        if data["prompt_id"] == 3:
            head.running[3][1].cancel()
        return 1.0

    head = head_with(score)

    async def main():
        await head.begin_wait()
        with pytest.raises(RLError, match="task of a group was cancelled"):
            await head.fill()
        await head.close()

    clock.run(main())


def test_watch_task_that_is_killed_ends_the_wait(clock, make_head, null_engine):
    null_engine.faults.hang = lambda request: True
    head = make_head()

    async def main():
        await head.begin_wait()
        [task] = [task for task in asyncio.all_tasks() if task.get_name() == "rollout-watch"]
        task.cancel()
        with pytest.raises(RLError, match="watchdog was cancelled"):
            await head.fill()
        await head.close()

    clock.run(main())


def test_loop_that_dies_ends_the_wait_with_what_killed_it():
    async def score(data):
        sys.exit(3)

    rollout = _rollout(Scored(score))
    with pytest.raises(RLError, match=r"SystemExit") as caught:
        rollout.next_batch()
    assert isinstance(caught.value.__cause__, SystemExit)
    rollout.loop.close()  # joins the thread: all tasks have ended


def test_reward_worker_that_never_returns_is_killed_and_counted_as_a_reward_error(tmp_path, monkeypatch):
    (tmp_path / "stuck_rewards.py").write_text("import time\ndef never(*given, **data):\n    time.sleep(1000)\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    reward = AsyncRewardWrapper("stuck_rewards:never", timeout=0.3)

    async def score(data):
        return await reward("", "", [], [])

    rollout = _rollout(Scored(score), failure_min_groups=2)
    try:
        with pytest.raises(
            RLError, match=r"groups failed \(reward \d\)[\s\S]*took longer than its limit of 0.3 s"
        ) as e:
            rollout.next_batch()
        assert isinstance(e.value.__cause__, RewardError)
    finally:
        rollout.loop.run(reward.aclose(), 10)
        rollout.destroy()


def test_trainer_that_takes_no_batch_raises_the_alarm_and_says_where_it_is():
    alarm: list[StalledError] = []
    heard = threading.Event()

    def on_stuck_trainer(error):
        alarm.append(error)
        heard.set()

    rollout = _rollout(trainer_timeout=0.4, on_stuck_trainer=on_stuck_trainer)
    try:
        rollout.next_batch()
        outstanding = rollout.scheduler.manager.outstanding
        assert heard.wait(20), "the planted fault: this thread is busy with something else"
        message = str(alarm[0])
        assert re.search(r"stuck stage: trainer\. It has not called the runtime for \d", message)
        assert "rollout.trainer_timeout=0.4" in message
        assert "2 accepted, 2 in the step" in message
        assert "assert heard.wait(20)" in message, "the trainer's stack"
        assert rollout.scheduler.manager.outstanding <= max(outstanding, 4), "admission bounds what piles up"
        rollout.end_step(0)
        with pytest.raises(StalledError, match="stuck stage: trainer"):
            rollout.next_batch()
    finally:
        rollout.destroy()


@pytest.mark.slow
def test_trainer_that_waits_inside_of_the_runtime_is_not_stuck():
    alarm: list[StalledError] = []
    slow = NullInferenceEngine(NullInferenceEngineConfig(mean_tokens=4, seconds_per_token=0.3))
    rollout = _rollout(engine=slow, trainer_timeout=0.4, on_stuck_trainer=alarm.append)
    try:
        for _ in range(2):
            rollout.next_batch()
            rollout.end_step(0)
    finally:
        rollout.destroy()
    assert not alarm


@pytest.mark.parametrize("name", ["stall_timeout", "trainer_timeout"])
def test_limits_of_the_watchdogs_that_are_no_times_are_refused(name):
    with pytest.raises(ConfigError, match=f"rollout.{name}"):
        RolloutConfig(**{name: 0.0})


def test_within_result_error_or_deadline(clock):
    async def after(seconds, error=None):
        await clock.sleep(seconds)
        if error is not None:
            raise error
        return seconds

    async def main():
        assert await run_with_timeout(clock, 2.0, after(1.0)) == 1.0
        with pytest.raises(InferenceError):
            await run_with_timeout(clock, 2.0, after(1.0, InferenceError("planted")))
        with pytest.raises(TimeoutError):
            await run_with_timeout(clock, 2.0, after(1000.0))

    clock.run(main())
    assert clock.now() == pytest.approx(4.0)


@pytest.mark.slow
def test_finished_groups_leave_nothing_to_the_garbage_collector():
    rollout = _rollout(batch_size=25, group_size=4)
    try:
        for _ in range(2):
            rollout.next_batch()
            rollout.end_step(0)
        gc.collect()
        gc.disable()
        found = []
        gc.callbacks.append(lambda phase, info: found.append(info["collected"]) if phase == "stop" else None)
        for _ in range(8):
            rollout.next_batch()
            rollout.end_step(0)
        gc.collect()
        assert sum(found) < 8 * 25, "some objects per batch, not per group"
    finally:
        gc.callbacks.pop()
        gc.enable()
        rollout.destroy()


@pytest.mark.slow
def test_tensors_that_training_leaves_in_reference_cycles_do_not_outlive_their_step(monkeypatch):
    monkeypatch.setattr("rl_workflows.rollout.runtime.FULL_COLLECTION_EVERY", 4)
    monkeypatch.setattr("rl_workflows.rollout.runtime.COLLECTION_FRACTION", 1e9)  # steps of a run are longer than these
    thresholds, rollout = gc.get_threshold(), _rollout()
    gc.set_threshold(*GC_THRESHOLDS)
    try:
        left, kept = [], []
        for step in range(1, 9):
            rollout.next_batch()
            for held in (None, kept):  # one is dropped in its step, one in the step after
                cycle = Cycle(torch.zeros(1000))
                left.append(weakref.ref(cycle.tensor))
                if held is not None:
                    held.append(cycle)
            del cycle
            del kept[:-1]
            rollout.end_step(0)
            alive = [ref() is not None for ref in left]
            assert not any(alive[:-1:2]), "dropped within the step"
            assert sum(alive) <= 1 + step % 4, "what outlived a step is found by the next full collection"
    finally:
        gc.set_threshold(*thresholds)
        rollout.destroy()


def test_collections_at_the_ends_of_steps_take_a_hundredth_of_the_time(monkeypatch):
    rollout, began = _rollout(), []

    def collect(generation):
        began.append(time.monotonic())
        time.sleep(0.01)

    monkeypatch.setattr("rl_workflows.rollout.runtime.gc.collect", collect)
    try:
        for _ in range(20):
            rollout.next_batch()
            rollout.end_step(0)
        assert began
        assert all(later - sooner >= 100 * 0.01 for sooner, later in pairwise(began))
    finally:
        rollout.destroy()


class Cycle:
    """Holds a tensor and itself."""

    def __init__(self, tensor):
        self.tensor, self.itself = tensor, self


@pytest.mark.slow
def test_tune_garbage_collection_freezes_what_exists_and_collects_rarely():
    code = (
        "import gc; from rl_workflows import tune_garbage_collection as tune; tune(); "
        "print(gc.get_freeze_count() > 1000, gc.get_threshold(), gc.isenabled())"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert result.stdout.split(" ", 1) == ["True", "(1000000, 20, 50) True\n"]


def test_queue_that_nobody_drains_is_bounded_by_admission():
    rollout = _rollout(max_staleness=2)
    try:
        rollout.loop.run(rollout.scheduler.begin_wait(), 5)
        deadline = time.monotonic() + 20
        while rollout.scheduler.manager.accepted < 6:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert (rollout.scheduler.manager.outstanding, rollout.scheduler.manager.capacity) == (6, 0)
    finally:
        rollout.destroy()


def test_budget_that_is_used_up_names_the_first_failure_before_its_trace():
    budget = FailureBudget(RolloutConfig(max_failed_in_row=2))
    budget.failed(RewardError("reward 'mine.py:f' raised ValueError: nonsense (mine.py:5)\nTraceback of its process"))
    with pytest.raises(RLError) as caught:
        budget.failed(RewardError("another"))
    first = str(caught.value).partition("\n")[0]
    assert first.startswith("2 groups in a row failed (reward 2), more than rollout.max_failed_in_row=2 allows. ")
    assert first.endswith(
        "The first failure was RewardError: reward 'mine.py:f' raised ValueError: nonsense (mine.py:5)"
    )
    assert "Traceback of its process" in str(caught.value).removeprefix(first)
