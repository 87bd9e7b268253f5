"""Servers that die or hang come back at their address, until the budget is spent."""

import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rl_contracts.conformance.scheduler import SLEEP, python, server
from rl_contracts.errors import LaunchError
from rl_contracts.scheduler import JobSpec, Worker, WorkerStatus
from rl_launchers import Launcher, LauncherConfig, LocalScheduler, Resume

PATIENT_CLIENT = """
import pathlib, sys, time, urllib.request
deadline = time.monotonic() + 25
while True:
    assert time.monotonic() < deadline
    life = pathlib.Path(sys.argv[3]).read_text().count("======== ") + 1
    try:
        with urllib.request.urlopen(sys.argv[1] + "/health", timeout=0.3):
            if life >= int(sys.argv[2]):
                break
    except OSError:
        pass
    time.sleep(0.02)
"""
"""Ends once a server has answered in such a life, which it counts in the server's log."""

LOST_CLIENT = """
import pathlib, sys, time
while "======== " not in pathlib.Path(sys.argv[1]).read_text():
    time.sleep(0.02)
raise SystemExit(1)
"""
"""Fails once a server has begun another life."""


@pytest.fixture
def scheduler(tmp_path: Path) -> Iterator[LocalScheduler]:
    with LocalScheduler(tmp_path / "logs") as scheduler:
        yield scheduler


def trainer_of(lives: int) -> Callable[[list[Worker]], list[JobSpec]]:
    return lambda workers: [
        JobSpec("actor", python(PATIENT_CLIENT, workers[0].address, str(lives), str(workers[0].log)))
    ]


def once_running(signum: int, times: int) -> Callable[[list[Worker]], None]:
    """Send the first server a signal in each of its first lives, as soon as it and the trainer run."""
    sent: set[int | None] = set()

    def tick(workers: list[Worker]) -> None:
        first = workers[0]
        both = first.status is WorkerStatus.RUNNING and len(workers) > 1 and first.pid is not None
        if both and len(sent) < times and first.pid not in sent:
            sent.add(first.pid)
            os.kill(first.pid or 0, signum)

    return tick


@pytest.mark.parametrize("signum", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.slow)])
def test_run_server_lost_is_started_anew_and_the_run_goes_on(
    scheduler: LocalScheduler, signum: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = LauncherConfig(health_timeout=1.0, health_interval=0.1)

    code = Launcher(scheduler, config).run([server("rollout")], trainer_of(2), on_tick=once_running(signum, 1))

    what = "was killed by SIGKILL" if signum == signal.SIGKILL else "gave no good answer for 1 s"
    assert code == 0
    assert f"rollout-0 {what}" in caplog.text
    assert "restart 1 of 3" in (tmp_path / "logs" / "rollout-0.log").read_text()
    assert scheduler.poll() == []


@pytest.mark.slow
def test_run_server_dies_too_often_error_names_it_its_lives_and_its_log(scheduler: LocalScheduler) -> None:
    config = LauncherConfig(max_restarts=2, health_interval=0.1)

    with pytest.raises(LaunchError) as caught:
        Launcher(scheduler, config).run([server("rollout")], trainer_of(9), on_tick=once_running(signal.SIGKILL, 9))

    message = str(caught.value)
    assert message.startswith("rollout-0 was killed by SIGKILL (out of memory?)")
    assert "launcher.max_restarts=2 restarts are used" in message
    assert message.count("Before it: ") == 2
    assert "rollout-0.log" in message


@pytest.mark.slow
def test_run_restart_window_over_restarts_no_longer_count(scheduler: LocalScheduler) -> None:
    config = LauncherConfig(max_restarts=1, restart_window=0.01, health_interval=0.1)

    code = Launcher(scheduler, config).run([server("rollout")], trainer_of(3), on_tick=once_running(signal.SIGKILL, 2))

    assert code == 0


@pytest.mark.nightly
def test_run_restarted_server_never_ready_ends_the_run_with_its_last_answer(scheduler: LocalScheduler) -> None:
    config = LauncherConfig(max_restarts=1, health_interval=0.1)
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

    with pytest.raises(LaunchError, match=r"rollout-0 gave no good answer for 8 s \(last: .*refused"):
        Launcher(scheduler, config).run([spec], trainer_of(9), on_tick=once_running(signal.SIGKILL, 1))


@pytest.mark.slow
def test_run_server_for_which_there_is_no_room_is_tried_again_while_others_go_on(
    scheduler: LocalScheduler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("rl_launchers.supervise.server_health.RETRY_SECONDS", 0.3)
    refused, restart = list[str](), LocalScheduler.restart_worker

    def restart_later(self: LocalScheduler, worker: Worker, note: str = "") -> Worker:
        if len(refused) < 2:
            refused.append(worker.name)
            raise LaunchError("planted: no machine has room")
        return restart(self, worker, note)

    monkeypatch.setattr(LocalScheduler, "restart_worker", restart_later)
    config = LauncherConfig(max_restarts=1, health_interval=0.1)
    kill = once_running(signal.SIGKILL, 1)

    def tick(workers: list[Worker]) -> None:
        if [worker.role for worker in workers] == ["rollout", "rollout", "actor"]:
            kill(workers)

    code = Launcher(scheduler, config).run([server("rollout", count=2)], trainer_of(2), on_tick=tick)

    assert code == 0
    assert refused == ["rollout-0", "rollout-0"]
    assert "planted: no machine has room" in caplog.text


@pytest.mark.slow
def test_run_only_server_for_which_there_is_no_room_everything_is_started_again_where_it_can_be(
    scheduler: LocalScheduler, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(self: LocalScheduler, worker: Worker, note: str = "") -> Worker:
        raise LaunchError("planted: no machine has room")

    monkeypatch.setattr(LocalScheduler, "restart_worker", refuse)
    what, resume = "was killed by SIGKILL.*no other server answers.*planted", Resume(lambda: (3, 2), lambda: 2)
    run = Launcher(scheduler).run
    assert run([server("rollout")], trainer_of(2), once_running(signal.SIGKILL, 1), resume=resume) == 0
    assert re.search(f"rollout-0 {what}.*Restarting all processes after step 2", caplog.text)

    with pytest.raises(LaunchError, match=what):
        Launcher(scheduler).run([server("rollout")], trainer_of(9), once_running(signal.SIGKILL, 1))


def test_run_trainer_fails_after_a_restart_error_tells_of_both(scheduler: LocalScheduler) -> None:
    with pytest.raises(
        LaunchError, match=r"(?s)actor-0 ended with exit code 1.*Before it: .*rollout-0 was killed by SIGKILL"
    ):
        Launcher(scheduler).run(
            [server("rollout")],
            lambda workers: [JobSpec("actor", python(LOST_CLIENT, str(workers[0].log)))],
            on_tick=once_running(signal.SIGKILL, 1),
        )


def test_run_trainer_killed_ends_the_run_at_once(scheduler: LocalScheduler) -> None:
    def kill_trainer(workers: list[Worker]) -> None:
        if len(workers) == 2 and workers[1].exit_code is None:
            os.kill(workers[1].pid or 0, signal.SIGKILL)

    begin = time.monotonic()
    with pytest.raises(LaunchError, match=r"^actor-0 was killed by SIGKILL"):
        Launcher(scheduler).run([server("rollout")], lambda _: [JobSpec("actor", python(SLEEP))], on_tick=kill_trainer)
    assert time.monotonic() - begin < 8
