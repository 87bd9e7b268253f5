"""A Slurm of 256 nodes, simulated: real scheduler code, its commands replaced by a recorder, its agents by threads."""

import json
import os
import threading
import time
from pathlib import Path

import pytest

from rl_contracts.scheduler import JobSpec, WorkerStatus
from rl_launchers import SlurmScheduler, SlurmSchedulerConfig
from rl_launchers.slurm_commands import Commands
from rl_launchers.wire import called

NODES, EACH = 256, 8


class Simulated(Commands):
    """Answers `scontrol` for an allocation of many nodes, and is the agent wherever `srun` would start one."""

    def __init__(self):
        self.asked, self.started = [], []
        self.names = [f"n{index}" for index in range(NODES)]

    def output(self, *command, env=None):
        self.asked.append(command)
        if command[:3] == ("scontrol", "show", "job"):
            return (
                f"JobId=1 JobState=RUNNING Requeue=1 BatchFlag=1 BatchHost=n0 NodeList=n[0-{NODES - 1}]   "
                f"Nodes=n[0-{NODES - 1}] CPU_IDs=0-63 Mem=0 GRES=gpu:{EACH}(IDX:0-{EACH - 1})\n"
            )
        if command[:3] == ("scontrol", "show", "node"):
            return "\n".join(f"NodeName={name} NodeAddr=127.0.0.1 State=ALLOCATED Weight=1" for name in self.names)
        return "\n".join(self.names)

    def start(self, command, env, log):
        self.started.append(command)
        agent = SimulatedAgent(command[command.index("rl_launchers.agent") + 1 :])
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

    def run(self):
        secrets = json.loads(Path(self.secrets).read_text())
        host, _, port = self.launcher.rpartition(":")
        wire = called(host, int(port), bytes.fromhex(secrets["agents"]))
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
            "log_start": 0,
            "last_answer": "",
            **where,
        }


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_scheduler_2048_workers_on_256_nodes_cost_little_to_plan_start_and_poll(tmp_path, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "1")
    monkeypatch.setenv("SLURMD_NODENAME", "n0")
    slurm = Simulated()
    config = SlurmSchedulerConfig(heartbeat_timeout=600.0, start_timeout=600.0)
    with SlurmScheduler(tmp_path, config, slurm) as scheduler:
        half = NODES * EACH // 2
        servers = scheduler.create_workers(JobSpec("rollout", ("serve",), half, gpus=1, cpus=8))
        trainers = scheduler.create_workers(JobSpec("actor", ("train",), half, gpus=1, cpus=8, spmd=True))

        assert len({worker.node for worker in (*servers, *trainers)}) == NODES
        assert {worker.node for worker in servers}.isdisjoint(worker.node for worker in trainers)
        costs = []
        for _ in range(5):
            before = time.thread_time()
            workers = scheduler.poll()
            costs.append(time.thread_time() - before)
        assert [worker.status for worker in workers] == [WorkerStatus.RUNNING] * NODES * EACH
        print(f"\npoll of {len(workers)} workers: {max(costs):.4f} s of CPU")
        assert max(costs) < 2.0
        assert len(slurm.started) == NODES
        assert len(slurm.asked) <= 6  # not one a node
        assert max((file.stat().st_size for file in tmp_path.rglob("*") if file.is_file()), default=0) < 1_000_000
    assert not [file for file in tmp_path.rglob("*") if "agents-" in file.name]
