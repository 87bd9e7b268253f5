"""The same command learns on one machine, on a real Ray cluster and under a real Slurm; and the real GSM8K runs."""

from __future__ import annotations

import importlib.util
import json
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import mean
from types import ModuleType
from typing import Any

import psutil
import pytest
from commands import Command
from launchers import CLUSTERS, nodes_of, running_cluster, settings_of
from ray_cluster import ray
from slurm_cluster import slurm

from rl_apps.run.components import weights_directory
from rl_contracts.testing.models import make_tiny_model

ROOT = Path(__file__).parents[2]
GSM8K = Path("../shared/data/gsm8k")
"""The real one, seen from the repository."""
SECONDS = 1500
"""For a whole command on a busy machine."""
ONE_CORE = {"cluster.cores": 1}
"""Of a node, for all nodes are this machine: threads that wait for a core that others have take three times as long."""
SHORT = {
    "recipe": "embedded",
    "seed": 3,
    "total_steps": 20,
    "evaluation.rows": 0,
    "data.options.levels": 1,
    "data.batch_size": 16,
    "rollout.group_size": 16,
    "actor.minibatches": 4,
    "actor.optimizer.lr": 2e-4,
    "actor.optimizer.warmup_steps": 6,
    "recover.every": 4,
    **ONE_CORE,
}
"""Short problems and large groups, as in test_presets_learn.py: twenty steps are enough to see a difference. With
seed 1 they are not on every processor, for the rounding of the warm-up makes another model."""

pytestmark = pytest.mark.timeout(SECONDS + 300)


@pytest.fixture(scope="module")
def checker() -> ModuleType:
    """The learning check of CI."""
    spec = importlib.util.spec_from_file_location("check_learning_of_clusters", ROOT / "infra/ci/check_learning.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module", params=CLUSTERS)
def launcher(request: pytest.FixtureRequest) -> Iterator[dict[str, Any]]:
    """The settings of each launcher, whose cluster stands."""
    with running_cluster(request.param) as settings:
        yield settings


def _committed(command: Command, route: str) -> str:
    """The route by which weights came, as the record of the last commit says."""
    record = weights_directory(command.run_dir, route) / "committed.json"
    command.wait_for(record.exists)
    found: str = json.loads(record.read_text())["meta"]["route"]
    return found


def _whole(steps: list[dict[str, Any]], number: int, prompts: int, unscored: int = 0) -> None:
    """Every step took all of its prompts and published its version, and servers and trainer agree.

    No group failed but those whose reward worker was killed while it scored them, at most `unscored`.
    """
    assert [r["step"] for r in steps] == [r["version"] for r in steps] == list(range(1, number + 1))
    assert {r["groups/trained"] for r in steps} == {prompts}
    failed = sum(r["groups/failed"] for r in steps)
    assert failed == sum(r.get("groups/failed/reward", 0) for r in steps) <= unscored
    gaps = [r["gap/max_abs"] for r in steps if r["gap/max_abs"] is not None]
    assert len(gaps) > number / 2
    assert max(gaps) < 1e-4


@pytest.mark.nightly
@pytest.mark.parametrize("route", ["broadcast", "disk"])
def test_default_run_with_server_and_trainer_on_two_nodes_learns(
    launcher, route, start_command, checker, record_property
):
    begin = time.monotonic()
    command = start_command("gsm8k-grpo", launcher | ONE_CORE | {"publish.route": route})
    nodes = set(nodes_of(command).values())
    committed = _committed(command, route)
    said = command.finish(SECONDS)

    steps, accuracy = command.steps(), checker.values(command.records(), "eval/accuracy")
    record_property("accuracy before and after", f"{accuracy[0]:.3f}, {accuracy[-1]:.3f}")
    each = mean(r["time/step"] for r in steps)
    record_property("steps, seconds of one, of all", f"{len(steps)}, {each:.2f}, {time.monotonic() - begin:.0f}")
    assert len(nodes) == (1 if launcher["launcher"] == "local" else 2)
    assert committed == route
    assert checker.problems(command.records(), start=0.55, end=0.90, staleness=1) == []
    _whole(steps, 90, prompts=32)
    assert {(r["server/servers"], r["server/rejoins"]) for r in steps} == {(1, 0)}
    assert "restart 1 of" not in said


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["gsm8k-grpo", "gsm8k-sft"])
def test_gsm8k_data_with_a_random_model_runs_five_steps(
    launcher, name, tiny, start_command, monkeypatch, record_property
):
    if not (ROOT / GSM8K / "train.jsonl").is_file():
        pytest.skip(f"GSM8K is not at {GSM8K}")
    monkeypatch.chdir(ROOT)
    data = {"data.name": "gsm8k", "data.path": GSM8K, "model.path": tiny, "total_steps": 5, "data.batch_size": 4}
    small = {"rollout.group_size": 4, "rollout.generation.max_new_tokens": 32} if name == "gsm8k-grpo" else {}
    begin = time.monotonic()
    command = start_command(name, launcher | ONE_CORE | data | small | {"evaluation.rows": 8})
    command.finish(SECONDS)

    record_property("seconds", f"{time.monotonic() - begin:.0f}")
    steps = command.steps()
    assert [r["step"] for r in steps] == [1, 2, 3, 4, 5]
    assert all(r["tokens"] > 0 for r in steps)
    if name == "gsm8k-grpo":
        _whole(steps, 5, prompts=4)
        learned = command.trained_completions()
        assert len(learned) == 20
        assert set(learned.values()) == {4}
    checkpoint = command.run_dir / "checkpoints" / "step_5" / "model.safetensors"
    assert checkpoint.is_file()


