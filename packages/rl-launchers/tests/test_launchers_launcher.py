"""Tests of the launcher with real processes: order of the starts, supervision, and errors."""

import errno
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from rl_contracts.conformance.scheduler import SLEEP, listens, python, server
from rl_contracts.errors import ConfigError, LaunchError, ServerStartError
from rl_contracts.runtime.name_service import MemoryNames
from rl_contracts.scheduler import JobSpec, Resources, SchedulerConfig, Worker, WorkerStatus
from rl_launchers import Launcher, LauncherConfig, LocalScheduler, LocalSchedulerConfig, RunControl

CLIENT = """
import sys, time, urllib.request
while True:
    urllib.request.urlopen(sys.argv[1] + "/health", timeout=5)
    time.sleep(0.01)
"""
"""Trainer that fails as soon as its server does."""


@pytest.fixture
def scheduler(tmp_path: Path) -> Iterator[LocalScheduler]:
    with LocalScheduler(tmp_path / "logs") as scheduler:
        yield scheduler


def test_run_trainers_done_returns_0_and_stops_servers(scheduler: LocalScheduler) -> None:
    handlers = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    seen: list[dict[str, WorkerStatus]] = []
    servers: list[Worker] = []

    def trainer_specs(workers: list[Worker]) -> list[JobSpec]:
        servers.extend(workers)
        program = "import sys, urllib.request; [urllib.request.urlopen(a + '/health') for a in sys.argv[1:]]"
        return [JobSpec("actor", python(program, *(worker.address for worker in workers)), count=2)]

    code = Launcher(scheduler).run(
        [server(count=2, delay=0.3)],
        trainer_specs,
        on_tick=lambda workers: seen.append({worker.name: worker.status for worker in workers}),
    )

    assert code == 0
    assert len(servers) == 2
    assert not any(listens(worker) for worker in servers)
    assert scheduler.poll() == []
    assert seen[0] == {"server-0": WorkerStatus.STARTING, "server-1": WorkerStatus.STARTING}
    assert seen[-1]["actor-0"] is seen[-1]["actor-1"] is WorkerStatus.DONE
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == handlers


def test_run_with_ended_parent_starts_nothing(scheduler: LocalScheduler, tmp_path: Path) -> None:
    launcher = Launcher(scheduler, parent=os.getpid())  # this process is not its own parent
    assert launcher.run([server()], lambda _: [JobSpec("actor", python("pass"))]) == 143
    assert not (tmp_path / "logs").exists()


@pytest.mark.slow
def test_run_together_starts_trainers_before_servers_are_ready(scheduler: LocalScheduler) -> None:
    program = "import sys, time, urllib.request, pathlib\n" + (
        "while True:\n"
        "    try: urllib.request.urlopen(sys.argv[1] + '/health', timeout=5); break\n"
        "    except OSError: time.sleep(0.05)\n"
    )
    seen: list[dict[str, WorkerStatus]] = []

    code = Launcher(scheduler).run(
        [server(delay=2.0)],
        lambda workers: [JobSpec("actor", python(program, workers[0].address))],
        on_tick=lambda workers: seen.append({worker.name: worker.status for worker in workers}),
        together=True,
    )

    assert code == 0
    assert {"server-0": WorkerStatus.STARTING, "actor-0": WorkerStatus.RUNNING} in seen


def test_run_together_server_start_failure_ends_run_without_restart(
    scheduler: LocalScheduler,
) -> None:
    program = python("print('no such model'); raise SystemExit(3)")
    broken = JobSpec("rollout", program, ready_path="/health", remedy="Choose another model.")

    with pytest.raises(
        ServerStartError, match=r"(?s)^rollout-0 ended with exit code 3 .*\nChoose another model\.\n.*no such model"
    ):
        Launcher(scheduler).run([broken], lambda _: [JobSpec("actor", python(SLEEP))], together=True)

    assert scheduler.poll() == []


def test_run_together_trainer_failure_does_not_wait_for_servers(scheduler: LocalScheduler) -> None:
    started = time.monotonic()
    with pytest.raises(LaunchError, match=r"(?s)^actor-0 ended with exit code 1 .*no such data") as caught:
        Launcher(scheduler).run(
            [server(delay=600.0)],
            lambda _: [JobSpec("actor", python("raise ValueError('no such data')"))],
            together=True,
        )
    assert not isinstance(caught.value, ServerStartError)
    assert time.monotonic() - started < 15


def test_run_outside_main_thread_returns_0(scheduler: LocalScheduler) -> None:
    codes: list[int] = []
    launcher = Launcher(scheduler)
    thread = threading.Thread(
        target=lambda: codes.append(launcher.run([], lambda _: [JobSpec("actor", python("pass"))]))
    )
    thread.start()
    thread.join(30)
    assert codes == [0]


