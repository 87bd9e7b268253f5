"""Scheduler for several machines, with real agents as child processes on this machine."""

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
from rl_launchers.testing import LocalNodes

pytestmark = pytest.mark.slow


@pytest.fixture
def machines() -> LocalNodes:
    return LocalNodes()


@pytest.fixture
def scheduler(tmp_path: Path, machines: LocalNodes) -> Iterator[ClusterScheduler]:
    cluster_scheduler = ClusterScheduler(tmp_path / "logs", ClusterSchedulerConfig(), machines)
    yield cluster_scheduler
    cluster_scheduler.delete_workers(grace=0.0)
    assert all(agent.poll() is not None for agent in machines.agents.values())


class TestClusterScheduler(SchedulerConformance):
    @pytest.fixture
    def scheduler(self, scheduler: ClusterScheduler) -> ClusterScheduler:
        return scheduler


def test_create_workers_ranks_on_two_machines_share_master_address(scheduler: ClusterScheduler, tmp_path: Path) -> None:
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


def test_machine_lost_its_workers_fail_and_restart_on_another(
    scheduler: ClusterScheduler, machines: LocalNodes
) -> None:
    one, two = scheduler.create_workers(server(count=2, cpus=2))
    scheduler.wait_ready("server")
    assert [one.node, two.node] == ["node0", "node1"]

    machines.kill("node1")
    wait_until(lambda: [w.status for w in scheduler.poll()] == [WorkerStatus.RUNNING, WorkerStatus.FAILED])
    wait_until(lambda: not listens(two))  # the worker may end later than its agent
    assert "lost with node node1" in two.cause

    again = scheduler.restart_worker(two, "injected")
    assert (again.name, again.node, again.restarts) == ("server-1", "node0", 1)
    scheduler.wait_ready("server")
    assert listens(one)
    assert listens(again)
    assert "on another machine: injected" in again.log.read_text()


def test_machine_lost_but_still_offered_is_replaced_by_spare(scheduler: ClusterScheduler, machines: LocalNodes) -> None:
    from rl_contracts.scheduler import Node

    machines.available.append(Node("node2", "127.0.0.1", 2, 0))
    machines.spares = 1
    spec = JobSpec("role", python(SLEEP), count=2, cpus=2)
    assert {worker.node for worker in scheduler.create_workers(spec)} == {"node0", "node1"}
    offered = machines.available
    machines.kill("node1")
    machines.available = offered  # like a cluster that detects the loss minutes later
    wait_until(lambda: WorkerStatus.FAILED in {worker.status for worker in scheduler.poll()})
    scheduler.delete_workers(grace=0.0)

    again = scheduler.create_workers(spec)

    assert {worker.node for worker in again} == {"node0", "node2"}
    scheduler.delete_workers(grace=0.0)
    machines.available = [node for node in offered if node.name != "node1"]  # now the cluster has detected the loss
    assert {worker.node for worker in scheduler.create_workers(spec)} == {"node0", "node2"}


@pytest.mark.nightly
@pytest.mark.parametrize("recovers", [True, False])
def test_machine_lost_without_spare_is_retried_then_reported(tmp_path: Path, recovers: bool) -> None:
    class FailingMachines(LocalNodes):
        is_broken, reason, reported = False, "", ()

        def start(self, node, command, env, log):  # type: ignore[no-untyped-def]
            broken = self.is_broken and node.name == "node1"
            super().start(node, ["false"] if broken else command, env, log)

        def on_nodes_lost(self, lost, why):  # type: ignore[no-untyped-def]
            self.reported, self.reason = lost, why

    machines = FailingMachines()
    with ClusterScheduler(tmp_path / "logs", ClusterSchedulerConfig(), machines) as scheduler:
        spec = JobSpec("role", python(SLEEP), count=2, cpus=2)
        scheduler.create_workers(spec)
        offered = machines.available
        machines.kill("node1")
        machines.available, machines.is_broken = offered, not recovers
        wait_until(lambda: WorkerStatus.FAILED in {worker.status for worker in scheduler.poll()})
        scheduler.delete_workers(grace=0.0)

        again = scheduler.create_workers(spec)

        assert {worker.node for worker in again} == ({"node0", "node1"} if recovers else {"node0"})
        assert ("node1" in machines.reason) is not recovers
        assert list(machines.reported) == ([] if recovers else ["node1"])