def _improved(command: Command, record_property: Callable[[str, object], None], unscored: int = 0) -> None:
    """All steps are there, each once, and the last five brought more reward than the first five."""
    steps = command.steps()
    rewards = [r["reward/mean"] for r in steps]
    first, last = mean(rewards[:5]), mean(rewards[-5:])
    record_property("mean reward, first and last five steps", f"{first:.3f}, {last:.3f}")
    _whole(steps, SHORT["total_steps"], prompts=16, unscored=unscored)
    assert last >= first + 0.05
    learned = command.trained_completions()
    assert (len(learned), set(learned.values())) == (len(steps) * 16, {16})


@pytest.mark.slow
@pytest.mark.parametrize("trainer_too", [False, pytest.param(True, marks=pytest.mark.nightly)])
def test_slurm_run_with_killed_trainer_and_node_improves(start_command, record_property, trainer_too):
    """Weights by broadcast. CI kills the node with the trainer alone: a restart costs a busy machine a minute."""
    with slurm(lost_after=8) as cluster:
        settings = SHORT | settings_of("slurm", spare_nodes=1) | {"publish.route": "broadcast"}
        command = start_command("gsm8k-grpo", settings)
        command.wait_for(lambda: len(command.steps()) > 5)
        assert _committed(command, "broadcast") == "broadcast"
        if trainer_too:
            command.send_signal("actor-0", signal.SIGKILL)
            command.wait_for(lambda: "restart 1 of 3" in command.output)
            command.wait_for(lambda: len(command.steps()) > 10)
        launchers = cluster.run("squeue", "-h", "-t", "RUNNING", "-o", "%B")
        [lost] = {*nodes_of(command).values()} - {launchers}
        cluster.kill_node(lost)
        said = command.finish(400)

    assert "actor-0 was killed by SIGKILL" in said or not trainer_too
    assert f"lost with node {lost}" in said
    assert f"restart {1 + trainer_too} of 3" in said
    _improved(command, record_property)


@pytest.mark.slow
def test_ray_run_with_killed_reward_worker_and_server_improves(start_command, record_property):
    """Weights by disk, so that the only server can be replaced."""
    with ray(nodes=2):
        command = start_command("gsm8k-grpo", SHORT | settings_of("ray") | {"publish.route": "disk"})
        command.wait_for(lambda: len(command.steps()) > 4)
        children = psutil.Process(command.workers()["actor-0"]["pid"]).children(recursive=True)
        next(child for child in children if "rl_contracts.reward_worker" in child.cmdline()).kill()
        command.wait_for(lambda: len(command.steps()) > 8)
        assert len(set(nodes_of(command).values())) == 2
        assert _committed(command, "disk") == "disk"
        command.send_signal("rollout-0", signal.SIGKILL)
        said = command.finish(400)

    assert "rollout-0 was killed by SIGKILL" in said
    assert "trainers" not in said.partition("rollout-0 was killed")[2].partition("\n")[0]
    assert command.steps()[-1]["server/rejoins"] >= 1
    _improved(command, record_property, unscored=1)
