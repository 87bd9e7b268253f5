"""Bringing back servers that died or hang, within a budget."""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rl_contracts.logging import get_logger
from rl_contracts.scheduler import JobSpec, Scheduler, Worker, WorkerStatus
from rl_launchers.health import HealthChecks
from rl_launchers.report import describe_exit

if TYPE_CHECKING:
    from rl_launchers.launcher import LauncherConfig

logger = get_logger("launcher")


class ServerCare:
    """Looks after the servers from the moment at which all of them were ready.

    A server that ended, however it did, or that gives no good answer for too long is started anew at its address, up
    to `max_restarts` times within `restart_window` seconds. It comes back by itself with the weights that were
    committed last; its clients check them before they use it.

    Args:
        scheduler: starts processes.
        config: the budget and the deadlines.
        specs: the servers' roles.
    """

    def __init__(self, scheduler: Scheduler, config: LauncherConfig, specs: Sequence[JobSpec]) -> None:
        self._scheduler, self._config = scheduler, config
        self._specs = {spec.role: spec for spec in specs}
        self._restarts: dict[str, deque[float]] = defaultdict(deque)
        self._health = HealthChecks(config.health_interval, config.health_timeout) if config.health_timeout else None
        self.history: list[str] = []
        """A sentence per restart, for the error that may come after it."""

    def look(self, workers: Sequence[Worker]) -> dict[str, str]:
        """Restart what needs it.

        Returns:
            names of servers that cannot be helped any more, and in words what happened to each.

        Raises:
            LaunchError: a process could not be started again.
        """
        servers = [(worker, self._specs[worker.role]) for worker in workers if worker.role in self._specs]
        ill = [
            (w, describe_exit(w.exit_code)) for w, _ in servers if w.status in (WorkerStatus.DONE, WorkerStatus.FAILED)
        ]
        if self._health is not None:
            ill += self._health.hung(servers)
        return {worker.name: what for worker, what in ill if not self._restart(worker, what)}

    def close(self) -> None:
        """Look after nobody any more."""
        if self._health is not None:
            self._health.close()

    def _restart(self, worker: Worker, what: str) -> bool:
        """Start it anew, unless the budget is spent."""
        limit, now = self._config.max_restarts, time.monotonic()
        done = self._restarts[worker.name]
        while done and now - done[0] > self._config.restart_window:
            done.popleft()
        if len(done) >= limit:
            return False
        done.append(now)
        count = f"restart {len(done)} of {limit} within {self._config.restart_window:g} s"
        logger.warning("%s %s; it is started anew (%s). Log: %s", worker.name, what, count, worker.log)
        self.history.append(f"{time.strftime('%H:%M:%S')} {worker.name} {what}; it was started anew ({count}).")
        self._scheduler.restart_worker(worker, f"it {what}; {count}")
        return True
