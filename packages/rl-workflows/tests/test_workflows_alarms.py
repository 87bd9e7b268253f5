"""Injected faults in the runtime itself. Each alarm must report the cause."""

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
from rl_contracts.errors import InferenceError, RewardError, RLError, StalledError
from rl_contracts.reward_worker import AsyncRewardWrapper
from rl_contracts.testing import NullInferenceEngine, NullInferenceEngineConfig
from rl_contracts.workflow import RolloutWorkflow
from rl_workflows import DistRollout, RolloutConfig
from rl_workflows.rollout import failure_budget, watchdog
from rl_workflows.rollout.episode import stage
from rl_workflows.rollout.failure_budget import FailureBudget
from rl_workflows.rollout.runtime import GC_THRESHOLDS
from rl_workflows.rollout.watchdog import STACKS_SHOWN, run_with_timeout


class Scored(RolloutWorkflow):
    """Workflow with one completion. `score(data)` returns the reward."""

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
    examples = ({"prompt_id": i} for i in count())
    return DistRollout(engine, workflow or Scored(), examples, batch_size=batch_size, config=config, **options)


@pytest.fixture
def scheduler_with(make_scheduler):
    """Return a function that builds a scheduler on the simulated clock with the workflow `Scored(score)`."""

    def make(score, **settings):
        scheduler = make_scheduler(**settings)
        scheduler.episodes.workflow = Scored(score)
        return scheduler

    return make


@pytest.mark.guarantee(
    "If episodes make no progress, the run stops and reports the stuck stage, its age and its stack.", area="failures"
)
def test_stall_hanging_episode_reports_stage_age_and_stack(clock, scheduler_with, caplog):
    async def waits_forever():
        await asyncio.Event().wait()

    async def score(data):
        with stage("environment"):
            await waits_forever()

    scheduler = scheduler_with(score, stall_timeout=30.0)

    async def main():
        await scheduler.begin_wait()
        with pytest.raises(StalledError) as caught:
            await scheduler.fill()
        await scheduler.close()
        return str(caught.value)

    message = clock.run(main())
    assert "stuck stage: environment, for 3" in message
    assert "of prompt 0 (group 0, sample 0)" in message
    assert "in waits_forever" in message, "the whole chain of awaits of that episode"
    assert message.index("in arun_episode") < message.index("in score") < message.index("in waits_forever")
    assert caplog.text.count("in waits_forever") == STACKS_SHOWN, "the log shows other episodes before anything else"


def test_stall_without_server_metrics_is_still_detected(clock, scheduler_with, null_engine):
    async def silent():
        await asyncio.Event().wait()

    async def score(data):
        await asyncio.Event().wait()

    null_engine.stats = silent
    scheduler = scheduler_with(score, stall_timeout=60.0)

    async def main():
        await scheduler.begin_wait()
        with pytest.raises(StalledError, match="stuck stage: reward"):
            await scheduler.fill()
        assert (await scheduler.stats()).results(), "metrics without those of the servers"
        await scheduler.close()

    clock.run(main())
    assert clock.now() < 120


@pytest.mark.parametrize("cancelled_task", ["its own task", "an inner task"])
def test_cancelled_error_in_workflow_fails_only_its_episode(clock, scheduler_with, cancelled_task):
    async def score(data):
        if data["prompt_id"] == 3 and cancelled_task == "its own task":
            asyncio.current_task().cancel()
            await asyncio.sleep(0)
        elif data["prompt_id"] == 3:
            inner = asyncio.create_task(asyncio.sleep(1))
            inner.cancel()
            await inner
        return 1.0

    scheduler = scheduler_with(score, failure_budget=0.5)
    trained = []

    async def main():
        for _ in range(3):
            await scheduler.begin_wait()
            await scheduler.fill()
            trained.extend(group.prompt["prompt_id"] for group in await scheduler.take())
            await scheduler.end_step(0)
        stats = (await scheduler.stats()).results()
        assert stats["groups/failed"] == stats["groups/failed/internal"] == 1
        assert scheduler.manager.outstanding <= 8, "the slot of the failed group is free again"
        await scheduler.close()

    clock.run(main())
    assert 3 not in trained
    assert len(trained) == 12


