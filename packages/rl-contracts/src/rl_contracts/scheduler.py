"""Contract of a scheduler, which starts, monitors and stops the processes described by job specs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import ClassVar

from rl_contracts.config import Settings
from rl_contracts.errors import LaunchError
from rl_contracts.runtime.machine import url_of

__all__ = [
    "RUN_KEY_VARIABLE",
    "ClusterRequest",
    "JobSpec",
    "JobSubmission",
    "Node",
    "Resources",
    "Scheduler",
    "SchedulerConfig",
    "Worker",
    "WorkerStatus",
]

RUN_KEY_VARIABLE = "RL_RUN_KEY"
"""Environment variable that passes the key of a run's control endpoints to its processes."""


@dataclass(frozen=True)
class JobSpec:
    """Role of identical processes.

    In `command` and in the values of `env`, `{index}`, `{host}` and `{port}` are replaced by the worker's values.
    `{port}` is a free port unless `port` fixes it.
    """

    role: str
    """Name of the role, for example `rollout` or `actor`. Its log files are `<role>-<index>.log`."""
    command: tuple[str, ...]
    """Program and arguments, without secrets."""
    count: int = 1
    """Number of processes."""
    env: dict[str, str] = field(default_factory=dict)
    """Additional environment variables, including the run key."""
    cpus: int = 1
    """Cores, and threads of numeric libraries, per process."""
    gpus: int = 0
    """GPUs per process."""
    colocated_with: str = ""
    """Role, already started, whose devices these processes share; empty for separate devices. Requires a scheduler with
    `SchedulerConfig.shares_devices`."""
    port: int | None = None
    """Fixed port of worker 0 (worker i gets port + i), or None for any free port."""
    needs_port: bool = False
    """True if each worker listens on a port."""
    ready_path: str | None = None
    """URL path that returns status 200 once a worker is ready, for example `/health`. None: ready once started."""
    ready_timeout: float = 180.0
    """Seconds within which a worker must become ready."""
    spmd: bool = False
    """True if the workers are ranks of one process group, which get the variables of torchrun: RANK, WORLD_SIZE,
    LOCAL_RANK, MASTER_ADDR, MASTER_PORT."""
    scratch: tuple[str, ...] = ()
    """Local directories, for example in shared memory, that roles with the same entries share.

    All workers of these roles run on one machine. The directories are removed before the first worker starts and after
    the last one ends.
    """
    remedy: str = ""
    """Advice to the user if a server ends before it is ready, in sentences."""


class WorkerStatus(StrEnum):
    """State of a worker."""

    STARTING = "starting"
    """Started; the readiness check still fails."""
    RUNNING = "running"
    """Ready. A worker without a readiness check is in this state from its start."""
    DONE = "done"
    """Ended with exit code 0."""
    FAILED = "failed"
    """Ended with another exit code, or by a signal."""


@dataclass
class Worker:
    """Process that a scheduler started."""

    role: str
    index: int
    host: str
    port: int | None
    log: Path
    status: WorkerStatus = WorkerStatus.STARTING
    exit_code: int | None = None
    """Exit code as in `subprocess`: negative for the signal that ended the worker. None while it runs."""
    cause: str = ""
    """Reason for the end if the exit code does not show it, as the predicate of a sentence about the worker."""
    pid: int | None = None
    ended_at: float | None = None
    """Time of the end, in seconds since the epoch. Of several failed workers, the first is the likely cause."""
    restarts: int = 0
    """Number of times that the process was restarted."""
    node: str = ""
    """Name of the node on which the worker runs; empty if there is only one. Workers with equal names share a host."""

    @property
    def name(self) -> str:
        """Name of the worker, `<role>-<index>`."""
        return f"{self.role}-{self.index}"

    @property
    def address(self) -> str:
        """URL of the worker, `http://host:port`."""
        return url_of(self.host, self.port)


@dataclass(frozen=True)
class Node:
    """Machine of a cluster, as its scheduler reports it."""

    name: str
    """Name of the machine in the scheduler."""
    host: str
    """Address on which its processes listen and are reachable."""
    cores: int
    gpus: int = 0
    """Number of CUDA devices."""
    servers: bool | None = None
    """Roles that the machine runs: servers (True), roles with `spmd` (False), or both (None)."""


@dataclass(frozen=True)
class Resources:
    """Resources that a scheduler can allocate."""

    gpus: int
    """Total number of CUDA devices."""
    cores: int
    """Total number of CPU cores."""
    nodes: tuple[Node, ...] = ()
    """Machines with these resources; empty for a single machine."""


@dataclass(frozen=True)
class JobSubmission:
    """Run to submit to a cluster as a job."""

    command: tuple[str, ...]
    """Program and arguments that launch this run inside the job, without secrets."""
    run_dir: Path
    """Directory of the run on a shared file system. The command's output is `logs/launcher.log` in it."""
    roles: tuple[JobSpec, ...]
    """Roles that the run will start."""
    grace: float = 30.0
    """Seconds that the run needs after a stop request to save a recovery checkpoint."""


@dataclass(frozen=True)
class ClusterRequest:
    """Machines that a run requests."""

    nodes: int = 0
    """Number of machines; 0 for the scheduler's default."""
    cores: int = 0
    """Cores per machine; 0 for all."""
    gpus: int | None = None
    """GPUs per machine; None for all."""


