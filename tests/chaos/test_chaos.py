"""Runs with fault injection at random moments: each exhausts its data and uses every prompt once per epoch."""

from __future__ import annotations

import random
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import chaos
import pytest
from launchers import settings_of
from prompt_accounting import check_accounting
from ray_cluster import ray
from slurm_cluster import slurm

from rl_apps.run.components import weights_directory
from rl_contracts.testing.models import make_tiny_model

KILLS = ("kill_server", "kill_trainer", "kill_launcher")
PROCESS_FAULTS = (
    "kill_server",
    "stop_server",
    "kill_trainer",
    "stop_trainer",
    "kill_reward",
    "stop_reward",
    "kill_launcher",
    "stop_launcher",
)
CLUSTER_FAULTS = (*PROCESS_FAULTS, "truncate_checkpoint", "lose_node")
ALLOCATIONS = {"broadcast": "embedded:d2+fsdp:d2", "disk": "embedded:d1+fsdp:d1"}
"""Allocation per weight route on a cluster; only the route `disk` allows replacing a single server."""
DP_LEADERS = {"broadcast": 2, "disk": 1}
"""Data-parallel leaders of these allocations; each has a shard of the data."""
DISK_MIB = 256


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"), layers=1, hidden=32)


@pytest.fixture(autouse=True, scope="module")
def environment() -> Iterator[None]:
    """Let all processes import the reward of `chaos`, also processes of clusters that start later."""
    with pytest.MonkeyPatch.context() as changed:
        changed.setenv("PYTHONPATH", str(Path(chaos.__file__).parent))
        yield


@contextmanager
def small_disk(directory: Path) -> Iterator[Path | None]:
    """Mount a small file system that a test can fill; yield None if this process may not mount one."""
    directory.mkdir()
    options = ["-t", "tmpfs", "-o", f"size={DISK_MIB}m", "tmpfs", str(directory)]
    if subprocess.run(["mount", *options], capture_output=True).returncode:
        print("skipping the full-disk fault: this user may not mount a file system")
        yield None
        return
    try:
        yield directory
    finally:
        subprocess.run(["umount", "--lazy", str(directory)], check=True)


def max_left_over(outcomes: Counter[str], dp_leaders: int) -> float:
    """Return the number of prompts that may be left over when the first data-parallel leader exhausts its shard.

    A single leader leaves none, because it trains on a smaller last batch. Several leaders train on the same number of
    prompts, but reject or fail different numbers of them. Let p be the fraction of prompts that are trained. Of n
    prompts, a leader trains on n p ± sqrt(n p (1 - p)). The same batches therefore take n ± sqrt(n (1 - p) / p)
    prompts. The bound is three standard deviations of the difference between two leaders.
    """
    trained = outcomes["trained"] / (outcomes.total() - outcomes["left_over"])
    return 3 * (2 * outcomes.total() / dp_leaders * (1 - trained) / trained) ** 0.5 if dp_leaders > 1 else 0


def check_run(
    part: chaos.ChaosRun, prompts: int, epochs: int, record: Callable[[str, object], None], dp_leaders: int = 1
) -> None:
    """Record the statistics of a run; check that every kind of fault was injected and that the account holds."""
    outcomes = check_accounting(part.run_dir, range(prompts), epochs)
    statistics = {
        "faults": dict(part.injected),
        "seconds between faults": part.fault_intervals(),
        "starts": part.starts,
        "steps": part._step(),
        "seconds": round(part.seconds),
        "outcomes": dict(outcomes),
        "shared memory left": len(part.leftover_shared_memory()),
    }
    for name, value in statistics.items():
        record(name, value)
    print(statistics)
    assert part.injected.total() >= part.faults
    assert part.missing_kinds() == []
    assert not weights_directory(part.run_dir).exists()
    assert outcomes["rejected"] > 0
    assert outcomes["failed"] > 0
    assert outcomes["left_over"] <= max_left_over(outcomes, dp_leaders)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("step 3\ngsm8k-grpo: LaunchError: actor-0 was killed by SIGKILL (signal 9);\nits log:\n  step 3\n", True),
        ("warning: rollout-0 was killed by SIGKILL\nstep 3\ngsm8k-grpo: RLError: the loss is not finite\n", False),
        (
            "gsm8k-grpo: LaunchError: rollout-0 failed its readiness checks for 10 s\ngsm8k-grpo: DataError: no rows\n",
            False,
        ),
        ("warning: No space left on device\nTraceback (most recent call last):\nKeyError: 'step'\n", False),
        ("Traceback (most recent call last):\nOSError: [Errno 28] No space left on device\n", True),
        ("step 3\njob 7: FAILED, exit code 137\n", True),
        ("job 7: FAILED, exit code 137\n--- 01:12:29 lose_node: node1 (step 2)\n", True),
        ("job 7: FAILED, exit code 1\n--- 01:12:29 kill_launcher: SIGKILL to 5 (step 2)\n", False),
        ("", False),
    ],
)
def test_is_explained_considers_only_the_last_error(text: str, expected: bool) -> None:
    assert chaos.is_expected_failure(text) == expected


