"""Tests of scale requests, which add or remove servers during a run."""

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rl_contracts.conformance.scheduler import SLEEP, listens, python, server
from rl_contracts.errors import LaunchError
from rl_contracts.runtime.name_service import FileNames
from rl_contracts.runtime.run_files import read_json
from rl_contracts.scheduler import JobSpec, Worker
from rl_contracts.testing.processes import free_port
from rl_launchers import Launcher, LauncherConfig, LocalScheduler, Resume, RunControl
from rl_launchers.local import scheduler as local_scheduler
from rl_launchers.supervise import server_scaling
from rl_launchers.supervise.server_scaling import ServerScaler

WAITS = """
import pathlib, sys, time
while not pathlib.Path(sys.argv[1]).exists():
    time.sleep(0.02)
"""
"""Trainer that is done once a file exists."""


@pytest.fixture
def scheduler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalScheduler]:
    monkeypatch.setattr(server_scaling, "DRAIN_SECONDS", 0.2)
    with LocalScheduler(tmp_path / "logs") as scheduler:
        yield scheduler


class Requester:
    """Requests one number of servers after the other, and ends the run after the last reply."""

    def __init__(self, directory: Path, *counts: str, role: str = "rollout") -> None:
        self.names, self.done, self.role = FileNames(directory / "names"), directory / "done", role
        self.counts, self.replies, self.published = list(counts), list[dict[str, Any]](), list[dict[str, str]]()
        self.workers: list[Worker] = []
        self._waiting = False

    def trainers(self, servers: list[Worker]) -> list[JobSpec]:
        return [JobSpec("actor", python(WAITS, str(self.done)))]

    def tick(self, workers: list[Worker]) -> None:
        self.workers = list(workers)
        if "actor" not in {worker.role for worker in workers}:
            return
        reply = read_json(self.names, f"replies/scale/{self.role}")
        if self._waiting and reply and reply["done"]:
            self.replies.append(reply)
            self.published.append(self.names.children("servers"))
            self._waiting = False
        elif not self._waiting and self.counts:
            self.names.delete(f"replies/scale/{self.role}")
            self.names.add(f"control/scale/{self.role}", self.counts.pop(0), replace=True)
            self._waiting = True
        elif not self._waiting:
            self.done.touch()

    def run(self, scheduler: LocalScheduler, servers: list[JobSpec], **settings: Any) -> int:
        with RunControl(self.names, beat=0.1) as control:
            return Launcher(scheduler, LauncherConfig(**settings), control=control).run(
                servers, self.trainers, on_tick=self.tick
            )


def test_scale_up_then_down_starts_and_stops_last_servers(scheduler: LocalScheduler, tmp_path: Path) -> None:
    requester, workers_by_name = Requester(tmp_path, "3", "1"), dict[str, Worker]()

    def record(tick: Callable[[list[Worker]], None], workers: list[Worker]) -> None:
        workers_by_name.update({worker.name: worker for worker in workers})
        tick(workers)

    tick = requester.tick
    requester.tick = lambda workers: record(tick, workers)  # type: ignore[method-assign]
    assert requester.run(scheduler, [server("rollout", delay=0.2)]) == 0

    up, down = requester.replies
    assert (up["right"], up["text"]) == (True, "3 servers, all ready")
    assert (down["right"], down["text"]) == (True, "1 servers; stopped rollout-1, rollout-2")
    addresses = {f"servers/rollout/{index}": workers_by_name[f"rollout-{index}"].address for index in range(3)}
    assert requester.published == [addresses, {"servers/rollout/0": addresses["servers/rollout/0"]}]
    assert requester.names.children("servers") == {}
    assert not any(listens(worker) for worker in workers_by_name.values() if worker.role == "rollout")


def test_scale_with_fixed_port_uses_following_ports(scheduler: LocalScheduler, tmp_path: Path) -> None:
    requester, port = Requester(tmp_path, "2"), free_port(2)
    assert requester.run(scheduler, [server("rollout", port=port)]) == 0
    assert [worker.port for worker in requester.workers if worker.role == "rollout"] == [port, port + 1]


@pytest.mark.slow
def test_scale_invalid_number_is_rejected(scheduler: LocalScheduler, tmp_path: Path) -> None:
    counts = ["0", "-1", "many", "1000000"]
    requester = Requester(tmp_path, *counts)
    assert requester.run(scheduler, [server("rollout")]) == 0
    assert [reply["right"] for reply in requester.replies] == [False] * len(counts)
    for count, reply in zip(counts, requester.replies, strict=True):
        assert f"1 to 1,000, found '{count}'" in reply["text"]


def test_scale_unknown_role_is_rejected_with_server_roles(scheduler: LocalScheduler, tmp_path: Path) -> None:
    requester = Requester(tmp_path, "2", role="actor")
    assert requester.run(scheduler, [server("rollout")]) == 0
    assert "no server role 'actor'; its server roles: rollout" in requester.replies[0]["text"]


