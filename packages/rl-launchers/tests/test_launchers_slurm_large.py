"""A Slurm of up to 256 nodes, simulated: real scheduler code, its commands replaced by a recorder, its agents by
threads. What the launcher does of it is measured as CPU of its own threads; left out are the questions to servers
whether they are well (`ServerHealth`: threads, and a request to each every `health_interval`), and progress."""

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
from rl_launchers.cluster.messages import connect_to_launcher
from rl_launchers.cluster.placement import Ledger
from rl_launchers.slurm.commands import Commands
from rl_launchers.slurm.scheduler import SlurmNodes
from rl_launchers.supervise.heartbeat import Heartbeats

SIZES, EACH = (64, 128, 256), 8
PER_POLL, LARGEST_FILE = 2.0, 1_000_000
LINEAR = 2.5
"""Times the cost per node of the smallest cluster, at most."""


class Simulated(Commands):
    """Answers `scontrol` for an allocation of many nodes, and is the agent wherever `srun` would start one."""

    def __init__(self, nodes):
        self.asked, self.started = [], []
        self.names = [f"n{index}" for index in range(nodes)]

    def output(self, *command, env=None):
        self.asked.append(command)
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
    """Says what an agent would say; its workers run until they are removed."""

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
            given = order["with"]
            answer = {"answer": order["id"], "workers": [], "result": None}
            if order["do"] == "add":
                answer["workers"] = [self._state(given["spec"]["role"], index) for index in given["indices"]]
            elif order["do"] == "meet":
                answer["result"] = 29500
            else:
                answer["result"] = [
                    self._state(given["role"], i) | {"status": "done", "exit_code": 0} for i in given["indices"]
                ]
            wire.send(answer)
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
    """Seconds of the launcher's CPU."""

    plan: float
    start: float
    """Of both roles, with what the thread does meanwhile that hears the agents."""
    poll: float
    """The dearest of five."""
    hear: float
    """What that thread does in a second."""
    names: float
    """Of a look at the names: all servers' addresses, as they were, and the signs of life of all trainers, which are
    read every few seconds."""


@contextmanager
def no_old_garbage():
    """A block whose garbage collections leave out what other tests have left in this process."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _measure(nodes, directory):
    """What so many nodes with eight workers each cost; on the way, that the workers are where they should be."""
    slurm, half = Simulated(nodes), nodes * EACH // 2
    config = SlurmSchedulerConfig(heartbeat_timeout=600.0, start_timeout=600.0)
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
        began, heard = time.monotonic(), time.clock_gettime(clock)
        wait_until(lambda: time.monotonic() > began + 3 and "workers" in names.children())
        hear = (time.clock_gettime(clock) - heard) / (time.monotonic() - began)

        addresses, pulses = {f"{w.role}/{w.index}": w.address for w in servers}, Heartbeats(names)
        control.publish(addresses)
        for worker in trainers:
            names.add(f"pulse/{worker.name}", "1")
        pulses.timeout = 90.0
        looks = []
        for _ in range(3):
            pulses._last = 0.0
            before = time.thread_time()
            control.publish(addresses)
            pulses.read()
            looks.append(time.thread_time() - before)
        look = min(looks)
        assert len(names.children("servers")) == len(pulses._seen) == half

        assert len(slurm.started) == nodes
        assert len(slurm.asked) <= 9  # not one a node
        largest = max(file.stat().st_size for file in directory.rglob("*") if file.is_file())
        assert 10_000 < largest < LARGEST_FILE
    assert not [file for file in directory.rglob("*") if "agents-" in file.name]
    return Cost(plan, start, max(polls), hear, look), largest


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_launcher_of_2048_workers_on_256_nodes_does_little_and_what_it_does_grows_linearly(
    tmp_path, monkeypatch, record_property
):
    monkeypatch.setenv("SLURM_JOB_ID", "1")
    monkeypatch.setenv("SLURMD_NODENAME", "n0")
    costs = {}
    for nodes in SIZES:
        with no_old_garbage():
            costs[nodes], largest = _measure(nodes, tmp_path / str(nodes))
        said = {name: round(value, 5) for name, value in asdict(costs[nodes]).items()} | {"largest_file": largest}
        record_property(f"nodes_{nodes}", json.dumps(said))
        print(f"\n{nodes} nodes, {nodes * EACH} workers: {said}")

    last = costs[SIZES[-1]]
    assert last.poll + last.hear + last.names < PER_POLL
    for part in ("plan", "start", "poll", "hear", "names"):
        small, large = (getattr(costs[nodes], part) / nodes for nodes in (SIZES[0], SIZES[-1]))
        assert large < LINEAR * small or large * SIZES[-1] < 0.05, f"{part}: {small:.6f} and {large:.6f} s per node"
