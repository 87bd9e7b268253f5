"""Scheduler for several machines, on which node agents start the workers."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from rl_contracts.errors import LaunchError, RLError
from rl_contracts.scheduler import RUN_KEY_VARIABLE, JobSpec, Node, Scheduler, SchedulerConfig, Worker, WorkerStatus
from rl_launchers.cluster.messages import Message
from rl_launchers.cluster.node_agents import Machine, NodeAgents
from rl_launchers.cluster.nodes import NodeProvider
from rl_launchers.cluster.placement import Ledger, used_nodes
from rl_launchers.local.scheduler import require_resizable, require_valid_job
from rl_launchers.supervise import exit_report

TICK = 0.05
"""Seconds between two polls of a condition."""
ORDER_SECONDS = 60.0
"""Seconds within which an agent must execute an order, in addition to any grace period."""
LOG_LINES = 30
"""Number of last lines of a log shown in an error."""
LOST_EXIT_CODE = -9
"""Exit code of workers whose machine was lost."""


@dataclass
class ClusterSchedulerConfig(SchedulerConfig):
    """Common settings of schedulers for several machines."""

    host: str = ""
    """Address of the launcher's machine to which the node agents connect. Empty for the address that the cluster
    reports. In a Slurm job with one node, empty selects loopback for the agents, servers and trainers."""


@dataclass
class _Placement:
    """A worker, with its machine and last known state."""

    machine: Machine
    worker: Worker
    started: float = field(default_factory=time.monotonic)
    previous_restarts: int = 0
    """Number of restarts before the start on this machine."""
    log_start: int = 0
    last_answer: str = ""

    def update(self, state: Message) -> None:
        """Update the worker with a state that its agent sent."""
        worker = self.worker
        worker.host, worker.port, worker.log = state["host"], state["port"], Path(state["log"])
        worker.status, worker.exit_code = WorkerStatus(state["status"]), state["exit_code"]
        worker.pid, worker.ended_at, worker.cause = state["pid"], state["ended_at"], state["cause"]
        worker.restarts = self.previous_restarts + state["restarts"]
        self.log_start, self.last_answer = state["log_start"], state["last_answer"]

    def mark_lost(self) -> None:
        """Record that the worker was lost with its machine, unless it had ended before."""
        if self.worker.exit_code is None:
            self.worker.status, self.worker.exit_code = WorkerStatus.FAILED, LOST_EXIT_CODE
            self.worker.ended_at = time.time()
            self.worker.cause = f"was lost with node {self.machine.node.name}, which {self.machine.lost}"


@dataclass
class _Role:
    spec: JobSpec
    placements: dict[int, _Placement] = field(default_factory=dict)
    """Placements by index of the worker."""


class ClusterScheduler(Scheduler, AbstractContextManager["ClusterScheduler"]):
    """Starts workers on several machines, through a node agent on each.

    Use it from one thread and as a context manager. Workers write to `<log_dir>/<role>-<index>.log`. If a machine is
    lost, its workers fail, and `restart_worker` starts them on another machine with enough free resources. If this
    process dies, even by SIGKILL, the agents stop everything that they started.

    Args:
        log_dir: directory of the logs, on a file system that all machines share. Created if missing.
        config: see `ClusterSchedulerConfig`.
        provider: provides the machines.
    """

    def __init__(self, log_dir: Path, config: ClusterSchedulerConfig, provider: NodeProvider) -> None:
        self._log_dir, self._config, self._provider = Path(log_dir), config, provider
        self._roles: dict[str, _Role] = {}
        self._agents: NodeAgents | None = None
        self._ledger = Ledger(())
        self._machines: dict[str, Machine] = {}
        """Machines by name, including lost ones. A lost machine is not reused while the cluster still offers it: the
        cluster detects a loss later than this process."""
        self._num_machines = 0

    def __exit__(self, *_: object) -> None:
        self.delete_workers()

    def create_workers(self, spec: JobSpec) -> list[Worker]:
        """Start the workers of a role on machines with enough free resources; see the contract."""
        require_valid_job(spec, self._roles)
        if spec.role in self._roles:
            raise LaunchError(f"role {spec.role!r} exists already. Delete its workers first, or choose another name.")
        self._start_agents(spec)
        role = self._roles[spec.role] = _Role(spec)
        try:
            self._start_workers(role, range(spec.count))
        except RLError:
            self.delete_workers(spec.role, grace=0.0)
            raise
        return self.get_workers(spec.role)

    def wait_ready(self, role: str, tick: Callable[[], object] | None = None) -> list[Worker]:
        """Block until the readiness check of every worker of the role succeeds; see the contract."""
        if role not in self._roles:
            raise LaunchError(f"there is no role {role!r} to wait for. Started: {', '.join(self._roles) or 'nothing'}.")
        spec = self._roles[role].spec
        while True:
            if tick is not None:
                tick()
            self.poll()
            placements = self._roles[role].placements.values()
            for placement in placements:
                worker = placement.worker
                if worker.exit_code is not None:
                    self._fail(
                        placement, f"{worker.name} {exit_report.describe_end(worker)} before its role was ready."
                    )
                is_late = time.monotonic() > placement.started + spec.ready_timeout
                if worker.status is WorkerStatus.STARTING and is_late:
                    path = f"{worker.address}{spec.ready_path}"
                    self._fail(
                        placement, exit_report.not_ready(worker.name, spec.ready_timeout, path, placement.last_answer)
                    )
            if all(placement.worker.status is WorkerStatus.RUNNING for placement in placements):
                return self.get_workers(role)
            time.sleep(TICK)

    def get_workers(self, role: str) -> list[Worker]:
        """Return the workers of a role, by index, with their status at the last `poll`; empty for an unknown role."""
        placements = self._roles[role].placements if role in self._roles else {}
        return [placements[index].worker for index in sorted(placements)]

    def poll(self) -> list[Worker]:
        """Return all workers, after applying the states that their agents sent."""
        if self._agents is not None:
            self._agents.check()
            lost = [
                placement
                for role in self._roles.values()
                for placement in role.placements.values()
                if placement.machine.lost
            ]
            for machine, state in self._agents.events():  # including the last states from machines that are now lost
                self._update_worker(machine, state)
            for placement in lost:
                placement.mark_lost()
            for name, machine in self._machines.items():
                if machine.lost:
                    self._ledger.drop(name)
        return [worker for role in self._roles for worker in self.get_workers(role)]

    def restart_worker(self, worker: Worker, note: str = "") -> Worker:
        """Restart one worker on the same machine, or on another one if that machine was lost; see the contract."""
        self.poll()
        role = self._roles.get(worker.role)
        placement = role.placements.get(worker.index) if role else None
        if role is None or placement is None or self._agents is None:
            raise LaunchError(f"there is no worker {worker.name!r} to restart.")
        if not placement.machine.lost:
            placement.worker = replace(placement.worker)  # the caller's object keeps the state of the previous start
            order = self._agents.request(placement.machine, "restart", role=worker.role, index=worker.index, note=note)
            self._results([order], ORDER_SECONDS)
        else:
            restarts = placement.worker.restarts + 1
            exit_report.separate(
                worker.log, f"{worker.name}, start {restarts + 1}, on another machine" + (f": {note}" if note else "")
            )
            try:
                self._start_workers(role, [worker.index], restarts)
            except RLError:
                with suppress(LaunchError):
                    self._stop_workers({worker.role: [worker.index]}, 0.0)
                self._release(worker.role, [worker.index])
                role.placements[worker.index] = placement  # so that the restart can be retried
                raise
        role.placements[worker.index].started = time.monotonic()
        self.poll()
        return role.placements[worker.index].worker

    def resize_workers(self, role: str, count: int, grace: float = 5.0) -> list[Worker]:
        """Start additional workers of a role, or stop the last ones; see the contract."""
        if role not in self._roles:
            raise LaunchError(f"there is no role {role!r} to resize. Started: {', '.join(self._roles) or 'nothing'}.")
        resized = self._roles[role]
        require_resizable(resized.spec, count)
        current = len(resized.placements)
        if count > current:
            try:
                self._start_workers(resized, range(current, count))
            except RLError:
                self._stop_and_release(role, range(current, count), 0.0)
                raise
        self._stop_and_release(role, range(count, current), grace)
        return self.get_workers(role)

    def logs(self, worker: Worker, lines: int = 30) -> str:
        """Return the last lines of a worker's log, preceded by earlier lines that name an error; may be empty."""
        role = self._roles.get(worker.role)
        start = role.placements[worker.index].log_start if role and worker.index in role.placements else 0
        return exit_report.informative_tail(worker.log, lines, start)

    def terminate_workers(self, role: str) -> None:
        """Send SIGTERM to each worker of a role; see `Scheduler.terminate_workers`.

        Raises:
            LaunchError: a machine does not confirm the order. All other machines were sent the order, too.
        """
        placements = self._roles[role].placements.values() if role in self._roles else []
        machines = {
            placement.machine.node.name: placement.machine for placement in placements if not placement.machine.lost
        }
        if self._agents is not None:
            self._results([self._agents.request(m, "terminate", role=role) for m in machines.values()], ORDER_SECONDS)

    def delete_workers(self, role: str | None = None, grace: float = 5.0) -> None:
        """Stop the workers of one role or of all, with their child processes, and end the agents after the last role.

        May be called at any time, also again after an interruption. Unknown roles are ignored.

        Raises:
            LaunchError: a process survived SIGKILL, or a node did not stop its workers in time.
        """
        names = [name for name in self._roles if role is None or name == role]
        try:
            self._stop_workers({name: list(self._roles[name].placements) for name in names}, grace)
        finally:
            for name in names:
                self._release(name, list(self._roles[name].placements))
                del self._roles[name]
            if not self._roles and self._agents is not None:
                self._agents.close()  # also stops the remaining workers
                self._agents = None

    def _start_agents(self, spec: JobSpec) -> None:
        """Start the agents, if none are running."""
        if self._agents is None:
            hidden = {name: spec.env[name] for name in (RUN_KEY_VARIABLE,) if name in spec.env}
            self._provider.tick = self.tick
            offered = self._provider.nodes()
            lost = [m for node in offered if (m := self._machines.get(node.name)) is not None and m.lost]
            self._machines = {machine.node.name: machine for machine in lost}
            self._num_machines = max(self._num_machines, len(offered) - self._provider.spares)
            self._num_machines = min(self._num_machines, self._config.cluster.nodes or self._num_machines)
            nodes = [node for node in offered if node.name not in self._machines][: self._num_machines]
            self._agents = NodeAgents(self._provider, self._machines, self._log_dir, hidden, self._config.host)
            self._ledger = Ledger(self._limit_nodes(nodes))
            try:
                self._agents.start(nodes)
                self._agents.wait(self.tick)
                for node in nodes:
                    if (machine := self._machines[node.name]).lost:
                        raise self._agents.failure(machine)
                if lost and len(nodes) < self._num_machines:
                    self._retry_lost_machines()
            except BaseException:
                self._agents.close()
                self._agents = None
                raise

    def _retry_lost_machines(self) -> None:
        """Retry lost machines, which may work again. If none does, report their loss to the provider."""
        lost = [name for name, machine in self._machines.items() if machine.lost]
        for name in lost:
            del self._machines[name]
        if not self._add_new_machines():
            self._provider.on_nodes_lost(
                lost, f"nodes {', '.join(sorted(lost))} were lost, did not recover, and have no replacement"
            )

    def _start_workers(self, role: _Role, indices: Sequence[int], previous_restarts: int = 0) -> None:
        """Allocate resources for workers of a role and start them."""
        assert self._agents is not None
        spec = role.spec
        shared = self._roles[spec.colocated_with].placements.values() if spec.colocated_with else ()
        if lost := [placement.worker.name for placement in shared if placement.machine.lost]:
            raise LaunchError(f"role {spec.role!r} shares devices with {', '.join(lost)}, whose node was lost.")
        shared_machines = [placement.machine.node.name for placement in shared]
        machine_names = self._allocate(spec, len(indices), shared_machines)
        machines = [self._machines[name] for name in machine_names]
        indices_by_machine: dict[Machine, list[int]] = defaultdict(list)
        for index, machine in zip(indices, machines, strict=True):
            node, log = machine.node, self._log_dir / f"{spec.role}-{index}.log"
            worker = Worker(spec.role, index, node.host, None, log, node=node.name)
            role.placements[index] = _Placement(machine, worker, previous_restarts=previous_restarts)
            indices_by_machine[machine].append(index)
        master = ""
        if spec.spmd:
            (port,) = self._results([self._agents.request(machines[0], "meet", role=spec.role)], ORDER_SECONDS)
            master = f"{machines[0].node.host}:{port}"
        sent = asdict(spec) | {"env": {k: "" if k == RUN_KEY_VARIABLE else v for k, v in spec.env.items()}}
        self._results(
            [
                self._agents.request(
                    machine, "add", spec=sent, indices=machine_indices, world=spec.count, master=master
                )
                for machine, machine_indices in indices_by_machine.items()
            ],
            ORDER_SECONDS,
        )
        self.poll()

    def _allocate(self, spec: JobSpec, count: int, shared_machines: Sequence[str]) -> list[str]:
        """Reserve resources and return a machine name per worker. Look for new machines after a loss or if none fit."""
        assert self._agents is not None
        if any(machine.lost for machine in self._machines.values()):
            self._add_new_machines()
        scratch_machines = [
            placement.machine.node.name
            for role in self._roles.values()
            if {*role.spec.scratch} & {*spec.scratch}
            for placement in role.placements.values()
            if not placement.machine.lost
        ]
        try:
            return self._ledger.allocate(spec, count, shared_machines, scratch_machines)
        except LaunchError:
            if not self._add_new_machines():
                raise
            return self._ledger.allocate(spec, count, shared_machines, scratch_machines)

    def _add_new_machines(self) -> bool:
        """Start agents on machines that became available, and return whether there are any."""
        assert self._agents is not None
        offered = {node.name: node for node in self._provider.nodes()}
        for name in [name for name, machine in self._machines.items() if machine.lost and name not in offered]:
            del self._machines[name]  # if the cluster offers it again later, it counts as new
            self._ledger.drop(name)
        unknown = [node for name, node in offered.items() if name not in self._machines]
        limit = self._config.cluster.nodes
        self._agents.start(unknown[: limit - len(self._ledger.nodes)] if limit else unknown)
        self._agents.wait(self.tick)
        in_ledger = self._ledger.nodes
        new = [m.node for name, m in self._machines.items() if not m.lost and name not in in_ledger]
        for node in self._limit_nodes(new):
            self._ledger.add(node)
        return bool(new)

    def _limit_nodes(self, nodes: Sequence[Node]) -> list[Node]:
        """Return the nodes with the cores and GPUs that the run uses."""
        return used_nodes(nodes, 0, self._config.cluster.cores, self._config.cluster.gpus or 0)

    def _stop_and_release(self, role: str, indices: Sequence[int], grace: float) -> None:
        existing = [index for index in indices if index in self._roles[role].placements]
        self._stop_workers({role: existing}, grace)
        self._release(role, existing)

    def _stop_workers(self, indices: dict[str, list[int]], grace: float) -> None:
        """Stop workers on all machines concurrently."""
        if self._agents is None:
            return
        self.poll()
        indices_by_machine: dict[tuple[Machine, str], list[int]] = defaultdict(list)
        for name, role_indices in indices.items():
            for index in role_indices:
                if not (machine := self._roles[name].placements[index].machine).lost:
                    indices_by_machine[machine, name].append(index)
        orders = [
            (machine, self._agents.request(machine, "remove", role=name, indices=machine_indices, grace=grace))
            for (machine, name), machine_indices in indices_by_machine.items()
        ]
        problems = []
        for machine, order in orders:
            try:
                for state in order.result(grace + ORDER_SECONDS):
                    self._update_worker(machine, state)
            except TimeoutError:
                name = machine.node.name
                problems.append(f"node {name} did not stop its workers within {grace + ORDER_SECONDS:g} s.")
            except LaunchError as error:
                if not machine.lost:  # the agent of a lost machine stops its workers itself
                    problems.append(str(error))
        self.poll()
        if problems:
            raise LaunchError("\n".join(problems))

    def _release(self, role: str, indices: Sequence[int]) -> None:
        """Forget workers that have ended, and free their resources."""
        placements = [self._roles[role].placements.pop(index) for index in indices]
        machine_names = [placement.machine.node.name for placement in placements if not placement.machine.lost]
        self._ledger.release(self._roles[role].spec, machine_names)

    def _update_worker(self, machine: Machine, state: Message) -> None:
        role = self._roles.get(state["role"])
        placement = role.placements.get(state["index"]) if role else None
        if placement is not None and placement.machine is machine:
            placement.update(state)

    def _results(self, orders: Sequence[Future[Any]], seconds: float) -> list[Any]:
        """Wait for orders and return their results.

        Raises:
            ConfigError, LaunchError: the error of the first failed order, or an agent did not reply in time.
        """
        deadline = time.monotonic() + seconds
        try:
            return [order.result(max(0.0, deadline - time.monotonic())) for order in orders]
        except TimeoutError:
            raise LaunchError(
                f"a node did not reply to an order within {seconds:g} s; see {self._log_dir}/agent-*.log."
            ) from None

    def _fail(self, placement: _Placement, problem: str) -> None:
        raise LaunchError(exit_report.with_log(problem, placement.worker.log, self.logs(placement.worker, LOG_LINES)))