def test_fill_group_task_cancelled_raises(clock, scheduler_with):
    async def score(data):
        if data["prompt_id"] == 3:
            scheduler.running[3][1].cancel()
        return 1.0

    scheduler = scheduler_with(score)

    async def main():
        await scheduler.begin_wait()
        with pytest.raises(RLError, match="task of a group was cancelled"):
            await scheduler.fill()
        await scheduler.close()

    clock.run(main())


def test_fill_watchdog_task_cancelled_raises(clock, make_scheduler, null_engine):
    null_engine.faults.hang = lambda request: True
    scheduler = make_scheduler()

    async def main():
        await scheduler.begin_wait()
        [task] = [task for task in asyncio.all_tasks() if task.get_name() == "rollout-watch"]
        task.cancel()
        with pytest.raises(RLError, match="watchdog was cancelled"):
            await scheduler.fill()
        await scheduler.close()

    clock.run(main())


def test_next_batch_event_loop_dies_raises_with_cause():
    async def score(data):
        sys.exit(3)

    rollout = _rollout(Scored(score))
    with pytest.raises(RLError, match=r"SystemExit") as caught:
        rollout.next_batch()
    assert isinstance(caught.value.__cause__, SystemExit)
    rollout.loop.close()  # joins the thread: all tasks have ended


