"""The scheduler of several machines, with real agents in processes of this one."""

from __future__ import annotations

import os
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from multiprocessing.connection import Client
from pathlib import Path

import psutil
import pytest

from rl_contracts.conformance.scheduler import (
    SLEEP,
    WRITE_ENVIRONMENT,
    SchedulerConformance,
    listens,
    python,
    server,
    wait_for_end,
)
from rl_contracts.errors import LaunchError
from rl_contracts.scheduler import RUN_KEY_VARIABLE, JobSpec, WorkerStatus
from rl_contracts.testing.waiting import wait_until
from rl_launchers.cluster.scheduler import ClusterScheduler, ClusterSchedulerConfig
from rl_launchers.testing import MachinesOfTests

pytestmark = pytest.mark.slow


@pytest.fixture
def machines() -> MachinesOfTests:
    return MachinesOfTests()


@pytest.fixture
def scheduler(tmp_path: Path, machines: MachinesOfTests) -> Iterator[ClusterScheduler]:
    made = ClusterScheduler(tmp_path / "logs", ClusterSchedulerConfig(), machines)
    yield made
    made.delete_workers(grace=0.0)
    assert all(agent.poll() is not None for agent in machines.agents.values())


class TestClusterScheduler(SchedulerConformance):
    @pytest.fixture
    def scheduler(self, scheduler: ClusterScheduler) -> ClusterScheduler:
        return scheduler


def test_create_workers_ranks_meet_over_machines(scheduler: ClusterScheduler, tmp_path: Path) -> None:
    import json

    command = python(WRITE_ENVIRONMENT, str(tmp_path / "rank-{index}.json"))
    workers = scheduler.create_workers(JobSpec("actor", command, count=4, spmd=True))
    assert [worker.node for worker in workers] == ["node0", "node0", "node1", "node1"]
    wait_for_end(scheduler, "actor")
    ranks = [json.loads((tmp_path / f"rank-{i}.json").read_text())[1] for i in range(4)]
    assert [(r["RANK"], r["LOCAL_RANK"], r["LOCAL_WORLD_SIZE"], r["WORLD_SIZE"]) for r in ranks] == [
        ("0", "0", "2", "4"),
        ("1", "1", "2", "4"),
        ("2", "0", "2", "4"),
        ("3", "1", "2", "4"),
    ]
    assert len({(r["MASTER_ADDR"], r["MASTER_PORT"]) for r in ranks}) == 1


def test_machine_is_lost_its_workers_fail_and_come_back_elsewhere(
    scheduler: ClusterScheduler, machines: MachinesOfTests
) -> None:
    one, two = scheduler.create_workers(server(count=2, cpus=2))
    scheduler.wait_ready("server")
    assert [one.node, two.node] == ["node0", "node1"]

    machines.kill("node1")
    wait_until(lambda: [w.status for w in scheduler.poll()] == [WorkerStatus.RUNNING, WorkerStatus.FAILED])
    wait_until(lambda: not listens(two))  # its process may be slower to die than the agent
    assert "lost with node node1" in two.cause

    again = scheduler.restart_worker(two, "planted")
    assert (again.name, again.node, again.restarts) == ("server-1", "node0", 1)
    scheduler.wait_ready("server")
    assert listens(one)
    assert listens(again)
    assert "elsewhere: planted" in again.log.read_text()


def test_machine_is_lost_a_new_one_takes_its_ranks(scheduler: ClusterScheduler, machines: MachinesOfTests) -> None:
    from rl_contracts.scheduler import Node

    machines.there = [Node("node0", "127.0.0.1", 2, 2), Node("node1", "127.0.0.1", 2, 2)]
    scheduler.create_workers(
        JobSpec("actor", python(SLEEP), count=4, gpus=1, spmd=True, env={"CUDA_VISIBLE_DEVICES": ""})
    )
    machines.kill("node0")
    wait_until(lambda: WorkerStatus.FAILED in {worker.status for worker in scheduler.poll()})
    scheduler.delete_workers("actor", grace=0.0)
    spec = JobSpec("actor", python(SLEEP), count=4, gpus=1, spmd=True, env={"CUDA_VISIBLE_DEVICES": ""})
    with pytest.raises(LaunchError, match=r"room for 4 workers of 1 GPUs.*free are 2 \(node1 2\)"):
        _keep_open(scheduler).create_workers(spec)
    machines.there.append(Node("node2", "127.0.0.1", 2, 2))
    workers = scheduler.create_workers(spec)
    assert {worker.node for worker in workers} == {"node1", "node2"}


