"""The Ray scheduler on a real cluster of two nodes, and what happens when one of them, or the launcher, is killed."""

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
"""Seconds for Ray to see what happened."""
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
"""A launcher that keeps four workers until its input ends."""


def load_clusters() -> ModuleType:
    """`infra/clusters/ray.py`."""
    path = Path(__file__).parents[3] / "infra" / "clusters" / "ray.py"
    spec = importlib.util.spec_from_file_location("infra_clusters_ray", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """Two nodes, which no test kills."""
    with load_clusters().running(nodes=2, cpus=2, gpus=2) as cluster:
        yield cluster
    assert not cluster.directory.exists()
    assert not running_with(str(cluster.directory))


@pytest.fixture
def told(cluster: Any, provider: KeptNodes, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The cluster, of which the environment tells, and which nobody holds."""
    RayNodes.close(provider)
    for name, value in cluster.environment.items():
        monkeypatch.setenv(name, value)
    describe_cluster.cache_clear()
    return cluster


def running_with(words: str) -> list[psutil.Process]:
    """Processes with these words in their command."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.status() != psutil.STATUS_ZOMBIE and words in " ".join(process.cmdline()):
                found.append(process)
    return found


class KeptNodes(RayNodes):
    """Keeps its connection to Ray from one scheduler to the next."""

    def close(self) -> None:
        """Agents have ended by themselves."""


@pytest.fixture(scope="module")
def provider(cluster: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[KeptNodes]:
    """Holds the cluster while a contract's tests go on."""
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
def test_resources_of_a_cluster_are_what_its_nodes_have(told: Any) -> None:
    there = RaySchedulerConfig().resources()
    assert (there.cores, there.gpus) == (4, 4)
    assert {node.host for node in there.nodes} == {"127.0.0.2", "127.0.0.3"}
    with pytest.raises(ConfigError, match="expected 3 nodes with CPU 1 each, found 2 among 2"):
        RaySchedulerConfig(nodes=3).resources()


@pytest.mark.nightly
def test_resources_no_cluster_answers_says_what_to_do() -> None:
    with pytest.raises(
        ConfigError, match=r"launcher.options.address=127.0.0.1:1: expected a Ray cluster.*ray job submit"
    ):
        RaySchedulerConfig(address="127.0.0.1:1").resources()


@pytest.mark.nightly
def test_workers_have_the_gpus_that_ray_gave(told: Any, tmp_path: Path) -> None:
    command = python(WRITE_ENVIRONMENT, str(tmp_path / "worker-{index}.json"))
    with RayScheduler(tmp_path / "logs") as scheduler:
        workers = scheduler.create_workers(JobSpec("actor", command, count=4, gpus=1))
        wait_for_end(scheduler, "actor")
    seen = [json.loads((tmp_path / f"worker-{i}.json").read_text())[1] for i in range(4)]
    assert {(w.host, e["CUDA_VISIBLE_DEVICES"]) for w, e in zip(workers, seen, strict=True)} == {
        (host, gpu) for host in ("127.0.0.2", "127.0.0.3") for gpu in ("0", "1")
    }
    assert {e["TMPDIR"] for e in seen} == {str(told.directory / node / "tmp") for node in "01"}
    assert not [name for e in seen for name in e if name.startswith("RAY_")]


@pytest.mark.nightly
@pytest.mark.skipif(os.geteuid() != 0, reason="only root may take back the niceness that Ray gives its workers")
def test_workers_do_not_yield_to_everything_else_as_those_of_ray_do(told: Any, tmp_path: Path) -> None:
    with RayScheduler(tmp_path / "logs") as scheduler:
        (worker,) = scheduler.create_workers(JobSpec("role", python(SLEEP)))
        assert os.getpriority(os.PRIO_PROCESS, worker.pid) == 0


@pytest.mark.nightly
def test_nothing_secret_is_shown_to_others(told: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
        assert len(holders) == 1  # the worker; neither its agent nor anything of Ray's
        shown = [path for root in (told.directory, tmp_path) for path in root.rglob("*") if path.is_file()]
        hidden = [path for path in shown if path.stat().st_mode & 0o077 == 0]
        assert {path.name[:8] for path in hidden} <= {".agents-", "token"}
        for path in set(shown) - set(hidden):
            text = path.read_bytes()
            assert key.encode() not in text, path
            assert token.encode() not in text, path
    assert signal.getsignal(signal.SIGTERM) is before


def _environment(process: psutil.Process) -> dict[str, str]:
    with suppress(psutil.Error):
        return dict(process.environ())
    return {}


@pytest.mark.nightly
def test_launcher_under_uv_run_is_killed_and_nothing_is_left(told: Any, tmp_path: Path) -> None:
    command = ["uv", "run", "--no-sync", "python", "-c", LAUNCHER, str(tmp_path / "logs"), SLEEP]
    before = {process.pid for node in (0, 1) for process in told.processes(node)}
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True) as uv:
        assert uv.stdout is not None
        assert uv.stdout.readline() == b"started\n"
        assert len(running_with(str(tmp_path))) >= 2 + 4  # agents, workers
        assert not [*told.directory.glob("*/session_*/runtime_resources/working_dir_files/*")]  # Ray packed up nothing
        os.killpg(uv.pid, signal.SIGKILL)
    wait_until(lambda: not running_with(str(tmp_path)), PATIENCE)
    wait_until(
        lambda: not _of_ours([p for node in (0, 1) for p in told.processes(node) if p.pid not in before]), PATIENCE
    )


def _of_ours(processes: list[psutil.Process]) -> list[str]:
    """Names of those that are not Ray's own, which keeps idle workers."""
    lines = []
    for process in processes:
        with suppress(psutil.Error):
            lines.append(" ".join(process.cmdline()))
    return [line for line in lines if "NodeAgent" in line or "rl_launchers" in line]


@pytest.mark.nightly
def test_cluster_is_in_use_says_what_is_free(told: Any, tmp_path: Path) -> None:
    with (
        RayScheduler(tmp_path / "one") as first,
        RayScheduler(tmp_path / "two", RaySchedulerConfig(placement_timeout=1.0)) as second,
    ):
        first.create_workers(JobSpec("role", python(SLEEP)))
        with pytest.raises(LaunchError, match=r"placement_timeout=1: expected a node for each of 2 .*0 of 4 CPU"):
            second.create_workers(JobSpec("role", python(SLEEP)))


@pytest.mark.nightly
def test_cluster_is_started_on_the_spot_and_goes_with_the_run(tmp_path: Path) -> None:
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
def mortal(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Three nodes for one test, which may kill two of them."""
    with load_clusters().running(nodes=3, cpus=2) as cluster:
        for name, value in cluster.environment.items():
            monkeypatch.setenv(name, value)
        describe_cluster.cache_clear()
        yield cluster


@pytest.mark.nightly
def test_node_is_killed_its_workers_fail_and_another_takes_its_place(mortal: Any, tmp_path: Path) -> None:
    config = RaySchedulerConfig(nodes=2)
    provider = RayNodes(tmp_path / "logs", config)
    with ClusterScheduler(tmp_path / "logs", config, provider) as scheduler:
        scheduler.create_workers(server(count=2, cpus=2))
        workers = scheduler.wait_ready("server")
        held = provider.nodes()
        lost = next(worker for worker in workers if worker.host != "127.0.0.2")  # the head stays

        mortal.kill_node(int(lost.host.rpartition(".")[2]) - 2)
        wait_until(lambda: WorkerStatus.FAILED in {worker.status for worker in scheduler.poll()})
        (failed,) = [worker for worker in scheduler.poll() if worker.status is WorkerStatus.FAILED]
        assert failed.name == lost.name
        assert f"was lost with node {lost.node}, which" in failed.cause

        wait_until(lambda: len(set(provider.nodes()) - set(held)) == 1, PATIENCE)
        (new,) = set(provider.nodes()) - set(held)
        scheduler.resize_workers("server", 3)
        assert new.host not in {node.host for node in held}
        again = scheduler.restart_worker(failed, "planted")
        assert again.restarts == 1
        scheduler.wait_ready("server")


@pytest.mark.nightly
def test_node_is_lost_the_next_start_waits_for_another_and_the_first_does_not(mortal: Any, tmp_path: Path) -> None:
    few = pytest.raises(ConfigError, match="expected 4 nodes with CPU 1 each, found 3 among 3")
    with RayScheduler(tmp_path / "never", RaySchedulerConfig(nodes=4)) as scheduler, few:
        scheduler.create_workers(JobSpec("role", python(SLEEP)))
    config = RaySchedulerConfig(nodes=3, placement_timeout=3.0)
    provider = RayNodes(tmp_path / "logs", config)
    with ClusterScheduler(tmp_path / "logs", config, provider) as scheduler:
        scheduler.create_workers(JobSpec("role", python(SLEEP)))
        mortal.kill_node(2)
        wait_until(lambda: len(provider._state()["living"]) == 2, PATIENCE)
        scheduler.delete_workers()
        with pytest.raises(LaunchError, match=r"expected 3 nodes .* found 2 among 2.*not in .*placement_timeout=3 s"):
            scheduler.create_workers(JobSpec("role", python(SLEEP)))
        config.placement_timeout = 60.0
        later = Timer(2.0, mortal.add_node)
        later.start()
        (worker,) = scheduler.create_workers(JobSpec("role", python(SLEEP)))
        later.join()
        assert worker.status is WorkerStatus.RUNNING


@pytest.mark.nightly
def test_node_is_drained_this_process_gets_sigterm(mortal: Any, tmp_path: Path) -> None:
    received: list[int] = []
    former = signal.signal(signal.SIGTERM, lambda number, _: received.append(number))
    try:
        with RayScheduler(tmp_path / "logs") as scheduler:
            (worker,) = scheduler.create_workers(JobSpec("role", python(SLEEP)))
            node_id = _node_id(worker.host)
            drain = [sys.executable, "-m", "ray.scripts.scripts", "drain-node", f"--node-id={node_id}"]
            reason = [
                "--reason=DRAIN_NODE_REASON_PREEMPTION",
                "--reason-message=spot",
                "--deadline-remaining-seconds=60",
            ]
            subprocess.run([*drain, *reason], check=True, capture_output=True)
            wait_until(lambda: bool(scheduler.poll()) and bool(received), PATIENCE)
    finally:
        signal.signal(signal.SIGTERM, former)
    assert received == [signal.SIGTERM]


def _node_id(host: str) -> str:
    by_host = "{n['NodeManagerAddress']: n['NodeID'] for n in ray.nodes()}"
    program = f"import ray, sys; ray.init(log_to_driver=False); print({by_host}[sys.argv[1]])"
    return subprocess.run([*python(program), host], check=True, capture_output=True, text=True).stdout.split()[-1]


@pytest.mark.nightly
def test_ended_agent_that_dies_on_a_living_node_is_told_and_the_node_offered(told: Any, tmp_path: Path) -> None:
    provider = RayNodes(tmp_path, RaySchedulerConfig(nodes=1))
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
