"""Tests of automatic restarts of a run from its newest recovery checkpoint after trainers are lost."""

import os
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from rl_contracts.conformance.scheduler import listens, python, server
from rl_contracts.errors import ConfigError, LaunchError, ServerStartError
from rl_contracts.runtime.name_service import FileNames
from rl_contracts.runtime.run_files import read_json
from rl_contracts.scheduler import JobSpec, Worker, WorkerStatus
from rl_contracts.testing.waiting import wait_until
from rl_launchers import Launcher, LauncherConfig, LocalScheduler, Resume, RunControl

TRAINER = """
import os, pathlib, sys, time
steps, plan, rank = pathlib.Path(sys.argv[1]), sys.argv[2:], os.environ.get("RANK", "0")
starts = steps.with_suffix(".starts" + rank)
start = len(starts.read_text()) if starts.exists() else 0
with starts.open("a") as file:
    file.write("x")
fault_step, _, fault = (plan[start] if start < len(plan) else "").partition(":")
last = int(steps.read_text())
print("start", start, "resumes after step", last, flush=True)
while True:
    if fault_step and last >= int(fault_step):
        if fault == "kill":
            os.kill(os.getpid(), 9)
        print("injected fault", start, flush=True)
        sys.exit(int(fault))
    if last >= 6:
        break
    last += 1
    if rank == "0":
        steps.with_suffix(".part").write_text(str(last))
        steps.with_suffix(".part").rename(steps)
    time.sleep(0.02)
"""
"""Trainer that takes six steps and writes the last one to a file.

The plan has an entry for each of the first starts. `<step>:kill` kills the trainer after this step, and
`<step>:<exit code>` ends it with this exit code."""

HANGS = """
import os, pathlib, signal, sys
from rl_contracts.runtime.name_service import FileNames
from rl_launchers.supervise.heartbeat import beat
beat(FileNames(sys.argv[1]), "actor-0", float(sys.argv[2]))
if not pathlib.Path(sys.argv[3]).exists():
    pathlib.Path(sys.argv[3]).touch()
    import time
    time.sleep(float(sys.argv[2]))
    os.kill(os.getpid(), signal.SIGSTOP)
"""
"""Trainer that sends heartbeats, and stops itself with SIGSTOP at its first start."""


@pytest.fixture
def scheduler(tmp_path: Path) -> Iterator[LocalScheduler]:
    with LocalScheduler(tmp_path / "logs") as scheduler:
        yield scheduler


class Steps:
    """Run of `TRAINER` with a recovery checkpoint at each even step."""

    def __init__(self, directory: Path, *plan: str, count: int = 1) -> None:
        self.file, self.plan, self.count, self.resumed = directory / "steps", plan, count, list[int]()
        self.file.write_text("0")
        self.resume = Resume(self.reached, self.prepare)

    def reached(self) -> tuple[int, int]:
        last = int(self.file.read_text())
        return last, last // 2 * 2

    def prepare(self) -> int:
        self.resumed.append(self.reached()[1])
        self.file.write_text(str(self.resumed[-1]))
        return self.resumed[-1]

    def trainers(self, servers: list[Worker]) -> list[JobSpec]:
        command = python(TRAINER, str(self.file), *self.plan)
        return [JobSpec("actor", command, count=self.count, spmd=self.count > 1)]