def test_machine_is_lost_and_still_offered_a_spare_one_begins_in_its_place(
    scheduler: ClusterScheduler, machines: MachinesOfTests
) -> None:
    from rl_contracts.scheduler import Node

    machines.there.append(Node("node2", "127.0.0.1", 2, 0))
    machines.spares = 1
    spec = JobSpec("role", python(SLEEP), count=2, cpus=2)
    assert {worker.node for worker in scheduler.create_workers(spec)} == {"node0", "node1"}
    offered = machines.there
    machines.kill("node1")
    machines.there = offered  # as by a controller that takes minutes to find out
    wait_until(lambda: WorkerStatus.FAILED in {worker.status for worker in scheduler.poll()})
    scheduler.delete_workers(grace=0.0)

    again = scheduler.create_workers(spec)

    assert {worker.node for worker in again} == {"node0", "node2"}
    scheduler.delete_workers(grace=0.0)
    machines.there = [node for node in offered if node.name != "node1"]  # now it has found out
    assert {worker.node for worker in scheduler.create_workers(spec)} == {"node0", "node2"}


@pytest.mark.nightly
@pytest.mark.parametrize("well", [True, False])
def test_machine_is_lost_and_none_stands_in_it_is_tried_again_and_else_the_scheduler_is_told(
    tmp_path: Path, well: bool
) -> None:
    class Failing(MachinesOfTests):
        lost, told, named = False, "", ()

        def start(self, node, command, env, log):  # type: ignore[no-untyped-def]
            broken = self.lost and node.name == "node1"
            super().start(node, ["false"] if broken else command, env, log)

        def lacking(self, lost, why):  # type: ignore[no-untyped-def]
            self.named, self.told = lost, why

    machines = Failing()
    with ClusterScheduler(tmp_path / "logs", ClusterSchedulerConfig(), machines) as scheduler:
        spec = JobSpec("role", python(SLEEP), count=2, cpus=2)
        scheduler.create_workers(spec)
        offered = machines.there
        machines.kill("node1")
        machines.there, machines.lost = offered, not well
        wait_until(lambda: WorkerStatus.FAILED in {worker.status for worker in scheduler.poll()})
        scheduler.delete_workers(grace=0.0)

        again = scheduler.create_workers(spec)

        assert {worker.node for worker in again} == ({"node0", "node1"} if well else {"node0"})
        assert ("node1" in machines.told) is not well
        assert list(machines.named) == ([] if well else ["node1"])


def _keep_open(scheduler: ClusterScheduler) -> ClusterScheduler:
    """With a role that stays, so that the agents do too."""
    if not scheduler.get_workers("stays"):
        scheduler.create_workers(JobSpec("stays", python(SLEEP)))
    return scheduler


@pytest.mark.nightly
def test_machine_that_is_frozen_is_lost_after_the_timeout(tmp_path: Path, machines: MachinesOfTests) -> None:
    config = ClusterSchedulerConfig(heartbeat_timeout=3.0)
    with ClusterScheduler(tmp_path / "logs", config, machines) as scheduler:
        one, two = scheduler.create_workers(server(count=2, cpus=2))
        scheduler.wait_ready("server")
        os.kill(machines.agents[two.node].pid, signal.SIGSTOP)
        wait_until(lambda: scheduler.poll()[1].status is WorkerStatus.FAILED)
        assert "said nothing for 3 s" in two.cause
        assert one.status is WorkerStatus.RUNNING
        os.kill(machines.agents[two.node].pid, signal.SIGCONT)
        wait_until(lambda: not listens(two))  # it ends what it has, for the launcher is gone to it


