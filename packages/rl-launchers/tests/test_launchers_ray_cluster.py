"""Ray scheduler on a real cluster of two nodes, also with a killed node or launcher."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from threading import Timer
from types import ModuleType
from typing import Any

import psutil
import pytest

from rl_contracts.conformance.scheduler import (
    SLEEP,
    WRITE_ENVIRONMENT,
    SchedulerConformance,
    listens,
    python,
    server,
    wait_for_end,
)
from rl_contracts.errors import ConfigError, LaunchError
from rl_contracts.scheduler import RUN_KEY_VARIABLE, JobSpec, WorkerStatus
from rl_contracts.testing.waiting import wait_until
from rl_launchers import RayScheduler, RaySchedulerConfig
from rl_launchers.cluster.scheduler import ClusterScheduler
from rl_launchers.ray.scheduler import RayNodes, describe_cluster

pytest.importorskip("ray")
pytestmark = pytest.mark.timeout(600)

PATIENCE = 120.0
"""Seconds to wait for Ray to detect a change."""
LAUNCHER = """
import sys
from pathlib import Path
from rl_contracts.scheduler import JobSpec
from rl_launchers import RayScheduler
scheduler = RayScheduler(Path(sys.argv[1]))
scheduler.create_workers(JobSpec("role", (sys.executable, "-c", sys.argv[2], sys.argv[1]), count=4))
print("started", flush=True)
sys.stdin.read()
"""
"""Program that starts four workers and waits for the end of its input."""


def load_clusters() -> ModuleType:
    """Import `infra/clusters/ray.py` as a module."""
    path = Path(__file__).parents[3] / "infra" / "clusters" / "ray.py"
    spec = importlib.util.spec_from_file_location("infra_clusters_ray", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """Cluster of two nodes that no test kills."""
    with load_clusters().running(nodes=2, cpus=2, gpus=2) as cluster:
        yield cluster
    assert not cluster.directory.exists()
    assert not running_with(str(cluster.directory))


@pytest.fixture
def free_cluster(cluster: Any, provider: KeptNodes, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The cluster, with its address in the environment and no resources in use."""
    RayNodes.close(provider)
    for name, value in cluster.environment.items():
        monkeypatch.setenv(name, value)
    describe_cluster.cache_clear()
    return cluster


def running_with(text: str) -> list[psutil.Process]:
    """Return the processes whose command line contains a text."""
    processes = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.status() != psutil.STATUS_ZOMBIE and text in " ".join(process.cmdline()):
                processes.append(process)
    return processes


class KeptNodes(RayNodes):
    """Provider that keeps its connection to Ray for several schedulers."""

    def close(self) -> None:
        """Do nothing; the agents have ended already."""


