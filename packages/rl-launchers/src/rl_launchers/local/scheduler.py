"""Local scheduler, which runs workers as processes of this machine."""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from rl_contracts.config import require
from rl_contracts.errors import ConfigError, LaunchError, RLError
from rl_contracts.runtime.machine import usable_cores, visible_gpus
from rl_contracts.scheduler import JobSpec, Resources, Scheduler, SchedulerConfig, Worker, WorkerStatus
from rl_launchers.local.process import LocalProcess, RankGroup, fill_in, ranks_of, worker_environment
from rl_launchers.local.reaper import Reaper
from rl_launchers.local.resources import GpuPool, PortReservation
from rl_launchers.local.sessions import stop_sessions
from rl_launchers.supervise import exit_report

TICK = 0.05
"""Seconds between two status checks while waiting for workers."""
LOG_LINES = 30
"""Number of last log lines in an error message."""


@dataclass
class LocalSchedulerConfig(SchedulerConfig):
    """Settings of the local scheduler."""

    shares_devices: ClassVar[bool] = True
    host: str = "127.0.0.1"
    """Address on which servers and trainers listen. The default is loopback, which attached servers on other machines
    cannot reach."""

    def resources(self) -> Resources:
        """Return the number of GPUs (see `CUDA_VISIBLE_DEVICES`) and of cores that this process may use."""
        return Resources(len(visible_gpus(os.environ)), usable_cores())

    def check(self, roles: Sequence[JobSpec]) -> None:
        """Reject roles whose fixed ports are in use."""
        try:
            for port in (spec.port + index for spec in roles if spec.port for index in range(spec.count)):
                PortReservation(self.host, port).release()
        except LaunchError as error:
            raise ConfigError(str(error)) from error


@dataclass
class _Slot:
    """Resources that one worker holds until it is deleted."""

    port: PortReservation | None = None
    gpus: list[str] = field(default_factory=list)
    process: LocalProcess | None = None


@dataclass
class _Role:
    """Workers of a role on this machine."""

    spec: JobSpec
    group: RankGroup
    slots: dict[int, _Slot] = field(default_factory=dict)
    """Slots by index of the worker."""
    rendezvous: PortReservation | None = None
    """Rendezvous port of the ranks, if it is on this machine."""


