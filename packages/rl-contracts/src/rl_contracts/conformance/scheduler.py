"""Conformance suite for schedulers. Subclass `SchedulerConformance` and override the `scheduler` fixture.

The workers are small Python programs that use only the standard library. If the workers run on other machines, these
machines must share a file system with the tests.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
import urllib.request
from pathlib import Path

import pytest

from rl_contracts.errors import ConfigError, LaunchError
from rl_contracts.scheduler import JobSpec, Scheduler, Worker, WorkerStatus
from rl_contracts.testing.processes import free_port
from rl_contracts.testing.waiting import wait_until

__all__ = ["SchedulerConformance"]

SERVER = """
import http.server, sys, time
delay, host, port = float(sys.argv[1]), sys.argv[2], int(sys.argv[3])
started = time.monotonic()
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if time.monotonic() > started + delay else 503)
        self.end_headers()
http.server.HTTPServer((host, port), Handler).serve_forever()
"""
"""Program of a web server that responds with 503 for some seconds, then with 200. Arguments: seconds, host, port."""

WRITE_ENVIRONMENT = """
import json, os, pathlib, sys
path = pathlib.Path(sys.argv[1])
path.with_suffix(".part").write_text(json.dumps([sys.argv[2:], dict(os.environ)]))
path.with_suffix(".part").rename(path)
"""
"""Program that writes its remaining arguments and its environment to the file named by its first argument, as JSON."""

IGNORE_TERMINATE = """
import pathlib, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
pathlib.Path(sys.argv[1]).touch()
time.sleep(600)
"""
"""Program that ignores SIGTERM, then creates the file named by its first argument."""

SLEEP = "import time; time.sleep(600)"
"""Program that runs for ten minutes."""


def python(source: str, *arguments: str) -> tuple[str, ...]:
    """Return the command that runs Python source code with the current interpreter."""
    return (sys.executable, "-c", source, *arguments)


def server(role: str = "server", delay: float = 0.0, **fields: object) -> JobSpec:
    """Return the spec of a role of small web servers that become ready after `delay` seconds."""
    command = python(SERVER, str(delay), "{host}", "{port}")
    return JobSpec(role, command, needs_port=True, ready_path="/health", **fields)  # type: ignore[arg-type]


def wait_for_end(scheduler: Scheduler, role: str) -> list[Worker]:
    """Poll the scheduler until all workers of a role have ended, and return them."""

    def ended() -> bool:
        scheduler.poll()
        return all(worker.exit_code is not None for worker in scheduler.get_workers(role))

    wait_until(ended)
    return scheduler.get_workers(role)


def listens(worker: Worker) -> bool:
    """Return whether a process accepts connections at the address of a worker."""
    with socket.socket() as probe:
        probe.settimeout(1.0)
        return worker.port is not None and probe.connect_ex((worker.host, worker.port)) == 0


WRITE_FILE = """
import pathlib, sys, time
pathlib.Path(sys.argv[1]).mkdir(exist_ok=True)
pathlib.Path(sys.argv[1], sys.argv[2]).touch()
time.sleep(600)
"""
"""Program that creates a file, named by its second argument, in the directory named by its first argument."""


class SchedulerConformance:
    """Tests of the `Scheduler` contract."""

    restarts_workers = True
    """True if the scheduler implements `restart_worker`, which the launcher uses to restart failed servers."""

    resizes_roles = True
    """True if the scheduler implements `resize_workers`, which adds and removes servers during a run."""

    @pytest.fixture
    def scheduler(self) -> Scheduler:
        """Scheduler without workers, whose workers are deleted after the test. Subclasses override it."""
        raise NotImplementedError("the `scheduler` fixture is not implemented: override it")

    def test_create_workers_ended_program_has_status_and_exit_code(self, scheduler: Scheduler) -> None:
        scheduler.create_workers(JobSpec("good", python("pass")))
        scheduler.create_workers(JobSpec("bad", python("raise SystemExit(3)")))

        (good,) = wait_for_end(scheduler, "good")
        (bad,) = wait_for_end(scheduler, "bad")

        assert (good.status, good.exit_code) == (WorkerStatus.DONE, 0)
        assert (bad.status, bad.exit_code) == (WorkerStatus.FAILED, 3)
        assert good.ended_at is not None
        assert abs(time.time() - good.ended_at) < 60

    def test_create_workers_removes_scratch_before_first_and_after_last_role(
        self, scheduler: Scheduler, tmp_path: Path
    ) -> None:
        scratch = tmp_path / "scratch"
        scratch.mkdir()
        (scratch / "stale").touch()
        for role in ("one", "two"):
            command = python(WRITE_FILE, str(scratch), role)
            scheduler.create_workers(JobSpec(role, command, scratch=(str(scratch),)))
            wait_until((scratch / role).exists)
        assert sorted(file.name for file in scratch.iterdir()) == ["one", "two"]
        assert len({worker.node for worker in scheduler.poll()}) == 1
        scheduler.delete_workers("one", grace=0.0)
        assert scratch.exists()
        scheduler.delete_workers("two", grace=0.0)
        assert not scratch.exists()

    def test_create_workers_fills_in_templates_for_each_worker(self, scheduler: Scheduler, tmp_path: Path) -> None:
        out = tmp_path / "worker-{index}.json"
        command = python(WRITE_ENVIRONMENT, str(out), "{host}:{port}", '{"kept": {}}')
        spec = JobSpec("role", command, count=2, needs_port=True, env={"ME": "{index}@{host}:{port}"})

        workers = scheduler.create_workers(spec)
        wait_for_end(scheduler, "role")

        assert len({worker.port for worker in workers}) == 2
        for worker in workers:
            arguments, environment = json.loads((tmp_path / f"worker-{worker.index}.json").read_text())
            assert arguments == [f"{worker.host}:{worker.port}", '{"kept": {}}']
            assert environment["ME"] == f"{worker.index}@{worker.host}:{worker.port}"

    def test_create_workers_spmd_role_sets_torchrun_variables(self, scheduler: Scheduler, tmp_path: Path) -> None:
        command = python(WRITE_ENVIRONMENT, str(tmp_path / "rank-{index}.json"))

        workers = scheduler.create_workers(JobSpec("actor", command, count=2, cpus=3, spmd=True))
        wait_for_end(scheduler, "actor")

        ranks = [json.loads((tmp_path / f"rank-{i}.json").read_text())[1] for i in range(2)]
        local = "1" if workers[0].node == workers[1].node else "0"
        assert [(r["RANK"], r["LOCAL_RANK"], r["WORLD_SIZE"]) for r in ranks] == [("0", "0", "2"), ("1", local, "2")]
        assert ranks[0]["MASTER_ADDR"] == ranks[1]["MASTER_ADDR"]
        assert int(ranks[0]["MASTER_PORT"]) == int(ranks[1]["MASTER_PORT"])

    def test_create_workers_existing_role_raises(self, scheduler: Scheduler) -> None:
        scheduler.create_workers(JobSpec("role", python(SLEEP)))
        with pytest.raises(LaunchError, match="role"):
            scheduler.create_workers(JobSpec("role", python(SLEEP)))

    def test_create_workers_unknown_program_raises_and_leaves_no_role(self, scheduler: Scheduler) -> None:
        with pytest.raises(LaunchError, match="no-such-program"):
            scheduler.create_workers(JobSpec("role", ("no-such-program",)))
        assert scheduler.get_workers("role") == []

    def test_create_workers_fixed_port_in_use_raises_and_names_it(self, scheduler: Scheduler, tmp_path: Path) -> None:
        with socket.create_server(
            ("", 0)
        ) as taken:  # bind to every address, since the worker may run on another machine
            port = taken.getsockname()[1]
            started = tmp_path / "started"
            spec = JobSpec("role", python(f"open({str(started)!r}, 'w')"), port=port)
            with pytest.raises(LaunchError, match=str(port)):
                scheduler.create_workers(spec)
        assert not started.exists()

    def test_logs_returns_last_lines_of_both_streams(self, scheduler: Scheduler) -> None:
        program = "import sys; [print('line', i) for i in range(50)]; sys.stdout.flush(); sys.stderr.write('oops\\n')"
        scheduler.create_workers(JobSpec("role", python(program)))

        (worker,) = wait_for_end(scheduler, "role")

        assert worker.log.name == "role-0.log"
        assert scheduler.logs(worker, lines=2).splitlines() == ["line 49", "oops"]

    def test_wait_ready_slow_server_returns_when_ready(self, scheduler: Scheduler) -> None:
        (worker,) = scheduler.create_workers(server(delay=2.0))
        assert worker.status is WorkerStatus.STARTING

        (ready,) = scheduler.wait_ready("server")

        assert ready.status is WorkerStatus.RUNNING
        with urllib.request.urlopen(f"{ready.address}/health", timeout=5) as response:
            assert response.status == 200

    def test_wait_ready_without_ready_path_returns_running_workers(self, scheduler: Scheduler) -> None:
        scheduler.create_workers(JobSpec("role", python(SLEEP), count=2))
        assert [worker.status for worker in scheduler.wait_ready("role")] == [WorkerStatus.RUNNING] * 2

    def test_wait_ready_ended_worker_raises_with_its_log(self, scheduler: Scheduler) -> None:
        scheduler.create_workers(JobSpec("role", python("raise ValueError('no weights')"), ready_path="/health"))
        with pytest.raises(LaunchError, match=r"(?s)role-0 .*exit code 1.*ValueError: no weights"):
            scheduler.wait_ready("role")

    def test_wait_ready_never_ready_raises_at_the_deadline(self, scheduler: Scheduler) -> None:
        started = time.monotonic()
        scheduler.create_workers(server(delay=600.0, ready_timeout=3.0))
        with pytest.raises(LaunchError, match=r"server-0 .*3 s"):
            scheduler.wait_ready("server")
        assert 3 <= time.monotonic() - started < 30

    def test_wait_ready_error_in_tick_ends_the_wait(self, scheduler: Scheduler) -> None:
        def tick() -> None:
            raise KeyboardInterrupt

        scheduler.create_workers(server(delay=600.0))
        with pytest.raises(KeyboardInterrupt):
            scheduler.wait_ready("server", tick=tick)

    def test_wait_ready_unknown_role_raises(self, scheduler: Scheduler) -> None:
        with pytest.raises(LaunchError, match="unknown"):
            scheduler.wait_ready("unknown")

    def test_get_workers_unknown_role_is_empty(self, scheduler: Scheduler) -> None:
        assert scheduler.get_workers("unknown") == []

    def test_delete_workers_of_one_role_keeps_other_roles(self, scheduler: Scheduler) -> None:
        scheduler.create_workers(server("one"))
        scheduler.create_workers(server("two"))
        (one,) = scheduler.wait_ready("one")
        (two,) = scheduler.wait_ready("two")

        scheduler.delete_workers("one")

        assert not listens(one)
        assert listens(two)
        assert [worker.name for worker in scheduler.poll()] == ["two-0"]

    def test_delete_workers_twice_or_unknown_role_does_nothing(self, scheduler: Scheduler) -> None:
        scheduler.create_workers(JobSpec("role", python(SLEEP)))
        scheduler.delete_workers("role")
        scheduler.delete_workers("role")
        scheduler.delete_workers("unknown")
        scheduler.delete_workers()
        assert scheduler.poll() == []

    def test_delete_workers_ends_plain_program_with_sigterm(self, scheduler: Scheduler, tmp_path: Path) -> None:
        print_mask = "import signal, sys; print(signal.pthread_sigmask(signal.SIG_BLOCK, [])); sys.stdout.flush(); "
        (worker,) = scheduler.create_workers(JobSpec("role", python(print_mask + SLEEP)))
        wait_until(lambda: "set()" in scheduler.logs(worker))
        scheduler.delete_workers("role", grace=60.0)
        assert worker.exit_code == -signal.SIGTERM

    def test_delete_workers_kills_worker_ignoring_sigterm_after_grace(
        self, scheduler: Scheduler, tmp_path: Path
    ) -> None:
        ignores_sigterm = tmp_path / "ignores-sigterm"
        (worker,) = scheduler.create_workers(JobSpec("role", python(IGNORE_TERMINATE, str(ignores_sigterm))))
        wait_until(ignores_sigterm.exists)

        started = time.monotonic()
        scheduler.delete_workers("role", grace=0.3)

        assert 0.3 <= time.monotonic() - started < 10
        assert worker.exit_code == -9

    def test_terminate_workers_sends_sigterm_without_waiting(self, scheduler: Scheduler, tmp_path: Path) -> None:
        if type(scheduler).terminate_workers is Scheduler.terminate_workers:
            pytest.skip("this scheduler implements terminate_workers by delete_workers, which waits")
        ignores_sigterm = tmp_path / "ignores-sigterm"
        scheduler.create_workers(JobSpec("stubborn", python(IGNORE_TERMINATE, str(ignores_sigterm))))
        (worker,) = scheduler.create_workers(JobSpec("role", python(SLEEP)))
        wait_until(ignores_sigterm.exists)

        for role in ("unknown", "stubborn", "role"):
            scheduler.terminate_workers(role)

        wait_until(lambda: worker in scheduler.poll() and worker.exit_code is not None)
        assert worker.exit_code == -signal.SIGTERM
        assert scheduler.get_workers("stubborn")[0].exit_code is None

    def test_create_workers_after_delete_reuses_role_and_port(self, scheduler: Scheduler) -> None:
        port = free_port()
        for _ in range(2):
            scheduler.create_workers(server(port=port))
            (worker,) = scheduler.wait_ready("server")
            assert worker.port == port
            scheduler.delete_workers()

    def test_restart_worker_killed_or_stopped_keeps_its_address(self, scheduler: Scheduler) -> None:
        if not self.restarts_workers:
            pytest.skip("this scheduler cannot restart a single worker")
        one, two = scheduler.create_workers(server(count=2))
        scheduler.wait_ready("server")

        for number, restarts in ((signal.SIGKILL, 1), (signal.SIGSTOP, 2)):
            os.kill(one.pid or 0, number)
            restarted = scheduler.restart_worker(one, "injected")
            assert (restarted.name, restarted.address, restarted.log, restarted.restarts) == (
                one.name,
                one.address,
                one.log,
                restarts,
            )
            assert restarted.pid != one.pid
            assert restarted.status is WorkerStatus.STARTING
            scheduler.wait_ready("server")
            assert listens(restarted)
            one = restarted

        assert [worker.pid for worker in scheduler.poll()] == [one.pid, two.pid]
        assert "injected" in one.log.read_text()
        scheduler.delete_workers()
        assert not listens(one)

    def test_restart_worker_unknown_raises(self, scheduler: Scheduler) -> None:
        with pytest.raises(LaunchError, match="unknown-0"):
            scheduler.restart_worker(Worker("unknown", 0, "127.0.0.1", None, Path("unknown-0.log")))

    def test_resize_workers_adds_workers_and_removes_the_last(self, scheduler: Scheduler) -> None:
        if not self.resizes_roles:
            pytest.skip("this scheduler cannot resize a role")
        (first,) = scheduler.create_workers(server())
        scheduler.wait_ready("server")

        workers = scheduler.resize_workers("server", 3)
        assert [worker.name for worker in workers] == ["server-0", "server-1", "server-2"]
        scheduler.wait_ready("server")
        assert len({worker.address for worker in workers}) == 3
        assert all(listens(worker) for worker in workers)

        assert [worker.name for worker in scheduler.resize_workers("server", 1, grace=0.0)] == ["server-0"]
        assert [worker.pid for worker in scheduler.poll()] == [first.pid]
        assert [listens(worker) for worker in workers] == [True, False, False]

    def test_resize_workers_spmd_role_zero_or_unknown_role_raises(self, scheduler: Scheduler) -> None:
        if not self.resizes_roles:
            pytest.skip("this scheduler cannot resize a role")
        scheduler.create_workers(JobSpec("ranks", python(SLEEP), spmd=True))
        scheduler.create_workers(JobSpec("role", python(SLEEP)))
        with pytest.raises(ConfigError, match="ranks"):
            scheduler.resize_workers("ranks", 2)
        with pytest.raises(ConfigError, match="at least 1"):
            scheduler.resize_workers("role", 0)
        with pytest.raises(LaunchError, match="unknown"):
            scheduler.resize_workers("unknown", 2)
        assert [worker.name for worker in scheduler.poll()] == ["ranks-0", "role-0"]
