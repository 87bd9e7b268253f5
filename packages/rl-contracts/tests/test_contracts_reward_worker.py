"""Reward functions in worker processes: results and failures."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rl_contracts.errors import ConfigError, RewardError
from rl_contracts.reward import components_of, time_limit
from rl_contracts.reward_worker import AsyncRewardWrapper
from rl_contracts.runtime.metrics import collect
from rl_contracts.testing.waiting import wait_until

REWARDS = """
import asyncio, ctypes, logging, os, subprocess, sys, time
from rl_contracts.reward import CompositeReward, time_limit

def exact(prompt, completions, prompt_ids, completion_ids, answer, **data):
    return 1.0 if completions == answer else 0.0

LIMIT = time_limit()

def composite(prompt, completions, prompt_ids, completion_ids, **data):
    return CompositeReward(right=1.0, form=0.5)

def limited(prompt, completions, prompt_ids, completion_ids, **data):
    return 0.0 if time_limit() != LIMIT else LIMIT

def narrow(prompt, completions):
    return 1.0

def requires_answer(prompt, completions, prompt_ids, completion_ids, *, answer, **data):
    return 1.0

def without_kwargs(prompt, completions, prompt_ids, completion_ids, answer):
    return 1.0

def reads_final(prompt, completions, prompt_ids, completion_ids, *, final_text, **data):
    return float(final_text)

async def later(prompt, completions, prompt_ids, completion_ids, **data):
    await asyncio.sleep(0.01)
    return float(len(completion_ids))

def talkative(prompt, completions, prompt_ids, completion_ids, **data):
    print("to stdout " * 1000)
    os.write(1, b"raw bytes")
    subprocess.run(["echo", "from a child"])
    assert sys.stdin.read() == ""
    return 2

def prints_and_logs(prompt, completions, prompt_ids, completion_ids, **data):
    print("printed", completions)
    print("to stderr", file=sys.stderr)
    logging.getLogger("local").info("logged")
    return 0.5

def acts(prompt, completions, prompt_ids, completion_ids, **data):
    if completions == "raise":
        raise LookupError("no gold answer")
    if completions == "exit":
        print("last words", flush=True)
        os._exit(7)
    if completions == "sys.exit":
        sys.exit(3)
    if completions == "segfault":
        ctypes.string_at(0)
    if completions == "hang":
        time.sleep(1000)
    if completions == "hang with a child":
        child = subprocess.Popen(["sleep", "1000"])
        with open(data["file"], "w") as file:
            file.write(f"{os.getpid()} {child.pid}")
        child.wait()
    if completions == "close":
        os.closerange(3, 100)
        time.sleep(1000)
    return {"nan": float("nan"), "none": None, "text": "1.0"}.get(completions, os.getpid())

def modules(prompt, completions, prompt_ids, completion_ids, **data):
    return float(sum(name in sys.modules for name in data["names"]))

def records(prompt, completions, prompt_ids, completion_ids, **data):
    from rl_contracts.runtime.metrics import record

    record("length", len(completions))
    record("calls", 1, kind="sum")
    if not completions:
        raise LookupError("nothing to score")
    return 1.0

async def records_later(prompt, completions, prompt_ids, completion_ids, **data):
    await asyncio.sleep(0)
    return records(prompt, completions, prompt_ids, completion_ids)

class Scorer:
    @staticmethod
    def score(prompt, completions, prompt_ids, completion_ids, **data):
        return 0.5

