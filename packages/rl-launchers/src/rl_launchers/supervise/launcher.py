"""Launcher, which starts a run's servers and trainers, supervises them and stops all processes at the end."""

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
"""Seconds to wait after a worker ends, so that the error also names workers that end soon after it. A later end may be
the consequence or the cause of the first."""

TICK_SECONDS = 0.2
"""Seconds between two polls of the processes. A poll costs milliseconds, and a person does not notice this delay."""

STOP_SECONDS = 3.0
"""Seconds for all processes to end after SIGTERM when a run has ended or failed; then they are killed. Nothing remains
to be saved at that time, so a longer wait would only delay a restart."""

USERS_FAULT = 2
"""Exit code of a trainer whose error would recur, so that a restart is useless."""

TrainerSpecs = Callable[[list[Worker]], Sequence[JobSpec]]
"""Function that returns the trainers' roles for the given servers, whose addresses it may use."""


@dataclass
class LauncherConfig(RestartConfig):
    """Settings of the launcher: its scheduler, and time limits for stopping processes."""

    kind: str = "local"
    """Scheduler: a name in the entry-point group `rl.schedulers`, or a dotted path `package.module:Class`."""
    options: SchedulerConfig | None = None
    """Settings of the scheduler, an instance of its settings class; None for the defaults."""
    grace_seconds: float = bounded(30.0, "0 or more", lambda seconds: seconds >= 0)
    """Seconds for trainers to save the last finished step after they abandon the running one at a second stop request.
    Then they are killed. Slurm kills a job soon after the first stop request. There, a third of these seconds is for
    the running step to finish, and the rest for saving."""

    def __post_init__(self) -> None:
        super().__post_init__()
        options_class = registry.settings("rl.schedulers", self.kind)
        if self.options is None:
            self.options = options_class()
        expected = f"{options_class.__name__}, the settings class of launcher.kind={self.kind}"
        require(isinstance(self.options, options_class), "launcher.options", expected, self.options)

    def stop_limits(self) -> tuple[float, float]:
        """Return the seconds until trainers abandon the running step, and from then until they are killed."""
        assert self.options is not None
        if self.options.kills_soon:
            return self.grace_seconds / 3, self.grace_seconds * 2 / 3
        return math.inf, self.grace_seconds

    def scheduler(self, log_dir: Path) -> Scheduler:
        """Create the scheduler, whose workers write their logs to `log_dir`."""
        scheduler: Scheduler = registry.load("rl.schedulers", self.kind)(log_dir, self.options)
        return scheduler


