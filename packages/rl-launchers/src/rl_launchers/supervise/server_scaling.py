"""More servers or fewer, while a run goes on."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from rl_contracts.errors import ConfigError, LaunchError
from rl_contracts.scheduler import JobSpec, Scheduler, Worker, WorkerStatus
from rl_launchers.supervise.control import RunControl

RETRY_SECONDS = 10.0
"""Seconds until a server that did not end is asked again."""
MOST_SERVERS = 1000
"""Largest number of servers of a role; a larger one is a typing mistake."""
AT_ONCE = 8
"""Servers started between two looks at those that run: starting many takes minutes."""


@dataclass
class _Role:
    spec: JobSpec
    """With the number of servers that the role is to have."""
    settled: int
    """How many of them were ready together."""
    asked: int = 0
    """How many somebody asked for."""
    busy: bool = False
    """Whether there is something left to do."""
    problem: str = ""
    """What went wrong with it, in sentences."""
    drained: float | None = None
    """When those that are too many may end; None: it is not said yet."""


class ServerScaler:
    """Brings the servers of each role to the number that was asked for last.

    Further ones are started, and named to clients with the others. Of those that are too many the last ones are no
    longer named first; `drain_seconds` later, in which clients go on elsewhere, they are ended.

    Args:
        scheduler: starts and ends them.
        control: says what is asked, and is told what becomes of it.
        specs: the servers' roles as they start, with the run key.
        drain_seconds: see above.
        stop_seconds: for a server to end by itself.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        control: RunControl,
        specs: Sequence[JobSpec],
        drain_seconds: float,
        stop_seconds: float,
    ) -> None:
        self._scheduler, self._control = scheduler, control
        self._drain, self._stop = drain_seconds, stop_seconds
        self._roles = {spec.role: _Role(spec, spec.count) for spec in specs}

    @property
    def specs(self) -> list[JobSpec]:
        """The roles, with as many servers as they are to have."""
        return [role.spec for role in self._roles.values()]

    def begin(self) -> None:
        """All of them were started, and were ready."""
        for role in self._roles.values():
            role.settled, role.drained = role.spec.count, None

    def remaining_servers(self, workers: Sequence[Worker]) -> list[Worker]:
        """The servers among them, without those that are about to end."""
        return [w for w in workers if w.role in self._roles and w.index < self._roles[w.role].spec.count]

    def poll(self, workers: Sequence[Worker], sharing: Collection[str]) -> None:
        """Go on with what was asked for; returns soon.

        Args:
            workers: all that run.
            sharing: roles whose devices others use as well.
        """
        for name, text in self._control.scale_requests().items():
            self._ask(name, text, sharing)
        for name, role in self._roles.items():
            if role.busy:
                self._step(role, [worker for worker in workers if worker.role == name])

    def give_up(self, lost: Mapping[str, str], workers: Sequence[Worker]) -> dict[str, str]:
        """Do without servers that were asked for and cannot be started.

        Args:
            lost: names of servers that cannot be helped, and what happened to each.

        Returns:
            those of them without which the run cannot go on: they did take part.
        """
        left = dict(lost)
        for worker in self.remaining_servers(workers):
            role = self._roles[worker.role]
            if worker.name in lost and worker.index >= role.settled:
                del left[worker.name]
                role.problem += f"{worker.name} {lost[worker.name]} (log: {worker.log}). "
                role.spec, role.busy, role.drained = replace(role.spec, count=role.settled), True, time.monotonic()
        return left

    def _ask(self, name: str, text: str, sharing: Collection[str]) -> None:
        role = self._roles.get(name)
        if role is None:
            problem = f"there is no role {name!r} of servers in this run; there is {', '.join(self._roles) or 'none'}"
        elif not (text.isdecimal() and len(text) < 9 and 1 <= int(text) <= MOST_SERVERS):
            problem = f"expected 1 to {MOST_SERVERS:,}, found {text!r}"
        elif name in sharing:
            problem = f"{name} shares its GPUs with others (`|` in the allocation), which are as many as they are"
        else:
            role.asked, role.busy, role.drained = int(text), True, None
            role.spec = replace(role.spec, count=role.asked)
            return
        self._control.answer_scale(name, text, True, problem, right=False)

    def _step(self, role: _Role, workers: Sequence[Worker]) -> None:
        """One step towards the number that was asked for."""
        now, wanted = len(workers), role.spec.count
        if wanted > now:
            try:
                started = self._scheduler.resize_workers(role.spec.role, min(wanted, now + AT_ONCE))[now:]
                self._answer(role, f"starting {_names(started)}", done=False)
            except (ConfigError, LaunchError) as error:
                role.problem = f"{str(error).rstrip('.')}. "
                role.spec, role.drained = replace(role.spec, count=role.settled), time.monotonic()
        elif wanted < now and role.drained is None:
            role.drained = time.monotonic() + self._drain
            self._answer(role, f"{_names(workers[wanted:])} will end in {self._drain:g} s", done=False)
        elif wanted < now and time.monotonic() >= (role.drained or 0):
            ended = _names(workers[wanted:])
            try:
                self._scheduler.resize_workers(role.spec.role, wanted, grace=self._stop)
            except LaunchError as error:
                role.drained = time.monotonic() + max(self._drain, RETRY_SECONDS)
                self._answer(role, f"{ended} did not end, and will be asked again: {error}", done=False)
                return
            role.settled = min(role.settled, wanted)
            self._answer(role, f"{wanted} servers; {ended} ended")
        elif wanted == now and all(worker.status is WorkerStatus.RUNNING for worker in workers):
            role.settled = wanted
            self._answer(role, f"{wanted} servers, all of them ready")

    def _answer(self, role: _Role, text: str, done: bool = True) -> None:
        problem, role.problem = role.problem, role.problem if not done else ""
        role.busy = not done
        self._control.answer_scale(role.spec.role, str(role.asked), done, problem + text, right=not problem)


def _names(workers: Sequence[Worker]) -> str:
    return ", ".join(worker.name for worker in workers[:4]) + (", ..." if len(workers) > 4 else "")
