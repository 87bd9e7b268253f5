"""Reward functions that fork, leave processes and files behind, flood output, or write to the worker's pipes."""

from __future__ import annotations

import asyncio
import errno
import importlib
import itertools
import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rl_contracts.errors import ConfigError, RewardError
from rl_contracts.reward_worker import AsyncRewardWrapper
from rl_contracts.runtime.metrics import collect
from rl_contracts.testing.waiting import wait_until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs /proc and the reaper of Linux")

REWARDS = """
import builtins, os, signal, subprocess, sys, tempfile, threading, time
from rl_contracts.runtime.metrics import record
from rl_contracts.reward import CompositeReward

def pipes():
    return [int(fd) for fd in os.listdir("/proc/self/fd") if int(fd) > 2 and "pipe" in target(fd)]

def target(fd):
    try:
        return os.readlink(f"/proc/self/fd/{fd}")
    except OSError:
        return ""

def write_to_pipes(data):
    for fd in pipes():
        try:
            os.write(fd, data)
        except OSError:
            pass

def leaves_child(prompt, completions, prompt_ids, completion_ids, *, file, **data):
    child = subprocess.Popen(["sleep", "1000"], start_new_session=True)
    with open(file + ".new", "w") as output:
        output.write(f"{os.getpid()} {child.pid} {tempfile.mkdtemp()}")
    os.rename(file + ".new", file)
    if completions == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if completions == "hang":
        time.sleep(1000)
    return 1.0

def orphans(*args, **data):
    command = "sleep 0.05 > /dev/null 2>&1 & echo $!"
    return float(subprocess.run(command, shell=True, stdout=subprocess.PIPE).stdout)

def process_id(*args, **data):
    return os.getpid()

def environment(prompt, completions, prompt_ids, completion_ids, **data):
    return float("RL_RUN_KEY" in os.environ)

def forks(prompt, completions, prompt_ids, completion_ids, *, value, **data):
    if completions == "return" and not os.fork():
        return -1.0
    if completions == "write":
        write_to_pipes(b'{"value": 42.0}\\n')
    if completions == "write without newline":
        write_to_pipes(b"[" * 1000)
    if completions == "write much":
        while True:
            write_to_pipes(b"[" * 60000)
    return value

def long_error(prompt, completions, prompt_ids, completion_ids, **data):
    raise ValueError(completions + "x" * 50_000_000)

def prints(prompt, completions, prompt_ids, completion_ids, **data):
    for _ in range(80 if len(completions) > 100 else 1):
        print(completions)
    return 1.0

def records(prompt, completions, prompt_ids, completion_ids, **data):
    record(completions, 7.0)
    return 1.0

def composite(prompt, completions, prompt_ids, completion_ids, *, components, **data):
    return CompositeReward(**components)

def number(prompt, completions, prompt_ids, completion_ids, *, value, **data):
    return value

def prints_slowly():
    for _ in range(20):
        print("in a thread")
        time.sleep(0.05)

def faulty(prompt, completions, prompt_ids, completion_ids, *, value, faults, **data):
    if faults["thread"] == "raises":
        threading.Thread(target=int, args=("no number",)).start()
    if faults["thread"] == "prints":
        threading.Thread(target=prints_slowly).start()
    if faults["output"] == "print":
        print("x" * 100_000)
    if faults["output"] == "descriptors":
        os.write(1, b"{}\\n" * 1000)
        os.write(2, bytes(range(256)))
    if faults["output"] == "pipes":
        write_to_pipes(b'{"value": 42.0}\\n')
    if faults["fork"] and not os.fork():
        if faults["fork"] == "raises":
            raise LookupError("in a fork")
        time.sleep(1000 * (faults["fork"] == "sleeps"))
        return -1.0
    if faults["signal"]:
        os.kill(os.getpid(), getattr(signal, faults["signal"]))
    time.sleep(1000 * (faults["time"] == "hangs"))
    if faults["exception"]:
        raise getattr(builtins, faults["exception"])
    return {"nan": float("nan"), "None": None}.get(faults["value"], value)
"""


