"""Runs with the real vLLM and SGLang learn the embedded task, also after a server is killed.

The tests run the commands of docs/servers.md and read the results from the run directory. They need the environments
of `infra/servers/build.py`.
"""

from __future__ import annotations

import importlib.util
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import psutil
import pytest
from real_servers import interpreter_of

from rl_apps.run.components import weights_directory
from rl_contracts.testing.waiting import wait_until

SECONDS = 1500
"""Time limit of one command on a busy machine."""
QUARTER_OF_AN_HOUR = 900
"""Time limit in seconds of a run with one server of either kind."""
PROGRAMS = {"vllm": "vllm.entrypoints.openai.api_server", "sglang": "sglang_server.py"}
"""Module or script in the command line of each server."""

pytestmark = pytest.mark.timeout(SECONDS + 300)


@pytest.fixture(scope="module")
def checker() -> ModuleType:
    """The learning check of CI."""
    path = Path(__file__).parents[2] / "infra" / "ci" / "check_learning.py"
    spec = importlib.util.spec_from_file_location("check_learning_of_servers", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Command:
    """A running `gsm8k-grpo` command with real servers."""

    def __init__(
        self, server: str, servers: int, run_dir: Path, checker: ModuleType, *settings: str, trainer: str = "fsdp:d1"
    ) -> None:
        self.server, self.run_dir, self._checker = server, run_dir, checker
        words = (f"allocation={server}:d{servers}+{trainer}", f"rollout.server.python={interpreter_of(server)}")
        command = [str(Path(sys.executable).parent / "gsm8k-grpo"), f"run_dir={run_dir}", *words, *settings]
        self._log, self.begin = run_dir.with_suffix(".out"), time.monotonic()
        with self._log.open("w") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log)

    @property
    def output(self) -> str:
        """Output so far."""
        return self._log.read_text()

    @property
    def records(self) -> list[dict[str, Any]]:
        """Records of metrics.jsonl so far."""
        path = self.run_dir / "metrics.jsonl"
        return self._checker.read_metrics(path) if path.exists() else []

    def processes(self) -> list[psutil.Process]:
        """Return the running descendants of the command."""
        descendants = psutil.Process(self._process.pid).children(recursive=True)
        return [process for process in descendants if process.is_running()]

    def servers(self) -> list[psutil.Process]:
        """Return the server processes that lead a process group."""
        name = PROGRAMS[self.server]
        matches = (p for p in self.processes() if any(word.endswith(name) for word in p.cmdline()))
        return [p for p in matches if os.getpgid(p.pid) == p.pid]

    def wait_for(self, condition: Callable[[], bool], what: str) -> None:
        """Wait for the condition; fail if the command ends first."""

        def holds() -> bool:
            if condition():
                return True
            assert self._process.poll() is None, self.output
            return False

        wait_until(holds, self.begin + SECONDS - time.monotonic(), what=lambda: f"{what}\n{self.output}")

    def end(self, code: int = 0) -> None:
        """Wait for the command; check its exit code and that it removed the weights."""
        assert self._process.wait(self.begin + SECONDS - time.monotonic()) == code, self.output
        assert not weights_directory(self.run_dir).exists()

    def stop(self) -> None:
        """Send SIGTERM, as Slurm does; the command must save a recovery checkpoint and exit with 143."""
        self._process.terminate()
        self.end(128 + signal.SIGTERM)

    def kill(self) -> None:
        """Terminate the command and the processes that it started."""
        self._process.terminate()
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            self._process.kill()


@pytest.fixture
def start(tmp_path: Path, checker: ModuleType) -> Iterator[Callable[..., Command]]:
    """Function that starts a command; the fixture terminates commands that still run after the test."""
    started: list[Command] = []

    def begin(server: str, servers: int, *settings: str, **trainer: str) -> Command:
        started.append(Command(server, servers, tmp_path / "run", checker, *settings, **trainer))
        return started[-1]

    yield begin
    for command in started:
        command.kill()


