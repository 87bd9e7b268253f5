"""The four-node Slurm on one machine: it starts, loses nodes, and stops without leftover processes."""

import os
import subprocess
import sys
import time

import pytest
from slurm_cluster import PROGRAM, clusters, slurm

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def _wait_for(condition, seconds=120.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"still waiting after {seconds:g} s"
        time.sleep(0.1)


def test_cluster_each_node_has_its_name_and_temporary_directory():
    with slurm() as cluster:
        output = cluster.run("srun", "-N4", "-n4", "sh", "-c", "echo $SLURMD_NODENAME $TMPDIR")

        directories = dict(line.split() for line in output.splitlines())
        assert sorted(directories) == cluster.names == ["node0", "node1", "node2", "node3"]
        assert len(set(directories.values())) == 4
        assert all(directory.endswith(f"/{name}") for name, directory in directories.items())


@pytest.mark.nightly
def test_cluster_killed_node_ends_its_processes_and_is_down_in_slurm(tmp_path):
    with slurm(lost_after=4) as cluster:
        pids = tmp_path / "pids"
        script = f"(setsid sleep 1000 & echo $! >> {pids}); env -i sleep 1000 & echo $! >> {pids}; wait"
        cluster.run("sbatch", "-wnode1", "-o/dev/null", "--wrap", script)
        _wait_for(lambda: pids.exists() and len(pids.read_text().split()) == 2)

        cluster.kill_node("node1")

        assert cluster.processes("node1") == []
        assert not [pid for pid in pids.read_text().split() if os.path.exists(f"/proc/{pid}/fd/0")]
        assert cluster.processes("node0")
        cluster.await_state("node1", "down*", "idle*")
        cluster.revive("node1")
        assert cluster.run("srun", "-wnode1", "echo", "back") == "back"


def test_cluster_program_start_and_stop_can_be_repeated(tmp_path):
    directory = tmp_path / "cluster"

    def call(*arguments):
        done = subprocess.run([sys.executable, PROGRAM, *arguments], capture_output=True, text=True, timeout=300)
        return done.returncode, done.stdout + done.stderr

    assert call("start", directory, "--nodes", "2", "--gpus", "1")[0] == 0
    code, output = call("start", directory, "--nodes", "2", "--gpus", "1")
    assert (code, output.strip()) == (0, f"export SLURM_CONF={directory}/slurm.conf")
    cluster = clusters.Cluster(directory)
    assert cluster.run("sinfo", "-hN", "-pall", "-o", "%N %c %G").splitlines() == ["node0 2 gpu:1", "node1 2 gpu:1"]
    code, output = call("kill-node", directory, "node7")
    assert (code, "node0, node1" in output) == (1, True)

    assert call("stop", directory)[0] == call("stop", directory)[0] == 0

    assert cluster.processes() == []
