"""Tests of the local scheduler beyond the conformance suite."""

import json
import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from rl_contracts.conformance.scheduler import (
    IGNORE_TERMINATE,
    SLEEP,
    WRITE_ENVIRONMENT,
    listens,
    python,
    server,
    wait_for_end,
)
from rl_contracts.errors import ConfigError, LaunchError
from rl_contracts.scheduler import JobSpec
from rl_contracts.testing.processes import free_port
from rl_contracts.testing.waiting import wait_until
from rl_launchers import LocalScheduler, LocalSchedulerConfig
from rl_launchers.local import process
from rl_launchers.local import scheduler as local_scheduler
from rl_launchers.local.process import worker_environment

FAMILY = """
import os, pathlib, subprocess, sys, time
out = pathlib.Path(sys.argv[1])
sleep = [sys.executable, "-c", "import time; time.sleep(600)"]
child = subprocess.Popen(sleep)
detached = subprocess.Popen(sleep, start_new_session=True)
orphan = subprocess.run(
    [sys.executable, "-c", f"import subprocess; print(subprocess.Popen({sleep!r}, stdout=-3, stderr=-3).pid)"],
    capture_output=True, text=True,
).stdout
out.with_suffix(".part").write_text(f"{child.pid} {detached.pid} {orphan}")
out.with_suffix(".part").rename(out)
time.sleep(600)
"""
"""Worker with a child, a child in a separate session, and an orphaned grandchild. It writes their PIDs to a file."""

FOLLOWER = """
import pathlib, sys, time
while not pathlib.Path(sys.argv[1]).exists():
    time.sleep(0.01)
time.sleep(0.1)
sys.exit(1)
"""
"""Worker that fails a tenth of a second after a file appears."""


@pytest.fixture
def scheduler(tmp_path: Path) -> Iterator[LocalScheduler]:
    with LocalScheduler(tmp_path / "logs") as scheduler:
        yield scheduler


def environments(scheduler: LocalScheduler, folder: Path, spec: JobSpec) -> list[dict[str, str]]:
    """Start the workers of a role with a command that records its environment, and return the environments."""
    command = python(WRITE_ENVIRONMENT, str(folder / f"{spec.role}-{{index}}.json"))
    workers = scheduler.create_workers(JobSpec(**{**vars(spec), "command": command}))
    wait_for_end(scheduler, spec.role)
    return [json.loads((folder / f"{worker.name}.json").read_text())[1] for worker in workers]