@pytest.fixture(scope="module", autouse=True)
def _module(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    folder = tmp_path_factory.mktemp("rewards")
    (folder / "fault_rewards.py").write_text(REWARDS)
    (folder / "forking_rewards.py").write_text("import os\nos.fork()\ndef f(*args, **data):\n    return 1.0\n")
    sys.path.insert(0, str(folder))
    yield
    sys.path.remove(str(folder))


async def score(wrapper: AsyncRewardWrapper, completion: str, **data: Any) -> float:
    return await wrapper("question", completion, [1, 2], [3, 4, 5], **data)


def is_alive(pid: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return False


def require_all_removed(file: Path) -> None:
    worker, child, directory = file.read_text().split()
    wait_until(lambda: not is_alive(int(worker)))
    wait_until(lambda: not is_alive(int(child)))
    assert Path(directory).parent.name.startswith("rl-reward-")
    wait_until(lambda: not Path(directory).parent.exists())


@pytest.mark.parametrize("fault", ["kill", "hang"])
async def test_reward_worker_that_fails_leaves_no_process_or_directory(fault: str, tmp_path: Path) -> None:
    file = tmp_path / "processes"
    async with AsyncRewardWrapper("fault_rewards:leaves_child", timeout=0.5) as wrapper:
        with pytest.raises(RewardError):
            await score(wrapper, fault, file=str(file))

        require_all_removed(file)


async def test_reward_worker_closed_leaves_no_process_or_directory(tmp_path: Path) -> None:
    file = tmp_path / "processes"
    async with AsyncRewardWrapper("fault_rewards:leaves_child") as wrapper:
        assert await score(wrapper, "return", file=str(file)) == 1.0

    require_all_removed(file)


OWNER = """
import asyncio, sys
from rl_contracts.reward_worker import AsyncRewardWrapper

asyncio.run(AsyncRewardWrapper("fault_rewards:leaves_child")("", "hang", [], [], file=sys.argv[1]))
"""


def test_reward_worker_with_killed_owner_leaves_nothing(tmp_path: Path) -> None:
    file = tmp_path / "processes"
    module = str(Path(str(importlib.import_module("fault_rewards").__file__)).parent)
    owner = subprocess.Popen([sys.executable, "-c", OWNER, str(file)], env={**os.environ, "PYTHONPATH": module})
    wait_until(file.exists, 30.0)

    owner.kill()
    owner.wait()

    require_all_removed(file)


async def test_reward_orphan_process_is_reaped() -> None:
    async with AsyncRewardWrapper("fault_rewards:orphans") as wrapper:
        orphan = int(await score(wrapper, ""))

        wait_until(lambda: not Path(f"/proc/{orphan}").exists())
        assert await score(wrapper, "") != orphan


async def test_reward_worker_without_descriptors_raises_config_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def full() -> Any:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr("rl_contracts.reward_worker.process.os.pipe", full)
    with pytest.raises(ConfigError, match="Too many open files"):
        async with asyncio.timeout(30), AsyncRewardWrapper("fault_rewards:process_id"):
            pass


async def test_reward_reaper_sigterm_keeps_its_worker() -> None:
    async with AsyncRewardWrapper("fault_rewards:process_id") as wrapper:
        worker = await score(wrapper, "")
        (process,) = wrapper._processes
        process._process.terminate()

        assert [await score(wrapper, "") for _ in range(3)] == [worker] * 3
        assert process.is_ready()


async def test_reward_reaper_stopped_is_killed_with_its_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rl_contracts.reward_worker.process._END_TIMEOUT", 0.2)
    async with AsyncRewardWrapper("fault_rewards:process_id") as wrapper:
        worker = await score(wrapper, "")
        (process,) = wrapper._processes
        os.kill(process._process.pid, signal.SIGSTOP)

    wait_until(lambda: not is_alive(int(worker)))
    wait_until(lambda: not is_alive(process._process.pid))


async def test_reward_worker_environment_has_no_run_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RL_RUN_KEY", "secret")
    async with AsyncRewardWrapper("fault_rewards:environment") as wrapper:
        assert await score(wrapper, "") == 0.0


@pytest.mark.parametrize("fault", ["return", "write without newline", "write much"])
async def test_reward_fault_on_the_pipes_keeps_later_replies_correct(fault: str) -> None:
    async with AsyncRewardWrapper("fault_rewards:forks", timeout=2.0) as wrapper:
        first = (await asyncio.gather(score(wrapper, fault, value=0.0), return_exceptions=True))[0]

        assert isinstance(first, RewardError) or first == 0.0
        assert [await score(wrapper, "", value=float(value)) for value in (1, 2, 3)] == [1.0, 2.0, 3.0]


async def test_reward_function_writes_a_frame_raises_reward_error() -> None:
    async with AsyncRewardWrapper("fault_rewards:forks", timeout=2.0) as wrapper:
        with pytest.raises(RewardError, match="file descriptors"):
            await score(wrapper, "write", value=0.0)


async def test_reward_module_forks_at_import_scores_each_call_once() -> None:
    async with AsyncRewardWrapper("forking_rewards:f", timeout=2.0) as wrapper:
        assert [await score(wrapper, "") for _ in range(3)] == [1.0] * 3


async def test_reward_call_unexpected_error_raises_reward_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> None:
        raise OSError("no descriptors")

    async with AsyncRewardWrapper("fault_rewards:forks") as wrapper:
        monkeypatch.setattr("rl_contracts.reward_worker.process.WorkerProcess.score", broken)
        with pytest.raises(RewardError, match="no descriptors"):
            await score(wrapper, "", value=1.0)
        monkeypatch.undo()

        assert await score(wrapper, "", value=1.0) == 1.0


async def test_reward_error_of_50_megabytes_is_truncated() -> None:
    async with AsyncRewardWrapper("fault_rewards:long_error") as wrapper:
        with pytest.raises(RewardError, match="the beginning") as caught:
            await score(wrapper, "the beginning")

    assert len(str(caught.value)) < 20_000


async def test_reward_log_of_80_megabytes_keeps_its_last_lines(tmp_path: Path) -> None:
    async with AsyncRewardWrapper("fault_rewards:prints", logs=[tmp_path / "reward.log"]) as wrapper:
        await score(wrapper, "y" * 999_999)
        (process,) = wrapper._processes
        wait_until(lambda: 8 << 20 <= os.fstat(process._log.fileno()).st_size <= 16 << 20)
        await score(wrapper, "last line")

        assert process._last_lines().endswith("last line")


async def test_reward_may_record_only_metrics_that_the_run_does_not() -> None:
    async with AsyncRewardWrapper("fault_rewards:records") as wrapper:
        with collect() as metrics:
            for name in ("reward/mean", "loss", "groups/failed/reward", "eval/reward/mean"):
                with pytest.raises(RewardError, match=f"'{name}'"):
                    await score(wrapper, name)
            await asyncio.gather(*(score(wrapper, name) for name in ("code/passed", "reward/own")))

    assert metrics.results().keys() - {"time/reward"} == {"code/passed", "reward/own"}


async def test_reward_beyond_float32_raises_reward_error() -> None:
    async with AsyncRewardWrapper("fault_rewards:number") as wrapper:
        for value in (1e300, -1e39, 10**400):
            with pytest.raises(RewardError, match="float32"):
                await score(wrapper, "", value=value)


async def test_reward_component_beyond_float32_raises_reward_error() -> None:
    async with AsyncRewardWrapper("fault_rewards:composite") as wrapper:
        with pytest.raises(RewardError, match="float32"):
            await score(wrapper, "", components={"up": 1e300, "down": -1e300})


FAULTS = {
    "value": ["", "nan", "None"],
    "exception": ["", "LookupError", "SystemExit", "KeyboardInterrupt"],
    "fork": ["", "returns", "raises", "sleeps"],
    "thread": ["", "raises", "prints"],
    "signal": ["", "SIGTERM", "SIGKILL", "SIGSTOP"],
    "output": ["", "print", "descriptors", "pipes"],
    "time": ["", "hangs"],
}
HARMLESS = {"returns", "raises", "sleeps", "prints", "SIGTERM", "print", "descriptors", ""}
"""Values of `FAULTS` that do not change the reward of a call."""

NO_FAULTS = dict.fromkeys(FAULTS, "")


def covering_cases() -> list[dict[str, str]]:
    """Return combinations of faults that include each fault alone and each pair of values at least once."""
    single_fault_cases = [{**NO_FAULTS, kind: fault} for kind, faults in FAULTS.items() for fault in faults]
    all_cases = [dict(zip(FAULTS, faults, strict=True)) for faults in itertools.product(*FAULTS.values())]
    random.Random(0).shuffle(all_cases)
    cases, missing = [], {pair for case in all_cases for pair in itertools.combinations(case.items(), 2)}
    while missing:
        case = (
            single_fault_cases.pop()
            if single_fault_cases
            else max(all_cases, key=lambda case: len(missing & pairs_of(case)))
        )
        missing -= pairs_of(case)
        cases.append(case)
    return cases


def pairs_of(case: dict[str, str]) -> set[Any]:
    return set(itertools.combinations(case.items(), 2))


@pytest.mark.slow
async def test_reward_any_two_faults_end_in_time_and_keep_later_calls() -> None:
    cases = list(enumerate(covering_cases()))

    async def run(wrapper: AsyncRewardWrapper) -> None:
        while cases:
            number, faults = cases.pop()
            async with asyncio.timeout(60):
                triple = enumerate((faults, NO_FAULTS, NO_FAULTS))
                calls = [score(wrapper, "", value=float(number + i), faults=call_faults) for i, call_faults in triple]
                first, *later = await asyncio.gather(*calls, return_exceptions=True)
            if HARMLESS.issuperset(faults.values()):
                assert first == number, faults
            else:
                assert isinstance(first, RewardError), (faults, first)
            assert later == [number + 1, number + 2], faults

    async def run_in_one() -> None:
        async with AsyncRewardWrapper("fault_rewards:faulty", timeout=1.5) as wrapper:
            await run(wrapper)

    await asyncio.gather(*(run_in_one() for _ in range(4)))
