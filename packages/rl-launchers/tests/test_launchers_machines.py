"""Workers on machines that are lost, become available, or do not start."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import psutil
import pytest

from rl_contracts.conformance.scheduler import SLEEP, listens, python, server
from rl_contracts.errors import LaunchError
from rl_contracts.scheduler import JobSpec, Node, Worker, WorkerStatus
from rl_contracts.testing.waiting import wait_until
from rl_launchers.cluster.scheduler import ClusterScheduler, ClusterSchedulerConfig
from rl_launchers.supervise.launcher import Launcher, LauncherConfig
from rl_launchers.supervise.run_restarts import Resume
from rl_launchers.testing import LocalNodes

pytestmark = pytest.mark.slow

SILENT = """
import socket, sys, time
listener = socket.create_server((sys.argv[1], int(sys.argv[2])), backlog=200)
time.sleep(600)
"""
"""A server that accepts connections but never answers."""

HIDDEN = {"CUDA_VISIBLE_DEVICES": ""}


class Machines(LocalNodes):
    """Machines on which a shell command can delay or prevent the start of the agent."""

    def __init__(self) -> None:
        super().__init__(3)
        self.before: dict[str, str] = {}
        """Shell command to run before the agent, by machine."""
        self.started: list[str] = []

    def start(self, node: Node, command: Sequence[str], env: Mapping[str, str], log: Path) -> None:
        self.started.append(node.name)
        if before := self.before.get(node.name):
            command = ["sh", "-c", f'{before}; exec "$@"', "sh", *command]
        super().start(node, command, env, log)


@pytest.fixture
def machines() -> Iterator[Machines]:
    cluster_machines = Machines()
    yield cluster_machines
    cluster_machines.close()


@pytest.fixture
def config() -> ClusterSchedulerConfig:
    return ClusterSchedulerConfig()


@pytest.fixture
def scheduler(tmp_path: Path, machines: Machines, config: ClusterSchedulerConfig) -> Iterator[ClusterScheduler]:
    with ClusterScheduler(tmp_path / "logs", config, machines) as cluster_scheduler:
        yield cluster_scheduler


def statuses(scheduler: ClusterScheduler) -> list[WorkerStatus]:
    return [worker.status for worker in scheduler.poll()]


def lose(scheduler: ClusterScheduler, machines: Machines, name: str) -> list[Worker]:
    """Kill a machine, wait for the detection of its loss, and return its workers."""
    machines.kill(name)
    wait_until(lambda: all(w.status is WorkerStatus.FAILED for w in scheduler.poll() if w.node == name))
    return [worker for worker in scheduler.poll() if worker.node == name]


@pytest.mark.nightly
def test_machine_lost_during_start_of_spare_is_detected(scheduler: ClusterScheduler, machines: Machines) -> None:
    machines.spares, machines.before = 1, {"node2": "sleep 2"}
    scheduler.create_workers(JobSpec("role", python(SLEEP), count=2, cpus=2))
    (lost,) = lose(scheduler, machines, "node1")
    threading.Timer(0.5, machines.kill, ["node0"]).start()
    assert scheduler.restart_worker(lost).node == "node2"
    wait_until(lambda: statuses(scheduler) == [WorkerStatus.FAILED, WorkerStatus.RUNNING])
    scheduler.delete_workers(grace=0.0)


@pytest.mark.nightly
def test_restart_worker_failed_on_another_machine_can_be_retried(
    scheduler: ClusterScheduler, machines: Machines, tmp_path: Path
) -> None:
    program, moved = tmp_path / "program", tmp_path / "moved"
    program.write_text("#!/bin/sh\nexec sleep 600\n")
    program.chmod(0o755)
    machines.available = machines.available[:2]
    scheduler.create_workers(JobSpec("role", (str(program),), count=2, cpus=2, needs_port=True))
    (lost,) = lose(scheduler, machines, "node1")
    free = scheduler._ledger._free["node0"].cores
    program.rename(moved)
    with pytest.raises(LaunchError, match="no program"):
        scheduler.restart_worker(lost)
    assert statuses(scheduler) == [WorkerStatus.RUNNING, WorkerStatus.FAILED]
    assert scheduler._ledger._free["node0"].cores == free
    moved.rename(program)
    again = scheduler.restart_worker(scheduler.poll()[1])
    assert (again.node, again.status, again.restarts) == ("node0", WorkerStatus.RUNNING, 1)
    assert again.port


@pytest.mark.nightly
def test_new_machine_fails_to_start_other_new_machine_is_used(scheduler: ClusterScheduler, machines: Machines) -> None:
    machines.available = [Node(f"node{index}", "127.0.0.1", 2, 1) for index in range(3)]
    later, machines.available = machines.available[1:], machines.available[:1]
    machines.before["node2"] = "exit 4"
    spec = JobSpec("a", python(SLEEP), gpus=1, env=HIDDEN)
    scheduler.create_workers(spec)
    machines.available += later
    (worker,) = scheduler.create_workers(JobSpec("b", python(SLEEP), gpus=1, env=HIDDEN))
    assert worker.node == "node1"
    with pytest.raises(LaunchError, match=r"0 GPUs are free \(node0 0, node1 0\)"):
        scheduler.create_workers(JobSpec("c", python(SLEEP), gpus=1, env=HIDDEN))
    assert sorted(machines.started) == ["node0", "node1", "node2"]


def test_returned_machine_has_all_resources_free(scheduler: ClusterScheduler, machines: Machines) -> None:
    machines.available = [Node("node0", "127.0.0.1", 2, 1), back := Node("node1", "127.0.0.1", 2, 1)]
    scheduler.create_workers(JobSpec("a", python(SLEEP), count=2, gpus=1, env=HIDDEN))
    lose(scheduler, machines, "node1")
    spec = JobSpec("b", python(SLEEP), gpus=1, env=HIDDEN)
    with pytest.raises(LaunchError, match="0 GPUs are free"):
        scheduler.create_workers(spec)
    machines.available.append(back)
    (worker,) = scheduler.create_workers(spec)
    assert worker.node == "node1"
    scheduler.delete_workers("a", grace=0.0)  # one of them was on node1 before the loss
    with pytest.raises(LaunchError, match=r"1 GPUs are free \(node0 1, node1 0\)"):
        scheduler.create_workers(JobSpec("c", python(SLEEP), count=2, gpus=1, env=HIDDEN))


def test_run_continues_after_loss_of_machine_with_two_servers(scheduler: ClusterScheduler, machines: Machines) -> None:
    machines.spares, killed = 1, list[str]()
    machines.available = [Node(f"node{index}", "127.0.0.1", 4) for index in range(3)]
    done = Path(scheduler._log_dir).parent / "done"
    wait = "import os, sys, time\nwhile not os.path.exists(sys.argv[1]): time.sleep(0.05)"
    launcher = Launcher(scheduler, LauncherConfig(), 0)

    def tick(workers: list[Worker]) -> None:
        if launcher._ready and not killed:
            killed.append(next(worker.node for worker in workers if worker.node != workers[-1].node))
            machines.kill(killed[0])
        if killed and all(w.status is WorkerStatus.RUNNING and w.node != killed[0] for w in workers):
            done.touch()

    trainers = [JobSpec("actor", python(wait, str(done)), spmd=True)]
    assert launcher.run([server(count=4, cpus=2)], lambda _: trainers, on_tick=tick) == 0


@pytest.mark.nightly
@pytest.mark.parametrize("recovers", [True, False])
def test_run_loses_machine_of_single_server_resumes_or_requeues(
    scheduler: ClusterScheduler, machines: Machines, monkeypatch: pytest.MonkeyPatch, recovers: bool
) -> None:
    """The cluster still offers the lost machine, because it would detect the loss minutes later."""
    offered = machines.available = [Node(f"node{index}", "127.0.0.1", 2, 1) for index in range(2)]
    reported, resumed, done = list[str](), list[int](), Path(scheduler._log_dir).parent / "done"

    def requeue(lost: list[str], why: str) -> None:  # like the requeue of a Slurm job
        reported.extend(lost)
        os.kill(os.getpid(), signal.SIGTERM)
        raise LaunchError(why)

    def prepare() -> int:
        resumed.append(2)
        return 2

    def tick(workers: list[Worker]) -> None:
        if launcher._ready and not resumed:
            machines.kill("node0")
            machines.available, machines.before = offered, {} if recovers else {"node0": "exit 4"}
        if launcher._ready and resumed:
            done.touch()

    monkeypatch.setattr(machines, "on_nodes_lost", requeue)
    launcher = Launcher(scheduler, LauncherConfig(), 0)
    wait = "import os, sys, time\nwhile not os.path.exists(sys.argv[1]): time.sleep(0.05)"
    trainers = [JobSpec("actor", python(wait, str(done)), gpus=1, spmd=True, env=HIDDEN)]
    servers = [server(gpus=1, env=HIDDEN)]
    code = launcher.run(servers, lambda _: trainers, on_tick=tick, resume=Resume(lambda: (3, 2), prepare))

    assert (code, reported) == ((0, []) if recovers else (143, ["node0"]))


@pytest.mark.nightly
def test_delete_workers_is_not_delayed_by_unresponsive_servers(
    tmp_path: Path, machines: Machines, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rl_launchers.cluster.node_agents.HEARTBEAT_TIMEOUT", 3.0)
    machines.available = machines.available[:1]
    with ClusterScheduler(tmp_path / "logs", ClusterSchedulerConfig(), machines) as scheduler:
        command = python(SILENT, "{host}", "{port}")
        workers = scheduler.create_workers(JobSpec("server", command, count=5, ready_path="/health", ready_timeout=600))
        wait_until(lambda: all(map(listens, workers)))
        until = time.monotonic() + 5.0  # longer than the heartbeat timeout
        wait_until(lambda: bool(scheduler.poll()) and time.monotonic() > until)
        assert statuses(scheduler) == [WorkerStatus.STARTING] * 5
        began = time.monotonic()
        scheduler.delete_workers(grace=0.0)
        assert time.monotonic() - began < 5.0


def test_signal_during_start_of_agents_ends_run_immediately(scheduler: ClusterScheduler, machines: Machines) -> None:
    machines.before = dict.fromkeys(("node0", "node1", "node2"), "sleep 60")
    threading.Timer(2, os.kill, [os.getpid(), signal.SIGTERM]).start()
    began = time.monotonic()
    code = Launcher(scheduler, LauncherConfig(), 0).run([], lambda _: [JobSpec("actor", python(SLEEP), spmd=True)])
    assert code == 143
    assert time.monotonic() - began < 30


def test_agent_does_not_ignore_stop_signals_of_its_workers(scheduler: ClusterScheduler, machines: Machines) -> None:
    scheduler.create_workers(JobSpec("role", python(SLEEP)))
    status = Path(f"/proc/{machines.agents['node0'].pid}/status").read_text()
    ignored = int(status.partition("SigIgn:")[2].split()[0], 16)  # child processes inherit ignored signals
    assert not any(ignored >> (number - 1) & 1 for number in (signal.SIGTERM, signal.SIGINT))


@pytest.mark.nightly
def test_delete_workers_times_out_on_one_machine_all_agents_end(
    scheduler: ClusterScheduler, machines: Machines, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    workers = scheduler.create_workers(JobSpec("role", python(SLEEP), count=2, cpus=2))
    monkeypatch.setattr("rl_launchers.cluster.scheduler.ORDER_SECONDS", 0.5)
    os.kill(machines.agents["node0"].pid, signal.SIGSTOP)
    with pytest.raises(LaunchError, match=r"node0.*0\.5 s"):
        scheduler.delete_workers(grace=0.0)
    assert scheduler.poll() == []
    assert not list((tmp_path / "logs").glob(".agents-*"))
    assert workers[1].pid is not None
    assert not psutil.pid_exists(workers[1].pid)


def test_cluster_request_bounds_machines_cores_and_gpus(
    scheduler: ClusterScheduler, machines: Machines, config: ClusterSchedulerConfig
) -> None:
    machines.available = [Node(f"node{index}", "127.0.0.1", 8, 8) for index in range(3)]
    config.use_cluster(nodes=1, cores=2, gpus=2)
    for role in ("rollout", "actor"):
        (worker,) = scheduler.create_workers(JobSpec(role, python(SLEEP), gpus=1, env=HIDDEN))
        assert worker.node == "node0"
    with pytest.raises(LaunchError, match=r"0 GPUs are free \(node0 0\)"):
        scheduler.resize_workers("rollout", 2)
    assert machines.started == ["node0"]
    lose(scheduler, machines, "node0")
    scheduler.delete_workers(grace=0.0)
    (worker,) = scheduler.create_workers(JobSpec("actor", python(SLEEP), gpus=1, env=HIDDEN))
    assert worker.node == "node1"


def test_roles_with_shared_scratch_stay_on_one_machine(scheduler: ClusterScheduler, machines: Machines) -> None:
    machines.available = [Node(f"node{index}", "127.0.0.1", 8, 2) for index in range(2)]
    shared = ("/nonexistent/weights",)
    for role in ("rollout", "actor"):
        (worker,) = scheduler.create_workers(JobSpec(role, python(SLEEP), gpus=1, env=HIDDEN, scratch=shared))
        assert worker.node == "node0"
    with pytest.raises(LaunchError, match=r"0 GPUs are free \(node0 0\)"):
        scheduler.resize_workers("rollout", 2)
    (other,) = scheduler.create_workers(JobSpec("other", python(SLEEP), gpus=1, env=HIDDEN))
    assert other.node == "node1"