not_callable = 3
decorated = (lambda f: lambda *a, **k: f(*a, **k))(exact)
"""


@pytest.fixture(scope="module")
def rewards(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    folder = tmp_path_factory.mktemp("rewards")
    (folder / "worker_rewards.py").write_text(REWARDS)
    (folder / "broken_rewards.py").write_text("raise RuntimeError('cannot be imported today')\n")
    (folder / "slow_rewards.py").write_text("import time\ntime.sleep(1000)\n")
    sys.path.insert(0, str(folder))
    yield importlib.import_module("worker_rewards")
    sys.path.remove(str(folder))


async def score(wrapper: AsyncRewardWrapper, completion: str, **data: Any) -> float:
    return await wrapper("question", completion, [1, 2], [3, 4, 5], **data)


def is_alive(pid: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return False


@pytest.mark.usefixtures("rewards")
async def test_call_plain_async_and_nested_functions_return_floats() -> None:
    for target, expected in [("exact", 1.0), ("later", 3.0), ("Scorer.score", 0.5)]:
        async with AsyncRewardWrapper(f"worker_rewards:{target}") as wrapper:
            value = await score(wrapper, "4", answer="4")
        assert type(value) is float
        assert value == expected


@pytest.mark.usefixtures("rewards")
@pytest.mark.parametrize(("target", "expected"), [("without_kwargs", 1.0), ("reads_final", 5.0)])
async def test_call_final_text_reaches_functions_that_take_it(target: str, expected: float) -> None:
    async with AsyncRewardWrapper(f"worker_rewards:{target}") as wrapper:
        reward = await wrapper("question", "</think>5", [1, 2], [3], final_text="5", answer="4")

    assert reward == expected


@pytest.mark.usefixtures("rewards")
async def test_call_composite_reward_keeps_its_components() -> None:
    async with AsyncRewardWrapper("worker_rewards:composite") as wrapper:
        reward = await score(wrapper, "5", answer="4")

    assert (reward, components_of(reward)) == (1.5, {"right": 1.0, "form": 0.5})
    assert components_of(0.5 * reward) == components_of(reward * 0.5) == {"right": 0.5, "form": 0.25}


@pytest.mark.usefixtures("rewards")
@pytest.mark.parametrize("target", ["records", "records_later"])
async def test_call_metrics_of_the_function_reach_the_callers_collector(target: str) -> None:
    async def episode(wrapper: AsyncRewardWrapper, completion: str) -> dict[str, float | None]:
        with collect() as metrics, contextlib.suppress(RewardError):
            await asyncio.gather(score(wrapper, completion), score(wrapper, 3 * completion))
        return metrics.results()

    async with AsyncRewardWrapper(f"worker_rewards:{target}", workers=2) as wrapper:
        assert await score(wrapper, "no collector") == 1.0
        results = [await episode(wrapper, completion) for completion in ("ab", "abcd")]
        failed = await episode(wrapper, "")

    assert [(result["length"], result["calls"]) for result in results] == [(4.0, 2.0), (8.0, 2.0)]
    assert failed["length"] == 0.0, "metrics recorded before the function raised are lost"


@pytest.mark.usefixtures("rewards")
async def test_time_limit_in_worker_equals_call_timeout() -> None:
    async with AsyncRewardWrapper("worker_rewards:limited", timeout=12.5) as wrapper:
        assert await score(wrapper, "") == 12.5

    assert time_limit() is None


@pytest.mark.usefixtures("rewards")
async def test_calls_concurrent_get_their_own_results() -> None:
    async with AsyncRewardWrapper("worker_rewards:exact", workers=2) as wrapper:
        values = await asyncio.gather(*(score(wrapper, str(i), answer=str(i - i % 2)) for i in range(500)))

    assert values == [1.0, 0.0] * 250


@pytest.mark.usefixtures("rewards")
async def test_call_large_arguments_pass_through_the_pipes() -> None:
    text = "é" * 1_000_000
    async with AsyncRewardWrapper("worker_rewards:exact") as wrapper:
        assert await asyncio.gather(*(score(wrapper, text, answer=text) for _ in range(3))) == [1.0] * 3
        assert await score(wrapper, "a", answer="a") == 1.0


@pytest.mark.usefixtures("rewards")
async def test_call_printing_and_reading_stdin_keeps_protocol_intact() -> None:
    async with AsyncRewardWrapper("worker_rewards:talkative") as wrapper:
        assert [await score(wrapper, "") for _ in range(20)] == [2.0] * 20


@pytest.mark.usefixtures("rewards")
async def test_worker_log_has_output_and_logs_of_the_function(tmp_path: Path) -> None:
    logs = [tmp_path / f"reward-{i}.log" for i in range(2)]
    logs[0].write_text("earlier\n")
    async with AsyncRewardWrapper("worker_rewards:prints_and_logs", workers=2, logs=logs) as wrapper:
        await asyncio.gather(*(score(wrapper, f"call {i}") for i in range(20)))

    assert logs[0].read_text().startswith("earlier\n")
    lines = [line for log in logs for line in log.read_text().splitlines()]
    assert {f"printed call {i}" for i in range(20)} <= set(lines)
    assert lines.count("to stderr") == 20
    assert sum(line.endswith("INFO local: logged") for line in lines) == 20


async def test_time_reward_metric_is_seconds_per_worker() -> None:
    async with AsyncRewardWrapper("time_rewards:pause", workers=2, heads=2) as wrapper:
        with collect() as metrics:
            await asyncio.gather(*(score(wrapper, "") for _ in range(8)))

    assert 0.2 <= (metrics.results()["time/reward"] or 0) < 1.0  # 8 calls of 0.1 s over 4 workers in total


@pytest.mark.usefixtures("rewards")
async def test_worker_imports_neither_torch_nor_transformers() -> None:
    async with AsyncRewardWrapper("worker_rewards:modules") as wrapper:
        assert await score(wrapper, "", names=["torch", "numpy", "transformers", "tensordict"]) == 0.0


@pytest.mark.guarantee(
    "A reward that raises, crashes or returns no finite number is an error, never a reward of 0.", area="failures"
)
@pytest.mark.usefixtures("rewards")
@pytest.mark.parametrize(
    ("completion", "match"),
    [
        (
            "raise",
            r"(?s)acts' raised LookupError: no gold answer \(\S+worker_rewards\.py:\d+\)\n.*Traceback.*in acts",
        ),
        ("sys.exit", r"raised SystemExit: 3"),
        ("exit", r"(?s)ended with exit code 7 while it scored\. Last lines.*last words"),
        ("segfault", r"(?s)ended by signal SIGSEGV while it scored.*in acts"),
        ("close", r"closed its pipe without exiting and was killed"),
        ("nan", r"expected a finite reward, found nan"),
        ("none", r"expected a number as reward, found NoneType: None"),
        ("text", r"expected a number as reward, found str: '1\.0'"),
    ],
)
async def test_call_failure_raises_reward_error_and_next_call_works(completion: str, match: str) -> None:
    async with AsyncRewardWrapper("worker_rewards:acts") as wrapper:
        with pytest.raises(RewardError, match=match):
            await score(wrapper, completion)

        assert await score(wrapper, "fine") > 0


@pytest.mark.usefixtures("rewards")
async def test_call_wrong_signature_error_lists_the_arguments() -> None:
    async with AsyncRewardWrapper("worker_rewards:narrow") as wrapper:
        with pytest.raises(RewardError, match=r"; it is called with \(prompt, completions, .*, gold=\.\.\.\)"):
            await score(wrapper, "fine", gold="4")
    async with AsyncRewardWrapper("worker_rewards:requires_answer") as wrapper:
        pattern = (
            r"'answer'; it is called with \(.*, gold=\.\.\.\); rename a column .* with data\.columns\.ARGUMENT=COLUMN"
        )
        with pytest.raises(RewardError, match=pattern):
            await score(wrapper, "fine", gold="4")


@pytest.mark.usefixtures("rewards")
async def test_worker_sigterm_keeps_scoring_for_its_owner() -> None:
    async with AsyncRewardWrapper("worker_rewards:acts") as wrapper:
        pid = await score(wrapper, "fine")
        os.kill(int(pid), signal.SIGTERM)

        assert [await score(wrapper, "fine") for _ in range(3)] == [pid] * 3


@pytest.mark.slow
@pytest.mark.usefixtures("rewards")
async def test_call_timeout_kills_children_and_other_calls_continue(tmp_path: Path) -> None:
    file = tmp_path / "pids"
    async with AsyncRewardWrapper("worker_rewards:acts", timeout=2) as wrapper:
        before = await score(wrapper, "fine")
        stuck = asyncio.ensure_future(score(wrapper, "hang with a child", file=str(file)))
        other_calls = [asyncio.ensure_future(score(wrapper, "fine")) for _ in range(5)]

        with pytest.raises(RewardError, match=r"'worker_rewards:acts' took longer than its limit of 2 s"):
            await stuck
        values = await asyncio.gather(*other_calls)

    assert before not in values
    pids = [int(p) for p in file.read_text().split()]
    assert pids[0] == int(before)
    wait_until(lambda: not any(map(is_alive, pids)))


@pytest.mark.slow
@pytest.mark.usefixtures("rewards")
async def test_timeout_counts_from_the_start_of_a_call() -> None:
    """The worker takes 0.1 s for each of 20 calls: the last call waits four times the limit and still succeeds."""
    async with AsyncRewardWrapper("time_rewards:pause", timeout=0.5) as wrapper:
        assert await asyncio.gather(*(score(wrapper, "") for _ in range(20))) == [1.0] * 20


@pytest.fixture(autouse=True)
def _time_rewards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "time_rewards.py").write_text("import time\ndef pause(*a, **k):\n    time.sleep(0.1)\n    return 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))


@pytest.mark.slow
@pytest.mark.usefixtures("rewards")
async def test_call_result_during_blocked_loop_is_not_a_timeout() -> None:
    async with AsyncRewardWrapper("worker_rewards:acts", timeout=1) as wrapper:
        call = asyncio.ensure_future(score(wrapper, "fine"))
        await asyncio.sleep(0)
        time.sleep(2)  # noqa: ASYNC251 - the blocked loop is what is tested

        assert await call > 0


@pytest.mark.usefixtures("rewards")
async def test_call_canceled_keeps_the_worker_usable() -> None:
    async with AsyncRewardWrapper("worker_rewards:acts") as wrapper:
        pid = await score(wrapper, "fine")
        calls = [asyncio.ensure_future(score(wrapper, "fine")) for _ in range(3)]
        await asyncio.sleep(0)
        for call in calls[:2]:
            call.cancel()

        assert await calls[2] == pid


@pytest.mark.usefixtures("rewards")
async def test_call_data_not_json_raises_reward_error_with_key() -> None:
    async with AsyncRewardWrapper("worker_rewards:exact") as wrapper:
        with pytest.raises(RewardError, match="'image' cannot be sent to the worker"):
            await score(wrapper, "", a=1, image=b"x")


@pytest.mark.usefixtures("rewards")
@pytest.mark.parametrize(
    ("target", "match"),
    [
        ("no_such_reward", "unknown name 'no_such_reward'"),
        ("worker_rewards:not_callable", "'worker_rewards:not_callable' resolves to 3"),
        ("broken_rewards:f", "(?s)RuntimeError: cannot be imported today.*Traceback"),
    ],
)
async def test_function_import_failure_raises_config_error_in_each_call(target: str, match: str) -> None:
    wrapper = AsyncRewardWrapper(target, workers=2)

    with pytest.raises(ConfigError, match=match):
        await wrapper.start()
    for failed in await asyncio.gather(*(score(wrapper, "") for _ in range(5)), return_exceptions=True):
        assert isinstance(failed, ConfigError)
    await wrapper.aclose()


@pytest.mark.usefixtures("rewards")
async def test_start_import_hangs_raises_config_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rl_contracts.reward_worker.wrapper._START_TIMEOUT", 0.3)
    wrapper = AsyncRewardWrapper("slow_rewards:f")

    with pytest.raises(ConfigError, match=r"not ready after 0\.3 s"):
        await wrapper.start()
    await wrapper.aclose()


def test_wrapper_function_not_importable_raises_config_error(rewards: Any) -> None:
    def local() -> None: ...

    main = type(sys)("__main__")
    exec("def f(): ...", main.__dict__)
    for function, reason in [
        (local, "inside another function"),
        (lambda: 0, "is a lambda"),
        (rewards.decorated, "is a lambda or is defined inside"),
        (main.f, "main program"),
        (rewards.Scorer(), "without a name"),
    ]:
        with pytest.raises(ConfigError, match=reason):
            AsyncRewardWrapper(function)


async def test_close_fails_pending_calls_and_leaves_no_process(rewards: Any) -> None:
    wrapper = AsyncRewardWrapper(rewards.acts, workers=2)
    await wrapper.start()
    pids = {worker._process.pid for worker in wrapper._processes}
    calls = [asyncio.ensure_future(score(wrapper, "hang")) for _ in range(4)]
    await asyncio.sleep(0)

    wrapper.close()

    failed = await asyncio.gather(*calls, return_exceptions=True)
    assert [type(f) for f in failed] == [RewardError] * 4
    assert len(pids) == 2
    assert not any(map(is_alive, pids))
    with pytest.raises(RewardError, match=r"used after close\(\)"):
        await score(wrapper, "")


@pytest.mark.slow
@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
@pytest.mark.usefixtures("rewards")
def test_wrapper_loop_in_another_thread_works_and_closes(loop: str) -> None:
    factory = asyncio.new_event_loop if loop == "asyncio" else pytest.importorskip("uvloop").new_event_loop
    running = factory()
    thread = threading.Thread(target=running.run_forever)
    thread.start()
    wrapper = AsyncRewardWrapper("worker_rewards:acts", timeout=2)

    def run(completion: str) -> float:
        return asyncio.run_coroutine_threadsafe(score(wrapper, completion), running).result(30)

    pid = int(run("fine"))
    with pytest.raises(RewardError, match="limit"):
        run("hang")
    second = int(run("fine"))
    wrapper.close()

    assert pid != second
    assert not is_alive(pid)
    assert not is_alive(second)
    running.call_soon_threadsafe(running.stop)
    thread.join()
    running.close()


def test_wrapper_successive_loops_use_the_same_worker(rewards: Any) -> None:
    wrapper = AsyncRewardWrapper(rewards.acts)

    first = asyncio.run(score(wrapper, "fine"))
    second = asyncio.run(score(wrapper, "fine"))
    wrapper.close()

    assert first == second
    assert not is_alive(int(first))


@pytest.mark.usefixtures("rewards")
async def test_worker_killed_while_idle_is_replaced() -> None:
    async with AsyncRewardWrapper("worker_rewards:acts") as wrapper:
        (worker,) = wrapper._processes
        first = int(await score(wrapper, "fine"))
        os.kill(first, signal.SIGKILL)
        wait_until(lambda: not worker.is_ready())  # an exiting process is a zombie before it can be waited for

        assert await score(wrapper, "fine") != first


@pytest.mark.nightly  # needs an idle machine
async def test_call_trivial_rewards_reach_3000_per_second(rewards: Any) -> None:
    async with AsyncRewardWrapper(rewards.exact) as wrapper:
        best_rate, rounds = 0.0, 0
        while best_rate <= 3000 and rounds < 60:  # other programs may use the cores for a while
            begin = time.perf_counter()
            await asyncio.gather(*(score(wrapper, "4", answer="4") for _ in range(1000)))
            best_rate, rounds = max(best_rate, 1000 / (time.perf_counter() - begin)), rounds + 1

    assert best_rate > 3000
