"""The scheduler of several machines: workers are processes that agents start there."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from rl_contracts.config import bounded
from rl_contracts.errors import LaunchError, RLError
from rl_contracts.scheduler import RUN_KEY_VARIABLE, JobSpec, Scheduler, SchedulerConfig, Worker, WorkerStatus
from rl_launchers.cluster.messages import Message
from rl_launchers.cluster.node_agents import Machine, NodeAgents
from rl_launchers.cluster.nodes import NodeProvider
from rl_launchers.cluster.placement import Ledger, used_nodes
from rl_launchers.local.scheduler import require_resizable, require_valid_job
from rl_launchers.supervise import exit_report

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
    """Address of the launcher's machine at which its agents call it; empty: that under which the scheduler knows it, or
    loopback in a Slurm job of one node, where servers and trainers listen there as well."""
    start_timeout: float = bounded(120.0, "more than 0 seconds", lambda seconds: seconds > 0)
    """Seconds within which a machine must answer once its agent was started."""
    heartbeat_timeout: float = bounded(20.0, "at least 3 seconds", lambda seconds: seconds >= 3)
    """Seconds without a word from a machine after which it counts as lost; it then ends what runs on it."""


@dataclass
class _Place:
    """Where a worker runs, and what is known of it."""

    machine: Machine
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
        worker.pid, worker.ended_at, worker.cause = state["pid"], state["ended_at"], state["cause"]
        worker.restarts = self.lives + state["restarts"]
        self.log_start, self.last_answer = state["log_start"], state["last_answer"]

    def lose(self) -> None:
        """Its machine is gone."""
        if self.worker.exit_code is None:
            self.worker.status, self.worker.exit_code = WorkerStatus.FAILED, LOST_EXIT_CODE
            self.worker.ended_at = time.time()
            self.worker.cause = f"was lost with node {self.machine.node.name}, which {self.machine.lost}"


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
        self._agents: NodeAgents | None = None
        self._ledger = Ledger(())
        self._machines: dict[str, Machine] = {}
        """Those that were lost are not used again while the cluster offers them: it finds out later than we do."""
        self._wanted = 0
        self._most, self._cores, self._gpus = 0, 0, 0

    def __exit__(self, *_: object) -> None:
        self.delete_workers()

    def limit(self, nodes: int = 0, cores: int = 0, gpus: int = 0) -> None:
        """Use no more of the machines; see the contract."""
        self._most, self._cores, self._gpus = nodes, cores, gpus

    def create_workers(self, spec: JobSpec) -> list[Worker]:
        """Start the workers of a role on machines that have room for them; see the contract."""
        require_valid_job(spec, self._roles)
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
                    self._fail(place, f"{worker.name} {exit_report.describe_end(worker)} before its role was ready.")
                late = time.monotonic() > place.started + spec.ready_timeout
                if worker.status is WorkerStatus.STARTING and late:
                    path = f"{worker.address}{spec.ready_path}"
                    self._fail(place, exit_report.not_ready(worker.name, spec.ready_timeout, path, place.last_answer))
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
            self._agents.check()
            lost = [place for role in self._roles.values() for place in role.places.values() if place.machine.lost]
            for machine, state in self._agents.events():  # all that was said by those that are lost now, too
                self._learn(machine, state)
            for place in lost:
                place.lose()
            for name, machine in self._machines.items():
                if machine.lost:
                    self._ledger.drop(name)
        return [worker for role in self._roles for worker in self.get_workers(role)]

    def restart_worker(self, worker: Worker, note: str = "") -> Worker:
        """Start one worker anew: in the place of its process, or where that machine was lost, on another; see the
        contract."""
        self.poll()
        role = self._roles.get(worker.role)
        place = role.places.get(worker.index) if role else None
        if role is None or place is None or self._agents is None:
            raise LaunchError(f"there is no worker {worker.name!r} to restart.")
        if not place.machine.lost:
            place.worker = replace(place.worker)  # the former one stays what it was
            order = self._agents.request(place.machine, "restart", role=worker.role, index=worker.index, note=note)
            self._answers([order], ORDER_SECONDS)
        else:
            lives = place.worker.restarts + 1
            exit_report.separate(
                worker.log, f"{worker.name}, start {lives + 1}, elsewhere" + (f": {note}" if note else "")
            )
            try:
                self._add(role, [worker.index], lives)
            except RLError:
                with suppress(LaunchError):
                    self._end({worker.role: [worker.index]}, 0.0)
                self._forget(worker.role, [worker.index])
                role.places[worker.index] = place  # so that it can be tried again
                raise
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
        return exit_report.informative_tail(worker.log, lines, start)

    def terminate_workers(self, role: str) -> None:
        """See `Scheduler.terminate_workers`.

        Raises:
            LaunchError: a machine does not answer; the others were asked.
        """
        places = self._roles[role].places.values() if role in self._roles else []
        machines = {place.machine.node.name: place.machine for place in places if not place.machine.lost}
        if self._agents is not None:
            self._answers([self._agents.request(m, "terminate", role=role) for m in machines.values()], ORDER_SECONDS)

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
                self._agents.close()  # which ends what is left
                self._agents = None

    def _open(self, spec: JobSpec) -> None:
        """Start the agents, before the first role."""
        if self._agents is None:
            hidden = {name: spec.env[name] for name in (RUN_KEY_VARIABLE,) if name in spec.env}
            config, self._provider.tick = self._config, self.tick
            offered = self._provider.nodes()
            former = [m for node in offered if (m := self._machines.get(node.name)) is not None and m.lost]
            self._machines = {machine.node.name: machine for machine in former}
            self._wanted = max(self._wanted, len(offered) - self._provider.spares)
            self._wanted = min(self._wanted, self._most or self._wanted)
            nodes = [node for node in offered if node.name not in self._machines][: self._wanted]
            self._agents = NodeAgents(
                self._provider,
                self._machines,
                self._log_dir,
                hidden,
                config.host,
                config.start_timeout,
                config.heartbeat_timeout,
            )
            self._ledger = Ledger(used_nodes(nodes, 0, self._cores, self._gpus))
            try:
                self._agents.start(nodes)
                self._agents.wait(self.tick)
                for node in nodes:
                    if (machine := self._machines[node.name]).lost:
                        raise self._agents.failure(machine)
                if former and len(nodes) < self._wanted:
                    self._try_again()
            except BaseException:
                self._agents.close()
                self._agents = None
                raise

    def _try_again(self) -> None:
        """Machines were lost and none stands in for them: they may be well again."""
        lost = [name for name, machine in self._machines.items() if machine.lost]
        for name in lost:
            del self._machines[name]
        if not self._find_new():
            self._provider.on_nodes_lost(
                lost, f"{', '.join(sorted(lost))} were lost, do not come back, and no others stand in"
            )

    def _add(self, role: _Role, indices: Sequence[int], lives: int = 0) -> None:
        """Start workers of a role where there is room, and return when they have been started."""
        assert self._agents is not None
        spec = role.spec
        shared = self._roles[spec.colocated_with].places.values() if spec.colocated_with else ()
        if gone := [place.worker.name for place in shared if place.machine.lost]:
            raise LaunchError(f"role {spec.role!r}: {', '.join(gone)}, whose devices it uses, was lost with its node.")
        beside = [place.machine.node.name for place in shared]
        names = self._take(spec, len(indices), beside)
        machines = [self._machines[name] for name in names]
        shares: dict[Machine, list[int]] = defaultdict(list)
        for index, machine in zip(indices, machines, strict=True):
            node, log = machine.node, self._log_dir / f"{spec.role}-{index}.log"
            worker = Worker(spec.role, index, node.host, None, log, node=node.name)
            role.places[index] = _Place(machine, worker, lives=lives)
            shares[machine].append(index)
        master = ""
        if spec.spmd:
            (port,) = self._answers([self._agents.request(machines[0], "meet", role=spec.role)], ORDER_SECONDS)
            master = f"{machines[0].node.host}:{port}"
        sent = asdict(spec) | {"env": {k: "" if k == RUN_KEY_VARIABLE else v for k, v in spec.env.items()}}
        self._answers(
            [
                self._agents.request(machine, "add", spec=sent, indices=share, world=spec.count, master=master)
                for machine, share in shares.items()
            ],
            ORDER_SECONDS,
        )
        self.poll()

    def _take(self, spec: JobSpec, number: int, beside: Sequence[str]) -> list[str]:
        """Places in the ledger; spare or new machines are looked for where others were lost, or there is no room."""
        assert self._agents is not None
        if any(machine.lost for machine in self._machines.values()):
            self._find_new()
        shared = [
            place.machine.node.name
            for role in self._roles.values()
            if {*role.spec.scratch} & {*spec.scratch}
            for place in role.places.values()
            if not place.machine.lost
        ]
        try:
            return self._ledger.allocate(spec, number, beside, shared)
        except LaunchError:
            if not self._find_new():
                raise
            return self._ledger.allocate(spec, number, beside, shared)

    def _find_new(self) -> bool:
        """Start agents on machines that have come since, and say whether there are any."""
        assert self._agents is not None
        offered = {node.name: node for node in self._provider.nodes()}
        for name in [name for name, machine in self._machines.items() if machine.lost and name not in offered]:
            del self._machines[name]  # one that went and comes again is as good as new
            self._ledger.drop(name)
        unknown = [node for name, node in offered.items() if name not in self._machines]
        self._agents.start(unknown[: self._most - len(self._ledger.nodes)] if self._most else unknown)
        self._agents.wait(self.tick)
        there = self._ledger.nodes
        new = [m.node for name, m in self._machines.items() if not m.lost and name not in there]
        for node in used_nodes(new, 0, self._cores, self._gpus):
            self._ledger.add(node)
        return bool(new)

    def _remove(self, role: str, indices: Sequence[int], grace: float) -> None:
        found = [index for index in indices if index in self._roles[role].places]
        self._end({role: found}, grace)
        self._forget(role, found)

    def _end(self, indices: dict[str, list[int]], grace: float) -> None:
        """Stop workers, everywhere at once."""
        if self._agents is None:
            return
        self.poll()
        shares: dict[tuple[Machine, str], list[int]] = defaultdict(list)
        for name, some in indices.items():
            for index in some:
                if not (machine := self._roles[name].places[index].machine).lost:
                    shares[machine, name].append(index)
        orders = [
            (machine, self._agents.request(machine, "remove", role=name, indices=share, grace=grace))
            for (machine, name), share in shares.items()
        ]
        problems = []
        for machine, order in orders:
            try:
                for state in order.result(grace + ORDER_SECONDS):
                    self._learn(machine, state)
            except TimeoutError:
                name = machine.node.name
                problems.append(f"node {name} did not end its workers within {grace + ORDER_SECONDS:g} s.")
            except LaunchError as error:
                if not machine.lost:  # what a lost machine still runs, it ends by itself
                    problems.append(str(error))
        self.poll()
        if problems:
            raise LaunchError("\n".join(problems))

    def _forget(self, role: str, indices: Sequence[int]) -> None:
        """Free what workers had that are gone."""
        places = [self._roles[role].places.pop(index) for index in indices]
        there = [place.machine.node.name for place in places if not place.machine.lost]
        self._ledger.release(self._roles[role].spec, there)

    def _learn(self, machine: Machine, state: Message) -> None:
        role = self._roles.get(state["role"])
        place = role.places.get(state["index"]) if role else None
        if place is not None and place.machine is machine:
            place.learn(state)

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
        raise LaunchError(exit_report.with_log(problem, place.worker.log, self.logs(place.worker, LOG_LINES)))