def is_gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_worker_environment_has_defaults_unless_launcher_or_role_sets_it(
    scheduler: LocalScheduler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inherited = {"MKL_NUM_THREADS": "7", "GOMP_SPINCOUNT": "300000", "NCCL_SOCKET_IFNAME": "ib0"}
    for name in ("OMP_NUM_THREADS", *inherited):
        monkeypatch.delenv(name, raising=False)
    (plain,) = environments(scheduler, tmp_path, JobSpec("plain", (), cpus=3))
    for name, value in inherited.items():
        monkeypatch.setenv(name, value)
    (own,) = environments(scheduler, tmp_path, JobSpec("own", (), cpus=3, env={"OMP_NUM_THREADS": "2"}))

    assert (plain["OMP_NUM_THREADS"], plain["MKL_NUM_THREADS"], plain["GOMP_SPINCOUNT"]) == ("3", "3", "1000")
    assert plain["NCCL_SOCKET_IFNAME"].startswith("lo")
    assert own["OMP_NUM_THREADS"] == "2"
    assert own.items() >= inherited.items()
    with_address = worker_environment(JobSpec("role", ()), {}, 0, "10.1.2.3", None, {}, None)
    assert "NCCL_SOCKET_IFNAME" not in with_address


def test_worker_environment_bypasses_proxies_for_own_hosts() -> None:
    inherited = {"http_proxy": "http://proxy:3128", "no_proxy": "corp.example"}
    environment = worker_environment(JobSpec("role", ()), inherited, 0, "10.1.2.3", None, {}, None)
    assert environment["no_proxy"] == environment["NO_PROXY"] == "corp.example,localhost,127.0.0.1,::1,10.1.2.3"


def test_worker_on_ipv6_host_becomes_ready(tmp_path: Path) -> None:
    command = (sys.executable, "-m", "http.server", "--bind", "{host}", "{port}", "--directory", str(tmp_path))
    with LocalScheduler(tmp_path / "logs", LocalSchedulerConfig(host="::1")) as scheduler:
        scheduler.create_workers(JobSpec("web", command, needs_port=True, ready_path="/"))
        (worker,) = scheduler.wait_ready("web")
        assert worker.address == f"http://[::1]:{worker.port}"


def test_aborted_worker_logs_stacks_of_its_threads(scheduler: LocalScheduler) -> None:
    program = "import threading, time\ndef stuck():\n  print('here', flush=True)\n  time.sleep(600)\n"
    scheduler.create_workers(JobSpec("actor", python(program + "threading.Thread(target=stuck).start()")))
    (worker,) = scheduler.get_workers("actor")
    wait_until(lambda: "here" in scheduler.logs(worker))

    os.kill(worker.pid or 0, signal.SIGABRT)
    (worker,) = wait_for_end(scheduler, "actor")

    assert worker.exit_code == -signal.SIGABRT
    assert "in stuck" in scheduler.logs(worker)


def test_log_level_of_command_applies_to_workers(scheduler: LocalScheduler, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RL_LOG_LEVEL", "DEBUG")
    program = (
        "from rl_contracts.runtime.logging import *; configure(role='actor'); get_logger('part').debug('a detail')"
    )

    scheduler.create_workers(JobSpec("actor", python(program)))
    (worker,) = wait_for_end(scheduler, "actor")

    assert "DEBUG [actor] rl.part: a detail" in scheduler.logs(worker)


def test_fixed_port_in_use_raises_with_process_and_starts_nothing(scheduler: LocalScheduler, tmp_path: Path) -> None:
    first = free_port(2)  # a port that the kernel does not assign to other programs
    message = rf"port {first + 1} is in use by process {os.getpid()} "
    with socket.create_server(("127.0.0.1", first + 1)), pytest.raises(LaunchError, match=message):
        scheduler.create_workers(server(port=first, count=2))
    assert scheduler.poll() == []
    assert not list(tmp_path.glob("logs/*"))


def test_free_port_stays_reserved_while_role_exists(scheduler: LocalScheduler) -> None:
    (worker,) = scheduler.create_workers(JobSpec("slow-to-listen", python(SLEEP), needs_port=True))
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(300)]
    ports = {listener.getsockname()[1] for listener in sockets}
    for listener in sockets:
        listener.close()
    assert worker.port not in ports


def test_gpus_workers_see_own_and_ranks_see_all_of_role(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_scheduler, "visible_gpus", lambda _: ["0", "1", "2", "3"])
    with LocalScheduler(tmp_path / "logs") as scheduler:
        servers = environments(scheduler, tmp_path, JobSpec("server", (), count=2, gpus=1))
        ranks = environments(scheduler, tmp_path, JobSpec("actor", (), count=2, gpus=1, spmd=True))
        (none,) = environments(scheduler, tmp_path, JobSpec("cpu", ()))
        (own,) = environments(scheduler, tmp_path, JobSpec("own", (), gpus=1, env={"CUDA_VISIBLE_DEVICES": "0"}))
        with pytest.raises(LaunchError, match="needs 1 GPUs, but 0 of this machine's 4 are free"):
            scheduler.create_workers(JobSpec("more", python(SLEEP), gpus=1))
        scheduler.delete_workers("server")
        (again,) = environments(scheduler, tmp_path, JobSpec("more", (), gpus=1))
        scheduler.delete_workers()
        pairs = environments(scheduler, tmp_path, JobSpec("pair", (), count=2, gpus=2))
    seen = [environment["CUDA_VISIBLE_DEVICES"] for environment in (*servers, *ranks, none, own, again)]
    assert seen == ["0", "1", "2,3", "2,3", "", "0", "0"]
    seen_by_pairs = [environment["CUDA_VISIBLE_DEVICES"].split(",") for environment in pairs]
    assert [len(gpus) for gpus in seen_by_pairs] == [2, 2]
    assert sorted(gpu for gpus in seen_by_pairs for gpu in gpus) == ["0", "1", "2", "3"]


def test_gpus_colocated_role_shares_gpus_and_releases_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_scheduler, "visible_gpus", lambda _: ["2", "3"])
    with LocalScheduler(tmp_path / "logs") as scheduler:
        servers = environments(scheduler, tmp_path, JobSpec("server", (), count=2, gpus=1))
        ranks = environments(
            scheduler, tmp_path, JobSpec("actor", (), count=2, gpus=1, spmd=True, colocated_with="server")
        )
        scheduler.delete_workers("actor")
        with pytest.raises(LaunchError, match="needs 1 GPUs, but 0 of this machine's 2 are free"):
            scheduler.create_workers(JobSpec("more", python(SLEEP), gpus=1))
        with pytest.raises(ConfigError, match=r"colocated_with: .*\['server'\].*'unknown'"):
            scheduler.create_workers(JobSpec("lost", python(SLEEP), gpus=1, colocated_with="unknown"))

    assert [environment["CUDA_VISIBLE_DEVICES"] for environment in (*servers, *ranks)] == ["2", "3", "2,3", "2,3"]


@pytest.mark.parametrize(
    ("spec", "word"),
    [
        (JobSpec("a/b", python(SLEEP)), "role"),
        (JobSpec("role", ()), "command"),
        (JobSpec("role", python(SLEEP), count=0), "count"),
        (JobSpec("role", python(SLEEP), port=65535, count=2), "port"),
        (JobSpec("role", python(SLEEP), ready_path="health"), "ready_path"),
        (JobSpec("role", python(SLEEP), ready_path="/", ready_timeout=0), "ready_timeout"),
        (JobSpec("role", python(SLEEP, "{port}")), "needs_port"),
    ],
)
def test_create_workers_invalid_spec_raises(scheduler: LocalScheduler, spec: JobSpec, word: str) -> None:
    with pytest.raises(ConfigError, match=word):
        scheduler.create_workers(spec)
    assert scheduler.poll() == []


