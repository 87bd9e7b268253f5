"""Commands on a real Ray cluster and a real Slurm: kill workers, scale servers, stop, detach and reattach."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from commands import Command, call
from launchers import nodes_of, running_cluster, settings_of
from ray_cluster import ray
from slurm_cluster import slurm

from rl_contracts.runtime.name_service import FileNames
from rl_contracts.runtime.run_files import last_recovery_checkpoint
from rl_contracts.testing.models import make_tiny_model

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(1500)]


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Settings of a run with steps of less than one second."""
    return {
        "model.path": make_tiny_model(tmp_path_factory.mktemp("model"), layers=1, hidden=32),
        "recipe": "embedded",
        "total_steps": 40,
        "data.batch_size": 4,
        "rollout.group_size": 2,
        "rollout.generation.max_new_tokens": 8,
        "evaluation.examples": 0,
        "recover.every": 3,
        "publish.route": "disk",
    }


ENDLESS = {"total_steps": 100_000}
SHORT_TIMEOUTS = {
    "launcher.health_timeout": 10,
    "rollout.client.progress_timeout": 15,
}
"""Short timeouts, so that a run detects hung processes within seconds."""


@pytest.fixture(scope="module", params=["ray", "slurm"])
def launcher(request: pytest.FixtureRequest) -> Iterator[dict[str, Any]]:
    """Settings of a launcher with a running cluster.

    With Ray, Ray stores the names of the run; test_clusters_learn.py tests Ray with names in files, as Slurm uses them.
    """
    with running_cluster(request.param) as settings:
        yield settings | ({"launcher.options.names": "ray"} if request.param == "ray" else {})


def _assert_names_location(command: Command, launcher: dict[str, Any]) -> None:
    """Check that names are files, or that one file refers to Ray."""
    files = FileNames(command.run_dir / "names").children()
    by_ray = launcher.get("launcher.options.names") == "ray"
    assert (set(files) == {"elsewhere"}) if by_ray else {"servers/rollout/0", "status", "workers"} <= set(files)


def _has_progress(command: Command, begin: int = 0) -> bool:
    """Return whether the run completed at least three steps after step `begin`."""
    return len(command.steps()) > begin + 2


def _assert_every_step_once(command: Command, steps: int) -> None:
    """Check that each step has one record and four prompts that no other step trained on."""
    assert [(r["step"], r["version"]) for r in command.steps()] == [(step, step) for step in range(1, steps + 1)]
    completions = command.trained_completions()
    assert (len(completions), set(completions.values())) == (steps * 4, {2})


def test_run_with_killed_and_hung_processes_trains_every_step_once(launcher, small, start_command):
    command = start_command("gsm8k-grpo", small | launcher | SHORT_TIMEOUTS | {"total_steps": 60})
    command.wait_for(lambda: _has_progress(command))
    assert len(set(nodes_of(command).values())) == 2
    command.send_signal("rollout-0", signal.SIGKILL)
    command.wait_for(lambda: command.steps()[-1]["server/rejoins"] == 1)
    command.send_signal("rollout-0", signal.SIGSTOP)
    command.wait_for(lambda: command.steps()[-1]["server/rejoins"] == 2)
    command.wait_for(command.has_recovery_checkpoint)
    command.send_signal("actor-0", signal.SIGKILL)
    output = command.finish(400)

    assert "rollout-0 was killed by SIGKILL" in output
    assert "rollout-0 failed its readiness checks for" in output
    assert "actor-0 was killed by SIGKILL" in output
    assert "the newest recovery checkpoint (restart 1 of 3 within 600 s)" in output
    _assert_every_step_once(command, 60)


