"""Whether servers answer, and bringing back those that died or hang, within a budget."""

from __future__ import annotations

import http.client
import time
from collections import defaultdict, deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import ClassVar

from rl_contracts.config import Settings, bounded
from rl_contracts.errors import LaunchError
from rl_contracts.runtime.logging import get_logger
from rl_contracts.scheduler import JobSpec, Scheduler, Worker, WorkerStatus
from rl_launchers.supervise.exit_report import describe_end

logger = get_logger("launcher")

PROBE_SECONDS = 5.0
"""Time for one answer, where the limit is not shorter."""
PROBES_AT_ONCE = 8
"""Threads that ask."""
FIRST_ANSWER_EVERY = 0.2
"""Seconds between two questions to a server that has not answered well yet."""
RETRY_SECONDS = 10.0
"""Seconds until a server for which there is no room is tried again, where others still answer."""


class ServersLostError(LaunchError):
    """No server of a role is left that answers, and there is no room for one."""


def probe(host: str, port: int, path: str, timeout: float = 1.0) -> str | None:
    """Ask `http://host:port/path` once, past any proxy.

    Args:
        host: address of the worker.
        port: its port.
        path: of the check.
        timeout: seconds without an answer after which it counts as none.

    Returns:
        None if it answered 200, else what happened instead, in words.
    """
    connection = http.client.HTTPConnection(host, port, timeout=timeout)
    try:
        connection.request("GET", path)
        status = connection.getresponse().status
    except (OSError, http.client.HTTPException) as error:
        return str(error) or type(error).__name__
    finally:
        connection.close()
    return None if status == http.client.OK else f"it answered {status}"


@dataclass
class RestartConfig(Settings):
    """When servers count as lost, and how often they are started anew."""

    setting: ClassVar[str] = "launcher"
    max_restarts: int = bounded(3, "0 (never) or more", lambda times: times >= 0)
    """Times that a server which died or hangs is started anew, within `restart_window`; one more, and the run ends. 0:
    its first death ends the run."""
    trainer_restarts: int = bounded(3, "0 (never) or more", lambda times: times >= 0)
    """Times that the whole run is started anew from its newest recover point when a trainer was killed, hangs, failed
    with an error that is not the user's, or lost its node, or no server is left and there is no room for one; within
    `restart_window`. Fewer where it comes no further. 0: the first such loss ends the run, as it does without a
    recovery checkpoint and with `recover.every_minutes=0`."""
    restart_window: float = bounded(600.0, "more than 0 seconds", lambda seconds: seconds > 0)
    """Seconds after which a restart no longer counts."""
    health_timeout: float = bounded(90.0, "0 (no checks) or more", lambda seconds: seconds >= 0)
    """Seconds without a good answer from a server's readiness path after which it is killed and started anew, and
    without a sign of life of a trainer after which it counts as lost; 0: only their death counts."""
    health_interval: float = bounded(2.0, "more than 0 seconds", lambda seconds: seconds > 0)
    """Seconds between two such questions."""


@dataclass
class _ServerState:
    due: float
    asked: float = 0.0
    was_well: bool = False
    failing_since: float | None = None
    problem: str = ""
    probe: Future[str | None] | None = None


