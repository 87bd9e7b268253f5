"""Tests of server restarts: servers that die or hang restart at their address until the limit is reached."""

import os
import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rl_contracts.conformance.scheduler import python, server
from rl_contracts.errors import LaunchError
from rl_contracts.scheduler import JobSpec, Worker, WorkerStatus
from rl_launchers import Launcher, LauncherConfig, LocalScheduler, Resume

RETRYING_CLIENT = """
import pathlib, sys, time, urllib.request
deadline = time.monotonic() + 25
while True:
    assert time.monotonic() < deadline
    start = pathlib.Path(sys.argv[3]).read_text().count("======== ") + 1
    try:
        with urllib.request.urlopen(sys.argv[1] + "/health", timeout=0.3):
            if start >= int(sys.argv[2]):
                break
    except OSError:
        pass
    time.sleep(0.02)
"""
"""Trainer that counts the starts in a server's log, and ends once the server responds after enough starts."""

FAILING_CLIENT = """
import pathlib, sys, time
while "======== " not in pathlib.Path(sys.argv[1]).read_text():
    time.sleep(0.02)
raise SystemExit(1)
"""
"""Trainer that fails once a server has been restarted."""


@pytest.fixture
def scheduler(tmp_path: Path) -> Iterator[LocalScheduler]:
    with LocalScheduler(tmp_path / "logs") as scheduler:
        yield scheduler


def trainer_of(starts: int) -> Callable[[list[Worker]], list[JobSpec]]:
    """Return a function for a trainer that ends after a number of starts of the first server."""
    return lambda workers: [
        JobSpec("actor", python(RETRYING_CLIENT, workers[0].address, str(starts), str(workers[0].log)))
    ]


def once_running(signum: int, times: int) -> Callable[[list[Worker]], None]:
    """Send a signal to the first server, in each of its first starts, as soon as it and the trainer run."""
    sent: set[int | None] = set()

    def tick(workers: list[Worker]) -> None:
        first = workers[0]
        running = first.status is WorkerStatus.RUNNING and len(workers) > 1 and first.pid is not None
        if running and len(sent) < times and first.pid not in sent:
            sent.add(first.pid)
            os.kill(first.pid or 0, signum)

    return tick


@pytest.mark.parametrize("signum", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.slow)])
def test_server_lost_is_restarted_and_run_continues(
    scheduler: LocalScheduler, signum: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = LauncherConfig(health_timeout=1.0)

    code = Launcher(scheduler, config).run([server("rollout")], trainer_of(2), on_tick=once_running(signum, 1))

    problem = "was killed by SIGKILL" if signum == signal.SIGKILL else "failed its readiness checks for 1 s"
    assert code == 0
    assert f"rollout-0 {problem}" in caplog.text
    assert "restart 1 of 3" in (tmp_path / "logs" / "rollout-0.log").read_text()
    assert scheduler.poll() == []


@pytest.mark.slow
def test_server_restarts_used_up_error_names_server_and_log(scheduler: LocalScheduler) -> None:
    config = LauncherConfig(max_restarts=2)

    with pytest.raises(LaunchError) as caught:
        Launcher(scheduler, config).run([server("rollout")], trainer_of(9), on_tick=once_running(signal.SIGKILL, 9))

    message = str(caught.value)
    assert message.startswith("rollout-0 was killed by SIGKILL (out of memory?)")
    assert "launcher.max_restarts=2 restarts are used" in message
    assert message.count("Before it: ") == 2  # one for each restart
    assert "rollout-0.log" in message


@pytest.mark.nightly
def test_restarted_server_never_ready_ends_run_with_last_result(scheduler: LocalScheduler) -> None:
    config = LauncherConfig(max_restarts=1)
    spec = server("rollout", ready_timeout=8.0)
    broken = python(
        "import os, pathlib, sys\n"
        "if pathlib.Path(sys.argv[4]).exists(): import time; time.sleep(600)\n"
        "pathlib.Path(sys.argv[4]).touch()\n"
        "sys.argv = ['', *sys.argv[1:4]]\n" + spec.command[2],
        *spec.command[3:],
        str(scheduler._log_dir.parent / "started"),
    )
    spec = JobSpec("rollout", broken, needs_port=True, ready_path="/health", ready_timeout=8.0)

    with pytest.raises(LaunchError, match=r"rollout-0 failed its readiness checks for 8 s \(last: .*refused"):
        Launcher(scheduler, config).run([spec], trainer_of(9), on_tick=once_running(signal.SIGKILL, 1))


@pytest.mark.slow
def test_server_without_resources_is_retried_while_others_run(
    scheduler: LocalScheduler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("rl_launchers.supervise.server_health.RETRY_SECONDS", 0.3)
    failed, restart = list[str](), LocalScheduler.restart_worker

    def restart_later(self: LocalScheduler, worker: Worker, note: str = "") -> Worker:
        if len(failed) < 2:
            failed.append(worker.name)
            raise LaunchError("injected fault: no free GPUs")
        return restart(self, worker, note)

    monkeypatch.setattr(LocalScheduler, "restart_worker", restart_later)
    config = LauncherConfig(max_restarts=1)
    kill = once_running(signal.SIGKILL, 1)

    def tick(workers: list[Worker]) -> None:
        if [worker.role for worker in workers] == ["rollout", "rollout", "actor"]:
            kill(workers)

    code = Launcher(scheduler, config).run([server("rollout", count=2)], trainer_of(2), on_tick=tick)

    assert code == 0
    assert failed == ["rollout-0", "rollout-0"]
    assert "injected fault: no free GPUs" in caplog.text


@pytest.mark.slow
def test_last_server_without_resources_restarts_run_if_resumable(
    scheduler: LocalScheduler, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(self: LocalScheduler, worker: Worker, note: str = "") -> Worker:
        raise LaunchError("injected fault: no free GPUs")

    monkeypatch.setattr(LocalScheduler, "restart_worker", fail)
    problem, resume = "was killed by SIGKILL.*no other server is healthy.*injected", Resume(lambda: (3, 2), lambda: 2)
    run = Launcher(scheduler).run
    assert run([server("rollout")], trainer_of(2), once_running(signal.SIGKILL, 1), resume=resume) == 0
    assert re.search(f"rollout-0 {problem}.*Restarting all processes after step 2", caplog.text)

    with pytest.raises(LaunchError, match=problem):
        Launcher(scheduler).run([server("rollout")], trainer_of(9), once_running(signal.SIGKILL, 1))


def test_trainer_failure_after_server_restart_error_names_both(scheduler: LocalScheduler) -> None:
    with pytest.raises(
        LaunchError, match=r"(?s)actor-0 ended with exit code 1.*Before it: .*rollout-0 was killed by SIGKILL"
    ):
        Launcher(scheduler).run(
            [server("rollout")],
            lambda workers: [JobSpec("actor", python(FAILING_CLIENT, str(workers[0].log)))],
            on_tick=once_running(signal.SIGKILL, 1),
        )