def test_create_workers_without_file_descriptor_raises(
    scheduler: LocalScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr("rl_launchers.local.resources.socket.socket", fail)

    with pytest.raises(LaunchError, match=r"role .rollout. cannot be started: .*Too many open files"):
        scheduler.create_workers(JobSpec("rollout", [sys.executable, "-c", "0"], port=40001))


def test_create_workers_unwritable_log_raises(tmp_path: Path) -> None:
    (tmp_path / "logs").write_text("a file where the directory should be")
    with LocalScheduler(tmp_path / "logs") as scheduler, pytest.raises(LaunchError, match="role"):
        scheduler.create_workers(JobSpec("role", python(SLEEP)))


def test_logs_of_earlier_run_are_kept_but_not_returned(tmp_path: Path) -> None:
    for text in ("first run", "second run"):
        with LocalScheduler(tmp_path) as scheduler:
            scheduler.create_workers(JobSpec("role", python(f"print({text!r})")))
            (worker,) = wait_for_end(scheduler, "role")
            assert scheduler.logs(worker) == text
    assert worker.log.read_text() == "first run\nsecond run\n"


def test_delete_workers_kills_descendants_and_orphans(scheduler: LocalScheduler, tmp_path: Path) -> None:
    pid_file = tmp_path / "pids"
    (worker,) = scheduler.create_workers(JobSpec("role", python(FAMILY, str(pid_file))))
    wait_until(pid_file.exists)
    pids = [worker.pid or 0, *map(int, pid_file.read_text().split())]
    assert len(pids) == 4
    program = "import subprocess, sys; print(subprocess.Popen([sys.executable, '-c', sys.argv[1]]).pid)"
    scheduler.create_workers(JobSpec("ended", python(program, SLEEP)))
    (ended,) = wait_for_end(scheduler, "ended")
    pids.append(int(scheduler.logs(ended)))
    assert not any(is_gone(pid) for pid in pids)

    scheduler.delete_workers()

    assert all(is_gone(pid) for pid in pids)


def test_delete_workers_interrupted_can_be_repeated(scheduler: LocalScheduler, tmp_path: Path) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    started = tmp_path / "started"
    (worker,) = scheduler.create_workers(JobSpec("role", python(IGNORE_TERMINATE, str(started)), needs_port=True))
    wait_until(started.exists)
    previous = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.3)
    with pytest.raises(KeyboardInterrupt):
        scheduler.delete_workers(grace=60)
    signal.signal(signal.SIGALRM, previous)

    scheduler.delete_workers(grace=0)

    assert is_gone(worker.pid or 0)
    assert scheduler.poll() == []


def test_exit_after_error_leaves_no_process_and_no_port(tmp_path: Path) -> None:
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    workers = []

    def fail() -> None:
        with LocalScheduler(tmp_path) as scheduler:
            scheduler.create_workers(server())
            workers.extend(scheduler.wait_ready("server"))
            raise RuntimeError("injected")

    with pytest.raises(RuntimeError, match="injected"):
        fail()
    assert {child.pid for child in psutil.Process().children(recursive=True)} <= before  # zombies included
    assert not listens(workers[0])


def test_workers_outlive_thread_that_started_them(scheduler: LocalScheduler) -> None:
    thread = threading.Thread(target=scheduler.create_workers, args=(server(),))
    thread.start()
    thread.join()
    (worker,) = scheduler.wait_ready("server")
    assert listens(worker)
    assert worker.exit_code is None


def test_ended_at_orders_ends_seen_by_one_poll(scheduler: LocalScheduler, tmp_path: Path) -> None:
    file = tmp_path / "first-ended"
    (second,) = scheduler.create_workers(JobSpec("second", python(FOLLOWER, str(file))))
    (first,) = scheduler.create_workers(JobSpec("first", python(f"open({str(file)!r}, 'w'); import os; os._exit(9)")))
    wait_until(lambda: is_gone(first.pid or 0) and is_gone(second.pid or 0))
    wait_for_end(scheduler, "first")
    wait_for_end(scheduler, "second")
    assert first.ended_at is not None
    assert second.ended_at is not None
    assert first.ended_at < second.ended_at


def test_worker_stopped_before_ready_is_killed_before_deadline(
    scheduler: LocalScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "STOPPED_SECONDS", 0.5)
    (worker,) = scheduler.create_workers(server(delay=600.0))
    os.kill(worker.pid or 0, signal.SIGSTOP)

    with pytest.raises(LaunchError, match=r"server-0 was stopped by a signal for 0\.5 s before") as caught:
        scheduler.wait_ready("server")
    assert "out of memory" not in str(caught.value)


def test_worker_stopped_briefly_before_ready_becomes_ready(
    scheduler: LocalScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "STOPPED_SECONDS", 30.0)
    (worker,) = scheduler.create_workers(server())
    os.kill(worker.pid or 0, signal.SIGSTOP)
    threading.Timer(0.7, os.kill, (worker.pid, signal.SIGCONT)).start()

    (worker,) = scheduler.wait_ready("server")

    assert listens(worker)
