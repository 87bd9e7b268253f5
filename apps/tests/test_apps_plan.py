"""`--dry-run` says what would run where, and needs neither GPU nor cluster; a real start is refused without them."""

import os
import sys
from pathlib import Path

import pytest

from rl_apps.cli.driver import main

NODES = """
from dataclasses import dataclass
from rl_contracts.scheduler import Node, Resources, SchedulerConfig
from rl_launchers import LocalScheduler, LocalSchedulerConfig

class Nodes(LocalScheduler):
    pass

@dataclass
class NodesConfig(LocalSchedulerConfig):
    def resources(self):
        return Resources(8, 8, tuple(Node(f"cn{i}", "127.0.0.1", 4, 4) for i in range(2)))
"""
"""A scheduler of two machines with four GPUs each."""


@pytest.fixture
def nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "two_nodes.py").write_text(NODES)
    monkeypatch.syspath_prepend(tmp_path)
    yield "launcher=two_nodes:Nodes"
    sys.modules.pop("two_nodes", None)


def test_plan_names_the_processes_of_each_machine_and_their_devices(
    nodes: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main("gsm8k-grpo", ["--dry-run", nodes, "allocation=embedded:d4+fsdp:d4"]) == 0
    out = capsys.readouterr().out
    assert "# Devices: 8 of 8 GPUs: rollout 4, actor 4 on 2 nodes" in out
    assert "#   4 x rollout: " in out
    assert "#   4 x actor: " in out
    places = [line for line in out.splitlines() if line.startswith("#     cn")]
    assert all(line.endswith("with 1 GPU(s) each") for line in places)
    named = [word.strip(",") for line in places for word in line.split() if word.startswith(("rollout-", "actor-"))]
    assert sorted(named) == [f"{role}-{i}" for role in ("actor", "rollout") for i in range(4)]


def test_plan_for_gpus_that_are_not_here_is_made_and_a_start_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    directory = tmp_path / "run"
    wanted = ["allocation=embedded:d4+fsdp:d8", "cluster.devices=12", f"run_dir={directory}"]

    assert main("gsm8k-grpo", ["--dry-run", *wanted]) == 0
    assert "actor-0, ..., actor-7 with 1 GPU(s) each" in capsys.readouterr().out

    assert main("gsm8k-grpo", wanted) == 2
    refused = capsys.readouterr().err
    assert "cluster.devices: expected at most 0 on a machine, as launcher.kind=local finds, found 12" in refused
    assert not directory.exists()


TWO_NODES = ("launcher.options.nodes=2", "launcher.options.cores_per_node=8", "launcher.options.gpus_per_node=4")
NOBODY = "launcher.options.address=127.0.0.1:1"
"""Where no Ray answers."""


@pytest.mark.parametrize(
    ("settings", "lines"),
    [
        (["launcher=local", "cluster.devices=8"], ["8 of 8 GPUs", "this machine: rollout-0", "actor-3 with 1 GPU(s)"]),
        (["launcher=slurm", *TWO_NODES], ["8 of 8 GPUs", "node0: rollout-0", "node1: actor-0", "#SBATCH --nodes=2"]),
        (["launcher=ray", NOBODY, *TWO_NODES], ["8 of 8 GPUs", "node0: rollout-0", "node1: actor-0"]),
        (
            ["launcher=slurm", TWO_NODES[0]],
            ["1 core each (launcher.options.cores_per_node sets the number of cores per node) on 2 nodes"],
        ),
        (
            ["launcher=ray", NOBODY, TWO_NODES[0]],
            ["1 core each (launcher.options.cores_per_node sets the number of cores per node) on 2 nodes"],
        ),
    ],
)
def test_plan_of_each_launcher_needs_no_cluster_and_no_gpu(
    settings: list[str],
    lines: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in [name for name in os.environ if name.startswith(("SLURM", "RAY_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    directory = tmp_path / "run"

    gpus = ["allocation=embedded:d4+fsdp:d4"] if "8 of 8 GPUs" in lines else []
    assert main("gsm8k-grpo", ["--dry-run", f"run_dir={directory}", *settings, *gpus]) == 0

    out = capsys.readouterr().out
    expected = ["rl_inference.embedded_server", "rl_apps.run.worker", *lines]
    expected += ["# Batch script", "rl_apps.cli.main run"] if "launcher=slurm" in settings else []
    assert [line for line in expected if line not in out] == []
    route = "shm" if settings[0] == "launcher=local" else "broadcast" if gpus else "disk"
    assert f"route: {route}" in out
    assert not directory.exists()
