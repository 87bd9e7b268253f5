"""`--dry-run` prints the processes of each machine without a GPU or a cluster; a start requires them."""

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
"""Source of a scheduler with two machines of four GPUs each."""


@pytest.fixture
def nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "two_nodes.py").write_text(NODES)
    monkeypatch.syspath_prepend(tmp_path)
    yield "launcher=two_nodes:Nodes"
    sys.modules.pop("two_nodes", None)


def test_dry_run_lists_processes_and_devices_of_each_machine(nodes: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main("gsm8k-grpo", ["--dry-run", nodes, "allocation=embedded:d4+fsdp:d4"]) == 0
    out = capsys.readouterr().out
    assert "Devices: 8 of 8 GPUs: rollout 4, actor 4 on 2 nodes" in out
    assert "  4 x rollout: " in out
    assert "  4 x actor: " in out
    places = [line for line in out.splitlines() if line.startswith("    cn")]
    assert all(line.endswith("with 1 GPU(s) each") for line in places)
    workers = [word.strip(",") for line in places for word in line.split() if word.startswith(("rollout-", "actor-"))]
    assert sorted(workers) == [f"{role}-{i}" for role in ("actor", "rollout") for i in range(4)]


def test_dry_run_for_missing_gpus_works_but_a_start_fails(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    directory = tmp_path / "run"
    settings = ["allocation=embedded:d4+fsdp:d8", "cluster.devices=12", f"run_dir={directory}"]

    assert main("gsm8k-grpo", ["--dry-run", *settings]) == 0
    assert "actor-0, ..., actor-7 with 1 GPU(s) each" in capsys.readouterr().out

    assert main("gsm8k-grpo", settings) == 2
    err = capsys.readouterr().err
    assert "cluster.devices" in err
    assert "at most 0" in err
    assert "found 12" in err
    assert not directory.exists()


TWO_NODES = ("cluster.nodes=2", "cluster.cores=8", "cluster.devices=4")
NO_RAY = "launcher.options.address=127.0.0.1:1"
"""Setting with an address that no Ray cluster listens on."""


@pytest.mark.parametrize(
    ("settings", "lines"),
    [
        (["launcher=local", "cluster.devices=8"], ["8 of 8 GPUs", "this machine: rollout-0", "actor-3 with 1 GPU(s)"]),
        (["launcher=slurm", *TWO_NODES], ["8 of 8 GPUs", "node0: rollout-0", "node1: actor-0", "#SBATCH --nodes=2"]),
        (["launcher=ray", NO_RAY, *TWO_NODES], ["8 of 8 GPUs", "node0: rollout-0", "node1: actor-0"]),
        (
            ["launcher=slurm", TWO_NODES[0]],
            ["1 core each (cluster.cores sets the number of cores per node) on 2 nodes"],
        ),
    ],
)
def test_dry_run_of_each_launcher_needs_no_cluster_and_no_gpu(
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
    expected += ["Batch script", "rl_apps.cli.main run"] if "launcher=slurm" in settings else []
    assert [line for line in expected if line not in out] == []
    route = "shm" if settings[0] == "launcher=local" else "broadcast" if gpus else "disk"
    assert f"publish.route={route}" in out
    assert not directory.exists()
