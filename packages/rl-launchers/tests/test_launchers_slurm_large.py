"""CPU cost of the launcher on a simulated Slurm cluster of up to 256 nodes.

The scheduler code is real. A recorder replaces Slurm's commands, and threads replace the node agents. The measurement
covers the launcher's threads, but not the health checks of servers (`ServerHealth`) and the progress display.
"""

import gc
import json
import os
import threading
import time
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import pytest

from rl_contracts.runtime.name_service import FileNames
from rl_contracts.scheduler import JobSpec, WorkerStatus
from rl_contracts.testing.waiting import wait_until
from rl_launchers import RunControl, SlurmScheduler, SlurmSchedulerConfig
from rl_launchers.cluster import node_agents
from rl_launchers.cluster.messages import connect_to_launcher
from rl_launchers.cluster.placement import Ledger
from rl_launchers.slurm.commands import Commands
from rl_launchers.slurm.scheduler import SlurmNodes
from rl_launchers.supervise.heartbeat import Heartbeats

SIZES, EACH = (64, 128, 256), 8
PER_POLL, LARGEST_FILE = 2.0, 1_000_000
LINEAR = 2.5
"""Maximum ratio of the cost per node between the largest and the smallest cluster."""


class Simulated(Commands):
    """Replies to `scontrol` for an allocation of many nodes, and starts simulated agents in place of `srun`."""

    def __init__(self, nodes):
        self.calls, self.started = [], []
        self.names = [f"n{index}" for index in range(nodes)]

    def output(self, *command, env=None):
        self.calls.append(command)
        if command[:3] == ("scontrol", "show", "job"):
            return (
                f"JobId=1 JobState=RUNNING Requeue=1 BatchFlag=1 BatchHost=n0 NodeList=n[0-{len(self.names) - 1}]   "
                f"Nodes=n[0-{len(self.names) - 1}] CPU_IDs=0-63 Mem=0 GRES=gpu:{EACH}(IDX:0-{EACH - 1})\n"
            )
        if command[:3] == ("scontrol", "show", "node"):
            return "\n".join(f"NodeName={name} NodeAddr=127.0.0.1 State=ALLOCATED Weight=1" for name in self.names)
        return "\n".join(self.names)

    def start(self, command, env, log):
        self.started.append(command)
        agent = SimulatedAgent(command[command.index("rl_launchers.cluster.node_agent") + 1 :])
        agent.start()
        return agent


class SimulatedAgent(threading.Thread):
    """Sends the messages of a node agent whose workers run until they are removed."""

    def __init__(self, arguments):
        super().__init__(daemon=True)
        self.launcher, self.node, _, self.logs, self.secrets = arguments

    def poll(self):
        return None if self.is_alive() else 0

    def send_signal(self, number):
        pass

    def wait(self, timeout=None):
        self.join(timeout)

    def kill(self):
        pass

    def leave(self):
        pass

    def run(self):
        secrets = json.loads(Path(self.secrets).read_text())
        host, _, port = self.launcher.rpartition(":")
        wire = connect_to_launcher(host, int(port), bytes.fromhex(secrets["agents"]))
        wire.send({"hello": self.node, "pid": os.getpid()})
        while (order := wire.receive())["do"] != "end":
            if order["do"] == "nothing":
                wire.send({})
                continue
            arguments = order["with"]
            reply = {"answer": order["id"], "workers": [], "result": None}
            if order["do"] == "add":
                reply["workers"] = [self._state(arguments["spec"]["role"], index) for index in arguments["indices"]]
            elif order["do"] == "meet":
                reply["result"] = 29500
            else:
                reply["result"] = [
                    self._state(arguments["role"], i) | {"status": "done", "exit_code": 0} for i in arguments["indices"]
                ]
            wire.send(reply)
        wire.close()

    def _state(self, role, index):
        log = f"{self.logs}/{role}-{index}.log"
        where = {"host": "127.0.0.1", "port": 8000, "log": log, "pid": 1, "ended_at": None, "restarts": 0}
        return {
            "role": role,
            "index": index,
            "status": "running",
            "exit_code": None,
            "cause": "",
            "log_start": 0,
            "last_answer": "",
            **where,
        }


@dataclass
class Cost:
    """CPU seconds of the launcher."""

    plan: float
    start: float
    """Start of both roles, including the thread that receives the agents' messages."""
    poll: float
    """Maximum of five polls."""
    receive: float
    """Cost of the receiving thread per second."""
    names: float
    """Cost of one update of the name service: unchanged addresses of all servers, and heartbeats of all trainers, which
    are read every few seconds."""