def test_trainer_killed_or_failed_resumes_from_checkpoint_and_new_servers(
    scheduler: LocalScheduler, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run, addresses = Steps(tmp_path, "3:kill", "5:1"), list[str]()

    def trainers(servers: list[Worker]) -> list[JobSpec]:
        addresses.extend(worker.address for worker in servers)
        return run.trainers(servers)

    code = Launcher(scheduler).run([server("rollout")], trainers, resume=run.resume)

    assert code == 0
    assert run.resumed == [2, 4]
    assert len(addresses) == 3
    assert "actor-0 was killed by SIGKILL" in caplog.text
    assert "actor-0 ended with exit code 1" in caplog.text
    assert "after step 2, the newest recovery checkpoint (restart 1 of 3 within 600 s)" in caplog.text
    log = (tmp_path / "logs" / "actor-0.log").read_text()
    assert [line for line in log.splitlines() if line.startswith("start")] == [
        "start 0 resumes after step 0",
        "start 1 resumes after step 2",
        "start 2 resumes after step 4",
    ]
    assert log.count("======== ") == (tmp_path / "logs" / "rollout-0.log").read_text().count("======== ") == 2
    assert scheduler.poll() == []


def test_two_ranks_killed_together_cause_one_restart(scheduler: LocalScheduler, tmp_path: Path) -> None:
    run, names = Steps(tmp_path, "3:kill", count=2), FileNames(tmp_path / "names")
    with RunControl(names) as control:
        assert Launcher(scheduler, control=control).run([], run.trainers, resume=run.resume) == 0
    assert run.resumed == [2]
    assert read_json(names, "status")["restart_steps"] == [2]


def test_trainer_error_before_first_step_does_not_restart_run(scheduler: LocalScheduler, tmp_path: Path) -> None:
    run = Steps(tmp_path, "0:1")
    with pytest.raises(LaunchError, match=r"(?s)^actor-0 ended with exit code 1.*injected fault 0.*first step"):
        Launcher(scheduler).run([], run.trainers, resume=run.resume)
    assert run.resumed == []


def test_trainer_killed_before_first_step_restarts_run(scheduler: LocalScheduler, tmp_path: Path) -> None:
    run = Steps(tmp_path, "0:kill")
    assert Launcher(scheduler).run([], run.trainers, resume=run.resume) == 0
    assert run.resumed == [0]


def test_user_error_exit_code_does_not_restart_run(scheduler: LocalScheduler, tmp_path: Path) -> None:
    run = Steps(tmp_path, "3:2")
    with pytest.raises(LaunchError, match=r"^actor-0 ended with exit code 2"):
        Launcher(scheduler).run([], run.trainers, resume=run.resume)
    assert run.resumed == []


def test_zero_trainer_restarts_ends_run_at_first_failure(scheduler: LocalScheduler, tmp_path: Path) -> None:
    run = Steps(tmp_path, "3:kill")
    with pytest.raises(LaunchError, match=r"^actor-0 was killed by SIGKILL"):
        Launcher(scheduler, LauncherConfig(trainer_restarts=0)).run([], run.trainers, resume=run.resume)
    assert run.resumed == []


@pytest.mark.slow
def test_repeated_failure_at_same_step_raises_with_all_errors_in_order(
    scheduler: LocalScheduler, tmp_path: Path
) -> None:
    run = Steps(tmp_path, "3:7", "3:kill", "3:9", "3:11")

    with pytest.raises(LaunchError) as caught:
        Launcher(scheduler, LauncherConfig(trainer_restarts=9)).run([], run.trainers, resume=run.resume)

    message = str(caught.value)
    assert run.resumed == [2, 2]
    assert message.startswith("actor-0 ended with exit code 7")
    positions = [
        message.index(text) for text in ("code 7", "injected fault 0", "restart 1 of 9", "SIGKILL", "restart 2 of 9")
    ]
    assert positions == sorted(positions)
    assert "exit code 9" in message
    assert message.endswith("The run did not get past step 3 in 3 starts.")


@pytest.mark.slow
def test_trainer_restarts_used_up_ends_run(scheduler: LocalScheduler, tmp_path: Path) -> None:
    run = Steps(tmp_path, "1:kill", "3:kill", "5:kill")
    with pytest.raises(LaunchError, match=r"launcher.trainer_restarts=2 within 600 s: all restarts are used\.$"):
        Launcher(scheduler, LauncherConfig(trainer_restarts=2)).run([], run.trainers, resume=run.resume)
    assert run.resumed == [0, 2]


@pytest.mark.slow
def test_trainer_restarts_outside_window_do_not_count(
    scheduler: LocalScheduler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rl_launchers.supervise.restart_window.WINDOW_SECONDS", 0.01)
    run = Steps(tmp_path, "1:kill", "3:kill", "5:kill")
    assert Launcher(scheduler, LauncherConfig(trainer_restarts=1)).run([], run.trainers, resume=run.resume) == 0


def test_prepare_error_ends_run_with_reason(scheduler: LocalScheduler, tmp_path: Path) -> None:
    run = Steps(tmp_path, "3:kill")

    def prepare() -> int:
        raise ConfigError("there is no recovery checkpoint")

    with pytest.raises(LaunchError, match=r"(?s)^actor-0 was killed.*there is no recovery checkpoint"):
        Launcher(scheduler).run([], run.trainers, resume=Resume(run.reached, prepare))


@pytest.mark.slow
def test_server_killed_during_restart_causes_another_restart(scheduler: LocalScheduler, tmp_path: Path) -> None:
    run, killed = Steps(tmp_path, "3:kill"), list[int]()

    def kill(workers: list[Worker]) -> None:
        first = workers[0]
        if run.resumed and not killed and first.status is WorkerStatus.STARTING and first.pid:
            killed.append(first.pid)
            os.kill(first.pid, signal.SIGKILL)

    code = Launcher(scheduler).run([server("rollout", delay=0.5)], run.trainers, on_tick=kill, resume=run.resume)

    assert code == 0
    assert killed
    assert run.resumed == [2, 2]


@pytest.mark.slow
@pytest.mark.parametrize("node_lost", [True, False])
def test_server_lost_before_ready_restarts_run_only_after_node_loss(
    node_lost: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A server that failed at its start would fail again, so only the loss of its node causes a restart."""
    starts = tmp_path / "starts"
    once = f"open({str(starts)!r}, 'a').write('x'); import os; os.stat({str(starts)!r}).st_size == 1 and os._exit(3)\n"

    class Nodes(LocalScheduler):
        def poll(self) -> list[Worker]:
            workers = super().poll()
            for worker in workers:
                if node_lost and worker.status is WorkerStatus.FAILED:
                    worker.cause = "was lost with node b, whose agent does not respond"
            return workers

    spec = server("rollout", remedy="fix the setting")
    spec = replace(spec, command=(*spec.command[:2], once + spec.command[2], *spec.command[3:]))
    run = Steps(tmp_path)
    with Nodes(tmp_path / "logs") as scheduler:
        launcher = Launcher(scheduler)
        if node_lost:
            assert launcher.run([spec], run.trainers, resume=run.resume) == 0
            assert "was lost with node b, whose agent does not respond while the run needed it." in caplog.text
        else:
            with pytest.raises(ServerStartError, match=r"(?s)rollout-0 ended with exit code 3 .*fix the setting"):
                launcher.run([spec], run.trainers, resume=run.resume)
    assert starts.read_text() == "x" * (1 + node_lost)
    assert run.resumed == [0] * node_lost


@pytest.mark.slow
def test_sigterm_during_restart_stops_all_processes(scheduler: LocalScheduler, tmp_path: Path) -> None:
    run, servers, sent = Steps(tmp_path, "3:kill"), list[Worker](), list[bool]()

    def terminate(workers: list[Worker]) -> None:
        servers[:] = [worker for worker in workers if worker.role == "rollout"]
        if run.resumed and not sent:
            sent.append(True)
            os.kill(os.getpid(), signal.SIGTERM)

    slow = server("rollout", delay=1.0)
    code = Launcher(scheduler).run([slow], run.trainers, on_tick=terminate, resume=run.resume)

    assert code == 143
    assert run.file.read_text() == "2"
    assert scheduler.poll() == []
    assert not any(listens(worker) for worker in servers)


@pytest.mark.nightly
def test_trainer_without_heartbeat_is_killed_and_run_restarts(
    scheduler: LocalScheduler, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    names, config = tmp_path / "names", LauncherConfig(health_timeout=1.0)
    command = python(HANGS, str(names), "1.0", str(tmp_path / "hung"))
    resume = Resume(lambda: (0, 0), lambda: 0)

    with RunControl(FileNames(names), beat=0.1) as control:
        code = Launcher(scheduler, config, control=control).run(
            [], lambda _: [JobSpec("actor", command)], resume=resume
        )

    assert code == 0
    assert "actor-0 sent no heartbeat for 1 s" in caplog.text


@pytest.mark.slow
def test_rank_is_not_hung_after_launcher_was_suspended(tmp_path: Path) -> None:
    names = FileNames(tmp_path / "names")
    control = RunControl(names)
    control.heartbeats.timeout = 0.4
    names.add("heartbeat/actor-0", "1")
    control.heartbeats.read()
    time.sleep(1.0)  # like a suspended machine, or an unavailable file system
    control.heartbeats.read()
    assert not control.heartbeats.is_hung("actor-0")
    assert not control.heartbeats.is_hung("actor-1")

    def hung() -> bool:
        control.heartbeats.read()
        return control.heartbeats.is_hung("actor-0")

    wait_until(hung)


def test_rank_ignoring_sigterm_is_killed_before_restart(scheduler: LocalScheduler, tmp_path: Path) -> None:
    run, pids = Steps(tmp_path, "3:kill"), list[int]()
    ignores_sigterm = python("import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)")

    def trainers(servers: list[Worker]) -> list[JobSpec]:
        return [*run.trainers(servers), JobSpec("other", python("pass") if run.resumed else ignores_sigterm)]

    def collect_pids(workers: list[Worker]) -> None:
        pids.extend(w.pid for w in workers if w.role == "other" and w.pid and not run.resumed)

    assert Launcher(scheduler).run([], trainers, on_tick=collect_pids, resume=run.resume) == 0
    assert pids
    assert not any(psutil.pid_exists(pid) for pid in pids)


@pytest.mark.slow
def test_user_error_in_later_start_before_servers_ready_ends_run(scheduler: LocalScheduler, tmp_path: Path) -> None:
    run = Steps(tmp_path, "3:kill", "2:2", "2:2")
    slow = server("rollout", delay=3.0)
    with pytest.raises(LaunchError, match="exit code 2"):
        Launcher(scheduler).run([slow], run.trainers, resume=run.resume, together=True)
    assert run.resumed == [2]


def test_server_killed_during_start_of_resumed_run_restarts_run(scheduler: LocalScheduler, tmp_path: Path) -> None:
    run, spec = Steps(tmp_path), server("rollout")
    run.file.write_text("4")
    kill_first_start = f"""
import os, pathlib
if not (started := pathlib.Path({str(tmp_path / "started")!r})).exists():
    started.touch()
    os.kill(os.getpid(), 9)
"""
    spec = replace(spec, command=(*spec.command[:2], kill_first_start + spec.command[2], *spec.command[3:]))

    assert Launcher(scheduler).run([spec], run.trainers, resume=run.resume) == 0
    assert run.resumed == [4]


def test_stop_error_before_restart_is_logged_and_run_restarts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run, errors, delete = Steps(tmp_path, "3:kill"), list[str](), LocalScheduler.delete_workers

    def delete_workers(self: LocalScheduler, role: str | None = None, grace: float = 5.0) -> None:
        delete(self, role, grace)
        if not errors:
            errors.append("injected fault: a node does not respond")
            raise LaunchError(errors[0])

    monkeypatch.setattr(LocalScheduler, "delete_workers", delete_workers)
    with LocalScheduler(tmp_path / "logs") as scheduler:
        assert Launcher(scheduler).run([], run.trainers, resume=run.resume) == 0
    assert run.resumed == [2]
    assert errors[0] in caplog.text
