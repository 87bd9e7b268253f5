"""The launcher: starts a run's servers and trainers, watches over them, and leaves nothing behind."""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rl_contracts import registry
from rl_contracts.config import bounded, require
from rl_contracts.errors import ConfigError, LaunchError, ServerStartError
from rl_contracts.logging import get_logger
from rl_contracts.scheduler import RUN_KEY_VARIABLE, JobSpec, Scheduler, SchedulerConfig, Worker, WorkerStatus
from rl_launchers.health import RestartConfig, ServerCare
from rl_launchers.interrupts import Hurried, Interrupted, Interrupts
from rl_launchers.report import describe_end, with_log

logger = get_logger("launcher")

SETTLE_SECONDS = 0.5
"""After a death, time for its consequences (or its slower cause) to show, so that the error tells of all of them."""

TrainerSpecs = Callable[[list[Worker]], Sequence[JobSpec]]
"""Makes the trainers' roles from the servers, whose addresses it may put into commands and environments."""


@dataclass
class LauncherConfig(RestartConfig):
    """Which scheduler starts the processes of a run, and how they are stopped."""

    kind: str = "local"
    """Scheduler: a name in the entry-point group `rl.schedulers`, or a dotted path `package.module:Class`."""
    options: SchedulerConfig | None = None
    """The scheduler's own settings, of the type that it brings; None: its defaults."""
    grace_seconds: float = bounded(30.0, "0 or more", lambda seconds: seconds >= 0)
    """Seconds that trainers have after a request to stop, to write a recover point; then they are killed."""
    stop_seconds: float = bounded(3.0, "0 or more", lambda seconds: seconds >= 0)
    """Seconds that everybody has to end by itself when a run is over, or has failed."""
    log_lines: int = bounded(30, "at least 1", lambda lines: lines >= 1)
    """Last lines of a log shown in an error."""
    tick_seconds: float = bounded(0.2, "in (0, 2]", lambda seconds: 0 < seconds <= 2)
    """Seconds between two looks at the processes."""

    def __post_init__(self) -> None:
        super().__post_init__()
        own = registry.settings("rl.schedulers", self.kind)
        if self.options is None:
            self.options = own()
        expected = f"{own.__name__}, which launcher.kind={self.kind} brings"
        require(isinstance(self.options, own), "launcher.options", expected, self.options)

    def scheduler(self, log_dir: Path) -> Scheduler:
        """A scheduler of the chosen kind that writes its logs to `log_dir`."""
        made: Scheduler = registry.load("rl.schedulers", self.kind)(log_dir, self.options)
        return made


