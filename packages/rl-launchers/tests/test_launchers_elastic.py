"""Servers are added to a run and taken away from it, by names in its directory."""

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
from rl_launchers import Launcher, LauncherConfig, LocalScheduler, LocalSchedulerConfig, Resume, RunControl
from rl_launchers.supervise.server_scaling import ServerScaler

WAITS = """
import pathlib, sys, time
while not pathlib.Path(sys.argv[1]).exists():
    time.sleep(0.02)
"""
"""A trainer that is done when a file is there."""


@pytest.fixture
def scheduler(tmp_path: Path) -> Iterator[LocalScheduler]:
    with LocalScheduler(tmp_path / "logs") as scheduler:
        yield scheduler


class Asker:
    """Asks for one number of servers after the other, and ends the run when all are answered."""

    def __init__(self, directory: Path, *wanted: str, role: str = "rollout") -> None:
        self.names, self.done, self.role = FileNames(directory / "names"), directory / "done", role
        self.wanted, self.answers, self.published = list(wanted), list[dict[str, Any]](), list[dict[str, str]]()
        self.workers: list[Worker] = []
        self._waits = False

    def trainers(self, servers: list[Worker]) -> list[JobSpec]:
        return [JobSpec("actor", python(WAITS, str(self.done)))]

    def tick(self, workers: list[Worker]) -> None:
        self.workers = list(workers)
        if "actor" not in {worker.role for worker in workers}:
            return
        answer = read_json(self.names, f"answers/scale/{self.role}")
        if self._waits and answer and answer["done"]:
            self.answers.append(answer)
            self.published.append(self.names.children("servers"))
            self._waits = False
        elif not self._waits and self.wanted:
            self.names.delete(f"answers/scale/{self.role}")
            self.names.add(f"control/scale/{self.role}", self.wanted.pop(0), replace=True)
            self._waits = True
        elif not self._waits:
            self.done.touch()

    def run(self, scheduler: LocalScheduler, servers: list[JobSpec], **settings: Any) -> int:
        config = LauncherConfig(**{"drain_seconds": 0.2, "health_interval": 0.1} | settings)  # type: ignore[arg-type]
        with RunControl(self.names, beat=0.1) as control:
            return Launcher(scheduler, config, control=control).run(servers, self.trainers, on_tick=self.tick)


def test_scale_up_and_down_starts_names_and_ends_the_last_servers(scheduler: LocalScheduler, tmp_path: Path) -> None:
    asker, seen = Asker(tmp_path, "3", "1"), dict[str, Worker]()

    def note(ask: Callable[[list[Worker]], None], workers: list[Worker]) -> None:
        seen.update({worker.name: worker for worker in workers})
        ask(workers)

    ask = asker.tick
    asker.tick = lambda workers: note(ask, workers)  # type: ignore[method-assign]
    assert asker.run(scheduler, [server("rollout", delay=0.2)]) == 0

    up, down = asker.answers
    assert (up["right"], up["text"]) == (True, "3 servers, all of them ready")
    assert (down["right"], down["text"]) == (True, "1 servers; rollout-1, rollout-2 ended")
    addresses = {f"servers/rollout/{index}": seen[f"rollout-{index}"].address for index in range(3)}
    assert asker.published == [addresses, {"servers/rollout/0": addresses["servers/rollout/0"]}]
    assert asker.names.children("servers") == {}
    assert not any(listens(worker) for worker in seen.values() if worker.role == "rollout")


def test_scale_fixed_port_gives_the_next_ports(scheduler: LocalScheduler, tmp_path: Path, free_ports: int) -> None:
    asker = Asker(tmp_path, "2")
    assert asker.run(scheduler, [server("rollout", port=free_ports)]) == 0
    assert [worker.port for worker in asker.workers if worker.role == "rollout"] == [free_ports, free_ports + 1]


@pytest.fixture
def free_ports() -> int:
    """The first of two free ports."""
    return free_port(2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("wanted", "expected"),
    [("0", "1 to 1,000, found '0'"), ("-1", "found '-1'"), ("many", "found 'many'"), ("1000000", "found '1000000'")],
)
def test_scale_number_that_cannot_be_is_refused(
    scheduler: LocalScheduler, tmp_path: Path, wanted: str, expected: str
) -> None:
    asker = Asker(tmp_path, wanted)
    assert asker.run(scheduler, [server("rollout")]) == 0
    (answer,) = asker.answers
    assert not answer["right"]
    assert expected in answer["text"]


def test_scale_unknown_role_is_refused_with_those_that_there_are(scheduler: LocalScheduler, tmp_path: Path) -> None:
    asker = Asker(tmp_path, "2", role="actor")
    assert asker.run(scheduler, [server("rollout")]) == 0
    assert "no role 'actor' of servers in this run; there is rollout" in asker.answers[0]["text"]


