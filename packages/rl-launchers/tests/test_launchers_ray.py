"""What the Ray scheduler asks of a cluster, refuses, and hands to its agents. Needs no Ray."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Any

import pytest

from rl_contracts.errors import ConfigError, LaunchError
from rl_contracts.scheduler import Node
from rl_launchers.ray import scheduler as launchers_ray
from rl_launchers.ray.scheduler import DriverConnection, RayNodes, RaySchedulerConfig, agent_environment


def found(name: str, cores: int, gpus: int = 0, **more: float) -> dict[str, Any]:
    """A node as Ray's driver tells of it."""
    own = {"name": name, "host": f"{name}.lan", "cores": cores, "gpus": gpus}
    return own | {"resources": {"CPU": cores, "GPU": gpus, **more}}


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    """A head without cores, two nodes with GPUs, and one without."""
    nodes = [found("head", 0), found("small", 8), found("a", 64, 8, pool=1), found("b", 32, 4, pool=1)]
    monkeypatch.setattr(launchers_ray, "living_nodes_at", lambda address: nodes)


@pytest.mark.usefixtures("cluster")
def test_resources_all_nodes_have_what_they_hold_the_largest_first() -> None:
    there = RaySchedulerConfig().resources()

    assert (there.gpus, there.cores) == (12, 104)
    assert there.nodes == (Node("a", "a.lan", 64, 8), Node("b", "b.lan", 32, 4), Node("small", "small.lan", 8, 0))


@pytest.mark.usefixtures("cluster")
def test_resources_parts_of_some_nodes_are_what_the_bundles_hold() -> None:
    config = RaySchedulerConfig(nodes=2, cores_per_node=16, gpus_per_node=2, node_resources={"pool": 0.5})

    assert config.resources().nodes == (Node("a", "a.lan", 16, 2), Node("b", "b.lan", 16, 2))
    bundles = [bundle for _, bundle in config.bundles([found("a", 64, 8, pool=1), found("b", 32, 4, pool=1)])]
    assert bundles == [{"CPU": 16.0, "GPU": 2.0, "pool": 0.5}] * 2


@pytest.mark.usefixtures("cluster")
def test_use_nodes_fewer_are_held_and_a_contradiction_is_refused() -> None:
    config = RaySchedulerConfig()
    config.use_nodes(2)
    assert len(config.resources().nodes) == 2
    with pytest.raises(ConfigError, match=r"launcher\.options\.nodes: expected 3 as cluster\.nodes.*found 2"):
        config.use_nodes(3)


@pytest.mark.usefixtures("cluster")
@pytest.mark.parametrize(
    ("wish", "words"),
    [
        ({"nodes": 4}, r"expected 4 nodes with CPU 1 each, found 3 among 4 \(head: 0 cores, 0 GPUs; small: 8 cores"),
        ({"nodes": 2, "gpus_per_node": 8}, "expected 2 nodes with CPU 1, GPU 8 each, found 1 among 4"),
        ({"cores_per_node": 128}, "expected 1 nodes with CPU 128 each, found 0 among 4"),
        ({"node_resources": {"tpu": 1}}, "expected 1 nodes with CPU 1, tpu 1 each, found 0 among 4"),
    ],
)
def test_resources_too_few_nodes_are_refused_with_the_arithmetic(wish: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        RaySchedulerConfig(**wish).resources()


def test_planned_no_cluster_answers_is_what_the_settings_say(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)  # not even Ray is there
    config = RaySchedulerConfig(address="head:6379", nodes=2, cores_per_node=8, gpus_per_node=4)
    planned = config.planned()
    assert [(node.name, node.cores, node.gpus) for node in planned.nodes] == [("node0", 8, 4), ("node1", 8, 4)]
    assert (planned.cores, planned.gpus) == (16, 8)
    with pytest.raises(ConfigError, match="not installed"):
        config.resources()


@pytest.mark.usefixtures("cluster")
def test_planned_cluster_that_has_too_little_is_refused_as_a_start_is() -> None:
    with pytest.raises(ConfigError, match="expected 9 nodes"):
        RaySchedulerConfig(nodes=9).planned()


def test_resources_nothing_is_running_this_machine_is_what_there_will_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launchers_ray, "living_nodes_at", lambda address: [])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {5})
    there = RaySchedulerConfig().resources()
    assert (there.gpus, there.cores, there.nodes[0].host) == (2, 1, "127.0.0.1")


def test_look_ray_is_not_installed_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"rl-launchers\[ray\]"):
        launchers_ray.living_nodes_at("nowhere:1")


def test_address_of_a_client_or_dashboard_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"host:port.*ray://head:10001"):
        RaySchedulerConfig(address="ray://head:10001")
    monkeypatch.setenv("RAY_ADDRESS", "http://127.0.0.1:8265")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    with pytest.raises(LaunchError, match=r"http://127.0.0.1:8265: expected host:port.*ray job submit"):
        DriverConnection("", "look")


def test_agent_environment_is_the_launchers_without_what_ray_adds() -> None:
    node = {"TMPDIR": "/node/tmp", "PATH": "/node", "RAY_JOB_ID": "1", "OMP_NUM_THREADS": "8", "OF_NODE": "1"}
    launcher = {"TMPDIR": "/tmp", "PATH": "/venv", "RAY_ADDRESS": "head:1", "HF_HOME": "/hf"}

    merged = agent_environment(node, launcher)

    assert merged == {"TMPDIR": "/node/tmp", "PATH": "/venv", "HF_HOME": "/hf", "OF_NODE": "1"}
    assert agent_environment(node, {"OMP_NUM_THREADS": "2"})["OMP_NUM_THREADS"] == "2"
    in_job = {"OMP_NUM_THREADS": "1", "RAY_JOB_CONFIG_JSON_ENV_VAR": "{}"}
    assert "OMP_NUM_THREADS" not in agent_environment(node, in_job)


def test_ended_nothing_was_started_says_so(tmp_path: Path) -> None:
    nodes = RayNodes(tmp_path, RaySchedulerConfig())
    nodes.close()
    assert nodes.end_reason(Node("a", "a.lan", 1)) == "was ended"
