"""The launcher: starts a run's servers and trainers, watches over them, and leaves nothing behind."""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from rl_contracts import registry
from rl_contracts.config import bounded, require
from rl_contracts.errors import ConfigError, LaunchError, ServerStartError
from rl_contracts.runtime.logging import get_logger
from rl_contracts.runtime.name_service import MemoryNames
from rl_contracts.scheduler import RUN_KEY_VARIABLE, JobSpec, Scheduler, SchedulerConfig, Worker, WorkerStatus
from rl_launchers.supervise.control import RunControl
from rl_launchers.supervise.exit_report import describe_end, separate, with_log
from rl_launchers.supervise.interrupts import ONE_REQUEST, Interrupted, Interrupts, SecondInterrupt
from rl_launchers.supervise.run_restarts import Resume, RunRestarts, TrainersLostError, UserCodeError, headline
from rl_launchers.supervise.server_health import RestartConfig, ServerHealth, ServersLostError
from rl_launchers.supervise.server_scaling import ServerScaler

logger = get_logger("launcher")

SETTLE_SECONDS = 0.5
"""After a death, time for its consequences (or its slower cause) to show, so that the error tells of all of them."""

USERS_FAULT = 2
"""Exit code of a trainer whose error would come again: nothing is started anew for it."""

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
    """Seconds that trainers have to save the last finished step, once they were asked to abandon the running one (by a
    second request to stop, or after `finish_seconds`); then they are killed."""
    finish_seconds: float = bounded(0.0, "0 (no limit) or more", lambda seconds: seconds >= 0)
    """Seconds that the running step has to finish after a request to stop; then it is abandoned. 0: no limit. With
    Slurm, which kills a job soon after it asks it to stop, 0 is a third of `grace_seconds`, the rest follows it."""
    stop_seconds: float = bounded(3.0, "0 or more", lambda seconds: seconds >= 0)
    """Seconds that everybody has to end by itself when a run is over, or has failed."""
    drain_seconds: float = bounded(5.0, "0 or more", lambda seconds: seconds >= 0)
    """Seconds between the moment from which clients no longer know a server that is taken away, and its end."""
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

    def stop_limits(self) -> tuple[float, float]:
        """Return the seconds until the running step is abandoned, and those from then until trainers are killed."""
        assert self.options is not None
        if self.options.kills_soon and not self.finish_seconds:
            return self.grace_seconds / 3, self.grace_seconds * 2 / 3
        return self.finish_seconds or math.inf, self.grace_seconds

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
        control: names of the run and requests to it, entered by whoever made it; None: nobody asks.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        config: LauncherConfig | None = None,
        parent: int | None = None,
        key: str = "",
        control: RunControl | None = None,
    ) -> None:
        self._scheduler, self._parent = scheduler, parent
        self._config = config or LauncherConfig()
        self._control = control or RunControl(MemoryNames())
        self.key = key or secrets.token_urlsafe(32)
        """The key of this run. Every worker has it in its environment as RL_RUN_KEY; never write it anywhere."""
        self._trainers: list[JobSpec] = []
        self._ready = self._blind = False
        self._on_tick: Callable[[list[Worker]], None] | None = None

    def run(
        self,
        servers: Sequence[JobSpec],
        trainer_specs: TrainerSpecs,
        on_tick: Callable[[list[Worker]], None] | None = None,
        together: bool = False,
        resume: Resume | None = None,
    ) -> int:
        """Run to the end. Whatever happens, no process and no port is left behind.

        The first SIGINT (Ctrl-C), SIGTERM or SIGHUP (the terminal is gone) sends the trainers SIGTERM: they finish
        their step and save it while the servers still answer; then everything else is stopped. A second one sends them
        SIGTERM again: they abandon the step, and have `grace_seconds`. A third one kills everything at once. The
        handlers that were there before are put back.

        Args:
            servers: roles to start first, in this order; none for a run without servers.
            trainer_specs: called with the servers' workers, at each start; returns the trainers' roles.
            on_tick: called with all workers several times a second, to draw progress.
            together: whether trainers start with the servers, and wait for them by themselves; else the servers are
                ready before. Servers are started anew only from the moment at which all of them were ready.
            resume: how the run goes on when trainers are lost, or no server is left and there is room for none:
                everything is stopped and started again, as another command would do it, up to `trainer_restarts` times.
                So it is where a server is lost with its node before all were ready.
                Not after a trainer's exit code 2 (`USERS_FAULT`), and not where one raised an error before the first
                step. None: the run ends then.

        Returns:
            exit code for the program: 0 when all trainers are done, 130 after SIGINT, 143 after SIGTERM, 129 after
            SIGHUP.

        Raises:
            ConfigError: a role contradicts itself, there is no trainer, or the run key is in a command.
            LaunchError: a worker could not be started, trainers were lost for good, or a server ended or hung once more
                than `max_restarts` allows. Names the one that ended first, what it ended with, and the last lines of
                its log; with what went wrong before, first cause first.
            ServerStartError: a server ended before all were ready; the same, and its role's `remedy`.
        """
        self._on_tick, self._remedies = on_tick, {spec.role: spec.remedy for spec in servers}
        self._care = ServerHealth(self._scheduler, self._config, servers)
        self._elastic = ServerScaler(
            self._scheduler,
            self._control,
            [self._with_key(spec) for spec in servers],
            self._config.drain_seconds,
            self._config.stop_seconds,
        )
        self._control.pulses.timeout = self._config.health_timeout
        self._step_seconds = resume.step_seconds if resume else lambda: 0.0
        attempts, code = RunRestarts(self._config, resume), 0
        with Interrupts(self._parent) as interrupts:
            self._scheduler.tick = interrupts.check
            try:
                with interrupts.raise_on_second():
                    while not self._done(trainer_specs, interrupts, together, attempts):
                        pass
            except Interrupted as interruption:
                code = 128 + interruption.number
                self._control.set_status(state="stopping", code=code)
            finally:
                self._care.close()
                self._stop(interrupts, patient=code != 0)
        return code

    def _done(self, trainer_specs: TrainerSpecs, interrupts: Interrupts, together: bool, attempts: RunRestarts) -> bool:
        """Start everything and look after it until the trainers are done; False: until it is to be started again."""
        try:
            self._start(trainer_specs, interrupts, together)
            while not self._poll(interrupts):
                interrupts.wait(self._config.tick_seconds)
            return True
        except LaunchError as error:
            self._control.set_status(state="restarting", error=headline(error))
            logs = [worker.log for worker in self._scheduler.poll()]
            try:
                self._stop(interrupts, patient=False)
            except LaunchError as stuck:  # on a machine that is sick; another start may do without it
                logger.warning("%s", stuck)
            what = attempts.prepare_restart(error, self._ready)
        logger.warning("%s", what)
        for log in logs:
            separate(log, what)
        self._control.set_status(trainer_restarts=attempts.count, history=attempts.headlines())
        return False

    def _start(self, trainer_specs: TrainerSpecs, interrupts: Interrupts, together: bool) -> None:
        self._ready, self._trainers = False, []
        self._care.forget()
        self._control.set_status(state="starting")
        servers = self._elastic.specs
        for spec in servers:
            interrupts.check()
            self._scheduler.create_workers(spec)
        if not together:
            self._await(servers, interrupts)
        specs = trainer_specs([worker for spec in servers for worker in self._scheduler.get_workers(spec.role)])
        require(len(specs) > 0, "trainer_specs", "at least one role", list(specs))
        for spec in specs:
            interrupts.check()
            self._trainers.append(spec)
            self._scheduler.create_workers(self._with_key(spec))
        self._await(servers, interrupts)
        self._ready = True
        self._elastic.begin()
        self._control.set_status(state="running", error="")

    def _await(self, servers: Sequence[JobSpec], interrupts: Interrupts) -> None:
        for spec in servers:
            try:
                self._scheduler.wait_ready(spec.role, tick=lambda: self._poll(interrupts))
            except LaunchError:
                self._poll(interrupts)  # where somebody ended, it tells of all of them
                raise

    def _with_key(self, spec: JobSpec) -> JobSpec:
        """The role with the run key in its environment, and a guard against it in a place that everybody can read."""
        if any(self.key in part for part in spec.command):
            raise ConfigError(
                f"role {spec.role!r}: expected no secret in its command, which every user of the machine can read; "
                f"found the run key. The process has it in its environment as {RUN_KEY_VARIABLE}."
            )
        return replace(spec, env={**spec.env, RUN_KEY_VARIABLE: self.key})

    def _poll(self, interrupts: Interrupts) -> bool:
        """One look at everything: signals, progress, deaths. Returns whether all trainers are done."""
        interrupts.check()
        workers = self._scheduler.poll()
        self._control.show(workers)
        self._control.publish(
            {f"{w.role}/{w.index}": w.address for w in self._elastic.remaining_servers(workers) if w.port}
        )
        self._show(workers)
        trainers = [worker for worker in workers if worker.role in self._roles()]
        if trainers and all(worker.status is WorkerStatus.DONE for worker in trainers):
            return True
        hung = [w.name for w in trainers if w.exit_code is None and self._control.pulses.is_hung(w.name)]
        lost = dict.fromkeys(hung, f"gave no sign of life for {self._config.health_timeout:g} s")
        failed = bool(hung) or any(worker.status is WorkerStatus.FAILED for worker in trainers)
        if not failed:
            lost = self._lost_servers(workers)
        if failed or lost:
            interrupts.wait(SETTLE_SECONDS)
            raise self._error(self._scheduler.poll(), lost, failed)
        if self._ready:
            self._elastic.poll(workers, {spec.colocated_with for spec in self._trainers})
        return False

    def _show(self, workers: list[Worker]) -> None:
        try:
            if self._on_tick is not None:
                self._on_tick(workers)
        except OSError as error:  # a full disk, or a terminal that is gone, ends no run
            if not self._blind:
                logger.warning("cannot show progress: %s", error)
            self._blind = True

    def _error(self, workers: list[Worker], lost: dict[str, str], failed: bool) -> LaunchError:
        told = self._post_mortem(workers, lost)
        ended = [w.exit_code for w in workers if w.role in self._roles() and w.status is WorkerStatus.FAILED]
        if failed and USERS_FAULT not in ended:
            return TrainersLostError(told, raised=not lost and all(code and 0 < code < 64 for code in ended))
        if failed:
            return UserCodeError(told)
        if any(worker.cause for worker in workers if worker.name in lost):  # with its node: no mistake that comes again
            return ServersLostError(told)
        return LaunchError(told) if self._ready else ServerStartError(told)

    def _roles(self) -> list[str]:
        """The trainers'."""
        return [spec.role for spec in self._trainers]

    def _lost_servers(self, workers: list[Worker]) -> dict[str, str]:
        """Names of servers that are gone for good, and in words what happened to each. Restarts what can be."""
        if self._ready:
            return self._elastic.give_up(
                self._care.restart_unhealthy(self._elastic.remaining_servers(workers)), workers
            )
        return {worker.name: describe_end(worker) for worker in workers if self._failed_workers(worker)}

    def _failed_workers(self, worker: Worker) -> bool:
        """Whether it failed, or is a server that ended while there are trainers that need it."""
        ended = worker.status is WorkerStatus.DONE and worker.role not in self._roles()
        return ended or worker.status is WorkerStatus.FAILED

    def _post_mortem(self, workers: list[Worker], lost: dict[str, str]) -> str:
        """What happened: the first death is told in full, for the later ones are mostly its consequences."""
        ended = [worker for worker in workers if worker.name in lost or self._failed_workers(worker)]
        first, *others = sorted(ended, key=lambda worker: worker.ended_at or math.inf)
        what = lost.get(first.name) or describe_end(first)
        problem = f"{first.name} {what} while the run needed it."
        if first.name in lost and self._ready and self._config.max_restarts and first.role not in self._roles():
            problem += f" All launcher.max_restarts={self._config.max_restarts} restarts are used."
        remedy = [] if self._ready or first.cause else [self._remedies.get(first.role, "")]
        after = [f"After it, {other.name} {describe_end(other)} (log: {other.log})." for other in others]
        before = [f"Before it: {sentence}" for sentence in self._care.history]
        problem = "\n".join(filter(None, [problem, *remedy, *after, *before]))
        return with_log(problem, first.log, self._scheduler.logs(first, self._config.log_lines))

    def _stop(self, interrupts: Interrupts, patient: bool) -> None:
        """Stop everything: where `patient`, the trainers first and with time to write a recover point.

        Raises:
            LaunchError: something is left.
        """
        try:
            if patient:
                self._stop_trainers(interrupts)
            with interrupts.raise_on_second():
                self._scheduler.delete_workers(grace=0.0 if interrupts.requests > 2 else self._config.stop_seconds)
        except SecondInterrupt:
            self._scheduler.delete_workers(grace=0.0)
        finally:
            self._control.show([])
            self._control.publish({})
            self._control.pulses.clear()

    def _stop_trainers(self, interrupts: Interrupts) -> None:
        """Let the trainers finish their step, then ask them to abandon it, then kill them; see `run`."""
        finish, grace = self._config.stop_limits()
        usual = f" (usually {self._step_seconds():.3g} s)" if self._step_seconds() else ""
        limit = f" within {finish:g} s" if finish < math.inf else ""
        logger.warning(
            "Stopping: trainers finish the running step%s%s and save a recovery checkpoint. A second signal abandons "
            "the step.",
            usual,
            limit,
        )
        if self._ended(interrupts, 2, finish, grace):
            return
        if interrupts.requests < 3:
            logger.warning(
                "Stopping sooner: trainers abandon the running step at its next micro-batch and have %g s to save the "
                "last finished one. A third signal kills them.",
                grace,
            )
            self._ended(interrupts, 3, grace, grace)
        self._of_trainers(partial(self._scheduler.delete_workers, grace=0.0))

    def _ended(self, interrupts: Interrupts, requests: int, seconds: float, grace: float) -> bool:
        """Ask the trainers to end; True when they have, False after so many requests of the user, or seconds.

        Once one has ended, or hangs, the others may wait for it in vain: they have `grace` seconds.
        """
        began = time.monotonic()
        deadline = began + max(seconds, ONE_REQUEST + 1 if requests == 2 else 0.0)
        self._of_trainers(self._scheduler.terminate_workers)
        while (now := time.monotonic()) < deadline and interrupts.requests < 3:
            if interrupts.requests >= requests and now > began + ONE_REQUEST + 1:
                break
            workers = self._scheduler.poll()
            self._control.show(workers)
            self._show(workers)
            trainers = [worker for worker in workers if worker.role in self._roles()]
            living = [worker for worker in trainers if worker.exit_code is None]
            if not living:
                return True
            if len(living) < len(trainers) or any(self._control.pulses.is_hung(worker.name) for worker in living):
                deadline = min(deadline, now + grace)
            time.sleep(self._config.tick_seconds)
        return False

    def _of_trainers(self, action: Callable[[str], None]) -> None:
        """Do something with each role of trainers; a machine that does not answer keeps no other from it."""
        for role in self._roles():
            try:
                action(role)
            except LaunchError as error:
                logger.warning("%s", error)