def test_run_scaled_and_stopped_resumes_with_the_same_command(launcher, small, start_command):
    command = start_command("gsm8k-grpo", small | launcher | ENDLESS)
    command.wait_for(lambda: _has_progress(command))

    assert "2 servers, all ready" in call("rl", "scale", command.run_dir, "rollout=2")
    command.wait_for(lambda: command.steps()[-1]["server/servers"] == 2)
    _assert_names_location(command, launcher)
    status = call("rl", "status", command.run_dir)
    assert {"rollout-0", "rollout-1", "actor-0"} <= set(command.workers())
    assert all(worker["node"] in status and name in status for name, worker in command.workers().items())
    call("rl", "scale", command.run_dir, "rollout=1")
    command.wait_for(lambda: command.steps()[-1]["server/servers"] == 1)
    command.wait_for(lambda: "rollout-1" not in command.workers())
    logs = call("rl", "logs", command.run_dir)
    assert all(f"==> {name} <==" in logs for name in ("rollout-0", "actor-0"))

    stopped = call("rl", "stop", command.run_dir)
    output = command.finish(120, code=143)
    checkpoint_step = last_recovery_checkpoint(command.run_dir / "recover")
    assert f"The same command resumes after step {checkpoint_step}." in stopped
    assert "Stopped." in output
    assert checkpoint_step == len(command.steps())
    assert "stopped" in call("rl", "status", command.run_dir)
    assert {"status", "workers"} <= set(FileNames(command.run_dir / "names").children())

    command.restart()
    command.wait_for(lambda: _has_progress(command, checkpoint_step))
    assert f"resuming after step {checkpoint_step}" in command.output
    call("rl", "stop", command.run_dir)
    command.finish(120, code=143)
    _assert_every_step_once(command, len(command.steps()))


def test_trainer_on_two_nodes_resumes_from_its_recovery_checkpoint(launcher, small, start_command):
    two_nodes = {"allocation": "embedded:d1+fsdp:d2", "cluster.cores": 1}
    command = start_command("gsm8k-grpo", small | launcher | ENDLESS | two_nodes)
    command.wait_for(command.has_recovery_checkpoint)
    assert command.workers()["actor-0"]["node"] != command.workers()["actor-1"]["node"]
    call("rl", "stop", command.run_dir)
    command.finish(120, code=143)
    checkpoint_step = last_recovery_checkpoint(command.run_dir / "recover")

    command.restart()
    command.wait_for(lambda: _has_progress(command, checkpoint_step))
    assert command.workers()["actor-0"]["node"] != command.workers()["actor-1"]["node"]
    call("rl", "stop", command.run_dir)
    output = command.finish(120, code=143)

    assert f"resuming after step {checkpoint_step}" in output
    _assert_every_step_once(command, len(command.steps()))


@contextmanager
def _slurm_of_four() -> Iterator[tuple[dict[str, Any], Callable[[dict[str, Any]], None], set[str]]]:
    with slurm(lost_after=4) as cluster:
        yield settings_of("slurm", nodes=3, spare_nodes=1), lambda worker: cluster.kill_node(worker["node"]), {"node0"}


@contextmanager
def _ray_of_four() -> Iterator[tuple[dict[str, Any], Callable[[dict[str, Any]], None], set[str]]]:
    with ray(nodes=4) as cluster:
        yield (
            settings_of("ray", nodes=3),
            lambda worker: cluster.kill_node(int(worker["host"].split(".")[-1]) - 2),
            {"127.0.0.2"},
        )


@pytest.mark.parametrize("cluster", [_ray_of_four, _slurm_of_four])
def test_lost_server_node_moves_the_server_and_keeps_the_trainers(cluster, small, start_command):
    """The run uses three of four nodes, with one process each. `stays` is the node of the launcher or of Ray's head."""
    one_per_node = {"allocation": "embedded:d2+fsdp:d1", "cluster.cores": 1}
    with cluster() as (settings, kill_node_of, stays):
        command = start_command("gsm8k-grpo", small | settings | ENDLESS | one_per_node)
        command.wait_for(lambda: _has_progress(command))
        before = command.workers()
        assert len({worker["node"] for worker in before.values()}) == 3
        servers = (before[name] for name in ("rollout-0", "rollout-1"))
        lost = next(server for server in servers if not {server["node"], server["host"]} & stays)

        kill_node_of(lost)
        command.wait_for(lambda: command.workers()[lost["name"]]["node"] not in (None, lost["node"]))
        command.wait_for(lambda: command.steps()[-1]["server/rejoins"] == 1)
        after, steps = command.workers(), len(command.steps())
        command.wait_for(lambda: _has_progress(command, steps))
        call("rl", "stop", command.run_dir)
        output = command.finish(120, code=143)

    assert after["actor-0"]["pid"] == before["actor-0"]["pid"]
    assert f"lost with node {lost['node']}" in output
    assert "newest recovery checkpoint" not in output
    _assert_every_step_once(command, len(command.steps()))


def test_slurm_heterogeneous_job_uses_one_partition_per_role(small, start_command):
    with slurm() as cluster:
        options = {"server_nodes": 1, "partition": "front", "server_partition": "back"}
        command = start_command("gsm8k-grpo", small | settings_of("slurm", **options) | {"total_steps": 2})
        nodes = nodes_of(command)
        command.finish(300)
        assert cluster.run("squeue", "-h") == ""

    assert nodes["actor-0"] in ("node0", "node1")
    assert nodes["rollout-0"] in ("node2", "node3")
    _assert_every_step_once(command, 2)


