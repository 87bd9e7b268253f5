"""The Slurm scheduler in real allocations of the four-node cluster: the conformance suite, and lost nodes."""

import os
import sys
import time
from contextlib import contextmanager

import pytest
from slurm_cluster import slurm

from rl_contracts.conformance.scheduler import SchedulerConformance
from rl_contracts.scheduler import JobSpec, WorkerStatus
from rl_launchers import SlurmScheduler, SlurmSchedulerConfig

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
SLEEP = (sys.executable, "-c", "import time; time.sleep(600)")


@pytest.fixture(scope="module")
def cluster():
    with slurm(lost_after=8) as running:
        yield running


@contextmanager
def allocation(cluster, *options):
    """Allocate a job without a script, with this process in the role of the batch script."""
    cluster.run("salloc", "--no-shell", "--exclusive", "--no-kill", "-Q", "-J", "test", *options)
    job = min(cluster.run("squeue", "-h", "-t", "RUNNING", "-o", "%A").split(), key=int)  # id of the first component
    os.environ["SLURM_JOB_ID"] = job
    try:
        yield job
    finally:
        del os.environ["SLURM_JOB_ID"]
        cluster.run("scancel", job)
        _wait_until(lambda: cluster.run("squeue", "-h") == "")


def _wait_until(condition, seconds=120.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"still waiting after {seconds:g} s"
        time.sleep(0.1)


@pytest.fixture(scope="class")
def two_nodes(cluster):
    with allocation(cluster, "-N2") as job:
        yield job


class TestSlurmScheduler(SchedulerConformance):
    @pytest.fixture
    def scheduler(self, tmp_path, two_nodes):
        with SlurmScheduler(tmp_path / "logs", SlurmSchedulerConfig()) as scheduler:
            yield scheduler


def test_scheduler_worker_of_a_lost_node_restarts_on_the_spare(cluster, tmp_path):
    config = SlurmSchedulerConfig(spare_nodes=1)
    with allocation(cluster, "-N3"), SlurmScheduler(tmp_path, config) as scheduler:
        workers = scheduler.create_workers(JobSpec("role", SLEEP, count=2, cpus=2))
        assert len({worker.node for worker in workers}) == 2
        lost = workers[1]

        cluster.kill_node(lost.node)
        _wait_until(lambda: [w.status for w in scheduler.poll()] == [WorkerStatus.RUNNING, WorkerStatus.FAILED])
        assert lost.node in lost.cause
        restarted = scheduler.restart_worker(lost)

        assert restarted.node not in {worker.node for worker in workers}
        assert [w.status for w in scheduler.poll()] == [WorkerStatus.RUNNING] * 2
        cluster.revive(lost.node)


@pytest.mark.nightly
def test_scheduler_resources_omit_a_node_that_is_down(cluster, tmp_path):
    config = SlurmSchedulerConfig()
    with allocation(cluster, "-N3"):
        names = [node.name for node in config.resources().nodes]

        cluster.kill_node(names[1])
        cluster.await_state(names[1], "down*")

        assert [node.name for node in config.resources().nodes] == [names[0], names[2]]
        cluster.revive(names[1])


def test_scheduler_heterogeneous_job_places_roles_on_their_components(cluster, tmp_path):
    config = SlurmSchedulerConfig(server_nodes=2)
    with allocation(cluster, "-N1", "-pfront", ":", "-N2", "-pback"), SlurmScheduler(tmp_path, config) as scheduler:
        servers = scheduler.create_workers(JobSpec("rollout", SLEEP, count=2, cpus=2))
        trainers = scheduler.create_workers(JobSpec("actor", SLEEP, count=2, cpus=2, spmd=True))

        assert {worker.node for worker in servers} == {"node2", "node3"}
        assert len({worker.node for worker in trainers}) == 1
        assert trainers[0].node in ("node0", "node1")


def test_scheduler_simulated_gpus_are_assigned_one_per_worker(tmp_path):
    with slurm(nodes=2, gpus=2) as cluster, allocation(cluster, "-N2", "--gpus-per-node=2"):
        config = SlurmSchedulerConfig()
        assert config.resources().gpus == 4
        with SlurmScheduler(tmp_path, config) as scheduler:
            print_devices = (sys.executable, "-c", "import os; print(os.environ['CUDA_VISIBLE_DEVICES'])")
            workers = scheduler.create_workers(JobSpec("role", print_devices, count=4, gpus=1))
            _wait_until(lambda: all(worker.exit_code == 0 for worker in scheduler.poll()))

            devices = sorted((worker.node, scheduler.logs(worker).strip()) for worker in workers)
            assert devices == [("node0", "0"), ("node0", "1"), ("node1", "0"), ("node1", "1")]
