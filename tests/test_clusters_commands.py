"""Whole commands on a real Ray cluster and a real Slurm: workers are killed, servers added and taken away, runs are
watched, stopped, left alone and followed again."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from commands import Command, call
from launchers import nodes_of, settings_of, standing
from ray_cluster import ray
from slurm_cluster import slurm

from rl_contracts.testing.models import make_tiny_model
from rl_trainers.points import last_point

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(1500)]


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Settings of a run whose steps take a fraction of a second."""
    return {
        "model.path": make_tiny_model(tmp_path_factory.mktemp("model"), layers=1, hidden=32),
        "recipe": "embedded",
        "total_steps": 40,
        "data.batch_size": 4,
        "rollout.group_size": 2,
        "rollout.generation.max_new_tokens": 8,
        "evaluation.rows": 0,
        "recover.every": 3,
        "publish.route": "disk",
    }


ENDLESS = {"total_steps": 100_000}


@pytest.fixture(scope="module", params=["ray", "slurm"])
def launcher(request: pytest.FixtureRequest) -> Iterator[dict[str, Any]]:
    """The settings of a launcher, whose cluster stands."""
    with standing(request.param) as settings:
        yield settings


def _went_on(command: Command, begin: int = 0) -> bool:
    """Whether it has made steps since."""
    return len(command.steps()) > begin + 2


def _exactly_once(command: Command, steps: int) -> None:
    """Each step is there once, and learned from its own prompts."""
    assert [(r["step"], r["version"]) for r in command.steps()] == [(step, step) for step in range(1, steps + 1)]
    learned = command.learned_from()
    assert (len(learned), set(learned.values())) == (steps * 4, {2})


def test_server_and_trainer_are_killed_the_run_goes_on_and_loses_nothing(launcher, small, start_command):
    command = start_command("gsm8k-grpo", small | launcher | {"total_steps": 60})
    command.wait_for(lambda: _went_on(command))
    assert len(set(nodes_of(command).values())) == 2
    command.send("rollout-0", signal.SIGKILL)
    command.wait_for(lambda: any(r["server/rejoins"] for r in command.steps()))
    command.wait_for(command.has_point)
    command.send("actor-0", signal.SIGKILL)
    said = command.finish(400)

    assert "rollout-0 was killed by SIGKILL" in said
    assert "actor-0 was killed by SIGKILL" in said
    assert "its newest recover point (restart 1 of 3 within 600 s)" in said
    _exactly_once(command, 60)


@pytest.mark.parametrize("launcher", ["slurm"], indirect=True)
def test_run_is_scaled_watched_and_stopped_and_the_same_command_goes_on(launcher, small, start_command):
    command = start_command("gsm8k-grpo", small | launcher | ENDLESS)
    command.wait_for(lambda: _went_on(command))

    assert "2 servers, all of them ready" in call("rl", "scale", command.run_dir, "rollout=2")
    command.wait_for(lambda: command.steps()[-1]["server/servers"] == 2)
    status = call("rl", "status", command.run_dir)
    assert {"rollout-0", "rollout-1", "actor-0"} <= set(command.workers())
    assert all(worker["node"] in status and name in status for name, worker in command.workers().items())
    call("rl", "scale", command.run_dir, "rollout=1")
    command.wait_for(lambda: command.steps()[-1]["server/servers"] == 1)
    command.wait_for(lambda: "rollout-1" not in command.workers())
    logs = call("rl", "logs", command.run_dir)
    assert all(f"==> {name} <==" in logs for name in ("rollout-0", "actor-0"))

    stopped = call("rl", "stop", command.run_dir)
    said = command.finish(120, code=143)
    point = last_point(command.run_dir / "recover")
    assert f"The same command goes on after step {point}." in stopped
    assert "Stopped." in said
    assert point == len(command.steps())
    assert "stopped" in call("rl", "status", command.run_dir)

    command.again()
    command.wait_for(lambda: _went_on(command, point))
    assert f"going on after step {point}" in command.said
    call("rl", "stop", command.run_dir)
    command.finish(120, code=143)
    _exactly_once(command, len(command.steps()))


def test_ctrl_c_leaves_the_job_of_slurm_alone_and_the_same_command_follows_it_again(small, start_command):
    with slurm() as cluster:
        command = start_command("gsm8k-grpo", small | settings_of("slurm") | {"total_steps": 100})
        command.wait_for(lambda: _went_on(command))
        command.process.send_signal(signal.SIGINT)
        assert "goes on without being followed" in command.finish(60, code=130)
        [job] = cluster.run("squeue", "-h", "-o", "%A").split()

        command.again()
        command.wait_for(lambda: f"job {job} of this run is there already; following it" in command.said)
        command.finish(400)
        assert cluster.run("squeue", "-h") == ""

    assert "step 100/100" in command.said
    _exactly_once(command, 100)


def test_ray_drains_a_node_a_recover_point_is_written_and_the_next_command_goes_on(small, start_command):
    with ray(nodes=3):
        settings = small | settings_of("ray") | {"recover.every": 1000, "total_steps": 200}
        command = start_command("gsm8k-grpo", settings)
        command.wait_for(lambda: _went_on(command))
        assert not command.has_point()
        host = next(w["host"] for w in command.workers().values() if w["host"] != "127.0.0.2")  # the head stays
        _drain(host)
        said = command.finish(120, code=143)
        point = last_point(command.run_dir / "recover")
        assert "Ray drains" in said
        assert f"The same command goes on after step {point}." in said
        assert point == len(command.steps())

        command.again()
        command.wait_for(lambda: _went_on(command, point))
        assert host not in {worker["host"] for worker in command.workers().values()}
        command.finish(400)

    _exactly_once(command, 200)


def _drain(host: str) -> None:
    """As Ray does with a node that its owner wants back in two minutes."""
    nodes = "{n['NodeManagerAddress']: n['NodeID'] for n in ray.nodes()}"
    program = f"import ray, sys; ray.init(log_to_driver=False); print({nodes}[sys.argv[1]])"
    node = subprocess.run([sys.executable, "-c", program, host], check=True, capture_output=True, text=True).stdout
    reason = ["--reason=DRAIN_NODE_REASON_PREEMPTION", "--reason-message=spot", "--deadline-remaining-seconds=120"]
    command = [sys.executable, "-m", "ray.scripts.scripts", "drain-node", f"--node-id={node.split()[-1]}", *reason]
    subprocess.run(command, check=True, capture_output=True)
