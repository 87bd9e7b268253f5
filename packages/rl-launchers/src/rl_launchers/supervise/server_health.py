"""Health checks of servers, and restarts of servers that died or hang, within a budget."""

from __future__ import annotations

import http.client
import time
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import ClassVar

from rl_contracts.config import Settings, bounded
from rl_contracts.errors import LaunchError
from rl_contracts.runtime.logging import get_logger
from rl_contracts.scheduler import JobSpec, Scheduler, Worker, WorkerStatus
from rl_launchers.supervise.exit_report import describe_end
from rl_launchers.supervise.restart_window import RestartWindow

logger = get_logger("launcher")

PROBE_SECONDS = 5.0
"""Timeout of one health check in seconds, if `health_timeout` is not shorter."""
PROBES_AT_ONCE = 8
"""Number of threads for health checks."""
CHECK_EVERY = 2.0
"""Seconds between two checks of a healthy server. A server must fail for `health_timeout` before its restart, so more
frequent checks hardly find a loss sooner."""
FIRST_ANSWER_EVERY = 0.2
"""Seconds between two checks of a server that has not been healthy yet."""
RETRY_SECONDS = 10.0
"""Seconds until the next attempt to restart a server without resources, while other servers are healthy."""


class ServersLostError(LaunchError):
    """Loss of the last healthy server of a role, without resources to restart one."""


def probe(host: str, port: int, path: str, timeout: float = 1.0) -> str | None:
    """Request `http://host:port/path` once, without a proxy.

    Args:
        host: address of the worker.
        port: port of the worker.
        path: URL path of the readiness check.
        timeout: seconds to wait for a response.

    Returns:
        None after status 200, otherwise a description of the problem.
    """
    connection = http.client.HTTPConnection(host, port, timeout=timeout)
    try:
        connection.request("GET", path)
        status = connection.getresponse().status
    except (OSError, http.client.HTTPException) as error:
        return str(error) or type(error).__name__
    finally:
        connection.close()
    return None if status == http.client.OK else f"status {status}"


@dataclass
class RestartConfig(Settings):
    """Limits on restarts, and the health checks that trigger them."""

    setting: ClassVar[str] = "launcher"
    max_restarts: int = bounded(3, "0 (never) or more", lambda times: times >= 0)
    """Maximum number of restarts of a server that died or hangs, within 600 s. The next loss ends the run.
    0: the first loss of a server ends the run."""
    trainer_restarts: int = bounded(3, "0 (never) or more", lambda times: times >= 0)
    """Maximum number of restarts of the whole run from its newest recovery checkpoint, within 600 s. A
    restart follows the loss of a trainer or of the last server, but not an error of the user. Repeated restarts without
    progress end the run earlier. 0: the first such loss ends the run. A loss also ends a run that has no recovery
    checkpoint and saves none periodically (`recover.every_minutes=0`)."""
    health_timeout: float = bounded(90.0, "0 (no checks) or more", lambda seconds: seconds >= 0)
    """Seconds without a successful readiness check after which a server is killed and restarted. A trainer without a
    heartbeat for that long counts as lost. 0: only the end of a process counts."""


@dataclass
class _ServerState:
    next_check: float
    last_check: float = 0.0
    was_healthy: bool = False
    failing_since: float | None = None
    problem: str = ""
    probe: Future[str | None] | None = None


