"""A scheduler that runs the workers as local processes with a configurable niceness."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from rl_contracts.config import bounded
from rl_contracts.errors import LaunchError
from rl_contracts.scheduler import JobSpec, Resources, Scheduler, SchedulerConfig, Worker, WorkerStatus

HOST = "127.0.0.1"


@dataclass
class AcmeSchedulerConfig(SchedulerConfig):
    """Settings of the scheduler."""

    setting: ClassVar[str] = "launcher.options"
    niceness: int = bounded(0, "0 to 19", lambda niceness: 0 <= niceness <= 19)
    """Niceness of each worker relative to the launcher, 0 to 19."""

    def resources(self) -> Resources:
        return Resources(gpus=0, cores=os.cpu_count() or 1)


@dataclass
class _Started:
    spec: JobSpec
    worker: Worker
    process: subprocess.Popen[bytes]
    since: float


class AcmeScheduler(Scheduler):
    """Start local processes and poll them until they are ready. It cannot restart a single worker."""

    def __init__(self, log_dir: Path, config: AcmeSchedulerConfig | None = None) -> None:
        self._log_dir, self._config = Path(log_dir), config or AcmeSchedulerConfig()
        self._roles: dict[str, list[_Started]] = {}

    def create_workers(self, spec: JobSpec) -> list[Worker]:
        if spec.role in self._roles:
            raise LaunchError(f"role {spec.role!r} exists already; delete its workers first.")
        if shutil.which(spec.command[0]) is None:
            raise LaunchError(f"role {spec.role!r}: program {spec.command[0]!r} not found; install it.")
        ports = [_free_port(spec.port + i if spec.port else 0) for i in range(spec.count)]
        torchrun = {"WORLD_SIZE": str(spec.count), "MASTER_ADDR": HOST, "MASTER_PORT": str(_free_port())}
        self._log_dir.mkdir(parents=True, exist_ok=True)
        self._clear(spec)
        self._roles[spec.role] = [
            self._start(spec, index, port, torchrun if spec.spmd else {}) for index, port in enumerate(ports)
        ]
        return self.get_workers(spec.role)

    def wait_ready(self, role: str, tick: Callable[[], object] | None = None) -> list[Worker]:
        if role not in self._roles:
            raise LaunchError(f"no role {role!r}; create its workers first.")
        while True:
            if tick is not None:
                tick()
            for each in self._roles[role]:
                _refresh(each)
                name, worker = each.worker.name, each.worker
                if worker.exit_code is not None:
                    raise LaunchError(f"{name} ended with exit code {worker.exit_code}:\n{self.logs(worker)}")
                health = _health(each)
                if health == "200":
                    worker.status = WorkerStatus.RUNNING
                elif time.monotonic() > each.since + each.spec.ready_timeout:
                    raise LaunchError(
                        f"{name} was not ready within {each.spec.ready_timeout:g} s: {health}\n{self.logs(worker)}"
                    )
            if all(each.worker.status is WorkerStatus.RUNNING for each in self._roles[role]):
                return [each.worker for each in self._roles[role]]
            time.sleep(0.05)

    def get_workers(self, role: str) -> list[Worker]:
        return [_refresh(each) for each in self._roles.get(role, [])]

    def poll(self) -> list[Worker]:
        return [worker for role in self._roles for worker in self.get_workers(role)]

    def logs(self, worker: Worker, lines: int = 30) -> str:
        text = worker.log.read_text(errors="replace") if worker.log.exists() else ""
        return "\n".join(text.splitlines()[-lines:])

    def delete_workers(self, role: str | None = None, grace: float = 5.0) -> None:
        names = [name for name in self._roles if role in (None, name)]
        started = [each for name in names for each in self._roles[name]]
        for each in started:
            _signal(each, signal.SIGTERM)
        deadline = time.monotonic() + grace
        for each in started:
            with suppress(subprocess.TimeoutExpired):
                each.process.wait(max(0.0, deadline - time.monotonic()))
        for each in started:
            _signal(each, signal.SIGKILL)
            each.process.wait()
            _refresh(each)
        for name in names:
            spec = self._roles.pop(name)[0].spec
            self._clear(spec)

    def _clear(self, spec: JobSpec) -> None:
        """Remove the scratch directories that no other role uses."""
        used = {directory for started in self._roles.values() for directory in started[0].spec.scratch}
        for directory in {*spec.scratch} - used:
            shutil.rmtree(directory, ignore_errors=True)

    def _start(self, spec: JobSpec, index: int, port: int, torchrun: dict[str, str]) -> _Started:
        def substitute(text: str) -> str:
            for name, value in (("index", index), ("host", HOST), ("port", port)):
                text = text.replace(f"{{{name}}}", str(value))
            return text

        ranks = {"RANK": str(index), "LOCAL_RANK": str(index)} if torchrun else {}
        job_env = {name: substitute(value) for name, value in spec.env.items()}
        environment = {**os.environ, "OMP_NUM_THREADS": str(spec.cpus), **torchrun, **ranks, **job_env}
        log = self._log_dir / f"{spec.role}-{index}.log"
        with log.open("wb") as file:
            process = subprocess.Popen(
                ["nice", "-n", str(self._config.niceness), *map(substitute, spec.command)],
                env=environment,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        ready = WorkerStatus.STARTING if spec.ready_path else WorkerStatus.RUNNING
        worker = Worker(spec.role, index, HOST, port, log, ready, pid=process.pid)
        return _Started(spec, worker, process, time.monotonic())


def _free_port(port: int = 0) -> int:
    """Return the given port, or with 0 any free port.

    Raises:
        LaunchError: another process uses the port.
    """
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError as error:
            raise LaunchError(f"port {port} is in use; choose another one.") from error
        return int(probe.getsockname()[1])


def _health(started: _Started) -> str:
    """Return `200` if the worker is ready, else another status code or the error."""
    if started.spec.ready_path is None:
        return "200"
    try:
        with urllib.request.urlopen(started.worker.address + started.spec.ready_path, timeout=1.0) as response:
            return str(response.status)
    except urllib.error.HTTPError as error:
        return str(error.code)
    except OSError as error:
        return str(error)


def _refresh(started: _Started) -> Worker:
    worker, code = started.worker, started.process.poll()
    if code is not None and worker.exit_code is None:
        worker.exit_code, worker.ended_at = code, time.time()
        worker.status = WorkerStatus.DONE if code == 0 else WorkerStatus.FAILED
    return worker


def _signal(started: _Started, number: int) -> None:
    """Send a signal to the process group of a worker, which includes its child processes."""
    with suppress(ProcessLookupError):
        os.killpg(started.process.pid, number)
