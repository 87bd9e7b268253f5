"""The scheduler of one machine: workers are its processes."""

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
from rl_launchers.local.resources import Pool, PortReservation, pinnable_cores
from rl_launchers.local.sessions import stop_sessions
from rl_launchers.supervise import exit_report

TICK = 0.05
"""Seconds between two looks at what is waited for."""
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
        """Return the GPUs to hand out, and the cores that this process may use."""
        gpus = visible_gpus(os.environ) if self.gpus is None else self.gpus
        return Resources(len(gpus), usable_cores())

    def check(self, roles: Sequence[JobSpec]) -> None:
        """Refuse roles whose fixed ports are in use."""
        try:
            for port in (spec.port + index for spec in roles if spec.port for index in range(spec.count)):
                PortReservation(self.host, port).release()
        except LaunchError as error:
            raise ConfigError(str(error)) from error


@dataclass
class _Slot:
    """What one worker holds until it is deleted."""

    port: PortReservation | None = None
    gpus: list[str] = field(default_factory=list)
    cores: list[str] = field(default_factory=list)
    process: LocalProcess | None = None


@dataclass
class _Role:
    """A role, or as much of it as lies on this machine."""

    spec: JobSpec
    group: RankGroup
    slots: dict[int, _Slot] = field(default_factory=dict)
    """By index of the worker."""
    meeting: PortReservation | None = None
    """Where the ranks meet, if that is here."""


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
        self._keeper: Reaper | None = None

    def __exit__(self, *_: object) -> None:
        self.delete_workers()

    def reserve(self) -> PortReservation:
        """Reserve a free port, of IPv6 where workers listen on such an address."""
        return PortReservation("::" if ":" in self._host else "")

    def create_workers(self, spec: JobSpec) -> list[Worker]:
        """Start the workers of a role and return at once.

        Raises:
            ConfigError: the role's description contradicts itself.
            LaunchError: the command is not there, a fixed port is in use, devices or cores are lacking, or the role
                exists already. Nothing of the role is running then.
        """
        if spec.role in self._roles:
            raise LaunchError(f"role {spec.role!r} exists already. Delete its workers first, or choose another name.")
        return self.add_workers(spec, range(spec.count))

    def add_workers(self, spec: JobSpec, indices: Sequence[int], group: RankGroup | None = None) -> list[Worker]:
        """Start some workers of a role, beside those of it that run here.

        Args:
            spec: the role.
            indices: of the workers in it.
            group: the ranks of a role that lies on several machines; None: all of it lies here.

        Raises:
            ConfigError, LaunchError: see `create_workers`; of these workers nothing is running then.
        """
        require_valid_job(spec, self._roles)
        if spec.role not in self._roles:
            self._clear(spec)
        role = self._roles.setdefault(spec.role, _Role(spec, group or RankGroup(len(indices), tuple(indices))))
        try:
            self._reserve(role, indices)
            for port in (role.meeting, *(role.slots[index].port for index in indices)):
                if port is not None:
                    port.hand_over()
            for index in indices:
                role.slots[index].process = self._start(role, index)
        except (RLError, OSError) as error:
            self.remove_workers(spec.role, indices, grace=0.0)
            if isinstance(error, OSError):  # such as no file descriptor left for a port
                raise LaunchError(f"role {spec.role!r} cannot be started: {error}") from error
            raise
        return [worker for worker in self.get_workers(spec.role) if worker.index in indices]

    def resize_workers(self, role: str, count: int, grace: float = 5.0) -> list[Worker]:
        """Start further workers of a role, or stop its last ones; see the contract."""
        if role not in self._roles:
            raise LaunchError(f"there is no role {role!r} to resize. Started: {', '.join(self._roles) or 'nothing'}.")
        spec, now = self._roles[role].spec, len(self._roles[role].slots)
        require_resizable(spec, count)
        if count < now:
            self.remove_workers(role, range(count, now), grace)
        elif count > now:
            self.add_workers(spec, range(now, count))
        return self.get_workers(role)

    def wait_ready(self, role: str, tick: Callable[[], object] | None = None) -> list[Worker]:
        """Block until every worker of the role answers its readiness check; see the contract."""
        if role not in self._roles:
            raise LaunchError(f"there is no role {role!r} to wait for. Started: {', '.join(self._roles) or 'nothing'}.")
        timeout = self._roles[role].spec.ready_timeout
        while True:
            if tick is not None:
                tick()
            workers = self.get_workers(role)
            processes = self._of(role)
            for process in processes:
                if process.worker.exit_code is not None:
                    end = exit_report.describe_end(process.worker)
                    self._fail(process, f"{process.worker.name} {end} before its role was ready.")
            waiting = [process for process in processes if process.worker.status is WorkerStatus.STARTING]
            if not waiting:
                return workers
            for process in waiting:
                if time.monotonic() > process.started_at + timeout:
                    path = f"{process.worker.address}{self._roles[role].spec.ready_path}"
                    self._fail(process, exit_report.not_ready(process.worker.name, timeout, path, process.last_answer))
            time.sleep(TICK)

    def get_workers(self, role: str) -> list[Worker]:
        """The workers of a role, status refreshed; empty for an unknown role."""
        processes = self._of(role)
        for process in processes:
            process.refresh()
        return [process.worker for process in processes]

    def poll(self) -> list[Worker]:
        """All workers, status refreshed. Also replaces a keeper that was killed."""
        if self._keeper is not None and not self._keeper.is_alive():
            self._keeper.close()
            self._keeper = Reaper(process.session.pid for process in self.processes())
            for role in self._roles.values():
                self._leave_nothing(role.spec)
        return [worker for role in self._roles for worker in self.get_workers(role)]

    def restart_worker(self, worker: Worker, note: str = "") -> Worker:
        """Start one worker anew in the place of its process; see the contract."""
        role = self._roles.get(worker.role)
        slot = role.slots.get(worker.index) if role else None
        if role is None or slot is None or slot.process is None:
            raise LaunchError(f"there is no worker {worker.name!r} to restart.")
        former = slot.process
        self._end([former], grace=0.0)
        lives = former.worker.restarts + 1
        exit_report.separate(former.worker.log, f"{worker.name}, start {lives + 1}" + (f": {note}" if note else ""))
        slot.process = self._start(role, worker.index, lives)
        return slot.process.worker

    def logs(self, worker: Worker, lines: int = 30) -> str:
        """The last lines that a worker wrote, behind earlier ones that name an error; empty where there are none."""
        for process in self.processes():
            if process.worker.name == worker.name:
                return process.log_tail(lines)
        return exit_report.informative_tail(worker.log, lines)

    def delete_workers(self, role: str | None = None, grace: float = 5.0) -> None:
        """Stop a role, or all, with everything that the workers started, and free ports, devices and cores.

        May be called at any time, also again after it was interrupted; unknown roles are fine.

        Raises:
            LaunchError: a process outlived SIGKILL.
        """
        names = [name for name in self._roles if role is None or name == role]
        self._end([process for name in names for process in self._of(name)], grace)
        for name in names:
            self._free(name, [*self._roles[name].slots])
        if self._keeper is not None and not self._roles:
            keeper, self._keeper = self._keeper, None
            keeper.close()

    def terminate_workers(self, role: str) -> None:
        """See `Scheduler.terminate_workers`."""
        for process in self._of(role):
            process.session.terminate()

    def remove_workers(self, role: str, indices: Sequence[int], grace: float = 5.0) -> None:
        """Stop some workers of a role, with everything that they started, and free what they held.

        Raises:
            LaunchError: a process outlived SIGKILL.
        """
        slots = self._roles[role].slots
        self._end([process for index in indices if index in slots and (process := slots[index].process)], grace)
        self._free(role, [index for index in indices if index in slots])

    def processes(self) -> list[LocalProcess]:
        """Of all roles."""
        return [process for role in self._roles for process in self._of(role)]

    def _of(self, role: str) -> list[LocalProcess]:
        """The processes of a role, by index; none for an unknown one."""
        slots = self._roles[role].slots if role in self._roles else {}
        return [process for index in sorted(slots) if (process := slots[index].process)]

    def _free(self, name: str, indices: Sequence[int]) -> None:
        """Give back what workers held that have ended, and with the last of them the role."""
        role = self._roles[name]
        for index in indices:
            slot = role.slots.pop(index)
            if slot.port is not None:
                slot.port.release()
            self._gpus.release([] if role.spec.colocated_with else slot.gpus)
            self._cores.release(slot.cores)
        if not role.slots:
            if role.meeting is not None:
                role.meeting.release()
            del self._roles[name]
            self._clear(role.spec)

    def _clear(self, spec: JobSpec) -> None:
        """Remove directories that nobody uses."""
        used = {directory for role in self._roles.values() for directory in role.spec.scratch}
        for directory in {*spec.scratch} - used:
            shutil.rmtree(directory, ignore_errors=True)

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

    def _reserve(self, role: _Role, indices: Sequence[int]) -> None:
        """Take ports, devices and cores for further workers, all of them before anything starts."""
        spec, number = role.spec, len(indices)
        if spec.colocated_with:
            gpus = [gpu for slot in self._roles[spec.colocated_with].slots.values() for gpu in slot.gpus]
        else:
            gpus = [] if "CUDA_VISIBLE_DEVICES" in spec.env else self._gpus.acquire(spec.gpus * number, spec.role)
        for place, index in enumerate(indices):
            role.slots[index] = _Slot(gpus=gpus[place * spec.gpus : (place + 1) * spec.gpus])
        cores = self._cores.acquire(spec.cpus * number, spec.role) if self._pins_cores else []
        for place, index in enumerate(indices):
            slot = role.slots[index]
            slot.cores = cores[place * spec.cpus : (place + 1) * spec.cpus]
            if _listens(spec):
                slot.port = PortReservation(self._host, spec.port + index) if spec.port else self.reserve()
        if spec.spmd and not role.group.master:
            role.meeting = self.reserve()

    def _start(self, role: _Role, index: int, restarts: int = 0) -> LocalProcess:
        spec, slot = role.spec, role.slots[index]
        port = slot.port.port if slot.port else None
        # ranks see all of their role's, and choose by LOCAL_RANK
        gpus = [gpu for other in role.slots.values() for gpu in other.gpus] if spec.spmd else slot.gpus
        ranks = ranks_of(role.group, index, role.meeting.port if role.meeting else 0, self._host) if spec.spmd else {}
        environment = worker_environment(
            spec, os.environ, index, self._host, port, ranks, gpus if self._gpus.size else None
        )
        command = [fill_in(part, index, self._host, port) for part in spec.command]
        if shutil.which(command[0], path=environment.get("PATH")) is None:
            raise LaunchError(f"role {spec.role!r}: no program {command[0]!r} on PATH. Install it, or give its path.")
        try:
            self._log_dir.mkdir(parents=True, exist_ok=True)
            if self._keeper is None:
                self._keeper = Reaper()
            self._leave_nothing(spec)
            return LocalProcess(
                Worker(
                    spec.role, index, self._host, port, self._log_dir / f"{spec.role}-{index}.log", restarts=restarts
                ),
                command,
                environment,
                self._keeper.fd,
                slot.cores,
                spec.ready_path,
            )
        except OSError as error:
            raise LaunchError(f"{spec.role}-{index} cannot be started: {error}") from error

    def _leave_nothing(self, spec: JobSpec) -> None:
        """Have the keeper remove the role's directories where this process cannot."""
        if self._keeper is not None:
            for directory in spec.scratch:
                self._keeper.remove_after(directory)

    def _fail(self, process: LocalProcess, problem: str) -> None:
        raise LaunchError(exit_report.with_log(problem, process.worker.log, process.log_tail(LOG_LINES)))


def require_resizable(spec: JobSpec, count: int) -> None:
    """Raise a ConfigError for a role whose number of workers cannot become `count`."""
    require(not spec.spmd, f"resizing role {spec.role!r}", "a role of servers: ranks of one group stay as many", count)
    require(
        not spec.colocated_with, f"resizing role {spec.role!r}", "a role with devices of its own", spec.colocated_with
    )
    require(count >= 1, f"resizing role {spec.role!r}", "at least 1 worker", count)


def _listens(spec: JobSpec) -> bool:
    return spec.needs_port or spec.port is not None or spec.ready_path is not None


def require_valid_job(spec: JobSpec, started: Iterable[str]) -> None:
    """Raise a ConfigError for a role that cannot be meant as it is written, after the roles that have `started`."""
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
    known = sorted(started)
    rules["colocated_with"] = (spec.colocated_with in ("", *known), f"a role that has started, of {known}")
    for name, (holds, expected) in rules.items():
        require(holds, f"role {spec.role!r}: {name}", expected, getattr(spec, name))