@pytest.fixture(scope="module")
def provider(cluster: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[KeptNodes]:
    """Provider that holds the cluster during the conformance tests."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in cluster.environment.items():
            patch.setenv(name, value)
        yield KeptNodes(tmp_path_factory.mktemp("ray"), RaySchedulerConfig())


@pytest.mark.slow
class TestRayScheduler(SchedulerConformance):
    @pytest.fixture
    def scheduler(self, provider: KeptNodes, tmp_path: Path) -> Iterator[ClusterScheduler]:
        with ClusterScheduler(tmp_path / "logs", RaySchedulerConfig(), provider) as scheduler:
            yield scheduler


@pytest.mark.nightly
def test_resources_of_cluster_are_those_of_its_nodes(free_cluster: Any) -> None:
    resources = RaySchedulerConfig().resources()
    assert (resources.cores, resources.gpus) == (4, 4)
    assert {node.host for node in resources.nodes} == {"127.0.0.2", "127.0.0.3"}
    with pytest.raises(ConfigError, match="expected 3 nodes with CPU 1 each, found 2 among 2"):
        _requesting(3).resources()


@pytest.mark.nightly
def test_resources_without_cluster_error_has_remedy() -> None:
    with pytest.raises(ConfigError, match=r"launcher.options.address=127.0.0.1:1: .*ray job submit"):
        RaySchedulerConfig(address="127.0.0.1:1").resources()


@pytest.mark.nightly
def test_workers_get_the_gpus_that_ray_assigned(free_cluster: Any, tmp_path: Path) -> None:
    command = python(WRITE_ENVIRONMENT, str(tmp_path / "worker-{index}.json"))
    with RayScheduler(tmp_path / "logs") as scheduler:
        workers = scheduler.create_workers(JobSpec("actor", command, count=4, gpus=1))
        wait_for_end(scheduler, "actor")
    environments = [json.loads((tmp_path / f"worker-{i}.json").read_text())[1] for i in range(4)]
    assert {(w.host, e["CUDA_VISIBLE_DEVICES"]) for w, e in zip(workers, environments, strict=True)} == {
        (host, gpu) for host in ("127.0.0.2", "127.0.0.3") for gpu in ("0", "1")
    }
    assert {e["TMPDIR"] for e in environments} == {str(free_cluster.directory / node / "tmp") for node in "01"}
    assert not [name for e in environments for name in e if name.startswith("RAY_")]


@pytest.mark.nightly
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can lower the niceness that Ray gives its workers")
def test_workers_have_normal_priority_unlike_ray_workers(free_cluster: Any, tmp_path: Path) -> None:
    with RayScheduler(tmp_path / "logs") as scheduler:
        (worker,) = scheduler.create_workers(JobSpec("role", python(SLEEP)))
        assert os.getpriority(os.PRIO_PROCESS, worker.pid) == 0


@pytest.mark.nightly
def test_secrets_are_invisible_to_other_users(
    free_cluster: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key, token = "the-key-of-this-run-1f8a", "the-token-of-the-user-7c3d"
    monkeypatch.setenv("HF_TOKEN", token)
    before = signal.getsignal(signal.SIGTERM)
    out = tmp_path / "secret.json"
    with RayScheduler(tmp_path / "logs") as scheduler:
        command = python(WRITE_ENVIRONMENT + SLEEP, str(out))
        scheduler.create_workers(JobSpec("role", command, env={RUN_KEY_VARIABLE: key}))
        wait_until(out.exists)
        environment = json.loads(out.read_text())[1]
        assert (environment[RUN_KEY_VARIABLE], environment["HF_TOKEN"]) == (key, token)
        out.unlink()

        assert not running_with(key) + running_with(token)
        holders = {process.name() for process in psutil.process_iter() if key in _environment(process).values()}
        assert len(holders) == 1  # only the worker, not its agent or a Ray process
        files = [path for root in (free_cluster.directory, tmp_path) for path in root.rglob("*") if path.is_file()]
        private_files = [path for path in files if path.stat().st_mode & 0o077 == 0]
        assert {path.name[:8] for path in private_files} <= {".agents-", "token"}
        for path in set(files) - set(private_files):
            text = path.read_bytes()
            assert key.encode() not in text, path
            assert token.encode() not in text, path
    assert signal.getsignal(signal.SIGTERM) is before


def _environment(process: psutil.Process) -> dict[str, str]:
    with suppress(psutil.Error):
        return dict(process.environ())
    return {}


@pytest.mark.nightly
def test_launcher_under_uv_run_killed_leaves_no_processes(free_cluster: Any, tmp_path: Path) -> None:
    command = ["uv", "run", "--no-sync", "python", "-c", LAUNCHER, str(tmp_path / "logs"), SLEEP]
    before = {process.pid for node in (0, 1) for process in free_cluster.processes(node)}
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True) as uv:
        assert uv.stdout is not None
        assert uv.stdout.readline() == b"started\n"
        assert len(running_with(str(tmp_path))) >= 2 + 4  # two agents and four workers
        # Ray packaged no working directory
        assert not [*free_cluster.directory.glob("*/session_*/runtime_resources/working_dir_files/*")]
        os.killpg(uv.pid, signal.SIGKILL)
    wait_until(lambda: not running_with(str(tmp_path)), PATIENCE)
    wait_until(
        lambda: (
            not _launcher_commands([p for node in (0, 1) for p in free_cluster.processes(node) if p.pid not in before])
        ),
        PATIENCE,
    )


def _launcher_commands(processes: list[psutil.Process]) -> list[str]:
    """Return the command lines of agents and workers, without Ray's own idle workers."""
    lines = []
    for process in processes:
        with suppress(psutil.Error):
            lines.append(" ".join(process.cmdline()))
    return [line for line in lines if "NodeAgent" in line or "rl_launchers" in line]


@pytest.mark.nightly
def test_create_workers_on_busy_cluster_error_lists_free_resources(
    free_cluster: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rl_launchers.ray.scheduler.PLACEMENT_SECONDS", 1.0)
    with (
        RayScheduler(tmp_path / "one") as first,
        RayScheduler(tmp_path / "two") as second,
    ):
        first.create_workers(JobSpec("role", python(SLEEP)))
        with pytest.raises(LaunchError, match=r"2 bundles.* within 1 s.*0 of 4 CPU"):
            second.create_workers(JobSpec("role", python(SLEEP)))


@pytest.mark.nightly
def test_local_cluster_starts_and_ends_with_the_run(tmp_path: Path) -> None:
    before = set(Path("/tmp").glob("rl-ray-*"))
    with RayScheduler(tmp_path / "logs", RaySchedulerConfig(address="local")) as scheduler:
        scheduler.create_workers(server())
        (worker,) = scheduler.wait_ready("server")
        assert (worker.host, listens(worker)) == ("127.0.0.1", True)
        (scratch,) = set(Path("/tmp").glob("rl-ray-*")) - before
        assert running_with(str(scratch))
    assert not scratch.exists()
    wait_until(lambda: not running_with(str(scratch)), PATIENCE)


@pytest.fixture
def expendable_cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Cluster of three nodes for one test, which may kill two of them."""
    with load_clusters().running(nodes=3, cpus=2) as cluster:
        for name, value in cluster.environment.items():
            monkeypatch.setenv(name, value)
        describe_cluster.cache_clear()
        yield cluster


@pytest.mark.nightly
def test_node_killed_its_workers_fail_and_another_node_replaces_it(expendable_cluster: Any, tmp_path: Path) -> None:
    config = _requesting(2)
    provider = RayNodes(tmp_path / "logs", config)
    with ClusterScheduler(tmp_path / "logs", config, provider) as scheduler:
        scheduler.create_workers(server(count=2, cpus=2))
        workers = scheduler.wait_ready("server")
        nodes_before = provider.nodes()
        lost = next(worker for worker in workers if worker.host != "127.0.0.2")  # the head stays

        expendable_cluster.kill_node(int(lost.host.rpartition(".")[2]) - 2)
        wait_until(lambda: WorkerStatus.FAILED in {worker.status for worker in scheduler.poll()})
        (failed,) = [worker for worker in scheduler.poll() if worker.status is WorkerStatus.FAILED]
        assert failed.name == lost.name
        assert f"was lost with node {lost.node}, which" in failed.cause

        wait_until(lambda: len(set(provider.nodes()) - set(nodes_before)) == 1, PATIENCE)
        (new,) = set(provider.nodes()) - set(nodes_before)
        scheduler.resize_workers("server", 3)
        assert new.host not in {node.host for node in nodes_before}
        again = scheduler.restart_worker(failed, "injected")
        assert again.restarts == 1
        scheduler.wait_ready("server")


@pytest.mark.nightly
def test_node_lost_only_later_starts_wait_for_a_new_node(
    expendable_cluster: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits = "rl_launchers.ray.scheduler.REPLACEMENT_SECONDS"
    too_few_nodes = pytest.raises(ConfigError, match="expected 4 nodes with CPU 1 each, found 3 among 3")
    with RayScheduler(tmp_path / "never", _requesting(4)) as scheduler, too_few_nodes:
        scheduler.create_workers(JobSpec("role", python(SLEEP)))
    config = _requesting(3)
    provider = RayNodes(tmp_path / "logs", config)
    with ClusterScheduler(tmp_path / "logs", config, provider) as scheduler:
        scheduler.create_workers(JobSpec("role", python(SLEEP)))
        expendable_cluster.kill_node(2)
        wait_until(lambda: len(provider._cluster_state()["living"]) == 2, PATIENCE)
        scheduler.delete_workers()
        monkeypatch.setattr(waits, 3.0)
        with pytest.raises(LaunchError, match=r"expected 3 nodes .* found 2 among 2.*within 3 s"):
            scheduler.create_workers(JobSpec("role", python(SLEEP)))
        monkeypatch.setattr(waits, 60.0)
        later = Timer(2.0, expendable_cluster.add_node)
        later.start()
        (worker,) = scheduler.create_workers(JobSpec("role", python(SLEEP)))
        later.join()
        assert worker.status is WorkerStatus.RUNNING


@pytest.mark.nightly
def test_node_drained_this_process_gets_sigterm(expendable_cluster: Any, tmp_path: Path) -> None:
    received: list[int] = []
    previous_handler = signal.signal(signal.SIGTERM, lambda number, _: received.append(number))
    try:
        with RayScheduler(tmp_path / "logs") as scheduler:
            (worker,) = scheduler.create_workers(JobSpec("role", python(SLEEP)))
            node_id = _node_id(worker.host)
            drain = [sys.executable, "-m", "ray.scripts.scripts", "drain-node", f"--node-id={node_id}"]
            options = [
                "--reason=DRAIN_NODE_REASON_PREEMPTION",
                "--reason-message=spot",
                "--deadline-remaining-seconds=60",
            ]
            subprocess.run([*drain, *options], check=True, capture_output=True)
            wait_until(lambda: bool(scheduler.poll()) and bool(received), PATIENCE)
    finally:
        signal.signal(signal.SIGTERM, previous_handler)
    assert received == [signal.SIGTERM]


def _requesting(nodes: int) -> RaySchedulerConfig:
    config = RaySchedulerConfig()
    config.use_cluster(nodes)
    return config


def _node_id(host: str) -> str:
    by_host = "{n['NodeManagerAddress']: n['NodeID'] for n in ray.nodes()}"
    program = f"import ray, sys; ray.init(log_to_driver=False); print({by_host}[sys.argv[1]])"
    return subprocess.run([*python(program), host], check=True, capture_output=True, text=True).stdout.split()[-1]


@pytest.mark.nightly
def test_agent_ends_on_live_node_reason_is_reported_node_is_kept(free_cluster: Any, tmp_path: Path) -> None:
    provider = RayNodes(tmp_path, _requesting(1))
    try:
        (node,) = provider.nodes()
        provider.start(node, python("raise SystemExit(3)"), dict(os.environ), tmp_path / "agent.log")
        wait_until(lambda: provider.end_reason(node) == "ended with exit code 3", PATIENCE)
        assert provider.nodes() == [node]
        provider.start(node, python("print('again')"), dict(os.environ), tmp_path / "agent.log")
        wait_until(lambda: provider.end_reason(node) == "ended with exit code 0", PATIENCE)
        assert "again" in (tmp_path / "agent.log").read_text()
    finally:
        provider.close()
