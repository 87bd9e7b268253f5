"""The scheduler of several machines: workers are processes that agents start there."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from rl_contracts.config import bounded
from rl_contracts.errors import LaunchError, RLError
from rl_contracts.scheduler import RUN_KEY_VARIABLE, JobSpec, Scheduler, SchedulerConfig, Worker, WorkerStatus
from rl_launchers import report
from rl_launchers.agents import Agents
from rl_launchers.local import require_resizable, require_sound
from rl_launchers.nodes import NodeProvider
from rl_launchers.placement import Ledger
from rl_launchers.wire import Message

TICK = 0.05
"""Seconds between two looks at what is waited for."""
ORDER_SECONDS = 60.0
"""Time for an agent to start or restart processes, besides any grace."""
LOG_LINES = 30
"""Last lines of a log shown in an error."""
LOST_EXIT_CODE = -9
"""Of workers whose machine was lost."""


@dataclass
class ClusterSchedulerConfig(SchedulerConfig):
    """What the schedulers of several machines have in common."""

    host: str = ""
    """Address of the launcher's machine at which its agents call it; empty: that under which the scheduler knows it."""
    start_timeout: float = bounded(120.0, "more than 0 seconds", lambda seconds: seconds > 0)
    """Seconds within which a machine must answer once its agent was started."""
    heartbeat_timeout: float = bounded(20.0, "at least 3 seconds", lambda seconds: seconds >= 3)
    """Seconds without a word from a machine after which it counts as lost; it then ends what runs on it."""


@dataclass
class _Place:
    """Where a worker runs, and what is known of it."""

    node: str
    worker: Worker
    started: float = field(default_factory=time.monotonic)
    lives: int = 0
    """Earlier ones on machines that were lost."""
    log_start: int = 0
    last_answer: str = ""

    def learn(self, state: Message) -> None:
        """What its agent says."""
        worker = self.worker
        worker.host, worker.port, worker.log = state["host"], state["port"], Path(state["log"])
        worker.status, worker.exit_code = WorkerStatus(state["status"]), state["exit_code"]
        worker.pid, worker.ended_at = state["pid"], state["ended_at"]
        worker.restarts = self.lives + state["restarts"]
        self.log_start, self.last_answer = state["log_start"], state["last_answer"]

    def lose(self, why: str) -> None:
        """Its machine is gone."""
        if self.worker.exit_code is None:
            self.worker.status, self.worker.exit_code = WorkerStatus.FAILED, LOST_EXIT_CODE
            self.worker.ended_at, self.worker.cause = time.time(), f"was lost with node {self.node}, which {why}"


@dataclass
class _Role:
    spec: JobSpec
    places: dict[int, _Place] = field(default_factory=dict)
    """By index of the worker."""


