"""Kill processes or nodes of a run and measure the time to the next trained step; used by `recovery.py`."""

from __future__ import annotations

import importlib.util
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from rl_launchers.cluster.node_agents import HEARTBEAT_TIMEOUT

CLUSTERS = Path(__file__).parents[2] / "infra" / "clusters"
INTERVAL = 2
"""Steps between two recovery checkpoints."""
HEALTH_TIMEOUT = 10.0
"""`launcher.health_timeout` in seconds; the default is 90."""
LOST_AFTER = 10
"""SlurmdTimeout in seconds; Slurm's default is 300."""
REQUEUE_AFTER = 15
"""Seconds that a requeued job waits (cred_expire of munge); 120 is usual."""
NODE_TIMEOUT = {"heartbeat timeout of a node": HEARTBEAT_TIMEOUT}
"""Seconds without a heartbeat after which a node is lost, if its connection does not break."""
WAIT_TIMEOUT = 400.0
"""Longest wait for a run to start or to continue, in seconds."""
POLL_SECONDS = 0.02
"""Seconds between two polls of the run's files."""
SETTINGS = {
    "recipe": "embedded",
    "total_steps": 1_000_000,
    "data.batch_size": 4,
    "rollout.group_size": 2,
    "rollout.generation.max_new_tokens": 16,
    "rollout.max_staleness": 0,
    "rollout.reward": "reward_by_ids:score",
    "evaluation.examples": 0,
    "cluster.device": "cpu",
    "recover.every": INTERVAL,
    "launcher.max_restarts": 1000,
    "launcher.trainer_restarts": 1000,
    "launcher.health_timeout": HEALTH_TIMEOUT,
}


REWARD = """
def score(prompt, completions, prompt_ids, completion_ids, **data):
    return sum(completion_ids) % 7 / 6
"""
"""A random model never solves a problem; this reward varies, so that every batch has advantages."""


class UnavailableError(Exception):
    """A requirement of a case is missing."""


@dataclass(frozen=True)
class Case:
    """Process or node to kill, deployment of the run, and time limit."""

    limit: float
    """Limit of the time to the next trained step, in seconds."""
    deploy: Callable[[Path], Any]
    """Context manager that yields the `Deployment` of the run."""
    role: str
    """Role of the killed worker."""
    signal: int | None = None
    """Signal to the worker; None kills its node."""

    def measure(self, directory: Path, kills: int) -> dict[str, Any]:
        """Start the run in a new directory and kill `kills` times.

        Returns:
            `measurements`, lists of seconds with one entry per kill, and `timeouts` of the deployment in seconds.
        """
        directory.mkdir()
        measurements: dict[str, list[float]] = {}
        rng = random.Random(1)
        with self.deploy(directory) as deployment, running(directory, deployment) as run:
            run.wait(lambda: run.last_step() > 2 * INTERVAL, "the run to start")
            for _ in range(kills):
                for name, seconds in self._kill(run, deployment, rng).items():
                    measurements.setdefault(name, []).append(round(seconds, 2))
        return {"measurements": measurements, "timeouts": deployment.timeouts}

    def _kill(self, run: Run, deployment: Deployment, rng: random.Random) -> dict[str, float]:
        """Kill once at a random moment, three steps from now or later; return the seconds to each outcome."""
        earliest = run.last_step() + 3
        run.wait(lambda: run.last_step() >= earliest, "three steps")
        run.wait(lambda: all(worker["status"] == "running" for worker in run.workers()), "all workers to be running")
        begin = run.last_step()
        run.wait(lambda: run.last_step() > begin, "a step")
        time.sleep(rng.random() * deployment.longest_delay)
        lost = rng.choice([worker for worker in run.workers() if worker["role"] == self.role])
        reached = run.last_step()
        killed = time.monotonic()
        if self.signal is not None:
            os.kill(lost["pid"], self.signal)
        else:
            deployment.kill(lost["node"])
        run.wait(lambda: run.pid(lost["name"]) not in (0, lost["pid"]), f"{lost['name']} to restart")
        seconds_after_kill = {"restart": time.monotonic() - killed}
        if self.role != "actor":
            # the completions of the next step may have arrived before the kill
            run.wait(lambda: run.last_step() >= reached + 2, "a step that needed the new server")
            seconds_after_kill["seconds"] = time.monotonic() - killed
        else:
            before = run.lines()
            run.wait(lambda: any(line not in before for line in run.lines()), "a step of the new trainers")
            seconds_after_kill["seconds"] = time.monotonic() - killed
            run.wait(lambda: run.last_step() > reached, "a step that was not trained before")
            seconds_after_kill["first_new_step"] = time.monotonic() - killed
        deployment.replace_node(lost["node"])
        return seconds_after_kill