def test_run_trainer_failure_raises_with_log_and_stops_all(scheduler: LocalScheduler) -> None:
    trainer = JobSpec("actor", python("import time; time.sleep(0.2); raise ValueError('nan in layer 3')"))
    servers: list[Worker] = []

    def trainer_specs(workers: list[Worker]) -> list[JobSpec]:
        servers.extend(workers)
        return [trainer]

    started = time.monotonic()
    with pytest.raises(LaunchError, match=r"(?s)^actor-0 ended with exit code 1 .*nan in layer 3"):
        Launcher(scheduler).run([server()], trainer_specs)

    assert time.monotonic() - started < 8
    assert scheduler.poll() == []
    assert not listens(servers[0])


@pytest.mark.slow
def test_run_server_killed_error_names_server_before_trainer(
    scheduler: LocalScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    # on a busy machine the trainer may end up to 3 s after the server
    monkeypatch.setattr("rl_launchers.supervise.launcher.SETTLE_SECONDS", 3.0)
    killed: list[float] = []

    def kill_once(workers: list[Worker]) -> None:
        # more requests than readiness checks: the trainer has sent some
        has_requests = len(workers) == 2 and workers[0].log.read_text().count("GET /health") > 9
        if has_requests and not killed:
            killed.append(time.monotonic())
            os.kill(workers[0].pid or 0, signal.SIGKILL)

    with pytest.raises(LaunchError) as caught:
        Launcher(scheduler, LauncherConfig(max_restarts=0)).run(
            [server("rollout")],
            lambda workers: [JobSpec("actor", python(CLIENT, workers[0].address))],
            on_tick=kill_once,
        )

    assert time.monotonic() - killed[0] < 10
    assert str(caught.value).startswith("rollout-0 was killed by SIGKILL (out of memory?)")
    assert "After it, actor-0 ended with exit code 1" in str(caught.value)


def test_run_server_exit_0_before_trainers_raises(scheduler: LocalScheduler) -> None:
    spec = JobSpec("rollout", python("import time; time.sleep(0.5); print('bye')"))
    launcher = Launcher(scheduler, LauncherConfig(max_restarts=0))
    with pytest.raises(LaunchError, match=r"(?s)rollout-0 ended with exit code 0 .*bye"):
        launcher.run([spec], lambda workers: [JobSpec("actor", python(SLEEP))])


def test_run_server_failure_during_start_of_another_raises_at_once(scheduler: LocalScheduler) -> None:
    started = time.monotonic()
    with pytest.raises(LaunchError, match="quick-0 ended with exit code 4"):
        Launcher(scheduler).run(
            [server("slow", delay=600.0), JobSpec("quick", python("raise SystemExit(4)"))], lambda workers: []
        )
    assert time.monotonic() - started < 8


def test_run_trainer_specs_error_stops_servers(scheduler: LocalScheduler) -> None:
    def trainer_specs(workers: list[Worker]) -> list[JobSpec]:
        raise RuntimeError("injected")

    with pytest.raises(RuntimeError, match="injected"):
        Launcher(scheduler).run([server()], trainer_specs)
    assert scheduler.poll() == []


def test_run_without_trainers_raises(scheduler: LocalScheduler) -> None:
    with pytest.raises(ConfigError, match="trainer_specs"):
        Launcher(scheduler).run([], lambda workers: [])


def test_run_key_is_only_in_environment(scheduler: LocalScheduler, tmp_path: Path) -> None:
    launcher = Launcher(scheduler)
    program = "import os, time; print(len(os.environ['RL_RUN_KEY']), flush=True); time.sleep(0.5)"
    commands: list[str] = []

    def read_commands(workers: list[Worker]) -> None:
        for child in psutil.Process().children(recursive=True):
            try:
                commands.append(" ".join(child.cmdline()))
            except psutil.Error:  # the process has ended
                continue

    launcher.run([server()], lambda workers: [JobSpec("actor", python(program))], on_tick=read_commands)

    assert any("RL_RUN_KEY" in command for command in commands)  # the trainer's command is among them
    assert not any(launcher.key in command for command in commands)
    logs = {log.name: log.read_text() for log in (tmp_path / "logs").iterdir()}
    assert logs["actor-0.log"].strip() == str(len(launcher.key))
    assert not any(launcher.key in text for text in logs.values())


def test_run_key_in_command_raises(scheduler: LocalScheduler) -> None:
    launcher = Launcher(scheduler)
    with pytest.raises(ConfigError, match=r"'actor'.*command") as caught:
        launcher.run([], lambda workers: [JobSpec("actor", python(SLEEP, f"--api-key={launcher.key}"))])
    assert launcher.key not in str(caught.value)


def test_run_key_differs_between_launchers(scheduler: LocalScheduler) -> None:
    assert Launcher(scheduler).key != Launcher(scheduler).key


def test_config_scheduler_uses_kind_and_options(tmp_path: Path) -> None:
    config = LauncherConfig(kind="local", options=LocalSchedulerConfig(host="127.0.0.2"))
    with config.scheduler(tmp_path) as scheduler:  # type: ignore[attr-defined]
        (worker,) = scheduler.create_workers(JobSpec("role", python(SLEEP)))
    assert worker.host == "127.0.0.2"
    assert LauncherConfig(kind="rl_launchers.local.scheduler:LocalScheduler").options == LocalSchedulerConfig()


def test_config_options_of_another_scheduler_raise() -> None:
    with pytest.raises(ConfigError, match=r"launcher\.options: expected LocalSchedulerConfig"):
        LauncherConfig(options=SchedulerConfig())


def test_resources_are_assignable_gpus_and_usable_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,3")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {5})
    assert LocalSchedulerConfig().resources() == Resources(gpus=2, cores=1)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert LocalSchedulerConfig().resources().gpus == 0


@pytest.mark.parametrize(
    "fields",
    [
        {"grace_seconds": -1},
        {"max_restarts": -1},
    ],
)
def test_config_value_out_of_range_raises_with_field(fields: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=rf"launcher\.{next(iter(fields))}"):
        LauncherConfig(**fields)  # type: ignore[arg-type]


def test_run_full_disk_or_closed_terminal_does_not_end_run(
    scheduler: LocalScheduler, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class UnavailableNames(MemoryNames):
        def children(self, prefix: str = "") -> dict[str, str]:
            if prefix == "heartbeat" and caplog.records:
                raise OSError(errno.ESTALE, "Stale file handle")
            return super().children(prefix)

    def show(workers: list[Worker]) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with RunControl(UnavailableNames()) as control:
        launcher = Launcher(scheduler, control=control)
        assert launcher.run([], lambda _: [JobSpec("actor", python("pass"))], on_tick=show) == 0
    assert caplog.text.count("cannot show progress") == 1


def test_restart_worker_with_unwritable_log_restarts(scheduler: LocalScheduler) -> None:
    (worker,) = scheduler.create_workers(JobSpec("role", python(SLEEP)))
    worker.log.unlink()
    worker.log.symlink_to("/dev/full")
    assert scheduler.restart_worker(worker).restarts == 1


def test_run_second_signal_during_cleanup_is_no_error(scheduler: LocalScheduler) -> None:
    class SignallingNames(MemoryNames):
        def children(self, prefix: str = "") -> dict[str, str]:
            if sent and threading.current_thread() is threading.main_thread():
                os.kill(os.getpid(), signal.SIGTERM)
            return super().children(prefix)

    sent = list[bool]()

    def terminate(workers: list[Worker]) -> None:
        if not sent:
            sent.append(True)
            os.kill(os.getpid(), signal.SIGTERM)

    with RunControl(SignallingNames()) as control:
        launcher = Launcher(scheduler, control=control)
        assert launcher.run([], lambda _: [JobSpec("actor", python(SLEEP))], on_tick=terminate) == 143


def test_run_without_resume_stop_message_names_no_checkpoint(
    scheduler: LocalScheduler, caplog: pytest.LogCaptureFixture
) -> None:
    sent = list[bool]()

    def interrupt(workers: list[Worker]) -> None:
        if not sent:
            sent.append(True)
            os.kill(os.getpid(), signal.SIGTERM)

    assert Launcher(scheduler).run([], lambda _: [JobSpec("evaluate", python(SLEEP))], on_tick=interrupt) == 143
    assert "Stopping" in caplog.text
    assert "checkpoint" not in caplog.text


def test_run_sighup_terminates_trainers_of_all_roles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    terminate = LocalScheduler.terminate_workers

    def terminate_workers(self: LocalScheduler, role: str) -> None:
        terminate(self, role)
        if role == "one":
            raise LaunchError("injected fault: a node does not respond")

    monkeypatch.setattr(LocalScheduler, "terminate_workers", terminate_workers)
    previous = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup makes a process ignore SIGHUP
    trainer = (
        "import pathlib, signal, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: (pathlib.Path(sys.argv[1] + '-saved').touch(), sys.exit(0)))\n"
        "pathlib.Path(sys.argv[1]).touch()\n"
        "time.sleep(600)"
    )
    files, sent = [tmp_path / "one", tmp_path / "two"], list[bool]()

    def interrupt(workers: list[Worker]) -> None:
        if not sent and all(file.exists() for file in files):
            sent.append(True)
            os.kill(os.getpid(), signal.SIGHUP)

    with LocalScheduler(tmp_path / "logs") as scheduler:
        specs = [JobSpec(file.name, python(trainer, str(file))) for file in files]
        try:
            assert Launcher(scheduler).run([], lambda _: specs, on_tick=interrupt) == 129
        finally:
            signal.signal(signal.SIGHUP, previous)
    assert (tmp_path / "one-saved").exists()
    assert (tmp_path / "two-saved").exists()