def test_slurm_preempted_run_saves_and_resumes_after_the_other_job(small, start_command):
    """The partition has a GraceTime of 60 s; test_slurm_jobs.py tests a partition without."""
    with slurm(grace=60, requeue_after=8, kill_wait=60) as cluster:
        settings = small | settings_of("slurm") | {"recover.every": 1000, "total_steps": 60}
        command = start_command("gsm8k-grpo", settings)
        command.wait_for(lambda: _has_progress(command))
        assert not command.has_recovery_checkpoint()
        cluster.run("sbatch", "-purgent", "-N4", "--exclusive", "-o/dev/null", "--wrap", "sleep 2")
        output = command.finish(600)

    [checkpoint_step] = re.findall(r"resuming after step (\d+) of 60", output)
    assert f"The same command resumes after step {checkpoint_step}." in output
    assert "start 2, on" in output
    _assert_every_step_once(command, 60)


def test_slurm_lost_launcher_node_requeues_the_job_and_resumes(small, start_command):
    """The job has no spare nodes, but two other nodes of the cluster are free."""
    with slurm(lost_after=4, requeue_after=8, kill_wait=5) as cluster:
        command = start_command("gsm8k-grpo", small | settings_of("slurm") | {"total_steps": 60})
        command.wait_for(lambda: _has_progress(command) and command.has_recovery_checkpoint())
        lost = cluster.run("squeue", "-h", "-t", "RUNNING", "-o", "%B")
        cluster.kill_node(lost)
        output = command.finish(600)

    assert "start 2, on" in output
    assert re.search(r"resuming after step \d+ of 60", output)
    assert lost not in {worker["node"] for worker in command.workers().values()}
    _assert_every_step_once(command, 60)


def test_slurm_ctrl_c_detaches_and_the_same_command_follows_again(small, start_command):
    with slurm() as cluster:
        command = start_command("gsm8k-grpo", small | settings_of("slurm") | {"total_steps": 100})
        command.wait_for(lambda: _has_progress(command))
        command.process.send_signal(signal.SIGINT)
        assert "is no longer followed" in command.finish(60, code=130)
        [job] = cluster.run("squeue", "-h", "-o", "%A").split()

        command.restart()
        command.wait_for(lambda: f"job {job} of this run already exists; following it" in command.output)
        command.finish(400)
        assert cluster.run("squeue", "-h") == ""

    assert "step 100/100" in command.output
    _assert_every_step_once(command, 100)


def test_ray_drained_node_saves_and_the_next_command_resumes(small, start_command):
    with ray(nodes=3):
        settings = small | settings_of("ray") | {"recover.every": 1000, "total_steps": 200}
        command = start_command("gsm8k-grpo", settings)
        command.wait_for(lambda: _has_progress(command))
        assert not command.has_recovery_checkpoint()
        host = next(w["host"] for w in command.workers().values() if w["host"] != "127.0.0.2")  # not Ray's head
        _drain(host)
        output = command.finish(120, code=143)
        checkpoint_step = last_recovery_checkpoint(command.run_dir / "recover")
        assert "Ray drains" in output
        assert f"The same command resumes after step {checkpoint_step}." in output
        assert checkpoint_step == len(command.steps())

        command.restart()
        command.wait_for(lambda: _has_progress(command, checkpoint_step))
        assert host not in {worker["host"] for worker in command.workers().values()}
        command.finish(400)

    _assert_every_step_once(command, 200)


def _drain(host: str) -> None:
    """Drain a node as Ray does for a spot instance that the provider reclaims in two minutes."""
    nodes = "{n['NodeManagerAddress']: n['NodeID'] for n in ray.nodes()}"
    program = f"import ray, sys; ray.init(log_to_driver=False); print({nodes}[sys.argv[1]])"
    node = subprocess.run([sys.executable, "-c", program, host], check=True, capture_output=True, text=True).stdout
    reason = ["--reason=DRAIN_NODE_REASON_PREEMPTION", "--reason-message=spot", "--deadline-remaining-seconds=120"]
    command = [sys.executable, "-m", "ray.scripts.scripts", "drain-node", f"--node-id={node.split()[-1]}", *reason]
    subprocess.run(command, check=True, capture_output=True)
