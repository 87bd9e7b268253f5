"""The scheduler of one machine: workers are its processes."""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from rl_contracts.config import require
from rl_contracts.errors import ConfigError, LaunchError, RLError
from rl_contracts.scheduler import JobSpec, Resources, Scheduler, SchedulerConfig, Worker
from rl_launchers import report
from rl_launchers.keeper import Keeper
from rl_launchers.process import LocalProcess, fill_in, worker_environment
from rl_launchers.resources import Pool, PortReservation, pinnable_cores, visible_gpus
from rl_launchers.sessions import stop_sessions

TICK = 0.1
"""Seconds between two readiness checks."""
LOG_LINES = 30
"""Last lines of a log shown in an error."""


@dataclass
class LocalSchedulerConfig(SchedulerConfig):
    """How the processes of one machine are started."""

    shares_devices: ClassVar[bool] = True
    host: str = "127.0.0.1"
    """Address on which workers listen and are reached. Loopback unless told otherwise."""
    pin_cores: bool = False
    """Give each worker cores of its own, as many as it has threads. Helps where many workers would wander over a
    machine with enough cores for all; refused when there are not enough."""
    gpus: list[str] | None = None
    """Names of the GPUs to hand out; None: those that this process may use."""

    def resources(self) -> Resources:
        """The GPUs to hand out, and all cores of this machine."""
        gpus = visible_gpus(os.environ) if self.gpus is None else self.gpus
        return Resources(len(gpus), os.cpu_count() or 1)

    def check(self, roles: Sequence[JobSpec]) -> None:
        """Refuse roles whose fixed ports are in use."""
        try:
            for port in (spec.port + index for spec in roles if spec.port for index in range(spec.count)):
                PortReservation(self.host, port).release()
        except LaunchError as error:
            raise ConfigError(str(error)) from error


@dataclass
class _Role:
    """What a role holds until it is deleted."""

    spec: JobSpec
    processes: list[LocalProcess] = field(default_factory=list)
    ports: list[PortReservation] = field(default_factory=list)
    gpus: list[str] = field(default_factory=list)
    cores: list[str] = field(default_factory=list)


