"""Settings, errors and agent environments of the Ray scheduler, without Ray."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rl_contracts.errors import ConfigError, LaunchError
from rl_contracts.scheduler import Node
from rl_launchers.ray import scheduler as launchers_ray
from rl_launchers.ray.scheduler import DriverConnection, RayNodes, RaySchedulerConfig, agent_environment


def described_node(name: str, cores: int, gpus: int = 0, **more: float) -> dict[str, Any]:
    """Return the description of a node as the Ray driver process sends it."""
    description = {"name": name, "host": f"{name}.lan", "cores": cores, "gpus": gpus}
    return description | {"resources": {"CPU": cores, "GPU": gpus, **more}}


def requesting(nodes: int = 0, cores: int = 0, gpus: int | None = None, **settings: Any) -> RaySchedulerConfig:
    """Return a config of a run that requests these machines."""
    config = RaySchedulerConfig(**settings)
    config.use_cluster(nodes, cores, gpus)
    return config


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cluster of a head without cores, two nodes with GPUs, and one node without."""
    nodes = [
        described_node("head", 0),
        described_node("small", 8),
        described_node("a", 64, 8, pool=1),
        described_node("b", 32, 4, pool=1),
    ]
    monkeypatch.setattr(launchers_ray, "living_nodes_at", lambda address: nodes)


@pytest.mark.usefixtures("cluster")
def test_resources_without_limits_hold_all_nodes_largest_first() -> None:
    resources = RaySchedulerConfig().resources()

    assert (resources.gpus, resources.cores) == (12, 104)
    assert resources.nodes == (Node("a", "a.lan", 64, 8), Node("b", "b.lan", 32, 4), Node("small", "small.lan", 8, 0))


@pytest.mark.usefixtures("cluster")
def test_resources_with_limits_match_the_bundles() -> None:
    config = requesting(2, 16, 2, node_resources={"pool": 0.5})

    assert config.resources().nodes == (Node("a", "a.lan", 16, 2), Node("b", "b.lan", 16, 2))
    bundles = [
        bundle for _, bundle in config.bundles([described_node("a", 64, 8, pool=1), described_node("b", 32, 4, pool=1)])
    ]
    assert bundles == [{"CPU": 16.0, "GPU": 2.0, "pool": 0.5}] * 2
    assert requesting(2, gpus=0).resources().nodes == (Node("a", "a.lan", 64), Node("b", "b.lan", 32))


@pytest.mark.usefixtures("cluster")
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"nodes": 4}, r"expected 4 nodes with CPU 1 each, found 3 among 4 \(head: 0 cores, 0 GPUs; small: 8 cores"),
        ({"nodes": 2, "gpus": 8}, "expected 2 nodes with CPU 1, GPU 8 each, found 1 among 4"),
        ({"node_resources": {"tpu": 1}}, "expected 1 nodes with CPU 1, tpu 1 each, found 0 among 4"),
    ],
)
def test_resources_with_too_few_nodes_error_lists_nodes(settings: dict[str, Any], message: str) -> None:
    for plan in (requesting(**settings).resources, requesting(**settings).planned):
        with pytest.raises(ConfigError, match=message):
            plan()


def test_planned_without_cluster_uses_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)  # Ray is not installed, either
    config = requesting(2, 8, 4, address="head:6379")
    planned = config.planned()
    assert [(node.name, node.cores, node.gpus) for node in planned.nodes] == [("node0", 8, 4), ("node1", 8, 4)]
    assert (planned.cores, planned.gpus) == (16, 8)
    with pytest.raises(ConfigError, match=r"launcher\.kind=ray .*rl-launchers\[ray\]"):
        config.resources()


def test_resources_without_running_cluster_are_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launchers_ray, "living_nodes_at", lambda address: [])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {5})
    resources = RaySchedulerConfig().resources()
    assert (resources.gpus, resources.cores, resources.nodes[0].host) == (2, 1, "127.0.0.1")
    assert RaySchedulerConfig().planned() == resources
    request = requesting(1, cores=64, gpus=8)
    assert (request.planned().gpus, request.planned().cores) == (8, 64)
    with pytest.raises(ConfigError, match="expected 1 nodes with CPU 64, GPU 8 each, found 0"):
        request.resources()


def test_address_of_client_or_dashboard_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"host:port.*ray://head:10001"):
        RaySchedulerConfig(address="ray://head:10001")
    monkeypatch.setenv("RAY_ADDRESS", "http://127.0.0.1:8265")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    with pytest.raises(LaunchError, match=r"http://127.0.0.1:8265: expected host:port.*ray job submit"):
        DriverConnection("", "look")


def test_agent_environment_has_launcher_variables_but_none_of_ray() -> None:
    node = {"TMPDIR": "/node/tmp", "PATH": "/node", "RAY_JOB_ID": "1", "OMP_NUM_THREADS": "8", "OF_NODE": "1"}
    launcher = {"TMPDIR": "/tmp", "PATH": "/venv", "RAY_ADDRESS": "head:1", "HF_HOME": "/hf"}

    merged = agent_environment(node, launcher)

    assert merged == {"TMPDIR": "/node/tmp", "PATH": "/venv", "HF_HOME": "/hf", "OF_NODE": "1"}
    assert agent_environment(node, {"OMP_NUM_THREADS": "2"})["OMP_NUM_THREADS"] == "2"
    in_job = {"OMP_NUM_THREADS": "1", "RAY_JOB_CONFIG_JSON_ENV_VAR": "{}"}
    assert "OMP_NUM_THREADS" not in agent_environment(node, in_job)


def test_end_reason_after_close_is_stopped(tmp_path: Path) -> None:
    nodes = RayNodes(tmp_path, RaySchedulerConfig())
    nodes.close()
    assert nodes.end_reason(Node("a", "a.lan", 1)) == "was stopped"


@pytest.mark.parametrize(("deadline", "signal_times"), [(0, [1000.0]), (1_060_000, [1000.0, 1020.0])])
def test_drained_node_sends_sigterm_twice_before_its_deadline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, deadline: int, signal_times: list[float]
) -> None:
    nodes, now, sent = RayNodes(tmp_path, RaySchedulerConfig()), 999.0, list[float]()
    connection = SimpleNamespace(state={"draining": {}, "ended": {}}, problem=lambda: "")
    monkeypatch.setattr(nodes, "_connection", connection)
    monkeypatch.setattr(launchers_ray.time, "time", lambda: now)
    monkeypatch.setattr(os, "kill", lambda pid, number: sent.append(now))
    for now in (999.0, 1000.0, 1019.0, 1020.0, 1060.0):
        connection.state["draining"] = {"a": deadline} if now >= 1000 else {}
        assert nodes.end_reason(Node("a", "a.lan", 1)) == ""
    assert sent == signal_times