class ClusterScheduler(Scheduler, AbstractContextManager["ClusterScheduler"]):
    """Starts workers on several machines, through an agent on each. For one thread, and as a context manager.

    Workers write to `<log_dir>/<role>-<index>.log`, which all machines share. A machine that is lost takes its workers
    along; one that `restart_worker` starts anew comes back on another machine, where there is room. When this process
    dies, however it does, the agents end everything that they have started.

    Args:
        log_dir: directory of the logs; made where it is missing.
        config: see `ClusterSchedulerConfig`.
        provider: the machines.
    """

    def __init__(self, log_dir: Path, config: ClusterSchedulerConfig, provider: NodeProvider) -> None:
        self._log_dir, self._config, self._provider = Path(log_dir), config, provider
        self._roles: dict[str, _Role] = {}
        self._agents: Agents | None = None
        self._ledger = Ledger(())
        self._gone: set[str] = set()
        """Machines that were lost, whatever the scheduler of the cluster says, which finds out later."""
        self._wanted = 0

    def __exit__(self, *_: object) -> None:
        self.delete_workers()

    def create_workers(self, spec: JobSpec) -> list[Worker]:
        """Start the workers of a role on machines that have room for them; see the contract."""
        require_sound(spec, self._roles)
        if spec.role in self._roles:
            raise LaunchError(f"role {spec.role!r} exists already. Delete its workers first, or choose another name.")
        self._open(spec)
        role = self._roles[spec.role] = _Role(spec)
        try:
            self._add(role, range(spec.count))
        except RLError:
            self.delete_workers(spec.role, grace=0.0)
            raise
        return self.get_workers(spec.role)

    def wait_ready(self, role: str, tick: Callable[[], object] | None = None) -> list[Worker]:
        """Block until every worker of the role answers its readiness check; see the contract."""
        if role not in self._roles:
            raise LaunchError(f"there is no role {role!r} to wait for. Started: {', '.join(self._roles) or 'nothing'}.")
        spec = self._roles[role].spec
        while True:
            if tick is not None:
                tick()
            self.poll()
            places = self._roles[role].places.values()
            for place in places:
                worker = place.worker
                if worker.exit_code is not None:
                    self._fail(place, f"{worker.name} {report.describe_end(worker)} before its role was ready.")
                late = time.monotonic() > place.started + spec.ready_timeout
                if worker.status is WorkerStatus.STARTING and late:
                    path = f"{worker.address}{spec.ready_path}"
                    self._fail(place, report.not_ready(worker.name, spec.ready_timeout, path, place.last_answer))
            if all(place.worker.status is WorkerStatus.RUNNING for place in places):
                return self.get_workers(role)
            time.sleep(TICK)

    def get_workers(self, role: str) -> list[Worker]:
        """The workers of a role, by index, as they were when `poll` last looked; empty for an unknown role."""
        places = self._roles[role].places if role in self._roles else {}
        return [places[index].worker for index in sorted(places)]

    def poll(self) -> list[Worker]:
        """All workers, status refreshed from what their agents have said."""
        if self._agents is not None:
            for node, state in self._agents.news():
                self._learn(node, state)
            for node, why in self._agents.find_lost().items():
                self._gone.add(node)
                self._ledger.drop(node)
                for place in self._on(node):
                    place.lose(why)
        return [worker for role in self._roles for worker in self.get_workers(role)]

    def restart_worker(self, worker: Worker, note: str = "") -> Worker:
        """Start one worker anew: in the place of its process, or where that machine was lost, on another; see the
        contract."""
        self.poll()
        role = self._roles.get(worker.role)
        place = role.places.get(worker.index) if role else None
        if role is None or place is None or self._agents is None:
            raise LaunchError(f"there is no worker {worker.name!r} to restart.")
        if place.node not in self._gone:
            place.worker = replace(place.worker)  # the former one stays what it was
            order = self._agents.ask(place.node, "restart", role=worker.role, index=worker.index, note=note)
            self._answers([order], ORDER_SECONDS)
        else:
            lives = place.worker.restarts + 1
            report.separate(worker.log, f"{worker.name}, start {lives + 1}, elsewhere" + (f": {note}" if note else ""))
            self._add(role, [worker.index], lives)
        role.places[worker.index].started = time.monotonic()
        self.poll()
        return role.places[worker.index].worker

    def resize_workers(self, role: str, count: int, grace: float = 5.0) -> list[Worker]:
        """Start further workers of a role, or stop its last ones; see the contract."""
        if role not in self._roles:
            raise LaunchError(f"there is no role {role!r} to resize. Started: {', '.join(self._roles) or 'nothing'}.")
        found = self._roles[role]
        require_resizable(found.spec, count)
        now = len(found.places)
        if count > now:
            try:
                self._add(found, range(now, count))
            except RLError:
                self._remove(role, range(now, count), 0.0)
                raise
        self._remove(role, range(count, now), grace)
        return self.get_workers(role)

    def logs(self, worker: Worker, lines: int = 30) -> str:
        """The last lines that a worker wrote, behind earlier ones that name an error; empty where there are none."""
        role = self._roles.get(worker.role)
        start = role.places[worker.index].log_start if role and worker.index in role.places else 0
        return report.telling(worker.log, lines, start)

    def delete_workers(self, role: str | None = None, grace: float = 5.0) -> None:
        """Stop a role, or all, with everything that the workers started; with the last role the agents end, too.

        May be called at any time, also again after it was interrupted; unknown roles are fine.

        Raises:
            LaunchError: a process outlived SIGKILL.
        """
        names = [name for name in self._roles if role is None or name == role]
        try:
            self._end({name: list(self._roles[name].places) for name in names}, grace)
        finally:
            for name in names:
                self._forget(name, list(self._roles[name].places))
                del self._roles[name]
        if not self._roles and self._agents is not None:
            agents, self._agents = self._agents, None
            agents.close()

    def _open(self, spec: JobSpec) -> None:
        """Start the agents, before the first role."""
        if self._agents is None:
            hidden = {name: spec.env[name] for name in (RUN_KEY_VARIABLE,) if name in spec.env}
            config, offered = self._config, self._provider.nodes()
            self._gone &= {node.name for node in offered}
            self._wanted = max(self._wanted, len(offered) - self._provider.spares)
            nodes = [node for node in offered if node.name not in self._gone][: self._wanted]
            self._agents = Agents(
                self._provider, self._log_dir, hidden, config.host, config.start_timeout, config.heartbeat_timeout
            )
            self._ledger = Ledger(nodes)
            try:
                self._agents.start(nodes)
                self._agents.wait([node.name for node in nodes])
                if self._gone and len(nodes) < self._wanted:
                    self._try_again()
            except BaseException:
                agents, self._agents = self._agents, None
                agents.close()
                raise

    def _try_again(self) -> None:
        """Machines were lost and none stands in for them: they may be well again."""
        lost, self._gone = self._gone, set()
        if not self._find_new():
            self._gone = lost
            self._provider.lacking(f"{', '.join(sorted(lost))} were lost, do not come back, and no others stand in")

    def _add(self, role: _Role, indices: Sequence[int], lives: int = 0) -> None:
        """Start workers of a role where there is room, and return when they have been started."""
        assert self._agents is not None
        spec = role.spec
        beside = [place.node for place in self._roles[spec.beside].places.values()] if spec.beside else []
        names = self._take(spec, len(indices), beside)
        shares: dict[str, list[int]] = defaultdict(list)
        for index, name in zip(indices, names, strict=True):
            host = self._ledger.nodes[name].host
            log = self._log_dir / f"{spec.role}-{index}.log"
            role.places[index] = _Place(name, Worker(spec.role, index, host, None, log, node=name), lives=lives)
            shares[name].append(index)
        master = ""
        if spec.spmd:
            first = names[0]
            (port,) = self._answers([self._agents.ask(first, "meet", role=spec.role)], ORDER_SECONDS)
            master = f"{self._ledger.nodes[first].host}:{port}"
        sent = asdict(spec) | {"env": {k: "" if k == RUN_KEY_VARIABLE else v for k, v in spec.env.items()}}
        self._answers(
            [
                self._agents.ask(name, "add", spec=sent, indices=share, world=spec.count, master=master)
                for name, share in shares.items()
            ],
            ORDER_SECONDS,
        )
        self.poll()

    def _take(self, spec: JobSpec, number: int, beside: Sequence[str]) -> list[str]:
        """Places in the ledger; spare or new machines are looked for where others were lost, or there is no room."""
        if self._gone:
            self._find_new()
        try:
            return self._ledger.take(spec, number, beside)
        except LaunchError:
            if not self._find_new():
                raise
            return self._ledger.take(spec, number, beside)

    def _find_new(self) -> bool:
        """Start agents on machines that have come since, and say whether there are any."""
        assert self._agents is not None
        offered = self._provider.nodes()
        new = [node for node in offered if node.name not in self._ledger.nodes and node.name not in self._gone]
        self._gone &= {node.name for node in offered}  # one that went and comes again is as good as new
        with suppress(LaunchError):
            self._agents.start(new)
            self._agents.wait([node.name for node in new])
            for node in new:
                self._ledger.add(node)
            return bool(new)
        return False

    def _remove(self, role: str, indices: Sequence[int], grace: float) -> None:
        found = [index for index in indices if index in self._roles[role].places]
        self._end({role: found}, grace)
        self._forget(role, found)

    def _end(self, indices: dict[str, list[int]], grace: float) -> None:
        """Stop workers, everywhere at once."""
        if self._agents is None:
            return
        self.poll()
        shares: dict[tuple[str, str], list[int]] = defaultdict(list)
        for name, some in indices.items():
            for index in some:
                if (node := self._roles[name].places[index].node) not in self._gone:
                    shares[node, name].append(index)
        orders = [
            (node, self._agents.ask(node, "remove", role=name, indices=share, grace=grace))
            for (node, name), share in shares.items()
        ]
        for node, order in orders:
            try:
                for state in order.result(grace + ORDER_SECONDS):
                    self._learn(node, state)
            except TimeoutError:
                raise LaunchError(f"node {node} did not end its workers within {grace + ORDER_SECONDS:g} s.") from None
            except LaunchError:
                self.poll()
                if node not in self._gone:  # what a lost machine still runs, it ends by itself
                    raise
        self.poll()

    def _forget(self, role: str, indices: Sequence[int]) -> None:
        """Free what workers had that are gone."""
        places = self._roles[role].places
        self._ledger.give_back(self._roles[role].spec, [places.pop(index).node for index in indices])

    def _learn(self, node: str, state: Message) -> None:
        role = self._roles.get(state["role"])
        place = role.places.get(state["index"]) if role else None
        if place is not None and place.node == node:
            place.learn(state)

    def _on(self, node: str) -> Iterable[_Place]:
        return [place for role in self._roles.values() for place in role.places.values() if place.node == node]

    def _answers(self, orders: Sequence[Future[Any]], seconds: float) -> list[Any]:
        """What agents answer to orders.

        Raises:
            ConfigError, LaunchError: the first error, or one did not answer in time.
        """
        deadline = time.monotonic() + seconds
        try:
            return [order.result(max(0.0, deadline - time.monotonic())) for order in orders]
        except TimeoutError:
            raise LaunchError(
                f"a node did not do what it was asked within {seconds:g} s; see {self._log_dir}/agent-*.log."
            ) from None

    def _fail(self, place: _Place, problem: str) -> None:
        raise LaunchError(report.with_log(problem, place.worker.log, self.logs(place.worker, LOG_LINES)))