@dataclass
class SchedulerConfig(Settings):
    """Base class of a scheduler's settings. A scheduler `XxxScheduler` requires a subclass `XxxSchedulerConfig`."""

    kills_soon: ClassVar[bool] = False
    """True if the cluster kills a run's processes soon after its stop request, even if they have not finished."""
    shares_devices: ClassVar[bool] = False
    """True if the scheduler can start a role on the devices of another role (`JobSpec.colocated_with`)."""
    cluster = ClusterRequest()  # without an annotation, because it is not a setting of the scheduler
    """Machines that the run requests (`cluster.*`); `use_cluster` sets it."""

    def resources(self) -> Resources | None:
        """Return the available resources, or None if they are unknown before a job starts.

        For None, the settings must contain the resources.
        """
        return None

    def planned(self) -> Resources | None:
        """Return the resources that a plan (`--dry-run`) assumes.

        Same as `resources`, or the resources in the settings if no cluster is reachable. A machine with an unknown
        number of cores has 0.
        """
        return self.resources()

    def check(self, roles: Sequence[JobSpec]) -> None:
        """Reject roles that cannot be started, as far as this is known before anything starts.

        Raises:
            ConfigError: a role cannot be started; the message names it and the reason.
        """

    def submits(self) -> bool:
        """Return whether this process submits a run to the cluster as a job, instead of launching it itself."""
        return False

    def submit(self, submission: JobSubmission) -> int:
        """Submit a run to the cluster and follow it to its end, if `submits` is True.

        Ctrl-C ends this call; the run continues.

        Returns:
            the exit code of the run, or 130 after Ctrl-C.

        Raises:
            ConfigError: the cluster rejects the job; the message has the reason and the remedy.
            LaunchError: the outcome of the job is unknown.
        """
        raise NotImplementedError

    def script(self, submission: JobSubmission) -> str:
        """Return the job script that `submit` would submit, for display, or "". Works without a cluster."""
        return ""

    def attach(self, run_dir: Path) -> int | None:
        """Follow the job of a run submitted earlier, like `submit`; return None if there is no unfinished job."""
        return None

    def use_cluster(self, nodes: int = 0, cores: int = 0, gpus: int | None = None) -> None:
        """Set the machines that the run requests. A scheduler of several machines reserves and uses no more than these.

        Raises:
            ConfigError: these settings need more machines.
        """
        self.cluster = ClusterRequest(nodes, cores, gpus)

    def job_state(self, run_dir: Path) -> str:
        """Return a text with the state of a run's submitted job, or "" if it has ended or its state is unavailable.

        The text of a waiting job begins with `pending`.
        """
        return ""

    def cancel(self, run_dir: Path) -> None:
        """Cancel the submitted job of a run, running or waiting, without a restart.

        Raises:
            LaunchError: the cluster cannot be reached.
        """


class Scheduler(ABC):
    """Starts, monitors and stops the workers of a run on one kind of machine or cluster.

    The constructor is `Scheduler(log_dir, config)`: the directory of the workers' logs, and the scheduler's settings.
    """

    tick: Callable[[], object] = staticmethod(lambda: None)
    """Function called several times a second while the start of workers waits for machines. An exception from it ends
    the wait. A launcher sets it to react to signals."""

    @abstractmethod
    def create_workers(self, spec: JobSpec) -> list[Worker]:
        """Start the workers of a role and return at once; `wait_ready` waits for them.

        Raises:
            LaunchError: the program does not exist, the fixed port is in use, or the role exists already.
        """

    @abstractmethod
    def wait_ready(self, role: str, tick: Callable[[], object] | None = None) -> list[Worker]:
        """Block until the readiness check of every worker of the role succeeds.

        Args:
            role: a role that `create_workers` started.
            tick: function called several times a second during the wait; an exception from it ends the wait. A launcher
                uses it to react to signals and to the end of other roles.

        Raises:
            LaunchError: the role does not exist, or a worker ended or was not ready in time. The message shows the last
                lines of the worker's log.
        """

    @abstractmethod
    def get_workers(self, role: str) -> list[Worker]:
        """Return the workers of a role with their last known status; empty for an unknown role."""

    @abstractmethod
    def poll(self) -> list[Worker]:
        """Return all workers, with their current status."""

    def restart_worker(self, worker: Worker, note: str = "") -> Worker:
        """Restart one worker and return immediately, with the same command, address, devices and log file.

        Remaining processes of the previous start are killed first. The worker appends to its log.

        Args:
            worker: a worker that `create_workers` or `restart_worker` returned.
            note: reason of the restart, for the line that separates the two starts in the log.

        Raises:
            LaunchError: the worker is unknown, its process survives SIGKILL or cannot be started, or this scheduler
                cannot restart a single worker.
        """
        raise LaunchError(f"{type(self).__name__} cannot restart {worker.name} alone. Set launcher.max_restarts to 0.")

    def resize_workers(self, role: str, count: int, grace: float = 5.0) -> list[Worker]:
        """Start further workers of a role, or stop its last ones, so that it has `count` workers.

        The call does not wait for started workers to become ready. It waits for stopped ones (see `delete_workers`).

        Returns:
            the workers that the role has now.

        Raises:
            ConfigError: the role has ranks (`spmd`), or no worker would remain.
            LaunchError: the role does not exist, resources are insufficient, or this scheduler cannot resize a role.
                The role is unchanged.
        """
        raise LaunchError(f"{type(self).__name__} cannot change the number of workers of role {role!r}.")

    @abstractmethod
    def logs(self, worker: Worker, lines: int = 30) -> str:
        """Return the last lines of a worker's log, possibly preceded by earlier lines with the cause of its end."""

    def terminate_workers(self, role: str) -> None:
        """Send SIGTERM to the process group of each worker of a role, without waiting for its end.

        Unknown roles are ignored. The default deletes the workers instead, with a grace period of 30 s.
        """
        self.delete_workers(role, grace=30.0)

    @abstractmethod
    def delete_workers(self, role: str | None = None, grace: float = 5.0) -> None:
        """Stop the workers of a role, or of all roles, and wait until they have ended.

        Their process groups get SIGTERM, and SIGKILL after `grace` seconds.
        """