def test_reward_worker_timeout_counts_as_reward_error(tmp_path, monkeypatch):
    (tmp_path / "stuck_rewards.py").write_text("import time\ndef never(*args, **data):\n    time.sleep(1000)\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    reward = AsyncRewardWrapper("stuck_rewards:never", timeout=0.3)

    async def score(data):
        return await reward("", "", [], [])

    monkeypatch.setattr("rl_workflows.rollout.failure_budget.MIN_GROUPS", 2)
    rollout = _rollout(Scored(score))
    try:
        with pytest.raises(
            RLError, match=r"groups failed \(reward \d\)[\s\S]*took longer than its limit of 0.3 s"
        ) as caught:
            rollout.next_batch()
        assert isinstance(caught.value.__cause__, RewardError)
    finally:
        rollout.loop.run(reward.aclose(), 10)
        rollout.destroy()


def test_stall_trainer_takes_no_batch_reports_its_stack(monkeypatch):
    monkeypatch.setattr(watchdog, "TRAINER_TIMEOUT", 0.4)
    alarm: list[StalledError] = []
    called = threading.Event()

    def on_stuck_trainer(error):
        alarm.append(error)
        called.set()

    rollout = _rollout(on_stuck_trainer=on_stuck_trainer)
    try:
        rollout.next_batch()
        outstanding = rollout.scheduler.manager.outstanding
        assert called.wait(20), "injected fault: this thread is busy with something else"
        message = str(alarm[0])
        assert re.search(r"stuck stage: trainer\. It has not called the runtime for \d", message)
        assert "(the limit is 0.4 s)" in message
        assert "2 accepted, 2 in the step" in message
        assert "assert called.wait(20)" in message, "the trainer's stack"
        assert rollout.scheduler.manager.outstanding <= max(outstanding, 4), "admission limits the outstanding groups"
        rollout.end_step(0)
        with pytest.raises(StalledError, match="stuck stage: trainer"):
            rollout.next_batch()
    finally:
        rollout.destroy()


@pytest.mark.slow
def test_stall_trainer_waiting_in_runtime_is_not_stuck(monkeypatch):
    monkeypatch.setattr(watchdog, "TRAINER_TIMEOUT", 0.4)
    alarm: list[StalledError] = []
    slow = NullInferenceEngine(NullInferenceEngineConfig(mean_tokens=4, seconds_per_token=0.3))
    rollout = _rollout(engine=slow, on_stuck_trainer=alarm.append)
    try:
        for _ in range(2):
            rollout.next_batch()
            rollout.end_step(0)
    finally:
        rollout.destroy()
    assert not alarm


def test_run_with_timeout_returns_result_error_or_timeout(clock):
    async def after(seconds, error=None):
        await clock.sleep(seconds)
        if error is not None:
            raise error
        return seconds

    async def main():
        assert await run_with_timeout(clock, 2.0, after(1.0)) == 1.0
        with pytest.raises(InferenceError):
            await run_with_timeout(clock, 2.0, after(1.0, InferenceError("injected")))
        with pytest.raises(TimeoutError, match="no result within 2 s"):
            await run_with_timeout(clock, 2.0, after(1000.0))

    clock.run(main())
    assert clock.now() == pytest.approx(4.0)


@pytest.mark.slow
def test_finished_groups_create_no_reference_cycles():
    rollout = _rollout(batch_size=25, group_size=4)
    try:
        for _ in range(2):
            rollout.next_batch()
            rollout.end_step(0)
        gc.collect()
        gc.disable()
        collected = []
        gc.callbacks.append(lambda phase, info: collected.append(info["collected"]) if phase == "stop" else None)
        for _ in range(8):
            rollout.next_batch()
            rollout.end_step(0)
        gc.collect()
        assert sum(collected) < 8 * 25, "some objects per batch, not per group"
    finally:
        gc.callbacks.pop()
        gc.enable()
        rollout.destroy()


@pytest.mark.slow
def test_end_step_frees_tensors_in_reference_cycles(monkeypatch):
    monkeypatch.setattr("rl_workflows.rollout.runtime.FULL_COLLECTION_EVERY", 4)
    monkeypatch.setattr("rl_workflows.rollout.runtime.COLLECTION_FRACTION", 1e9)  # collect at the end of each step
    thresholds, rollout = gc.get_threshold(), _rollout()
    gc.set_threshold(*GC_THRESHOLDS)
    try:
        tensor_refs, retained = [], []
        for step in range(1, 9):
            rollout.next_batch()
            for container in (None, retained):  # drops one cycle in its step, and the other in the next step
                cycle = Cycle(torch.zeros(1000))
                tensor_refs.append(weakref.ref(cycle.tensor))
                if container is not None:
                    container.append(cycle)
            del cycle
            del retained[:-1]
            rollout.end_step(0)
            reachable = [ref() is not None for ref in tensor_refs]
            assert not any(reachable[:-1:2]), "dropped within the step"
            assert sum(reachable) <= 1 + step % 4, "a full collection frees tensors that survived their step"
    finally:
        gc.set_threshold(*thresholds)
        rollout.destroy()


def test_end_step_collections_take_one_percent_of_time(monkeypatch):
    rollout, start_times = _rollout(), []

    def collect(generation):
        start_times.append(time.monotonic())
        time.sleep(0.01)

    monkeypatch.setattr("rl_workflows.rollout.runtime.gc.collect", collect)
    try:
        for _ in range(20):
            rollout.next_batch()
            rollout.end_step(0)
        assert start_times
        assert all(current - previous >= 100 * 0.01 for previous, current in pairwise(start_times))
    finally:
        rollout.destroy()


class Cycle:
    """Object that references a tensor and itself."""

    def __init__(self, tensor):
        self.tensor, self.itself = tensor, self


@pytest.mark.slow
def test_tune_garbage_collection_freezes_objects_and_sets_thresholds():
    code = (
        "import gc; from rl_workflows import tune_garbage_collection as tune; tune(); "
        "print(gc.get_freeze_count() > 1000, gc.get_threshold(), gc.isenabled())"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert result.stdout.split(" ", 1) == ["True", "(1000000, 20, 50) True\n"]


def test_failure_budget_error_names_first_failure_before_trace(monkeypatch):
    monkeypatch.setattr(failure_budget, "MAX_FAILED_IN_ROW", 2)
    budget = FailureBudget(RolloutConfig())
    budget.failed(RewardError("reward 'mine.py:f' raised ValueError: nonsense (mine.py:5)\nTraceback of its process"))
    with pytest.raises(RLError) as caught:
        budget.failed(RewardError("another"))
    first = str(caught.value).partition("\n")[0]
    assert first.startswith("2 groups in a row failed (reward 2); the limit is 2. ")
    assert first.endswith(
        "The first failure was RewardError: reward 'mine.py:f' raised ValueError: nonsense (mine.py:5)"
    )
    assert "Traceback of its process" in str(caught.value).removeprefix(first)
