"""Examples for Slurm, Ray and Kubernetes: they parse, name existing files, and their commands plan a run.

Nightly tests run them on a local Slurm and on a local Ray cluster.
"""

import json
import os
import re
import shlex
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest
import yaml
from ray_cluster import ray
from slurm_cluster import slurm

from rl_apps.cli.driver import main
from rl_contracts.allocation import Allocation
from rl_contracts.testing.models import make_tiny_model

ROOT = Path(__file__).parents[2]
INFRA = ROOT / "infra"
BIN = Path(sys.executable).parent
KUBERNETES = sorted((INFRA / "kubernetes").glob("*.yaml"))
SMALL = ("recipe=embedded", "data.batch_size=4", "evaluation.examples=0", "total_steps=3", "cluster.device=cpu")


def _locked(name):
    packages = tomllib.loads((ROOT / "uv.lock").read_text())["package"]
    (version,) = {package["version"] for package in packages if package["name"] == name}
    return version


def _images():
    """Return the image tags in the `docker build` comments of the image files."""
    files = (path.read_text() for path in (INFRA / "containers").glob("Dockerfile.*"))
    return {tag for text in files for tag in re.findall(r"docker build .* -t (\S+) \.", text)}


def _groups(cluster):
    """Yield (replicas, group) for the head group and each worker group of a RayCluster spec."""
    yield 1, cluster["headGroupSpec"]
    for group in cluster["workerGroupSpecs"]:
        yield group["replicas"], group


def _commands(text):
    """Return the arguments of each `gsm8k-grpo` command in the comments of an example."""
    joined = re.sub(r"\\\n#\s*", "", text)
    lines = re.findall(r"^#\s+.*?(gsm8k-grpo [^#\n]*)", joined, flags=re.M)
    return [shlex.split(line.partition(" && ")[0])[1:] for line in lines if "=" in line]


def _plan(words, capsys, *more):
    """Run with `--dry-run` and return the output; the only accepted error is a server that is not installed."""
    words = [word for word in words if word != "--dry-run"]
    code = main("gsm8k-grpo", [*words, *more, "--dry-run"])
    printed = capsys.readouterr()
    no_server = re.search(r"expected (sglang|vllm) .*found no such package", printed.err)  # the last check
    assert code == 0 or no_server, printed.err
    return printed.out or printed.err


@pytest.fixture
def no_cluster(monkeypatch):
    """An environment without Slurm and Ray."""
    monkeypatch.setenv("PATH", "/nonexistent")
    for name in [name for name in os.environ if name.startswith(("SLURM", "RAY_"))]:
        monkeypatch.delenv(name)


@pytest.mark.parametrize("path", KUBERNETES, ids=lambda path: path.name)
def test_kubernetes_pods_have_images_versions_limits_and_shared_volumes(path):
    manifest = yaml.safe_load(path.read_text())
    assert (manifest["apiVersion"], manifest["kind"].lower()) == ("ray.io/v1", path.stem)
    cluster = manifest["spec"].get("rayClusterSpec", manifest["spec"])
    assert cluster["rayVersion"] == _locked("ray")
    for replicas, group in _groups(cluster):
        assert group.get("minReplicas", replicas) == group.get("maxReplicas", replicas) == replicas
        assert all(isinstance(value, str) for value in group["rayStartParams"].values())
        pod = group["template"]["spec"]
        assert pod["securityContext"]["runAsNonRoot"] is True
        (container,) = pod["containers"]
        assert container["image"] in _images()
        assert container["resources"]["limits"] == container["resources"]["requests"]
        volumes = {volume["name"] for volume in pod["volumes"]}
        mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
        assert set(mounts) == {"/runs", "/dev/shm"}
        assert set(mounts.values()) == volumes


@pytest.mark.parametrize("path", KUBERNETES, ids=lambda path: path.name)
def test_kubernetes_commands_plan_a_run_that_fits_the_pods(path, no_cluster, capsys):
    manifest = yaml.safe_load(path.read_text())
    entrypoint = manifest["spec"].get("entrypoint")
    commands = [shlex.split(entrypoint)[1:]] if entrypoint else _commands(path.read_text())
    assert len(commands) == 1
    (words,) = commands
    assert "launcher=ray" in words
    (run_dir,) = (word.partition("=")[2] for word in words if word.startswith("run_dir="))
    assert run_dir.startswith("/runs/")

    workers = [group for _, group in _groups(manifest["spec"].get("rayClusterSpec", manifest["spec"]))][1:]
    limits = [(g["replicas"], g["template"]["spec"]["containers"][0]["resources"]["limits"]) for g in workers]
    gpus = sum(replicas * int(limit.get("nvidia.com/gpu", 0)) for replicas, limit in limits)
    (allocation,) = (Allocation.parse(word.partition("=")[2]) for word in words if word.startswith("allocation="))
    needed = sum(engine.world_size for engine in (*allocation.train, *allocation.inference))
    assert gpus in (0, needed)
    ((replicas, limit),) = limits
    resources = [f"cluster.nodes={replicas}", f"cluster.cores={limit['cpu']}"]
    resources = [setting for setting in resources if setting.partition("=")[0] not in " ".join(words)]
    if gpus:
        resources += [f"cluster.devices={limit['nvidia.com/gpu']}"]
    plan = _plan(words, capsys, *resources)
    if "Devices" in plan:
        assert f"on {replicas} nodes" in plan
        assert f"of {replicas * int(limit['cpu'])} cores" in plan or f"of {gpus} GPUs" in plan