@pytest.fixture
def learned(record_property: Callable[[str, object], None], checker: ModuleType) -> Callable[..., list[dict[str, Any]]]:
    """Function that waits for a command, checks that it learned, and returns its steps."""

    def check(command: Command, end: float = 0.80) -> list[dict[str, Any]]:
        command.end()
        records = command.records
        accuracy = checker.values(records, "eval/accuracy")
        steps = [record for record in records if "sequences" in record]
        seconds, step_seconds = time.monotonic() - command.begin, sum(r["time/step"] for r in steps) / len(steps)
        record_property("accuracy before and after", f"{accuracy[0]:.3f}, {accuracy[-1]:.3f}")
        record_property("steps, seconds of one, seconds of all", f"{len(steps)}, {step_seconds:.2f}, {seconds:.0f}")
        assert checker.problems(records, start=0.55, end=end, staleness=1) == []
        return steps

    return check


def _assert_steps_complete(steps: list[dict[str, Any]], prompts: int) -> None:
    """Check that each step trained on all its prompts without failures and published its version."""
    assert [r["step"] for r in steps] == [r["version"] for r in steps] == list(range(1, len(steps) + 1))
    assert {(r["groups/trained"], r["groups/failed"]) for r in steps} == {(prompts, 0)}
    assert max(r["staleness/max"] for r in steps) == 1
    # Use the mean, because the maximum grows with the number of tokens. It is None if the gate used the killed server.
    gaps = [r["gap/mean_abs"] for r in steps if r["gap/mean_abs"] is not None]
    assert len(gaps) > len(steps) / 2
    assert max(gaps) < 1e-5


@pytest.mark.nightly
def test_run_with_one_of_two_vllm_servers_killed_learns(start, record_property):
    """Run until the killed server rejoins and the reward rises, with the default route.

    SIGKILL to the process group ends all processes of the server at once, as when memory runs out.
    """
    command = start("vllm", 2, "total_steps=400")
    command.wait_for(lambda: len(command.records) > 6, "six steps")
    [victim, _] = command.servers()
    os.killpg(victim.pid, signal.SIGKILL)
    command.wait_for(lambda: 1 in _servers(command.records), "a step with one server")
    command.wait_for(lambda: _servers(command.records)[-1] == 2, "a step with both servers")
    command.wait_for(lambda: _gain(command.records) > 0.05, "a higher reward than in the first steps")
    command.stop()

    steps = [record for record in command.records if "sequences" in record]
    _assert_steps_complete(steps, 32)
    assert re.search(r"rollout-\d was killed by SIGKILL .*restart 1 of 3", command.output)
    record_property("steps, of them with one server", f"{len(steps)}, {_servers(steps).count(1)}")
    record_property("gain of the reward", f"{_gain(steps):.3f}")
    assert steps[-1]["server/rejoins"] >= 1  # more on a busy machine, where a server can miss a probe


def _servers(records: list[dict[str, Any]]) -> list[float]:
    """Return the number of servers at each step."""
    return [record["server/servers"] for record in records if "sequences" in record]


def _gain(records: list[dict[str, Any]]) -> float:
    """Return the mean reward of the last eight steps minus that of the first eight; 0 with fewer than 16 steps."""
    rewards = [record["reward/mean"] for record in records if "sequences" in record]
    return 0.0 if len(rewards) < 16 else (sum(rewards[-8:]) - sum(rewards[:8])) / 8


@pytest.mark.nightly
@pytest.mark.parametrize("route", ["disk", "broadcast"])
@pytest.mark.parametrize("server", ["vllm", "sglang"])
def test_run_with_one_server_learns_over_each_route(start, learned, server, route):
    command = start(server, 1, f"publish.route={route}")

    _assert_steps_complete(learned(command), 32)
    assert time.monotonic() - command.begin < QUARTER_OF_AN_HOUR


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("server", "trainer", "route"),
    [
        ("vllm", "megatron:t2", "broadcast"),
        ("vllm", "megatron:p2", "disk"),
        ("sglang", "megatron:t2", "shm"),
        ("sglang", "megatron:p2", "broadcast"),
    ],
)
def test_servers_match_the_weights_that_megatron_ranks_publish(start, server, trainer, route):
    command = start(
        server,
        1,
        f"publish.route={route}",
        "total_steps=3",
        "evaluation.examples=0",
        "gap.sequences=8",
        trainer=trainer,
    )
    command.end()
    steps = [record for record in command.records if "sequences" in record]
    assert len(steps) == 3
    _assert_steps_complete(steps, 32)