def test_launcher_is_killed_nothing_is_left(tmp_path: Path) -> None:
    program = f"""
import sys, time
from pathlib import Path
from rl_contracts.conformance.scheduler import server
from rl_launchers.cluster.scheduler import ClusterScheduler, ClusterSchedulerConfig
from rl_launchers.testing import MachinesOfTests
scheduler = ClusterScheduler(Path({str(tmp_path)!r}) / "logs", ClusterSchedulerConfig(), MachinesOfTests())
scheduler.create_workers(server(count=2, cpus=2))
for worker in scheduler.wait_ready("server"):
    print(worker.pid, flush=True)
time.sleep(600)
"""
    launcher = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert launcher.stdout is not None
    pids = [int(launcher.stdout.readline()) for _ in range(2)]
    agents = [
        child for child in psutil.Process(launcher.pid).children(recursive=True) if "agent" in str(child.cmdline())
    ]
    launcher.kill()
    launcher.wait()
    wait_until(lambda: not any(map(psutil.pid_exists, pids)))
    wait_until(lambda: not any(agent.is_running() and agent.status() != "zombie" for agent in agents))


def test_run_key_lies_in_a_file_of_the_users_alone(
    scheduler: ClusterScheduler, machines: MachinesOfTests, tmp_path: Path
) -> None:
    key, out = "a-very-secret-key", tmp_path / "environment.json"
    scheduler.create_workers(JobSpec("role", python(WRITE_ENVIRONMENT, str(out)), env={RUN_KEY_VARIABLE: key}))
    (secrets,) = (tmp_path / "logs").glob(".agents-*")
    assert stat.S_IMODE(secrets.stat().st_mode) == 0o600
    wait_for_end(scheduler, "role")
    assert key in out.read_text()  # the worker has it
    assert not any(key in part for command in machines.commands for part in command)
    assert not any(key in log.read_text() for log in (tmp_path / "logs").glob("*.log"))
    for agent in machines.agents.values():
        assert key not in " ".join(psutil.Process(agent.pid).environ().values())
    scheduler.delete_workers()
    assert not secrets.exists()


def test_callers_that_do_not_know_the_secret_are_refused_and_hold_up_nobody(scheduler: ClusterScheduler) -> None:
    from multiprocessing import AuthenticationError

    scheduler.create_workers(JobSpec("first", python(SLEEP)))
    assert scheduler._agents is not None
    host, _, port = scheduler._agents._address.rpartition(":")
    silent = [socket.create_connection((host, int(port))) for _ in range(20)]
    with pytest.raises((AuthenticationError, EOFError, OSError)):
        Client((host, int(port)), authkey=b"wrong")
    for peer in silent:
        peer.sendall(b"\xff\xff\xff\x7f")  # promises two gigabytes
    began = time.monotonic()
    scheduler.create_workers(JobSpec("second", python(SLEEP)))
    assert time.monotonic() - began < 9
    assert [worker.status for worker in scheduler.poll()] == [WorkerStatus.RUNNING] * 2
    for peer in silent:
        peer.close()


def test_agent_that_cannot_start_is_told_with_its_log(tmp_path: Path) -> None:
    class Broken(MachinesOfTests):
        def start(self, node, command, env, log):  # type: ignore[no-untyped-def]
            super().start(node, ["sh", "-c", "echo no python here; exit 3"], env, log)

    scheduler = ClusterScheduler(tmp_path / "logs", ClusterSchedulerConfig(), Broken())
    with pytest.raises(
        LaunchError, match=r"(?s)node node\d \(127.0.0.1\): its agent ended with exit code 3.*no python"
    ):
        scheduler.create_workers(JobSpec("role", python(SLEEP)))
    assert scheduler.poll() == []