class LocalScheduler(Scheduler, AbstractContextManager["LocalScheduler"]):
    """Starts workers as processes of this machine. Use it from one thread, and as a context manager.

    Each worker leads its own process group and session and writes to `<log_dir>/<role>-<index>.log`. If the process
    that holds the scheduler dies, even by SIGKILL, a reaper process ends the workers and their children.

    Args:
        log_dir: directory of the logs; created if missing.
        config: settings; None for the defaults.
    """

    def __init__(self, log_dir: Path, config: LocalSchedulerConfig | None = None) -> None:
        config = config or LocalSchedulerConfig()
        self._log_dir = Path(log_dir)
        self._host = config.host
        self._gpus = GpuPool(visible_gpus(os.environ))
        self._roles: dict[str, _Role] = {}
        self._reaper: Reaper | None = None

    def __exit__(self, *_: object) -> None:
        self.delete_workers()

    def reserve(self) -> PortReservation:
        """Reserve a free port, for IPv6 if the workers' host is an IPv6 address."""
        return PortReservation("::" if ":" in self._host else "")

    def create_workers(self, spec: JobSpec) -> list[Worker]:
        """Start the workers of a role and return at once.

        Raises:
            ConfigError: the job spec is invalid.
            LaunchError: the program does not exist, a fixed port is in use, GPUs are insufficient, or the role exists
                already. No worker of the role runs then.
        """
        if spec.role in self._roles:
            raise LaunchError(f"role {spec.role!r} exists already. Delete its workers first, or choose another name.")
        return self.add_workers(spec, range(spec.count))

    def add_workers(self, spec: JobSpec, indices: Sequence[int], group: RankGroup | None = None) -> list[Worker]:
        """Start further workers of a role on this machine.

        Args:
            spec: role of the workers.
            indices: indices of the new workers in the role.
            group: ranks of a role that spans several machines; None if the whole role is on this machine.

        Raises:
            ConfigError: see `create_workers`.
            LaunchError: see `create_workers`; none of these workers runs then.
        """
        require_valid_job(spec, self._roles)
        if spec.role not in self._roles:
            self._remove_unused_scratch(spec)
        role = self._roles.setdefault(spec.role, _Role(spec, group or RankGroup(len(indices), tuple(indices))))
        try:
            self._reserve(role, indices)
            for port in (role.rendezvous, *(role.slots[index].port for index in indices)):
                if port is not None:
                    port.hand_over()
            for index in indices:
                role.slots[index].process = self._start(role, index)
        except (RLError, OSError) as error:
            self.remove_workers(spec.role, indices, grace=0.0)
            if isinstance(error, OSError):  # for example no free file descriptor for a port
                raise LaunchError(f"role {spec.role!r} cannot be started: {error}") from error
            raise
        return [worker for worker in self.get_workers(spec.role) if worker.index in indices]

    def resize_workers(self, role: str, count: int, grace: float = 5.0) -> list[Worker]:
        """Start further workers of a role, or stop its last ones; see `Scheduler.resize_workers`."""
        if role not in self._roles:
            raise LaunchError(f"there is no role {role!r} to resize. Started: {', '.join(self._roles) or 'nothing'}.")
        spec, current = self._roles[role].spec, len(self._roles[role].slots)
        require_resizable(spec, count)
        if count < current:
            self.remove_workers(role, range(count, current), grace)
        elif count > current:
            self.add_workers(spec, range(current, count))
        return self.get_workers(role)

    def wait_ready(self, role: str, tick: Callable[[], object] | None = None) -> list[Worker]:
        """Block until the readiness check of every worker of the role succeeds; see `Scheduler.wait_ready`."""
        if role not in self._roles:
            raise LaunchError(f"there is no role {role!r} to wait for. Started: {', '.join(self._roles) or 'nothing'}.")
        timeout = self._roles[role].spec.ready_timeout
        while True:
            if tick is not None:
                tick()
            workers = self.get_workers(role)
            processes = self._processes_of(role)
            for process in processes:
                if process.worker.exit_code is not None:
                    end = exit_report.describe_end(process.worker)
                    self._raise_with_log(process, f"{process.worker.name} {end} before its role was ready.")
            waiting = [process for process in processes if process.worker.status is WorkerStatus.STARTING]
            if not waiting:
                return workers
            for process in waiting:
                if time.monotonic() > process.started_at + timeout:
                    url = f"{process.worker.address}{self._roles[role].spec.ready_path}"
                    self._raise_with_log(
                        process, exit_report.not_ready(process.worker.name, timeout, url, process.last_answer)
                    )
            time.sleep(TICK)

    def get_workers(self, role: str) -> list[Worker]:
        """Return the workers of a role with their current status; empty for an unknown role."""
        processes = self._processes_of(role)
        for process in processes:
            process.refresh()
        return [process.worker for process in processes]

    def poll(self) -> list[Worker]:
        """Return all workers with their current status. Also replace the reaper if it was killed."""
        if self._reaper is not None and not self._reaper.is_alive():
            self._reaper.close()
            self._reaper = Reaper(process.session.pid for process in self.processes())
            for role in self._roles.values():
                self._register_scratch(role.spec)
        return [worker for role in self._roles for worker in self.get_workers(role)]

    def restart_worker(self, worker: Worker, note: str = "") -> Worker:
        """Restart one worker; see `Scheduler.restart_worker`."""
        role = self._roles.get(worker.role)
        slot = role.slots.get(worker.index) if role else None
        if role is None or slot is None or slot.process is None:
            raise LaunchError(f"there is no worker {worker.name!r} to restart.")
        previous = slot.process
        self._stop_processes([previous], grace=0.0)
        restarts = previous.worker.restarts + 1
        exit_report.separate(
            previous.worker.log, f"{worker.name}, start {restarts + 1}" + (f": {note}" if note else "")
        )
        slot.process = self._start(role, worker.index, restarts)
        return slot.process.worker

    def logs(self, worker: Worker, lines: int = 30) -> str:
        """Return the last lines that a worker wrote, preceded by earlier lines that name an error."""
        for process in self.processes():
            if process.worker.name == worker.name:
                return process.log_tail(lines)
        return exit_report.informative_tail(worker.log, lines)

    def delete_workers(self, role: str | None = None, grace: float = 5.0) -> None:
        """Stop the workers of a role or of all roles, with their descendants, and release ports and GPUs.

        Calls are allowed at any time, also after an interrupted call. Unknown roles are ignored.

        Raises:
            LaunchError: a process outlived SIGKILL.
        """
        names = [name for name in self._roles if role is None or name == role]
        self._stop_processes([process for name in names for process in self._processes_of(name)], grace)
        for name in names:
            self._release(name, [*self._roles[name].slots])
        if self._reaper is not None and not self._roles:
            reaper, self._reaper = self._reaper, None
            reaper.close()

    def terminate_workers(self, role: str) -> None:
        """Send SIGTERM to each worker of a role; see `Scheduler.terminate_workers`."""
        for process in self._processes_of(role):
            process.session.terminate()

    def remove_workers(self, role: str, indices: Sequence[int], grace: float = 5.0) -> None:
        """Stop some workers of a role, with their descendants, and release their resources.

        Raises:
            LaunchError: a process outlived SIGKILL.
        """
        slots = self._roles[role].slots
        self._stop_processes(
            [process for index in indices if index in slots and (process := slots[index].process)], grace
        )
        self._release(role, [index for index in indices if index in slots])

    def processes(self) -> list[LocalProcess]:
        """Return the processes of all roles."""
        return [process for role in self._roles for process in self._processes_of(role)]

    def _processes_of(self, role: str) -> list[LocalProcess]:
        """Return the processes of a role in the order of their indices; empty for an unknown role."""
        slots = self._roles[role].slots if role in self._roles else {}
        return [process for index in sorted(slots) if (process := slots[index].process)]

    def _release(self, name: str, indices: Sequence[int]) -> None:
        """Release the resources of ended workers, and remove the role after its last worker."""
        role = self._roles[name]
        for index in indices:
            slot = role.slots.pop(index)
            if slot.port is not None:
                slot.port.release()
            self._gpus.release([] if role.spec.colocated_with else slot.gpus)
        if not role.slots:
            if role.rendezvous is not None:
                role.rendezvous.release()
            del self._roles[name]
            self._remove_unused_scratch(role.spec)

    def _remove_unused_scratch(self, spec: JobSpec) -> None:
        """Remove the scratch directories of a role that no started role uses."""
        used = {directory for role in self._roles.values() for directory in role.spec.scratch}
        for directory in {*spec.scratch} - used:
            shutil.rmtree(directory, ignore_errors=True)

    def _stop_processes(self, processes: list[LocalProcess], grace: float) -> None:
        """Stop processes and their descendants."""
        remaining = stop_sessions([process.session for process in processes], grace)
        if remaining:
            pids = ", ".join(str(process.pid) for process in remaining)
            raise LaunchError(f"processes outlived SIGKILL: {pids}. They may be stuck in a device driver.")
        for process in processes:
            process.collect(timeout=5.0)
            if self._reaper is not None:
                self._reaper.forget(process.session.pid)

    def _reserve(self, role: _Role, indices: Sequence[int]) -> None:
        """Reserve ports and GPUs for further workers before any of them starts."""
        spec, number = role.spec, len(indices)
        if spec.colocated_with:
            gpus = [gpu for slot in self._roles[spec.colocated_with].slots.values() for gpu in slot.gpus]
        else:
            gpus = [] if "CUDA_VISIBLE_DEVICES" in spec.env else self._gpus.acquire(spec.gpus * number, spec.role)
        for position, index in enumerate(indices):
            role.slots[index] = _Slot(gpus=gpus[position * spec.gpus : (position + 1) * spec.gpus])
        for index in indices:
            if _listens(spec):
                role.slots[index].port = PortReservation(self._host, spec.port + index) if spec.port else self.reserve()
        if spec.spmd and not role.group.master:
            role.rendezvous = self.reserve()

    def _start(self, role: _Role, index: int, restarts: int = 0) -> LocalProcess:
        spec, slot = role.spec, role.slots[index]
        port = slot.port.port if slot.port else None
        # each rank sees all GPUs of its role and chooses one by LOCAL_RANK
        gpus = [gpu for other in role.slots.values() for gpu in other.gpus] if spec.spmd else slot.gpus
        ranks = (
            ranks_of(role.group, index, role.rendezvous.port if role.rendezvous else 0, self._host) if spec.spmd else {}
        )
        environment = worker_environment(
            spec, os.environ, index, self._host, port, ranks, gpus if self._gpus.size else None
        )
        command = [fill_in(argument, index, self._host, port) for argument in spec.command]
        if shutil.which(command[0], path=environment.get("PATH")) is None:
            raise LaunchError(
                f"role {spec.role!r}: no program {command[0]!r} on PATH; install it or use its full path."
            )
        try:
            self._log_dir.mkdir(parents=True, exist_ok=True)
            if self._reaper is None:
                self._reaper = Reaper()
            self._register_scratch(spec)
            return LocalProcess(
                Worker(
                    spec.role, index, self._host, port, self._log_dir / f"{spec.role}-{index}.log", restarts=restarts
                ),
                command,
                environment,
                self._reaper.fd,
                spec.ready_path,
            )
        except OSError as error:
            raise LaunchError(f"{spec.role}-{index} cannot be started: {error}") from error

    def _register_scratch(self, spec: JobSpec) -> None:
        """Make the reaper remove the role's scratch directories if this process dies."""
        if self._reaper is not None:
            for directory in spec.scratch:
                self._reaper.remove_after(directory)

    def _raise_with_log(self, process: LocalProcess, problem: str) -> None:
        raise LaunchError(exit_report.with_log(problem, process.worker.log, process.log_tail(LOG_LINES)))