def test_faults_are_each_injected_once_before_any_repeats(tmp_path: Path) -> None:
    kinds = ("kill_server", "kill_trainer", "kill_launcher", "kill_reward")
    part = chaos.ChaosRun([], tmp_path, tmp_path / "log", 1, len(kinds), kinds)
    for kind in kinds:
        setattr(part, kind, lambda kind=kind: "" if kind == "kill_reward" else "done")

    for _ in kinds:
        part._inject_fault()

    assert part.injected.keys() == {*kinds} - {"kill_reward"}
    assert part.missing_kinds() == ["kill_reward"]


@pytest.mark.guarantee("Kills of a server, a trainer and the launcher lose no prompt and repeat none.", area="prompts")
@pytest.mark.nightly  # test_clusters_learn.py and test_trainer_restarts.py test each kind of kill
@pytest.mark.parametrize("data", ["word-problems", "drawn-scenes"])
def test_local_run_with_three_kills_uses_every_prompt_once(
    data: str, model: Path, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    """Kill a server, a trainer and the launcher once each, with and without images."""
    run_dir, prompts, epochs = tmp_path / "run", 120, 2
    small = {"allocation": "embedded:d1+fsdp:d1", "recover.every": 1, "data.name": data}
    if data == "drawn-scenes":  # the command builds a vision-language model
        model, small["rollout.reward"] = Path("embedded"), "chaos:scene_reward"
    command = chaos.grpo_command(model, run_dir, prompts, epochs, **small)
    part = chaos.ChaosRun(command, run_dir, tmp_path / "chaos.log", 3, 3, fault_interval=(2, 5), once=True, kinds=KILLS)
    part.run(seconds=240)
    check_run(part, prompts, epochs, record_property)
    assert set(part.injected) == {*KILLS}


@pytest.mark.nightly
@pytest.mark.timeout(2500)
@pytest.mark.parametrize("seed", range(4))
def test_local_run_with_random_faults_uses_every_prompt_once(
    seed: int, model: Path, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    """Seeds 1 and 3 save no batches, as most runs do; the account then cannot find duplicate sequences in a batch."""
    with small_disk(tmp_path / "disk") as disk:
        run_dir, prompts, epochs, dp_leaders = (disk or tmp_path) / "run", 500, 4, 2 if seed < 2 else 1
        settings = {
            "allocation": f"embedded:d{dp_leaders}+fsdp:d{dp_leaders}",
            "checkpoint.save_batches": str(seed % 2 == 0).lower(),  # batches need disk space
        }
        command = chaos.grpo_command(model, run_dir, prompts, epochs, **settings)
        kinds = (*PROCESS_FAULTS, "truncate_checkpoint", *(["fill_disk"] if disk else []))
        part = chaos.ChaosRun(command, run_dir, tmp_path / "chaos.log", seed, 20, kinds, disk=disk)
        part.run(seconds=2400)
        check_run(part, prompts, epochs, record_property, dp_leaders)


@pytest.mark.nightly
@pytest.mark.timeout(2500)
@pytest.mark.parametrize(("seed", "route"), [(10, "broadcast"), (11, "disk")])
def test_slurm_run_with_lost_nodes_uses_every_prompt_once(
    seed: int, route: str, model: Path, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    """The cluster has four nodes with separate temporary directories; the run uses two and has one spare."""
    with slurm(lost_after=4, requeue_after=8, kill_wait=5) as cluster:

        def lose(rng: random.Random) -> str:
            name = rng.choice(cluster.names)
            cluster.kill_node(name)
            time.sleep(rng.uniform(5, 15))
            cluster.revive(name)
            return str(name)

        run_dir, prompts, epochs = tmp_path / "run", 500, 2
        settings = settings_of("slurm", spare_nodes=1) | {"publish.route": route, "allocation": ALLOCATIONS[route]}
        command = chaos.grpo_command(model, run_dir, prompts, epochs, **settings)
        part = chaos.ChaosRun(command, run_dir, tmp_path / "chaos.log", seed, 15, CLUSTER_FAULTS, kill_node=lose)
        part.run(seconds=2400)
        check_run(part, prompts, epochs, record_property, DP_LEADERS[route])


@pytest.mark.nightly
@pytest.mark.timeout(2500)
@pytest.mark.parametrize(("seed", "route"), [(20, "broadcast"), (21, "disk")])
def test_ray_run_with_lost_nodes_uses_every_prompt_once(
    seed: int, route: str, model: Path, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    """The cluster has three nodes with separate temporary directories; the run uses two.

    The test never kills Ray's head, because this would end the cluster.
    """
    with ray(nodes=3) as cluster:
        nodes = [1, 2]

        def lose(rng: random.Random) -> str:
            nodes.remove(lost := rng.choice(nodes))
            cluster.kill_node(lost)
            time.sleep(rng.uniform(5, 15))
            nodes.append(cluster.add_node())
            return f"node {lost}"

        run_dir, prompts, epochs = tmp_path / "run", 500, 2
        settings = settings_of("ray") | {"publish.route": route, "allocation": ALLOCATIONS[route]}
        command = chaos.grpo_command(model, run_dir, prompts, epochs, **settings)
        part = chaos.ChaosRun(command, run_dir, tmp_path / "chaos.log", seed, 15, CLUSTER_FAULTS, kill_node=lose)
        part.run(seconds=2400)
        check_run(part, prompts, epochs, record_property, DP_LEADERS[route])