def test_scale_beyond_what_there_is_is_refused_with_the_arithmetic(tmp_path: Path) -> None:
    asker = Asker(tmp_path, "4")
    config = LocalSchedulerConfig(gpus=["0", "1"])
    with LocalScheduler(tmp_path / "logs", config) as scheduler:
        assert asker.run(scheduler, [server("rollout", gpus=1)]) == 0
    (answer,) = asker.answers
    assert not answer["right"]
    assert "needs 3 gpus, but 1 of this machine's 2 are free" in answer["text"]
    assert answer["text"].endswith("first. 1 servers, all of them ready")
    assert list(asker.published[0]) == ["servers/rollout/0"]


def test_scale_to_many_servers_starts_few_between_two_looks(tmp_path: Path) -> None:
    spec, sizes = server("rollout"), [1]

    class Scheduler:
        def resize_workers(self, role: str, count: int, **_: Any) -> list[Worker]:
            sizes.append(count)
            return [Worker(role, index, "127.0.0.1", None, Path("log")) for index in range(count)]

    with RunControl(FileNames(tmp_path / "names"), beat=60) as control:
        elastic = ServerScaler(Scheduler(), control, [spec], 0.0, 0.0)  # type: ignore[arg-type]
        control._scales.put(("rollout", "20"))
        for _ in range(4):
            elastic.poll([Worker("rollout", i, "127.0.0.1", None, Path("log")) for i in range(sizes[-1])], [])

    assert sizes == [1, 9, 17, 20]


def test_scale_role_whose_devices_trainers_use_too_is_refused(tmp_path: Path) -> None:
    asker = Asker(tmp_path, "2")
    beside = JobSpec("actor", python(WAITS, str(asker.done)), colocated_with="rollout")
    asker.trainers = lambda servers: [beside]  # type: ignore[method-assign]
    with LocalScheduler(tmp_path / "logs", LocalSchedulerConfig(gpus=["0", "1"])) as scheduler:
        assert asker.run(scheduler, [server("rollout", gpus=1)]) == 0
    assert "shares its GPUs" in asker.answers[0]["text"]


@pytest.mark.slow
def test_scale_server_that_cannot_be_started_is_given_up_and_the_run_goes_on(
    scheduler: LocalScheduler, tmp_path: Path
) -> None:
    asker = Asker(tmp_path, "2")
    good = server("rollout")
    program = "import sys\nif sys.argv[4] != '0': raise SystemExit(5)\n" + good.command[2]
    spec = JobSpec(
        "rollout", (*good.command[:2], program, *good.command[3:], "{index}"), needs_port=True, ready_path="/health"
    )

    assert asker.run(scheduler, [spec], max_restarts=1) == 0

    (answer,) = asker.answers
    assert not answer["right"]
    assert "rollout-1 ended with exit code 5" in answer["text"]
    assert list(asker.published[0]) == ["servers/rollout/0"]


@pytest.mark.slow
def test_scale_number_outlives_a_restart_of_the_trainers(scheduler: LocalScheduler, tmp_path: Path) -> None:
    names, done = FileNames(tmp_path / "names"), tmp_path / "done"
    lives: list[list[str]] = []

    def trainers(servers: list[Worker]) -> list[JobSpec]:
        lives.append([worker.name for worker in servers])
        return [JobSpec("actor", python(SLEEP if len(lives) == 1 else "pass"))]

    def tick(workers: list[Worker]) -> None:
        actor = next((worker for worker in workers if worker.role == "actor"), None)
        if actor is None or len(lives) > 1 or done.exists():
            return
        answer = read_json(names, "answers/scale/rollout")
        if answer is None:
            names.add("control/scale/rollout", "2", replace=True)
        elif answer["done"]:
            done.touch()
            os.kill(actor.pid or 0, signal.SIGKILL)

    with RunControl(names, beat=0.1) as control:
        launcher = Launcher(scheduler, LauncherConfig(health_interval=0.1), control=control)
        code = launcher.run([server("rollout")], trainers, on_tick=tick, resume=Resume(lambda: (0, 0), lambda: 0))

    assert code == 0
    assert lives == [["rollout-0"], ["rollout-0", "rollout-1"]]


@pytest.mark.slow
def test_scale_server_that_does_not_end_is_asked_again_and_the_run_goes_on(
    scheduler: LocalScheduler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rl_launchers.supervise.server_scaling.RETRY_SECONDS", 0.2)
    refused, resize = list[int](), LocalScheduler.resize_workers

    def resize_workers(self: LocalScheduler, role: str, count: int, grace: float = 5.0) -> list[Worker]:
        if not refused:
            refused.append(count)
            raise LaunchError("planted: it outlived SIGKILL")
        return resize(self, role, count, grace)

    monkeypatch.setattr(LocalScheduler, "resize_workers", resize_workers)
    asker = Asker(tmp_path, "1")
    assert asker.run(scheduler, [server("rollout", count=2)]) == 0
    assert refused == [1]
    assert [(answer["count"], answer["right"]) for answer in asker.answers] == [("1", True)]