class ServerHealth:
    """Monitor that checks and restarts servers once all of them have been ready.

    A server that ended for any reason, or fails its readiness checks for too long, is restarted at its address. The
    limit is `max_restarts` within `WINDOW_SECONDS`. The kind of the server decides which weights it loads after
    a restart. Clients send the committed version to the server and check its weights before they use it again. Checks
    run in threads, so that a silent server does not delay the others.

    Args:
        scheduler: scheduler that starts the servers.
        config: limits and timeouts.
        specs: roles of the servers. A restarted server has the role's `ready_timeout` to become ready.
    """

    def __init__(self, scheduler: Scheduler, config: RestartConfig, specs: Sequence[JobSpec]) -> None:
        self._scheduler, self._config = scheduler, config
        self._specs = {spec.role: spec for spec in specs}
        self._restarts: dict[str, RestartWindow] = defaultdict(lambda: RestartWindow(config.max_restarts))
        self._threads = ThreadPoolExecutor(PROBES_AT_ONCE, thread_name_prefix="health")
        self._states: dict[tuple[str, int], _ServerState] = {}
        """State by a server's name and number of restarts."""
        self._retry_at: dict[str, float] = {}
        """Time of the next attempt to restart a server without resources, by name."""
        self.history: list[str] = []
        """One sentence per restart, for the message of a later error."""

    def forget(self) -> None:
        """Forget the state of all servers before a restart of the run. Earlier restarts still count."""
        self._states.clear()

    def restart_unhealthy(self, workers: Sequence[Worker]) -> dict[str, str]:
        """Check all servers and restart those that ended or are unhealthy. Returns soon, as checks run in threads.

        Args:
            workers: all workers; workers of other roles are ignored.

        Returns:
            problem of each server whose restarts are used up, by name, as the predicate of a sentence.

        Raises:
            ServersLostError: a server cannot be restarted now, and no other server of its role is healthy.
        """
        servers = [(worker, self._specs[worker.role]) for worker in workers if worker.role in self._specs]
        current = {(worker.name, worker.restarts) for worker, _ in servers}
        self._states = {key: state for key, state in self._states.items() if key in current}
        checks = [(worker, self._problem(worker, spec)) for worker, spec in servers]
        healthy = {worker.role for worker, problem in checks if not problem}
        return {
            w.name: problem for w, problem in checks if problem and not self._restart(w, problem, w.role in healthy)
        }

    def close(self) -> None:
        """Stop the checks, without waiting for those in progress."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _problem(self, worker: Worker, spec: JobSpec) -> str:
        """Return the problem of a server as a predicate, or "" if there is none. Returns at once."""
        if worker.status in (WorkerStatus.DONE, WorkerStatus.FAILED):
            return describe_end(worker)
        now, limit, starting = time.monotonic(), self._config.health_timeout, worker.status is WorkerStatus.STARTING
        if spec.ready_path is None or worker.port is None or not (limit or starting):
            return ""
        state = self._states.setdefault((worker.name, worker.restarts), _ServerState(now))
        if state.probe is not None and state.probe.done():
            problem, state.probe = state.probe.result(), None
            if problem is None:
                state.was_healthy, state.failing_since = True, None
                worker.status = WorkerStatus.RUNNING
            else:
                state.problem, state.failing_since = problem, state.failing_since or state.last_check
        if state.probe is None and now >= state.next_check:
            state.last_check = now
            # check often until the first success: a server that hangs before it gets the whole ready_timeout
            state.next_check = now + (CHECK_EVERY if state.was_healthy else FIRST_ANSWER_EVERY)
            state.probe = self._threads.submit(
                probe, worker.host, worker.port, spec.ready_path, min(PROBE_SECONDS, limit or PROBE_SECONDS)
            )
        if not state.was_healthy and (starting or worker.restarts):
            limit = spec.ready_timeout
        if state.failing_since is None or now - state.failing_since <= limit or not self._config.health_timeout:
            return ""
        return f"failed its readiness checks for {limit:g} s (last: {state.problem})"

    def _restart(self, worker: Worker, problem: str, others_healthy: bool) -> bool:
        """Restart a server and return True, or return False if its restarts are used up.

        If the restart fails while other servers are healthy, a later call retries it.
        """
        now = time.monotonic()
        if now < self._retry_at.get(worker.name, now):
            return True
        restarts = self._restarts[worker.name]
        if restarts.is_used_up():
            return False
        count = restarts.add()
        logger.warning("%s %s; restarting it (%s). Log: %s", worker.name, problem, count, worker.log)
        try:
            self._scheduler.restart_worker(worker, f"it {problem}; {count}")
        except LaunchError as error:
            if not others_healthy:
                message = (
                    f"{worker.name} {problem}, no other server is healthy, and it cannot be restarted now: {error}"
                )
                raise ServersLostError(message) from error
            restarts.remove_last()
            self._retry_at[worker.name] = now + RETRY_SECONDS
            logger.warning("%s cannot be restarted now; retrying in %g s: %s", worker.name, RETRY_SECONDS, error)
        else:
            self.history.append(f"{time.strftime('%H:%M:%S')} {worker.name} {problem}; it was restarted ({count}).")
        return True
