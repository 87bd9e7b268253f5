"""Changes of the number of servers during a run."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from rl_contracts.errors import ConfigError, LaunchError
from rl_contracts.scheduler import JobSpec, Scheduler, Worker, WorkerStatus
from rl_launchers.supervise.control import RunControl

DRAIN_SECONDS = 5.0
"""Seconds between removing a server from the published list and stopping it. Clients read the list about
once per second, and stop routing to a server after two readings without it."""
RETRY_SECONDS = 10.0
"""Seconds until the next attempt to stop a server that did not end."""
MOST_SERVERS = 1000
"""Maximum number of servers of a role; a larger request counts as a typing mistake."""
AT_ONCE = 8
"""Maximum number of servers started per poll, because starting many takes minutes."""


@dataclass
class _Role:
    spec: JobSpec
    """Role with the target number of servers."""
    ready_count: int
    """Number of servers when all of them were last ready."""
    requested: int = 0
    """Requested number of servers."""
    busy: bool = False
    """True while a request is in progress."""
    problem: str = ""
    """Problems with the request, in sentences, each followed by a space."""
    stop_at: float | None = None
    """Time at which surplus servers are stopped; None before it is set."""


class ServerScaler:
    """Starts or stops servers until each role has the number requested last.

    New servers are started and published to clients. Surplus servers (the last ones of the role) are first removed from
    the published list, so that clients move their requests to other servers. After `DRAIN_SECONDS` they are stopped.

    Args:
        scheduler: scheduler that starts and stops the servers.
        control: source of the requests and receiver of the replies.
        specs: initial roles of the servers, with the run key.
        stop_seconds: seconds for a server to end after SIGTERM.
    """

    def __init__(
        self, scheduler: Scheduler, control: RunControl, specs: Sequence[JobSpec], stop_seconds: float
    ) -> None:
        self._scheduler, self._control, self._stop = scheduler, control, stop_seconds
        self._roles = {spec.role: _Role(spec, spec.count) for spec in specs}

    @property
    def specs(self) -> list[JobSpec]:
        """Roles with their target numbers of servers."""
        return [role.spec for role in self._roles.values()]

    def begin(self) -> None:
        """Record that all servers have been started and were ready."""
        for role in self._roles.values():
            role.ready_count, role.stop_at = role.spec.count, None

    def remaining_servers(self, workers: Sequence[Worker]) -> list[Worker]:
        """Return the servers among the workers, without surplus servers that will be stopped."""
        return [w for w in workers if w.role in self._roles and w.index < self._roles[w.role].spec.count]

    def poll(self, workers: Sequence[Worker], sharing: Collection[str]) -> None:
        """Read new requests and advance those in progress. Returns soon.

        Args:
            workers: all workers of the run.
            sharing: server roles whose devices other roles share.
        """
        for name, text in self._control.scale_requests().items():
            self._accept(name, text, sharing)
        for name, role in self._roles.items():
            if role.busy:
                self._advance(role, [worker for worker in workers if worker.role == name])

    def give_up(self, lost: Mapping[str, str], workers: Sequence[Worker]) -> dict[str, str]:
        """Give up requested servers that cannot be started, and return to the previous number.

        Args:
            lost: problem of each server whose restarts are used up, by name.
            workers: all workers of the run.

        Returns:
            the entries of `lost` for servers that had been ready; without these servers the run cannot continue.
        """
        remaining = dict(lost)
        for worker in self.remaining_servers(workers):
            role = self._roles[worker.role]
            if worker.name in lost and worker.index >= role.ready_count:
                del remaining[worker.name]
                role.problem += f"{worker.name} {lost[worker.name]} (log: {worker.log}). "
                role.spec, role.busy, role.stop_at = replace(role.spec, count=role.ready_count), True, time.monotonic()
        return remaining

    def _accept(self, name: str, text: str, sharing: Collection[str]) -> None:
        """Accept a request for a number of servers, or reply with the reason for its rejection."""
        role = self._roles.get(name)
        if role is None:
            problem = f"this run has no server role {name!r}; its server roles: {', '.join(self._roles) or 'none'}"
        elif not (text.isdecimal() and len(text) < 9 and 1 <= int(text) <= MOST_SERVERS):
            problem = f"expected 1 to {MOST_SERVERS:,}, found {text!r}"
        elif name in sharing:
            problem = (
                f"{name} shares its GPUs with other roles (`|` in the allocation), so its number of servers is fixed"
            )
        else:
            role.requested, role.busy, role.stop_at = int(text), True, None
            role.spec = replace(role.spec, count=role.requested)
            return
        self._control.answer_scale(name, text, True, problem, right=False)

    def _advance(self, role: _Role, workers: Sequence[Worker]) -> None:
        """Take one step towards the target number of servers."""
        current, target = len(workers), role.spec.count
        if target > current:
            try:
                started = self._scheduler.resize_workers(role.spec.role, min(target, current + AT_ONCE))[current:]
                self._reply(role, f"starting {_names(started)}", done=False)
            except (ConfigError, LaunchError) as error:
                role.problem = f"{str(error).rstrip('.')}. "
                role.spec, role.stop_at = replace(role.spec, count=role.ready_count), time.monotonic()
        elif target < current and role.stop_at is None:
            role.stop_at = time.monotonic() + DRAIN_SECONDS
            self._reply(role, f"{_names(workers[target:])} will stop in {DRAIN_SECONDS:g} s", done=False)
        elif target < current and time.monotonic() >= (role.stop_at or 0):
            surplus = _names(workers[target:])
            try:
                self._scheduler.resize_workers(role.spec.role, target, grace=self._stop)
            except LaunchError as error:
                role.stop_at = time.monotonic() + RETRY_SECONDS
                self._reply(role, f"{surplus} did not stop; retrying later: {error}", done=False)
                return
            role.ready_count = min(role.ready_count, target)
            self._reply(role, f"{target} servers; stopped {surplus}")
        elif target == current and all(worker.status is WorkerStatus.RUNNING for worker in workers):
            role.ready_count = target
            self._reply(role, f"{target} servers, all ready")

    def _reply(self, role: _Role, text: str, done: bool = True) -> None:
        problem, role.problem = role.problem, role.problem if not done else ""
        role.busy = not done
        self._control.answer_scale(role.spec.role, str(role.requested), done, problem + text, right=not problem)


def _names(workers: Sequence[Worker]) -> str:
    return ", ".join(worker.name for worker in workers[:4]) + (", ..." if len(workers) > 4 else "")