@dataclass
class Deployment:
    """Machine or cluster on which a run starts."""

    settings: dict[str, object]
    environment: dict[str, str]
    timeouts: dict[str, float]
    """Timeouts in seconds that determine when a loss is detected, by name."""
    kill: Callable[[str], None] = lambda node: None
    """Kill a node."""
    replace_node: Callable[[str], None] = lambda node: None
    """Replace a killed node."""
    longest_delay: float = 0.5
    """Longest delay between a step and the kill, in seconds."""


class Run:
    """A running command.

    Args:
        command: process of the command.
        directory: run directory.
        log: file with the output of the command.
    """

    def __init__(self, command: subprocess.Popen[bytes], directory: Path, log: Path) -> None:
        self._command, self._directory, self._log = command, directory, log

    def lines(self) -> list[str]:
        """Return the complete lines of `metrics.jsonl`."""
        with suppress(FileNotFoundError):
            return (self._directory / "metrics.jsonl").read_text().split("\n")[:-1]
        return []

    def last_step(self) -> int:
        """Return the last trained step, or 0 before the first."""
        lines = self.lines()
        return int(json.loads(lines[-1])["step"]) if lines else 0

    def workers(self) -> list[dict[str, Any]]:
        """Return the workers that the launcher reports."""
        with suppress(FileNotFoundError):
            workers = json.loads((self._directory / "names" / "workers" / "=value").read_text())
            return [worker | {"role": worker["name"].rpartition("-")[0]} for worker in workers]
        return []

    def pid(self, name: str) -> int:
        """Return the process id of a worker, or 0 if it does not run."""
        return next((int(worker["pid"] or 0) for worker in self.workers() if worker["name"] == name), 0)

    def wait(self, condition: Callable[[], bool], event: str) -> None:
        """Wait until `condition` holds.

        Raises:
            RuntimeError: the command exited, or the wait timed out; with the end of the log.
        """
        deadline = time.monotonic() + WAIT_TIMEOUT
        while not condition():
            ended = self._command.poll()
            if ended is not None or time.monotonic() > deadline:
                problem = (
                    f"waited {WAIT_TIMEOUT:g} s for {event}"
                    if ended is None
                    else f"the command exited with code {ended}"
                )
                raise RuntimeError(f"{problem}:\n{self._log.read_text()[-6000:]}")
            time.sleep(POLL_SECONDS)


@contextmanager
def running(directory: Path, deployment: Deployment) -> Iterator[Run]:
    """Start the command like a user and stop it at the end."""
    from rl_contracts.testing.models import make_tiny_model

    model = make_tiny_model(directory / "model", layers=1, hidden=32)
    settings = SETTINGS | {"model.path": model, "run_dir": directory / "run"} | deployment.settings
    line = [str(Path(sys.executable).parent / "gsm8k-grpo"), *(f"{name}={value}" for name, value in settings.items())]
    log = directory / "command.log"
    (directory / "reward_by_ids.py").write_text(REWARD)
    environment = os.environ | {"PYTHONPATH": str(directory)} | deployment.environment
    with log.open("wb") as file:
        command = subprocess.Popen(line, stdout=file, stderr=file, env=environment)
    try:
        yield Run(command, directory / "run", log)
    finally:
        command.terminate()
        command.wait(60)


