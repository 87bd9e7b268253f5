"""Runs in which something dies at random moments: each comes to its end, and uses every prompt once."""

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
PROCESSES = (
    "kill_server",
    "stop_server",
    "kill_trainer",
    "stop_trainer",
    "kill_reward",
    "stop_reward",
    "kill_launcher",
    "stop_launcher",
)
ALLOCATIONS = {"broadcast": "embedded:d2+fsdp:d2", "disk": "embedded:d1+fsdp:d1"}
"""By the route of weights on a cluster: an only server can be replaced where they lie on a disk."""
HEADS = {"broadcast": 2, "disk": 1}
"""Replicas of the trainer in these, each with a head that has a share of the data."""
DISK_MIB = 256


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"), layers=1, hidden=32)


@pytest.fixture(autouse=True, scope="module")
def environment() -> Iterator[None]:
    """In which all processes find the reward of `chaos`, also those of clusters that start later."""
    with pytest.MonkeyPatch.context() as changed:
        changed.setenv("PYTHONPATH", str(Path(chaos.__file__).parent))
        yield


@contextmanager
def small_disk(directory: Path) -> Iterator[Path | None]:
    """A file system of its own that can be filled; None where this process may not mount one."""
    directory.mkdir()
    options = ["-t", "tmpfs", "-o", f"size={DISK_MIB}m", "tmpfs", str(directory)]
    if subprocess.run(["mount", *options], capture_output=True).returncode:
        print("a disk that is full is left out: this user may not mount a file system")
        yield None
        return
    try:
        yield directory
    finally:
        subprocess.run(["umount", "--lazy", str(directory)], check=True)


def most_left(endings: Counter[str], heads: int) -> float:
    """How many prompts may be left over when the first head has used up its share of the data.

    Of one head none: it trains on a last batch that is smaller. Of two, those by which the other was slower: both have
    trained on as many prompts, of random shares of the data, of which unlike parts were rejected or failed. Of n a head
    uses n p, give or take sqrt(n p (1 - p)), so for the same batches it takes n, give or take that over p. Allowed are
    three deviations of the difference of two heads.
    """
    used = endings["trained"] / (endings.total() - endings["left_over"])
    return 3 * (2 * endings.total() / heads * (1 - used) / used) ** 0.5 if heads > 1 else 0


def examine(
    part: chaos.ChaosRun, prompts: int, epochs: int, record: Callable[[str, object], None], heads: int = 1
) -> None:
    """Tell what was done, and look whether all that was asked for was done, and whether the account holds."""
    endings = check_accounting(part.run_dir, range(prompts), epochs)
    figures = {
        "faults": dict(part.injected),
        "seconds between faults": part.fault_intervals(),
        "starts": part.starts,
        "steps": part._step(),
        "seconds": round(part.seconds),
        "endings": dict(endings),
        "shared memory left": len(part.leftover_shared_memory()),
    }
    for name, value in figures.items():
        record(name, value)
    print(figures)
    assert part.injected.total() >= part.faults
    assert part.missing_kinds() == []
    assert not weights_directory(part.run_dir).exists()
    assert endings["rejected"] > 0
    assert endings["failed"] > 0
    assert endings["left_over"] <= most_left(endings, heads)


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


@pytest.mark.nightly  # kills of each kind are in test_clusters_learn.py and test_trainer_restarts.py
def test_local_run_with_three_kills_uses_every_prompt_once(
    model: Path, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    """One of a server, a trainer and the launcher each, in turn."""
    run_dir, prompts, epochs = tmp_path / "run", 120, 2
    small = {"allocation": "embedded:d1+fsdp:d1", "recover.every": 1}
    command = chaos.grpo_command(model, run_dir, prompts, epochs, **small)
    part = chaos.ChaosRun(command, run_dir, tmp_path / "chaos.log", 3, 3, fault_interval=(2, 5), once=True, kinds=KILLS)
    part.run(seconds=240)
    examine(part, prompts, epochs, record_property)
    assert set(part.injected) == {*KILLS}


@pytest.mark.nightly
@pytest.mark.timeout(2500)
@pytest.mark.parametrize("seed", range(4))
def test_local_run_with_random_faults_uses_every_prompt_once(
    seed: int, model: Path, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    """Seeds 1 and 3 save no batches, as most runs do: of these the account compares what is told with the data and the
    steps alone, and not with the rows that were trained on, so that "twice in a batch" is looked for in 0 and 2."""
    with small_disk(tmp_path / "disk") as disk:
        run_dir, prompts, epochs, heads = (disk or tmp_path) / "run", 500, 4, 2 if seed < 2 else 1
        more = {
            "allocation": f"embedded:d{heads}+fsdp:d{heads}",
            "checkpoint.save_batches": str(seed % 2 == 0).lower(),  # for which there must be room
        }
        command = chaos.grpo_command(model, run_dir, prompts, epochs, **more)
        kinds = (*PROCESSES, "truncate_checkpoint", *(["fill_disk"] if disk else []))
        part = chaos.ChaosRun(command, run_dir, tmp_path / "chaos.log", seed, 20, kinds, disk=disk)
        part.run(seconds=2400)
        examine(part, prompts, epochs, record_property, heads)


@pytest.mark.nightly
@pytest.mark.timeout(2500)
@pytest.mark.parametrize(("seed", "route"), [(10, "broadcast"), (11, "disk")])
def test_slurm_run_with_lost_nodes_uses_every_prompt_once(
    seed: int, route: str, model: Path, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    """Four nodes, each with a temporary directory of its own, of which the run has two and a spare one."""
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
        part = chaos.ChaosRun(
            command,
            run_dir,
            tmp_path / "chaos.log",
            seed,
            15,
            (*PROCESSES, "truncate_checkpoint", "lose_node"),
            kill_node=lose,
        )
        part.run(seconds=2400)
        examine(part, prompts, epochs, record_property, HEADS[route])


@pytest.mark.nightly
@pytest.mark.timeout(2500)
@pytest.mark.parametrize(("seed", "route"), [(20, "broadcast"), (21, "disk")])
def test_ray_run_with_lost_nodes_uses_every_prompt_once(
    seed: int, route: str, model: Path, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    """Three nodes, each with a temporary directory of its own, of which the run has two. Ray's head is not killed: with
    it the cluster is gone. With seed 21 Ray keeps the run's names."""
    with ray(nodes=3) as cluster:
        nodes = [1, 2]

        def lose(rng: random.Random) -> str:
            nodes.remove(lost := rng.choice(nodes))
            cluster.kill_node(lost)
            time.sleep(rng.uniform(5, 15))
            nodes.append(cluster.add_node())
            return f"node {lost}"

        run_dir, prompts, epochs = tmp_path / "run", 500, 2
        names = "files" if seed == 20 else "ray"
        settings = settings_of("ray", names=names) | {"publish.route": route, "allocation": ALLOCATIONS[route]}
        command = chaos.grpo_command(model, run_dir, prompts, epochs, **settings)
        part = chaos.ChaosRun(
            command,
            run_dir,
            tmp_path / "chaos.log",
            seed,
            15,
            (*PROCESSES, "truncate_checkpoint", "lose_node"),
            kill_node=lose,
        )
        part.run(seconds=2400)
        examine(part, prompts, epochs, record_property, HEADS[route])
