"""The contract of a scheduler: start, watch and stop processes. What to start comes as data."""

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
"""Environment variable that carries the key of a run's control endpoints to its processes."""


@dataclass(frozen=True)
class JobSpec:
    """A role of equal processes.

    `{index}`, `{host}` and `{port}` in `command` and `env` values become the worker's own. `{port}` is a free port
    unless `port` fixes it.
    """

    role: str
    """Name of the role, for example `rollout` or `actor`; also of its log files, `<role>-<index>.log`."""
    command: tuple[str, ...]
    """Program and arguments. Never holds a secret."""
    count: int = 1
    """Processes to start."""
    env: dict[str, str] = field(default_factory=dict)
    """Added to the environment. The run key travels here."""
    cpus: int = 1
    """Cores, and threads of numeric libraries, per process."""
    gpus: int = 0
    """Devices per process."""
    colocated_with: str = ""
    """Role that has started, whose devices these processes use too; empty: they have devices of their own. Needs a
    scheduler with `SchedulerConfig.shares_devices`."""
    port: int | None = None
    """Fixed port of worker 0 (worker i gets port + i); None: any free one."""
    needs_port: bool = False
    """Whether the workers listen."""
    ready_path: str | None = None
    """URL path that answers 200 once a worker is ready, for example `/health`; None: ready when it runs."""
    ready_timeout: float = 180.0
    """Seconds within which it must."""
    spmd: bool = False
    """Set torchrun's variables (RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT) for the workers of this role.
    """
    scratch: tuple[str, ...] = ()
    """Directories of a machine, such as in its memory, that roles share which name them: all their workers are on that
    machine, and the directories are removed there before the first of them starts and after the last has ended."""
    remedy: str = ""
    """What to do where a server ends before it is ready, in sentences."""


class WorkerStatus(StrEnum):
    """Life of a worker."""

    STARTING = "starting"
    """Started; has not answered its readiness check yet."""
    RUNNING = "running"
    """Ready. A worker without a readiness check is so from its start."""
    DONE = "done"
    """Ended with exit code 0."""
    FAILED = "failed"
    """Ended with another exit code or by a signal."""


@dataclass
class Worker:
    """One started process."""

    role: str
    index: int
    host: str
    port: int | None
    log: Path
    status: WorkerStatus = WorkerStatus.STARTING
    exit_code: int | None = None
    """As `subprocess` gives it: negative for the signal that ended the worker. None while it runs."""
    cause: str = ""
    """Why it ended, in words that go on a sentence about it, where the exit code does not say so."""
    pid: int | None = None
    ended_at: float | None = None
    """When it ended, in seconds since the epoch. Of several dead workers the first is the likely cause."""
    restarts: int = 0
    """How often its process was started anew."""
    node: str = ""
    """Name of the scheduler's node on which it runs, which decides what is "the same host"; empty: there is one."""

    @property
    def name(self) -> str:
        """`<role>-<index>`."""
        return f"{self.role}-{self.index}"

    @property
    def address(self) -> str:
        """`http://host:port`."""
        return url_of(self.host, self.port)


@dataclass(frozen=True)
class Node:
    """A machine of a cluster, as its scheduler sees it."""

    name: str
    """The scheduler's own name for it."""
    host: str
    """Address under which its processes listen and are reached."""
    cores: int
    gpus: int = 0
    """CUDA devices."""
    servers: bool | None = None
    """Whether it is for servers only, or for all others only (roles with `spmd`); None: for all."""


@dataclass(frozen=True)
class Resources:
    """What a scheduler can hand out."""

    gpus: int
    """CUDA devices in all."""
    cores: int
    """Cores in all."""
    nodes: tuple[Node, ...] = ()
    """On which machines these are; empty: on one."""


@dataclass(frozen=True)
class JobSubmission:
    """A run that is handed to a cluster as a job."""

    command: tuple[str, ...]
    """Program and arguments of this same run, which launch it where the job runs. No secrets."""
    run_dir: Path
    """The run's directory, which the cluster's machines share. `logs/launcher.log` in it is the command's output."""
    roles: tuple[JobSpec, ...]
    """What it will start."""
    grace: float = 30.0
    """Seconds that the run needs after a request to stop, to write a recover point."""