class LocalScheduler(Scheduler, AbstractContextManager["LocalScheduler"]):
    """Starts workers as processes of this machine. To be used from one thread, and as a context manager.

    Each worker leads its own process group and session and writes to `<log_dir>/<role>-<index>.log`. When the process
    that holds the scheduler dies, even by SIGKILL, a keeper process ends the workers and their children.

    Args:
        log_dir: directory of the logs; made where it is missing.
        config: see `LocalSchedulerConfig`.
    """

    def __init__(self, log_dir: Path, config: LocalSchedulerConfig | None = None) -> None:
        config = config or LocalSchedulerConfig()
        self._log_dir = Path(log_dir)
        self._host, self._pins_cores = config.host, config.pin_cores
        self._cores = Pool("cores", pinnable_cores() if config.pin_cores else ())
        self._gpus = Pool("gpus", visible_gpus(os.environ) if config.gpus is None else config.gpus)
        self._roles: dict[str, _Role] = {}
        self._keeper: Keeper | None = None

    def __exit__(self, *_: object) -> None:
        self.delete_workers()

    def create_workers(self, spec: JobSpec) -> list[Worker]:
        """Start the workers of a role and return at once.

        Raises:
            ConfigError: the role's description contradicts itself.
            LaunchError: the command is not there, a fixed port is in use, devices or cores are lacking, or the role
                exists already. Nothing of the role is running then.
        """
        _validate(spec)
        if spec.role in self._roles:
            raise LaunchError(f"role {spec.role!r} exists already. Delete its workers first, or choose another name.")
        known = f"a role that has started, of {sorted(self._roles)}"
        require(spec.beside in ("", *self._roles), f"role {spec.role!r}: beside", known, spec.beside)
        role = self._roles[spec.role] = _Role(spec)
        try:
            self._reserve(role)
            for index in range(spec.count):
                role.processes.append(self._start(role, index))
        except (RLError, OSError) as error:
            self.delete_workers(spec.role, grace=0)
            if isinstance(error, OSError):  # such as no file descriptor left for a port
                raise LaunchError(f"role {spec.role!r} cannot be started: {error}") from error
            raise
        return self.get_workers(spec.role)

    def wait_ready(self, role: str, tick: Callable[[], object] | None = None) -> list[Worker]:
        """Block until every worker of the role answers its readiness check; see the contract."""
        if role not in self._roles:
            raise LaunchError(f"there is no role {role!r} to wait for. Started: {', '.join(self._roles) or 'nothing'}.")
        timeout = self._roles[role].spec.ready_timeout
        processes = self._roles[role].processes
        while True:
            if tick is not None:
                tick()
            workers = self.get_workers(role)
            for process in processes:
                if process.worker.exit_code is not None:
                    end = report.describe_exit(process.worker.exit_code)
                    self._fail(process, f"{process.worker.name} {end} before its role was ready.")
            waiting = [process for process in processes if not process.check_ready()]
            if not waiting:
                return workers
            late = [process for process in waiting if time.monotonic() > process.started_at + timeout]
            if late:
                self._fail(late[0], late[0].not_ready(timeout))
            time.sleep(TICK)

    def get_workers(self, role: str) -> list[Worker]:
        """The workers of a role, status refreshed; empty for an unknown role."""
        processes = self._roles[role].processes if role in self._roles else []
        for process in processes:
            process.refresh()
        return [process.worker for process in processes]

    def poll(self) -> list[Worker]:
        """All workers, status refreshed. Also replaces a keeper that was killed."""
        if self._keeper is not None and not self._keeper.lives():
            self._keeper.close()
            self._keeper = Keeper(process.session.pid for process in self._processes())
        return [worker for role in self._roles for worker in self.get_workers(role)]

    def restart_worker(self, worker: Worker, note: str = "") -> Worker:
        """Start one worker anew in the place of its process; see the contract."""
        role = self._roles.get(worker.role)
        if role is None or worker.index >= len(role.processes):
            raise LaunchError(f"there is no worker {worker.name!r} to restart.")
        former = role.processes[worker.index]
        self._end([former], grace=0.0)
        lives = former.worker.restarts + 1
        report.separate(former.worker.log, f"{worker.name}, start {lives + 1}" + (f": {note}" if note else ""))
        role.processes[worker.index] = self._start(role, worker.index, lives)
        return role.processes[worker.index].worker

    def logs(self, worker: Worker, lines: int = 30) -> str:
        """The last lines that a worker wrote, behind earlier ones that name an error; empty where there are none."""
        for process in self._processes():
            if process.worker.name == worker.name:
                return process.log_tail(lines)
        return report.telling(worker.log, lines)

    def delete_workers(self, role: str | None = None, grace: float = 5.0) -> None:
        """Stop a role, or all, with everything that the workers started, and free ports, devices and cores.

        May be called at any time, also again after it was interrupted; unknown roles are fine.

        Raises:
            LaunchError: a process outlived SIGKILL.
        """
        names = [name for name in self._roles if role is None or name == role]
        self._end([process for name in names for process in self._roles[name].processes], grace)
        for name in names:
            ended = self._roles.pop(name)
            for reservation in ended.ports:
                reservation.release()
            self._gpus.give_back([] if ended.spec.beside else ended.gpus)
            self._cores.give_back(ended.cores)
        if self._keeper is not None and not self._roles:
            keeper, self._keeper = self._keeper, None
            keeper.close()

    def _end(self, processes: list[LocalProcess], grace: float) -> None:
        """Stop processes with everything that they started."""
        left = stop_sessions([process.session for process in processes], grace)
        if left:
            stuck = ", ".join(str(process.pid) for process in left)
            raise LaunchError(f"processes outlived SIGKILL: {stuck}. They may be stuck in a device driver.")
        for process in processes:
            process.collect(timeout=5.0)
            if self._keeper is not None:
                self._keeper.forget(process.session.pid)

    def _reserve(self, role: _Role) -> None:
        """Take ports, devices and cores, all of them before anything starts."""
        spec = role.spec
        for index in range(spec.count if _listens(spec) else 0):
            role.ports.append(PortReservation(self._host, spec.port + index) if spec.port else PortReservation())
        if spec.beside:
            role.gpus = self._roles[spec.beside].gpus
        elif "CUDA_VISIBLE_DEVICES" not in spec.env:
            role.gpus = self._gpus.take(spec.gpus * spec.count, spec.role)
        if self._pins_cores:
            role.cores = self._cores.take(spec.cpus * spec.count, spec.role)
        if spec.spmd:
            role.ports.append(PortReservation())  # the last one: where the ranks meet

    def _start(self, role: _Role, index: int, restarts: int = 0) -> LocalProcess:
        spec = role.spec
        port = role.ports[index].port if _listens(spec) else None
        master_port = role.ports[-1].port if spec.spmd else None
        # ranks see all of their role's, and choose by LOCAL_RANK
        gpus = role.gpus if spec.spmd else role.gpus[index * spec.gpus : (index + 1) * spec.gpus]
        environment = worker_environment(
            spec, os.environ, index, self._host, port, master_port, gpus if self._gpus.size else None
        )
        command = [fill_in(part, index, self._host, port) for part in spec.command]
        if shutil.which(command[0], path=environment.get("PATH")) is None:
            raise LaunchError(f"role {spec.role!r}: no program {command[0]!r} on PATH. Install it, or give its path.")
        log = self._log_dir / f"{spec.role}-{index}.log"
        if index == 0:
            for reservation in role.ports:
                reservation.hand_over()
        try:
            self._log_dir.mkdir(parents=True, exist_ok=True)
            if self._keeper is None:
                self._keeper = Keeper()
            return LocalProcess(
                Worker(spec.role, index, self._host, port, log, restarts=restarts),
                command,
                environment,
                self._keeper.fd,
                role.cores[index * spec.cpus : (index + 1) * spec.cpus],
                spec.ready_path,
            )
        except OSError as error:
            raise LaunchError(f"{spec.role}-{index} cannot be started: {error}") from error

    def _processes(self) -> list[LocalProcess]:
        return [process for role in self._roles.values() for process in role.processes]

    def _fail(self, process: LocalProcess, problem: str) -> None:
        raise LaunchError(report.with_log(problem, process.worker.log, process.log_tail(LOG_LINES)))


def _listens(spec: JobSpec) -> bool:
    return spec.needs_port or spec.port is not None or spec.ready_path is not None


def _validate(spec: JobSpec) -> None:
    """Raise a ConfigError for a role that cannot be meant as it is written."""
    path, last = spec.ready_path, 65536 - spec.count
    rules = {
        "role": (
            re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]*", spec.role) is not None,
            "a name of letters, digits, '_', '.' and '-', for it names the log files",
        ),
        "command": (len(spec.command) > 0, "a program and its arguments"),
        "count": (spec.count >= 1, "at least 1"),
        "cpus": (spec.cpus >= 1, "at least 1"),
        "gpus": (spec.gpus >= 0, "0 or more"),
        "ready_timeout": (spec.ready_timeout > 0, "more than 0 seconds"),
        "port": (spec.port is None or 1 <= spec.port <= last, f"between 1 and {last} for {spec.count} workers"),
        "ready_path": (path is None or path.startswith("/"), "a path that starts with '/'"),
    }
    for name, (holds, expected) in rules.items():
        require(holds, f"role {spec.role!r}: {name}", expected, getattr(spec, name))