@contextmanager
def local(directory: Path, **settings: object) -> Iterator[Deployment]:
    """Run on this machine."""
    yield Deployment(settings, {}, {"launcher.health_timeout": HEALTH_TIMEOUT})


def local_one_trainer(directory: Path) -> Any:
    """Run on this machine with one trainer rank and one server."""
    return local(directory)


def local_two_trainers(directory: Path) -> Any:
    """Run on this machine with two trainer ranks and one server."""
    return local(directory, allocation="embedded:d1+fsdp:d2")


@contextmanager
def ray(directory: Path) -> Iterator[Deployment]:
    """Run on a Ray cluster of a head node and three nodes; the run uses two of them."""
    if importlib.util.find_spec("ray") is None:
        raise UnavailableError("Ray is not installed")
    clusters = _clusters("ray")
    with clusters.running(nodes=1, cpus=1) as cluster:
        for _ in range(3):
            cluster.add_node(cpus=2)
        period = float(clusters.LIGHT["RAY_health_check_period_ms"]) / 1000
        settings = {"launcher": "ray", "cluster.nodes": 2, "cluster.cores": 2}
        timeouts = {"Ray's health_check_period": period, "Ray's health checks until a node is dead": 5 * period}
        yield Deployment(
            settings,
            cluster.environment,
            timeouts | NODE_TIMEOUT,
            # the name of a node begins with its address, 127.0.0.(number + 2)
            kill=lambda node: cluster.kill_node(int(node.partition("-")[0].rpartition(".")[2]) - 2),
            replace_node=lambda node: cluster.add_node(cpus=2),
        )


@contextmanager
def slurm(directory: Path, **options: int) -> Iterator[Deployment]:
    """Run on a local Slurm cluster of four nodes; the run uses two of them."""
    if os.geteuid() != 0:
        raise UnavailableError("a local Slurm cluster needs root")
    clusters = _clusters("slurm")
    try:
        clusters.install()
    except RuntimeError as error:
        raise UnavailableError(str(error)) from error
    cluster_directory = directory / "slurm"
    with clusters.running(
        cluster_directory, clusters.Shape(lost_after=LOST_AFTER, requeue_after=REQUEUE_AFTER)
    ) as cluster:
        settings = {f"launcher.options.{name}": value for name, value in options.items()}
        timeouts = {"SlurmdTimeout": LOST_AFTER, "cred_expire": REQUEUE_AFTER} | NODE_TIMEOUT
        yield Deployment(
            {"launcher": "slurm", "cluster.nodes": 2, **settings},
            cluster.environment,
            timeouts,
            kill=cluster.kill_node,
            replace_node=cluster.revive,
        )


def slurm_spare(directory: Path) -> Any:
    """Run in a Slurm allocation of two nodes and a spare node."""
    return slurm(directory, spare_nodes=1)


def slurm_requeue(directory: Path) -> Any:
    """Run in a Slurm allocation of two nodes without a spare node."""
    return slurm(directory)


def _clusters(name: str) -> ModuleType:
    """Import a script of `infra/clusters`, which is not a package."""
    spec = importlib.util.spec_from_file_location(f"infra_clusters_{name}", CLUSTERS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


CASES = {
    "server-kill": Case(15.0, local_one_trainer, "rollout", signal.SIGKILL),
    "server-stop": Case(HEALTH_TIMEOUT + 15.0, local_one_trainer, "rollout", signal.SIGSTOP),
    "trainer-kill": Case(45.0, local_two_trainers, "actor", signal.SIGKILL),
    "node-ray": Case(60.0, ray, "actor"),
    "node-slurm-spare": Case(60.0, slurm_spare, "actor"),
    "node-slurm-requeue": Case(180.0, slurm_requeue, "actor"),
}