class Launcher:
    """Starts servers, waits until they are ready, starts trainers, and supervises all of them.

    Args:
        scheduler: scheduler that starts the processes. The launcher stops all of its workers at the end.
        config: settings; None for the defaults.
        parent: result of `rl_launchers.uv_parent` at the start of the program, if the program does other work before
            the launch. If that process has ended by then, nothing starts. None: determined when the run starts.
        key: run key of servers that another process has started; empty for a new key.
        control: publishes the status and accepts requests; the caller has entered it as a context manager. None if no
            other process needs the status or sends requests.
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
        """Run key. Every worker gets it in the environment variable RL_RUN_KEY. Never write it to a file or log."""
        self._trainers: list[JobSpec] = []
        self._ready = self._display_failed = False
        self._on_tick: Callable[[list[Worker]], None] | None = None

    def run(
        self,
        servers: Sequence[JobSpec],
        trainer_specs: TrainerSpecs,
        on_tick: Callable[[list[Worker]], None] | None = None,
        together: bool = False,
        resume: Resume | None = None,
    ) -> int:
        """Run all processes until the trainers are done. All processes and ports are released in every case.

        The first SIGINT (Ctrl-C), SIGTERM or SIGHUP (the terminal closed) sends SIGTERM to the trainers. They finish
        their step and save it while the servers still run, then all other processes are stopped. A second signal sends
        SIGTERM again: the trainers abandon the step and have `grace_seconds` to save. A third signal kills all
        processes. The previous signal handlers are restored at the end.

        Args:
            servers: roles to start first, in this order; empty for a run without servers.
            trainer_specs: function called with the servers' workers at each start, which returns the trainers' roles.
            on_tick: function called with all workers several times a second, for a progress display.
            together: whether trainers start at the same time as the servers and wait for them; otherwise they start
                when all servers are ready. Servers are restarted individually only after all of them have been ready.
            resume: functions that restart the run after a loss, up to `trainer_restarts` times. A restart stops and
                starts all processes, like a new command. It follows the loss of a trainer, of the last server of a role
                without resources for another server, or of a server's node before all servers are ready. It does not
                follow exit code 2 of a trainer (`USERS_FAULT`) or a trainer's error before the first step. None: each
                of these losses ends the run.

        Returns:
            exit code for the program: 0 when all trainers are done, 130 after SIGINT, 143 after SIGTERM, 129 after
            SIGHUP.

        Raises:
            ConfigError: a job spec is invalid, there is no trainer, or a command contains the run key.
            LaunchError: a worker could not be started, trainers were lost and not restarted, or a server ended or hung
                more often than `max_restarts` allows. The message names the worker that ended first, its exit code or
                signal, and the last lines of its log. After restarts it lists all errors of the run in order.
            ServerStartError: a server ended before all were ready. The message also has the role's `remedy`.
        """
        self._on_tick, self._remedies = on_tick, {spec.role: spec.remedy for spec in servers}
        self._health = ServerHealth(self._scheduler, self._config, servers)
        self._scaler = ServerScaler(
            self._scheduler, self._control, [self._with_key(spec) for spec in servers], STOP_SECONDS
        )
        self._control.heartbeats.timeout = self._config.health_timeout
        self._step_seconds = resume.step_seconds if resume else lambda: 0.0
        self._can_resume = resume is not None
        restarts, code = RunRestarts(self._config, resume), 0
        with Interrupts(self._parent) as interrupts:
            self._scheduler.tick = interrupts.check
            try:
                with interrupts.raise_on_second():
                    while not self._run_once(trainer_specs, interrupts, together, restarts):
                        pass
            except Interrupted as interruption:
                code = 128 + interruption.number
                self._control.set_status(state="stopping", code=code)
            finally:
                self._health.close()
                self._stop(interrupts, patient=code != 0)
        return code

    def _run_once(
        self, trainer_specs: TrainerSpecs, interrupts: Interrupts, together: bool, restarts: RunRestarts
    ) -> bool:
        """Start and supervise all processes. Return True when the trainers are done, False if a restart must follow."""
        try:
            self._start(trainer_specs, interrupts, together)
            while not self._poll(interrupts):
                interrupts.wait(TICK_SECONDS)
            return True
        except LaunchError as error:
            self._control.set_status(state="restarting", error=headline(error))
            logs = [worker.log for worker in self._scheduler.poll()]
            try:
                self._stop(interrupts, patient=False)
            except LaunchError as stop_error:  # for example on a faulty node, which the restart may not use
                logger.warning("%s", stop_error)
            message = restarts.prepare_restart(error, self._ready)
        logger.warning("%s", message)
        for log in logs:
            separate(log, message)
        self._control.set_status(
            trainer_restarts=restarts.count, restart_steps=restarts.steps, history=restarts.headlines()
        )
        return False

    def _start(self, trainer_specs: TrainerSpecs, interrupts: Interrupts, together: bool) -> None:
        self._ready, self._trainers = False, []
        self._health.forget()
        self._control.set_status(state="starting")
        servers = self._scaler.specs
        for spec in servers:
            interrupts.check()
            self._scheduler.create_workers(spec)
        if not together:
            self._await_ready(servers, interrupts)
        specs = trainer_specs([worker for spec in servers for worker in self._scheduler.get_workers(spec.role)])
        require(len(specs) > 0, "trainer_specs", "at least one role", list(specs))
        for spec in specs:
            interrupts.check()
            self._trainers.append(spec)
            self._scheduler.create_workers(self._with_key(spec))
        self._await_ready(servers, interrupts)
        self._ready = True
        self._scaler.begin()
        self._control.set_status(state="running", error="")

    def _await_ready(self, servers: Sequence[JobSpec], interrupts: Interrupts) -> None:
        for spec in servers:
            try:
                self._scheduler.wait_ready(spec.role, tick=lambda: self._poll(interrupts))
            except LaunchError:
                self._poll(interrupts)  # raises an error that names all workers that ended, if there are any
                raise

    def _with_key(self, spec: JobSpec) -> JobSpec:
        """Return the role with the run key in its environment.

        Raises:
            ConfigError: the command contains the run key.
        """
        if any(self.key in argument for argument in spec.command):
            raise ConfigError(
                f"role {spec.role!r}: expected no secret in its command, which every user of the machine can read; "
                f"found the run key. Use the environment variable {RUN_KEY_VARIABLE} instead."
            )
        return replace(spec, env={**spec.env, RUN_KEY_VARIABLE: self.key})

    def _poll(self, interrupts: Interrupts) -> bool:
        """Check for signals, restart failed servers and resize server roles. Return whether all trainers are done.

        Also writes the addresses of the servers and updates the workers of `status`.

        Raises:
            Interrupted: a signal arrived.
            LaunchError: a trainer failed or sends no heartbeat, or a server failed during the start or cannot be
                restarted.
        """
        interrupts.check()
        workers = self._scheduler.poll()
        self._control.show(workers)
        self._control.publish(
            {f"{w.role}/{w.index}": w.address for w in self._scaler.remaining_servers(workers) if w.port}
        )
        self._show(workers)
        trainers = [worker for worker in workers if worker.role in self._trainer_roles()]
        if trainers and all(worker.status is WorkerStatus.DONE for worker in trainers):
            return True
        hung = [w.name for w in trainers if w.exit_code is None and self._control.heartbeats.is_hung(w.name)]
        lost = dict.fromkeys(hung, f"sent no heartbeat for {self._config.health_timeout:g} s")
        failed = bool(hung) or any(worker.status is WorkerStatus.FAILED for worker in trainers)
        if not failed:
            lost = self._lost_servers(workers)
        if failed or lost:
            interrupts.wait(SETTLE_SECONDS)
            raise self._build_error(self._scheduler.poll(), lost, failed)
        if self._ready:
            self._scaler.poll(workers, {spec.colocated_with for spec in self._trainers})
        return False

    def _show(self, workers: list[Worker]) -> None:
        try:
            if self._on_tick is not None:
                self._on_tick(workers)
        except OSError as error:  # a full disk or a closed terminal must not end the run
            if not self._display_failed:
                logger.warning("cannot show progress: %s", error)
            self._display_failed = True

    def _build_error(self, workers: list[Worker], lost: dict[str, str], failed: bool) -> LaunchError:
        message = self._describe_failure(workers, lost)
        codes = [w.exit_code for w in workers if w.role in self._trainer_roles() and w.status is WorkerStatus.FAILED]
        if failed and USERS_FAULT not in codes:
            return TrainersLostError(message, raised=not lost and all(code and 0 < code < 64 for code in codes))
        if failed:
            return UserCodeError(message)
        if any(worker.cause for worker in workers if worker.name in lost):  # lost with its node, so a restart may help
            return ServersLostError(message)
        return LaunchError(message) if self._ready else ServerStartError(message)

    def _trainer_roles(self) -> list[str]:
        return [spec.role for spec in self._trainers]

    def _lost_servers(self, workers: list[Worker]) -> dict[str, str]:
        """Restart failed servers, and return the problem of each server that is lost for good, by name."""
        if self._ready:
            return self._scaler.give_up(
                self._health.restart_unhealthy(self._scaler.remaining_servers(workers)), workers
            )
        return {worker.name: describe_end(worker) for worker in workers if self._has_failed(worker)}

    def _has_failed(self, worker: Worker) -> bool:
        """Return whether a worker failed, or is a server that ended while trainers need it."""
        server_ended = worker.status is WorkerStatus.DONE and worker.role not in self._trainer_roles()
        return server_ended or worker.status is WorkerStatus.FAILED

    def _describe_failure(self, workers: list[Worker], lost: dict[str, str]) -> str:
        """Return the error message. Only the first end is described in full, as it probably caused the others."""
        ended = [worker for worker in workers if worker.name in lost or self._has_failed(worker)]
        first, *later = sorted(ended, key=lambda worker: worker.ended_at or math.inf)
        end = lost.get(first.name) or describe_end(first)
        problem = f"{first.name} {end} while the run needed it."
        if first.name in lost and self._ready and self._config.max_restarts and first.role not in self._trainer_roles():
            problem += f" All launcher.max_restarts={self._config.max_restarts} restarts are used."
        remedy = [] if self._ready or first.cause else [self._remedies.get(first.role, "")]
        after = [f"After it, {worker.name} {describe_end(worker)} (log: {worker.log})." for worker in later]
        before = [f"Before it: {sentence}" for sentence in self._health.history]
        problem = "\n".join(filter(None, [problem, *remedy, *after, *before]))
        return with_log(problem, first.log, self._scheduler.logs(first))

    def _stop(self, interrupts: Interrupts, patient: bool) -> None:
        """Stop all processes; if `patient`, first the trainers, with time to save a recovery checkpoint.

        Raises:
            LaunchError: a process remains.
        """
        try:
            if patient:
                self._stop_trainers(interrupts)
            with interrupts.raise_on_second():
                self._scheduler.delete_workers(grace=0.0 if interrupts.requests > 2 else STOP_SECONDS)
        except SecondInterrupt:
            self._scheduler.delete_workers(grace=0.0)
        finally:
            self._control.show([])
            self._control.publish({})
            self._control.heartbeats.clear()

    def _stop_trainers(self, interrupts: Interrupts) -> None:
        """Let the trainers finish their step, then request that they abandon it, then kill them; see `run`."""
        finish, grace = self._config.stop_limits()
        duration = f" (usually {self._step_seconds():.3g} s)" if self._step_seconds() else ""
        limit = f" within {finish:g} s" if finish < math.inf else ""
        saves = self._can_resume and self._ready  # no step can begin before all servers are ready
        if saves:
            logger.warning(
                "Stopping: trainers finish the running step%s%s and save a recovery checkpoint. A second signal "
                "abandons the step.",
                duration,
                limit,
            )
        else:
            logger.warning("Stopping all processes. Further signals stop them sooner.")
        if self._terminate_trainers(interrupts, 2, finish, grace):
            return
        if interrupts.requests < 3:
            if saves:
                logger.warning(
                    "Stopping sooner: trainers abandon the running step at its next micro-batch and have %g s to save "
                    "the last finished step. A third signal kills them.",
                    grace,
                )
            self._terminate_trainers(interrupts, 3, grace, grace)
        self._for_each_trainer_role(partial(self._scheduler.delete_workers, grace=0.0))

    def _terminate_trainers(self, interrupts: Interrupts, requests: int, seconds: float, grace: float) -> bool:
        """Send SIGTERM to the trainers and wait until they have ended.

        Once one trainer has ended or hangs, the others may wait for it forever, so they have only `grace` seconds.

        Args:
            interrupts: signals so far.
            requests: number of stop requests by the user at which the wait ends.
            seconds: maximum duration of the wait.
            grace: seconds to wait after the first trainer has ended or hangs.

        Returns:
            whether all trainers have ended.
        """
        began = time.monotonic()
        deadline = began + max(seconds, ONE_REQUEST + 1 if requests == 2 else 0.0)
        self._for_each_trainer_role(self._scheduler.terminate_workers)
        while (now := time.monotonic()) < deadline and interrupts.requests < 3:
            if interrupts.requests >= requests and now > began + ONE_REQUEST + 1:
                break
            workers = self._scheduler.poll()
            self._control.show(workers)
            self._show(workers)
            trainers = [worker for worker in workers if worker.role in self._trainer_roles()]
            running = [worker for worker in trainers if worker.exit_code is None]
            if not running:
                return True
            if len(running) < len(trainers) or any(self._control.heartbeats.is_hung(worker.name) for worker in running):
                deadline = min(deadline, now + grace)
            time.sleep(TICK_SECONDS)
        return False

    def _for_each_trainer_role(self, action: Callable[[str], None]) -> None:
        """Call a function for each trainer role. An error, for example of an unresponsive node, is only logged."""
        for role in self._trainer_roles():
            try:
                action(role)
            except LaunchError as error:
                logger.warning("%s", error)