@dataclass
class SchedulerConfig(Settings):
    """The settings of a scheduler: each brings a subclass beside its class, called like it with `Config` behind."""

    kills_soon: ClassVar[bool] = False
    """Whether the cluster kills the processes of a run soon after it asked them to stop, finished or not."""
    shares_devices: ClassVar[bool] = False
    """Whether it starts a role beside another, on the same devices (`JobSpec.colocated_with`)."""

    def resources(self) -> Resources | None:
        """What there is to run on; None where that is not known before a job starts, so that the user must say it."""
        return None

    def planned(self) -> Resources | None:
        """What a plan (`--dry-run`) counts on: `resources`, or what the settings say where no cluster can be asked.
        Machines whose cores nobody knows have 0."""
        return self.resources()

    def check(self, roles: Sequence[JobSpec]) -> None:
        """Refuse roles that could not be started, where that is known before anything is.

        Raises:
            ConfigError: says which, and why.
        """

    def submits(self) -> bool:
        """Whether a run is to be handed to the cluster as a job, from here; else this process launches it."""
        return False

    def submit(self, submission: JobSubmission) -> int:
        """Hand a run to the cluster and follow it to its end, where `submits`. Ctrl-C ends only the following.

        Returns:
            the exit code of the run, or 130 where it is not followed any more.

        Raises:
            ConfigError: the cluster does not take it; why, and what to do.
            LaunchError: what became of it cannot be known.
        """
        raise NotImplementedError

    def script(self, submission: JobSubmission) -> str:
        """What `submit` would hand in, as text for people; needs no cluster. Empty where there is nothing to show."""
        return ""

    def attach(self, run_dir: Path) -> int | None:
        """Follow the job of a run that was handed in earlier and lives, as `submit` does. None: there is none."""
        return None

    def use_nodes(self, number: int) -> None:
        """The run is to have so many machines (`cluster.nodes`), where these settings do not say how many.

        Raises:
            ConfigError: they say another number.
        """

    def job_state(self, run_dir: Path) -> str:
        """The state of the job of a run that was handed in, in words that begin with `pending` where it waits; empty
        where there is none any more, or nobody can be asked."""
        return ""

    def cancel(self, run_dir: Path) -> None:
        """End that job, also one that waits, and do not start it again.

        Raises:
            LaunchError: the cluster cannot be told.
        """


class Scheduler(ABC):
    """Starts, watches and stops the workers of a run on some kind of machine or cluster.

    Made as `Scheduler(log_dir, config)`: the directory of the workers' logs, and the scheduler's own settings.
    """

    tick: Callable[[], object] = staticmethod(lambda: None)
    """Called several times a second where a start of workers waits for machines; what it raises ends the wait. Set by a
    launcher, so that it hears of signals meanwhile."""

    def limit(self, nodes: int = 0, cores: int = 0, gpus: int = 0) -> None:  # noqa: B027 - one machine has no choice
        """Use so many machines at most, and of each so many cores and GPUs; 0: what there is. Before any worker."""

    @abstractmethod
    def create_workers(self, spec: JobSpec) -> list[Worker]:
        """Start the workers of a role and return at once; `wait_ready` waits for them.

        Raises:
            LaunchError: the command is not there, the fixed port is in use, or the role exists already.
        """

    @abstractmethod
    def wait_ready(self, role: str, tick: Callable[[], object] | None = None) -> list[Worker]:
        """Block until every worker of the role answers its readiness check.

        Args:
            role: a role that `create_workers` started.
            tick: called several times a second while it waits; what it raises ends the wait. So a launcher reacts to
                signals and to other roles' deaths in the meantime.

        Raises:
            LaunchError: no such role, or a worker ended or was not ready in time; shows the last lines of its log.
        """

    @abstractmethod
    def get_workers(self, role: str) -> list[Worker]:
        """The workers of a role with their last known status; empty for an unknown role."""

    @abstractmethod
    def poll(self) -> list[Worker]:
        """All workers, status refreshed."""

    def restart_worker(self, worker: Worker, note: str = "") -> Worker:
        """Start one worker anew and return at once: the same command, address, devices and log, to which it appends.
        What is left of the former process is killed first.

        Args:
            worker: one that `create_workers` or `restart_worker` returned.
            note: why, for the line that separates the two lives in the log.

        Raises:
            LaunchError: unknown worker, its process outlives SIGKILL or cannot be started, or this scheduler cannot
                restart a single worker.
        """
        raise LaunchError(f"{type(self).__name__} cannot restart {worker.name} alone. Set launcher.max_restarts to 0.")

    def resize_workers(self, role: str, count: int, grace: float = 5.0) -> list[Worker]:
        """Start further workers of a role, or stop its last ones, until there are `count`. Returns at once for those
        that start, and when they are gone for those that end (see `delete_workers`).

        Returns:
            the workers that the role has now.

        Raises:
            ConfigError: a role of ranks, or none would be left.
            LaunchError: no such role, there is no room for more, or this scheduler cannot do it; the role is as before.
        """
        raise LaunchError(f"{type(self).__name__} cannot change how many workers role {role!r} has.")

    @abstractmethod
    def logs(self, worker: Worker, lines: int = 30) -> str:
        """The last lines of a worker's log; before them there may be earlier ones that say why it ended."""

    def terminate_workers(self, role: str) -> None:
        """Send SIGTERM to the process group of each worker of a role, and return without waiting for their end. Unknown
        roles are fine. A scheduler that cannot do that deletes them, with half a minute, which is the default."""
        self.delete_workers(role, grace=30.0)

    @abstractmethod
    def delete_workers(self, role: str | None = None, grace: float = 5.0) -> None:
        """Stop a role, or all: SIGTERM to its process group, SIGKILL after `grace` seconds. Returns when they are
        gone."""