def test_ray_cluster_file_matches_the_schema_of_ray():
    jsonschema = pytest.importorskip("jsonschema")
    package = pytest.importorskip("ray")
    schema = json.loads((Path(package.__file__).parent / "autoscaler" / "ray-schema.json").read_text())
    cluster = yaml.safe_load((INFRA / "ray" / "cluster.yaml").read_text())
    jsonschema.validate(cluster, schema)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(cluster | {"workers": 2}, schema)


@pytest.mark.parametrize("name", ["gsm8k_grpo.yaml", "container.yaml"])
def test_slurm_settings_print_a_plan_and_a_batch_script(name, no_cluster, capsys):
    text = (INFRA / "slurm" / name).read_text()
    commands = _commands(text)
    assert commands
    for words in commands:
        words = [str(ROOT / word) if word.startswith("infra/") else word for word in words]
        plan = _plan(words, capsys, "cluster.cores=4", "cluster.device=cpu")
        assert "on 2 nodes" in plan
        assert "#SBATCH --nodes=3" in plan  # two nodes and a spare node
        assert "#SBATCH --time=4:00:00" in plan
        assert "recover.every" not in plan.partition("Batch script")[2]  # no warning
        settings = _plan(words, capsys, "--cfg", "job")
        assert name != "container.yaml" or "container_image: /shared/images/rl-cuda.sqsh" in settings


def _last_command(script):
    """Return the arguments of the last command of a script, without `"$@"` and `run_dir`."""
    line = (INFRA / script).read_text().splitlines()[-1]
    words = [word for word in shlex.split(line) if word not in ("$@", "run_dir=$run_dir")]
    return words[words.index("gsm8k-grpo") + 1 :]


@pytest.mark.parametrize("script", ["slurm/gsm8k_grpo.sbatch", "ray/submit.sh"])
def test_scripts_have_valid_syntax_and_their_commands_plan_a_run(script, no_cluster, capsys, tmp_path):
    assert subprocess.run(["/bin/bash", "-n", INFRA / script], check=False).returncode == 0
    words = [*_last_command(script), f"run_dir={tmp_path}", "cluster.nodes=2", "cluster.cores=2"]
    assert "recover.every=20" in words
    assert "2 nodes" in _plan(words, capsys, "cluster.device=cpu")


def test_examples_use_only_known_host_names():
    for path in (
        path for folder in ("slurm", "ray", "kubernetes", "containers") for path in (INFRA / folder).iterdir()
    ):
        hosts = set(re.findall(r"\b(?:[a-z0-9-]+\.)+(?:com|io|org|net|internal|local)\b", path.read_text()))
        assert hosts <= {"ray.io", "nvidia.com", "ghcr.io"}, path


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("model"), layers=1, hidden=32)


def _is_finished(run_dir):
    return (run_dir / "finished").exists()


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_sbatch_runs_on_the_four_node_slurm(model, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(BIN), prepend=os.pathsep)
    with slurm() as cluster:
        run_dir, out = tmp_path / "run", tmp_path / "out"
        script = str(INFRA / "slurm" / "gsm8k_grpo.sbatch")
        job = cluster.run(
            "sbatch", "--parsable", f"--output={out}", script, str(run_dir), f"model.path={model}", *SMALL
        )
        deadline = time.monotonic() + 600
        while cluster.run("squeue", "-h", "-j", job) and time.monotonic() < deadline:
            time.sleep(0.5)
        assert _is_finished(run_dir), out.read_text()
        assert len((run_dir / "metrics.jsonl").read_text().splitlines()) == 3
        assert len(list((run_dir / "logs").glob("agent-node*.log"))) == 2


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_submit_runs_on_the_two_node_ray_cluster(model, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(BIN), prepend=os.pathsep)
    with ray(nodes=2, cpus=2, dashboard=True) as cluster:
        monkeypatch.setenv("RAY_API_SERVER_ADDRESS", cluster.dashboard)
        run_dir = tmp_path / "run"
        done = subprocess.run(
            [INFRA / "ray" / "submit.sh", str(run_dir), f"model.path={model}", *SMALL],
            capture_output=True,
            text=True,
            timeout=800,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert _is_finished(run_dir), done.stdout
        assert len((run_dir / "metrics.jsonl").read_text().splitlines()) == 3