@contextmanager
def no_old_garbage():
    """Exclude objects of earlier tests from garbage collection within the block."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _measure(nodes, directory):
    """Return the cost of a run on `nodes` nodes with eight workers each; check also the placement of the workers."""
    slurm, half = Simulated(nodes), nodes * EACH // 2
    config = SlurmSchedulerConfig()
    serve = JobSpec("rollout", ("serve",), half, gpus=1, cpus=8)
    train = JobSpec("actor", ("train",), half, gpus=1, cpus=8, spmd=True)
    before = time.thread_time()
    ledger = Ledger(SlurmNodes(config, slurm).nodes())
    planned = [ledger.allocate(role, role.count) for role in (serve, train)]
    plan = time.thread_time() - before

    names = FileNames(directory / "names")
    with SlurmScheduler(directory / "logs", config, slurm) as scheduler, RunControl(names, beat=0.05) as control:
        before = time.thread_time()
        servers, trainers = scheduler.create_workers(serve), scheduler.create_workers(train)
        (listener,) = (thread for thread in threading.enumerate() if thread.name == "agents-listen")
        clock = time.pthread_getcpuclockid(listener.ident)
        start = time.thread_time() - before + time.clock_gettime(clock)
        assert [[worker.node for worker in role] for role in (servers, trainers)] == planned
        assert len({worker.node for worker in (*servers, *trainers)}) == nodes
        assert {worker.node for worker in servers}.isdisjoint(worker.node for worker in trainers)

        polls = []
        for _ in range(5):
            before = time.thread_time()
            workers = scheduler.poll()
            polls.append(time.thread_time() - before)
        assert [worker.status for worker in workers] == [WorkerStatus.RUNNING] * nodes * EACH
        control.show(workers)
        began, cpu_before = time.monotonic(), time.clock_gettime(clock)
        wait_until(lambda: time.monotonic() > began + 3 and "workers" in names.children())
        receive = (time.clock_gettime(clock) - cpu_before) / (time.monotonic() - began)

        addresses, heartbeats = {f"{w.role}/{w.index}": w.address for w in servers}, Heartbeats(names)
        control.publish(addresses)
        for worker in trainers:
            names.add(f"heartbeat/{worker.name}", "1")
        heartbeats.timeout = 90.0
        names_costs = []
        for _ in range(3):
            heartbeats._last = 0.0
            before = time.thread_time()
            control.publish(addresses)
            heartbeats.read()
            names_costs.append(time.thread_time() - before)
        names_cost = min(names_costs)
        assert len(names.children("servers")) == len(heartbeats._seen) == half

        assert len(slurm.started) == nodes
        assert len(slurm.calls) <= 9  # not one per node
        largest = max(file.stat().st_size for file in directory.rglob("*") if file.is_file())
        assert 10_000 < largest < LARGEST_FILE
    assert not [file for file in directory.rglob("*") if "agents-" in file.name]
    return Cost(plan, start, max(polls), receive, names_cost), largest


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_launcher_cpu_cost_is_low_and_linear_up_to_256_nodes(tmp_path, monkeypatch, record_property):
    monkeypatch.setenv("SLURM_JOB_ID", "1")
    monkeypatch.setenv("SLURMD_NODENAME", "n0")
    # the threads of hundreds of simulated agents share one interpreter
    monkeypatch.setattr(node_agents, "HEARTBEAT_TIMEOUT", 600.0)
    monkeypatch.setattr(SlurmNodes, "start_seconds", 600.0)
    costs = {}
    for nodes in SIZES:
        with no_old_garbage():
            costs[nodes], largest = _measure(nodes, tmp_path / str(nodes))
        metrics = {name: round(value, 5) for name, value in asdict(costs[nodes]).items()} | {"largest_file": largest}
        record_property(f"nodes_{nodes}", json.dumps(metrics))
        print(f"\n{nodes} nodes, {nodes * EACH} workers: {metrics}")

    last = costs[SIZES[-1]]
    assert last.poll + last.receive + last.names < PER_POLL
    for name in ("plan", "start", "poll", "receive", "names"):
        small, large = (getattr(costs[nodes], name) / nodes for nodes in (SIZES[0], SIZES[-1]))
        assert large < LINEAR * small or large * SIZES[-1] < 0.05, f"{name}: {small:.6f} and {large:.6f} s per node"