def require_resizable(spec: JobSpec, count: int) -> None:
    """Raise a ConfigError if the number of workers of a role cannot become `count`."""
    require(not spec.spmd, f"resizing role {spec.role!r}", "no change, because its ranks form a process group", count)
    require(
        not spec.colocated_with,
        f"resizing role {spec.role!r}",
        "a role that shares no devices with another role",
        spec.colocated_with,
    )
    require(count >= 1, f"resizing role {spec.role!r}", "at least 1 worker", count)


def _listens(spec: JobSpec) -> bool:
    return spec.needs_port or spec.port is not None or spec.ready_path is not None


def require_valid_job(spec: JobSpec, started: Iterable[str]) -> None:
    """Raise a ConfigError if a job spec is invalid, given the names of the roles that have `started`."""
    path, last_port = spec.ready_path, 65536 - spec.count
    rules = {
        "role": (
            re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]*", spec.role) is not None,
            "letters, digits, '_', '.' and '-', because it names the log files",
        ),
        "command": (len(spec.command) > 0, "a program and its arguments"),
        "count": (spec.count >= 1, "at least 1"),
        "cpus": (spec.cpus >= 1, "at least 1"),
        "gpus": (spec.gpus >= 0, "0 or more"),
        "ready_timeout": (spec.ready_timeout > 0, "more than 0 seconds"),
        "port": (
            spec.port is None or 1 <= spec.port <= last_port,
            f"between 1 and {last_port} for {spec.count} workers",
        ),
        "ready_path": (path is None or path.startswith("/"), "a path that starts with '/'"),
    }
    roles = sorted(started)
    rules["colocated_with"] = (spec.colocated_with in ("", *roles), f"one of the started roles {roles}")
    for name, (holds, expected) in rules.items():
        require(holds, f"role {spec.role!r}: {name}", expected, getattr(spec, name))