@pytest.mark.nightly
def test_machine_frozen_is_lost_after_heartbeat_timeout(
    tmp_path: Path, machines: LocalNodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rl_launchers.cluster.node_agents.HEARTBEAT_TIMEOUT", 3.0)
    with ClusterScheduler(tmp_path / "logs", ClusterSchedulerConfig(), machines) as scheduler:
        one, two = scheduler.create_workers(server(count=2, cpus=2))
        scheduler.wait_ready("server")
        os.kill(machines.agents[two.node].pid, signal.SIGSTOP)
        wait_until(lambda: scheduler.poll()[1].status is WorkerStatus.FAILED)
        assert "sent no message for 3 s" in two.cause
        assert one.status is WorkerStatus.RUNNING
        os.kill(machines.agents[two.node].pid, signal.SIGCONT)
        wait_until(lambda: not listens(two))  # the agent got no messages for too long, so it stops its worker


def test_launcher_killed_leaves_no_processes(tmp_path: Path) -> None:
    program = f"""
import sys, time
from pathlib import Path
from rl_contracts.conformance.scheduler import server
from rl_launchers.cluster.scheduler import ClusterScheduler, ClusterSchedulerConfig
from rl_launchers.testing import LocalNodes
scheduler = ClusterScheduler(Path({str(tmp_path)!r}) / "logs", ClusterSchedulerConfig(), LocalNodes())
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


def test_run_key_is_in_a_file_that_only_the_user_can_read(
    scheduler: ClusterScheduler, machines: LocalNodes, tmp_path: Path
) -> None:
    key, out = "a-very-secret-key", tmp_path / "environment.json"
    scheduler.create_workers(JobSpec("role", python(WRITE_ENVIRONMENT, str(out)), env={RUN_KEY_VARIABLE: key}))
    (secrets,) = (tmp_path / "logs").glob(".agents-*")
    assert stat.S_IMODE(secrets.stat().st_mode) == 0o600
    wait_for_end(scheduler, "role")
    assert key in out.read_text()  # only the worker gets it
    assert not any(key in part for command in machines.commands for part in command)
    assert not any(key in log.read_text() for log in (tmp_path / "logs").glob("*.log"))
    for agent in machines.agents.values():
        assert key not in " ".join(psutil.Process(agent.pid).environ().values())
    scheduler.delete_workers()
    assert not secrets.exists()


def test_connections_without_secret_are_rejected_without_delay(scheduler: ClusterScheduler) -> None:
    from multiprocessing import AuthenticationError

    scheduler.create_workers(JobSpec("first", python(SLEEP)))
    assert scheduler._agents is not None
    host, _, port = scheduler._agents._address.rpartition(":")
    silent = [socket.create_connection((host, int(port))) for _ in range(20)]
    with pytest.raises((AuthenticationError, EOFError, OSError)):
        Client((host, int(port)), authkey=b"wrong")
    for peer in silent:
        peer.sendall(b"\xff\xff\xff\x7f")  # announces a message of two gigabytes
    began = time.monotonic()
    scheduler.create_workers(JobSpec("second", python(SLEEP)))
    assert time.monotonic() - began < 9
    assert [worker.status for worker in scheduler.poll()] == [WorkerStatus.RUNNING] * 2
    for peer in silent:
        peer.close()


def test_agent_start_failure_error_shows_its_log(tmp_path: Path) -> None:
    class Broken(LocalNodes):
        def start(self, node, command, env, log):  # type: ignore[no-untyped-def]
            super().start(node, ["sh", "-c", "echo no python here; exit 3"], env, log)

    scheduler = ClusterScheduler(tmp_path / "logs", ClusterSchedulerConfig(), Broken())
    with pytest.raises(
        LaunchError, match=r"(?s)node node\d \(127.0.0.1\): its agent ended with exit code 3.*no python"
    ):
        scheduler.create_workers(JobSpec("role", python(SLEEP)))
    assert scheduler.poll() == []