class Launcher:
    """Starts servers, waits until they are ready, starts trainers, and supervises all of them.

    Args:
        scheduler: starts the processes. The launcher stops all of its workers when it is done.
        config: see `LauncherConfig`.
        parent: what `rl_launchers.uv_parent` said when the program began, for one that works before it launches: where
            that process is gone by then, nothing starts. None: it is asked when the run starts.
        key: of servers that somebody else has started; empty: one is made.
    """

    def __init__(
        self, scheduler: Scheduler, config: LauncherConfig | None = None, parent: int | None = None, key: str = ""
    ) -> None:
        self._scheduler, self._parent = scheduler, parent
        self._config = config or LauncherConfig()
        self.key = key or secrets.token_urlsafe(32)
        """The key of this run. Every worker has it in its environment as RL_RUN_KEY; never write it anywhere."""
        self._trainers: list[str] = []
        self._ready = False
        self._on_tick: Callable[[list[Worker]], None] | None = None

    def run(
        self,
        servers: Sequence[JobSpec],
        trainer_specs: TrainerSpecs,
        on_tick: Callable[[list[Worker]], None] | None = None,
        together: bool = False,
    ) -> int:
        """Run to the end. Whatever happens, no process and no port is left behind.

        The first SIGINT (Ctrl-C) or SIGTERM asks the trainers to end, with SIGTERM and `grace_seconds` in which they
        may write a recover point while the servers still answer; then everything else is stopped. A second one kills
        everything at once. The handlers that were there before are put back.

        Args:
            servers: roles to start first, in this order; none for a run without servers.
            trainer_specs: called with the servers' workers; returns the trainers' roles.
            on_tick: called with all workers several times a second, to draw progress.
            together: whether trainers start with the servers, and wait for them by themselves; else the servers are
                ready before. Servers are started anew only from the moment at which all of them were ready.

        Returns:
            exit code for the program: 0 when all trainers are done, 130 after SIGINT, 143 after SIGTERM.

        Raises:
            ConfigError: a role contradicts itself, there is no trainer, or the run key is in a command.
            LaunchError: a worker could not be started, a trainer failed, or a server ended or hung once more than
                `max_restarts` allows. Names the one that ended first, what it ended with, and the last lines of its
                log.
            ServerStartError: a server ended before all were ready; the same, and its role's `remedy`.
        """
        self._on_tick, self._remedies = on_tick, {spec.role: spec.remedy for spec in servers}
        self._care = ServerCare(self._scheduler, self._config, servers)
        code = 0
        with Interrupts(self._parent) as interrupts:
            try:
                self._start(servers, trainer_specs, interrupts, together)
                while not self._look(interrupts):
                    interrupts.wait(self._config.tick_seconds)
            except Interrupted as interruption:
                code = 128 + interruption.number
            finally:
                self._care.close()
                self._stop(interrupts, patient=code != 0)
        return code

    def _start(
        self, servers: Sequence[JobSpec], trainer_specs: TrainerSpecs, interrupts: Interrupts, together: bool
    ) -> None:
        for spec in servers:
            interrupts.check()
            self._scheduler.create_workers(self._with_key(spec))
        if not together:
            self._await(servers, interrupts)
        specs = trainer_specs([worker for spec in servers for worker in self._scheduler.get_workers(spec.role)])
        require(len(specs) > 0, "trainer_specs", "at least one role", list(specs))
        for spec in specs:
            interrupts.check()
            self._trainers.append(spec.role)
            self._scheduler.create_workers(self._with_key(spec))
        self._await(servers, interrupts)
        self._ready = True

    def _await(self, servers: Sequence[JobSpec], interrupts: Interrupts) -> None:
        for spec in servers:
            try:
                self._scheduler.wait_ready(spec.role, tick=lambda: self._look(interrupts))
            except LaunchError:
                self._look(interrupts)  # where somebody ended, it tells of all of them
                raise

    def _with_key(self, spec: JobSpec) -> JobSpec:
        """The role with the run key in its environment, and a guard against it in a place that everybody can read."""
        if any(self.key in part for part in spec.command):
            raise ConfigError(
                f"role {spec.role!r}: expected no secret in its command, which every user of the machine can read; "
                f"found the run key. The process has it in its environment as {RUN_KEY_VARIABLE}."
            )
        return replace(spec, env={**spec.env, RUN_KEY_VARIABLE: self.key})

    def _look(self, interrupts: Interrupts) -> bool:
        """One look at everything: signals, progress, deaths. Returns whether all trainers are done."""
        interrupts.check()
        workers = self._scheduler.poll()
        if self._on_tick is not None:
            self._on_tick(workers)
        trainers = [worker for worker in workers if worker.role in self._trainers]
        if trainers and all(worker.status is WorkerStatus.DONE for worker in trainers):
            return True
        failed = any(worker.status is WorkerStatus.FAILED for worker in trainers)
        lost = {} if failed else self._lost_servers(workers)
        if failed or lost:
            interrupts.wait(SETTLE_SECONDS)
            error = LaunchError if failed or self._ready else ServerStartError
            raise error(self._post_mortem(self._scheduler.poll(), lost))
        return False

    def _lost_servers(self, workers: list[Worker]) -> dict[str, str]:
        """Names of servers that are gone for good, and in words what happened to each. Restarts what can be."""
        if self._ready:
            return self._care.look(workers)
        return {worker.name: describe_end(worker) for worker in workers if self._ended_wrongly(worker)}

    def _ended_wrongly(self, worker: Worker) -> bool:
        """Whether it failed, or is a server that ended while there are trainers that need it."""
        ended = worker.status is WorkerStatus.DONE and worker.role not in self._trainers
        return ended or worker.status is WorkerStatus.FAILED

    def _post_mortem(self, workers: list[Worker], lost: dict[str, str]) -> str:
        """What happened: the first death is told in full, for the later ones are mostly its consequences."""
        ended = [worker for worker in workers if worker.name in lost or self._ended_wrongly(worker)]
        first, *others = sorted(ended, key=lambda worker: worker.ended_at or math.inf)
        what = lost.get(first.name) or describe_end(first)
        problem = f"{first.name} {what} while the run needed it, so the run was stopped."
        if first.name in lost and self._ready and self._config.max_restarts:
            problem += f" launcher.max_restarts={self._config.max_restarts} is used up."
        remedy = [] if self._ready else [self._remedies.get(first.role, "")]
        after = [f"After it, {other.name} {describe_end(other)} (log: {other.log})." for other in others]
        before = [f"Before it: {sentence}" for sentence in self._care.history]
        problem = "\n".join(filter(None, [problem, *remedy, *after, *before]))
        return with_log(problem, first.log, self._scheduler.logs(first, self._config.log_lines))

    def _stop(self, interrupts: Interrupts, patient: bool) -> None:
        """Stop everything: where `patient`, the trainers first and with time to write a recover point."""
        try:
            if patient and not interrupts.hurried:
                logger.warning(
                    "Stopping: trainers have launcher.grace_seconds=%g s to end their step and save a recover point. A "
                    "second signal stops at once.",
                    self._config.grace_seconds,
                )
                deadline = time.monotonic() + self._config.grace_seconds
                for role in self._trainers:
                    self._scheduler.delete_workers(role, grace=max(0.0, deadline - time.monotonic()))
            self._scheduler.delete_workers(grace=0.0 if interrupts.hurried else self._config.stop_seconds)
        except Hurried:
            self._scheduler.delete_workers(grace=0.0)