class ServerHealth:
    """Looks after the servers from the moment at which all of them were ready.

    A server that ended, however it did, or that gives no good answer for too long is started anew at its address, up
    to `max_restarts` times within `restart_window` seconds. With which weights it comes back is up to its kind; its
    clients bring it to those that were committed last, and check them, before they use it. Threads ask, so that one
    that is silent holds up nobody.

    Args:
        scheduler: starts processes.
        config: the budget and the deadlines.
        specs: the servers' roles. One that was started anew has its role's `ready_timeout` for its first good answer.
    """

    def __init__(self, scheduler: Scheduler, config: RestartConfig, specs: Sequence[JobSpec]) -> None:
        self._scheduler, self._config = scheduler, config
        self._specs = {spec.role: spec for spec in specs}
        self._restarts: dict[str, deque[float]] = defaultdict(deque)
        self._threads = ThreadPoolExecutor(PROBES_AT_ONCE, thread_name_prefix="health")
        self._patients: dict[tuple[str, int], _ServerState] = {}
        """By name and life of a server."""
        self._later: dict[str, float] = {}
        """By name, when a server for which there was no room is tried again."""
        self.history: list[str] = []
        """A sentence per restart, for the error that may come after it."""

    def forget(self) -> None:
        """All servers are others from now on. Their restarts still count."""
        self._patients.clear()

    def restart_unhealthy(self, workers: Sequence[Worker]) -> dict[str, str]:
        """Restart what needs it.

        Returns:
            names of servers that cannot be helped any more, and in words what happened to each.

        Raises:
            ServersLostError: the only server, or the last one that answered, cannot be started again here and now.
        """
        servers = [(worker, self._specs[worker.role]) for worker in workers if worker.role in self._specs]
        lives = {(worker.name, worker.restarts) for worker, _ in servers}
        self._patients = {life: patient for life, patient in self._patients.items() if life in lives}
        found = [(worker, self._trouble(worker, spec)) for worker, spec in servers]
        well = {worker.role for worker, what in found if not what}
        return {w.name: what for w, what in found if what and not self._restart(w, what, w.role in well)}

    def close(self) -> None:
        """Look after nobody any more; questions under way end by themselves."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _trouble(self, worker: Worker, spec: JobSpec) -> str:
        """What is wrong with a server, in words; empty where nothing is. Returns at once."""
        if worker.status in (WorkerStatus.DONE, WorkerStatus.FAILED):
            return describe_end(worker)
        now, limit, fresh = time.monotonic(), self._config.health_timeout, worker.status is WorkerStatus.STARTING
        if spec.ready_path is None or worker.port is None or not (limit or fresh):
            return ""
        patient = self._patients.setdefault((worker.name, worker.restarts), _ServerState(now))
        if patient.probe is not None and patient.probe.done():
            problem, patient.probe = patient.probe.result(), None
            if problem is None:
                patient.was_well, patient.failing_since = True, None
                worker.status = WorkerStatus.RUNNING
            else:
                patient.problem, patient.failing_since = problem, patient.failing_since or patient.asked
        if patient.probe is None and now >= patient.due:
            patient.asked = now
            # one that hangs before it was seen well has all of ready_timeout
            patient.due = now + (self._config.health_interval if patient.was_well else FIRST_ANSWER_EVERY)
            patient.probe = self._threads.submit(
                probe, worker.host, worker.port, spec.ready_path, min(PROBE_SECONDS, limit or PROBE_SECONDS)
            )
        if not patient.was_well and (fresh or worker.restarts):
            limit = spec.ready_timeout
        if patient.failing_since is None or now - patient.failing_since <= limit or not self._config.health_timeout:
            return ""
        return f"gave no good answer for {limit:g} s (last: {patient.problem})"

    def _restart(self, worker: Worker, what: str, others: bool) -> bool:
        """Start it anew, unless the budget is spent; later, where that is impossible now and others go on."""
        limit, now = self._config.max_restarts, time.monotonic()
        if now < self._later.get(worker.name, now):
            return True
        done = self._restarts[worker.name]
        while done and now - done[0] > self._config.restart_window:
            done.popleft()
        if len(done) >= limit:
            return False
        done.append(now)
        count = f"restart {len(done)} of {limit} within {self._config.restart_window:g} s"
        logger.warning("%s %s; restarting it (%s). Log: %s", worker.name, what, count, worker.log)
        try:
            self._scheduler.restart_worker(worker, f"it {what}; {count}")
        except LaunchError as error:
            if not others:
                gone = f"{worker.name} {what}, no other server answers, and it cannot be started now: {error}"
                raise ServersLostError(gone) from error
            done.pop()
            self._later[worker.name] = now + RETRY_SECONDS
            logger.warning("%s cannot be started now; retrying in %g s: %s", worker.name, RETRY_SECONDS, error)
        else:
            self.history.append(f"{time.strftime('%H:%M:%S')} {worker.name} {what}; it was restarted ({count}).")
        return True