def test_scale_beyond_gpus_is_rejected_with_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_scheduler, "visible_gpus", lambda _: ["0", "1"])
    requester = Requester(tmp_path, "4")
    with LocalScheduler(tmp_path / "logs") as scheduler:
        assert requester.run(scheduler, [server("rollout", gpus=1)]) == 0
    (reply,) = requester.replies
    assert not reply["right"]
    assert "needs 3 GPUs, but 1 of this machine's 2 are free" in reply["text"]
    assert reply["text"].endswith("first. 1 servers, all ready")
    assert list(requester.published[0]) == ["servers/rollout/0"]


def test_scale_to_many_servers_starts_a_few_per_poll(tmp_path: Path) -> None:
    spec, sizes = server("rollout"), [1]

    class Scheduler:
        def resize_workers(self, role: str, count: int, **_: Any) -> list[Worker]:
            sizes.append(count)
            return [Worker(role, index, "127.0.0.1", None, Path("log")) for index in range(count)]

    with RunControl(FileNames(tmp_path / "names"), beat=60) as control:
        scaler = ServerScaler(Scheduler(), control, [spec], 0.0)  # type: ignore[arg-type]
        control._scales.put(("rollout", "20"))
        for _ in range(4):
            scaler.poll([Worker("rollout", i, "127.0.0.1", None, Path("log")) for i in range(sizes[-1])], [])

    assert sizes == [1, 9, 17, 20]


def test_scale_role_with_shared_devices_is_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_scheduler, "visible_gpus", lambda _: ["0", "1"])
    requester = Requester(tmp_path, "2")
    trainer = JobSpec("actor", python(WAITS, str(requester.done)), colocated_with="rollout")
    requester.trainers = lambda servers: [trainer]  # type: ignore[method-assign]
    with LocalScheduler(tmp_path / "logs") as scheduler:
        assert requester.run(scheduler, [server("rollout", gpus=1)]) == 0
    assert "shares its GPUs" in requester.replies[0]["text"]


@pytest.mark.slow
def test_scale_server_that_fails_to_start_is_given_up(scheduler: LocalScheduler, tmp_path: Path) -> None:
    requester = Requester(tmp_path, "2")
    base = server("rollout")
    program = "import sys\nif sys.argv[4] != '0': raise SystemExit(5)\n" + base.command[2]
    spec = JobSpec(
        "rollout", (*base.command[:2], program, *base.command[3:], "{index}"), needs_port=True, ready_path="/health"
    )

    assert requester.run(scheduler, [spec], max_restarts=1) == 0

    (reply,) = requester.replies
    assert not reply["right"]
    assert "rollout-1 ended with exit code 5" in reply["text"]
    assert list(requester.published[0]) == ["servers/rollout/0"]


@pytest.mark.slow
def test_scale_target_persists_across_run_restart(scheduler: LocalScheduler, tmp_path: Path) -> None:
    names, done = FileNames(tmp_path / "names"), tmp_path / "done"
    starts: list[list[str]] = []

    def trainers(servers: list[Worker]) -> list[JobSpec]:
        starts.append([worker.name for worker in servers])
        return [JobSpec("actor", python(SLEEP if len(starts) == 1 else "pass"))]

    def tick(workers: list[Worker]) -> None:
        actor = next((worker for worker in workers if worker.role == "actor"), None)
        if actor is None or len(starts) > 1 or done.exists():
            return
        reply = read_json(names, "replies/scale/rollout")
        if reply is None:
            names.add("control/scale/rollout", "2", replace=True)
        elif reply["done"]:
            done.touch()
            os.kill(actor.pid or 0, signal.SIGKILL)

    with RunControl(names, beat=0.1) as control:
        launcher = Launcher(scheduler, control=control)
        code = launcher.run([server("rollout")], trainers, on_tick=tick, resume=Resume(lambda: (0, 0), lambda: 0))

    assert code == 0
    assert starts == [["rollout-0"], ["rollout-0", "rollout-1"]]


@pytest.mark.slow
def test_scale_down_retries_server_that_does_not_stop(
    scheduler: LocalScheduler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rl_launchers.supervise.server_scaling.RETRY_SECONDS", 0.2)
    failed, resize = list[int](), LocalScheduler.resize_workers

    def resize_workers(self: LocalScheduler, role: str, count: int, grace: float = 5.0) -> list[Worker]:
        if not failed:
            failed.append(count)
            raise LaunchError("injected fault: a process outlived SIGKILL")
        return resize(self, role, count, grace)

    monkeypatch.setattr(LocalScheduler, "resize_workers", resize_workers)
    requester = Requester(tmp_path, "1")
    assert requester.run(scheduler, [server("rollout", count=2)]) == 0
    assert failed == [1]
    assert [(reply["count"], reply["right"]) for reply in requester.replies] == [("1", True)]
