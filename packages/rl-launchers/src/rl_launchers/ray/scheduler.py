"""Scheduler for a Ray cluster. A placement group holds the nodes of a run."""

from __future__ import annotations

import importlib.util
import itertools
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

from rl_contracts.config import bounded
from rl_contracts.errors import ConfigError, LaunchError
from rl_contracts.runtime.logging import get_logger
from rl_contracts.runtime.machine import usable_cores, visible_gpus
from rl_contracts.scheduler import Node, Resources
from rl_launchers.cluster.nodes import LOOPBACK, NodeProvider
from rl_launchers.cluster.scheduler import ClusterScheduler, ClusterSchedulerConfig
from rl_launchers.supervise import exit_report
from rl_launchers.supervise.interrupts import ONE_REQUEST

logger = get_logger("launcher")

TICK = 0.05
"""Seconds between two polls of a condition."""
CONNECT_SECONDS = 120.0
"""Seconds to wait for a reply from Ray, or for the start of a cluster for the run."""
PLACEMENT_SECONDS = 60.0
"""Seconds to wait for the placement group at the start of a run. Ray places it within seconds, unless other jobs hold
the nodes for an unknown time."""
REPLACEMENT_SECONDS = 600.0
"""Seconds to wait for new nodes and the placement group after the loss of a node: a cloud or Kubernetes replaces a node
within minutes."""
SILENCE = 60.0
"""Seconds without a state from the driver after which the cluster counts as lost."""

NODE_RESOURCES = ("TMPDIR", "HOSTNAME")
"""Environment variables whose value on a node has priority over the launcher's value."""

BY_RAY = ("OMP_NUM_THREADS", "PYTHONBREAKPOINT", "SPT_NOENV")
"""Environment variables that Ray sets for its workers, and therefore also for the commands of submitted jobs."""


@dataclass
class RaySchedulerConfig(ClusterSchedulerConfig):
    """Settings of the Ray cluster, and of the resources that a run holds there.

    The run reserves `cluster.nodes` nodes, or all nodes with at least one core if that is not set. Each has a bundle of
    the placement group. The remaining nodes of the cluster replace lost nodes.
    """

    address: str = bounded("", "host:port, auto, local or empty", lambda text: "://" not in text)
    """Address of the cluster, as `ray start` prints it. Empty means RAY_ADDRESS, or else the cluster that `ray start`
    started on this machine. If neither exists, or for `local`, a cluster of only this machine is started for the run.
    Run the command on a machine of the cluster, or submit it with `ray job submit`."""
    node_resources: dict[str, float] = field(default_factory=dict)
    """Additional Ray resources to reserve on each node, for example `{rollout-pool: 1}` to select nodes with that
    resource."""

    def resources(self) -> Resources:
        """Return the resources of the bundles, or of this machine if the run will start a cluster."""
        return self._bundle_resources(living_nodes_at(self._configured_address()) or [this_machine()])

    def planned(self) -> Resources:
        """Return the same as `resources`, or the resources that the run requests.

        The request is used if the cluster at the configured address does not answer, or if no cluster runs. A request
        for one node is completed with the resources of this machine, on which the run would start a cluster.
        """
        address, request = self._configured_address(), self.cluster
        try:
            live_nodes = living_nodes_at(address)
        except ConfigError:
            live_nodes = []
        if live_nodes:
            return self._bundle_resources(live_nodes)
        starts_cluster = address == "local" or (request.nodes <= 1 and not address)
        known = this_machine() if starts_cluster else {"cores": 0, "gpus": 0}
        cores, gpus = request.cores or known["cores"], known["gpus"] if request.gpus is None else request.gpus
        if starts_cluster:
            return self._bundle_resources([_describe_this_machine(cores, gpus)])
        nodes = tuple(Node(f"node{index}", "", cores, gpus) for index in range(request.nodes or 1))
        return Resources(gpus * len(nodes), cores * len(nodes), nodes)

    def bundles(self, nodes: Sequence[Mapping[str, Any]]) -> list[tuple[Mapping[str, Any], dict[str, float]]]:
        """Return the nodes to hold, the largest first, each with its bundle. Ray may choose other nodes that fit.

        Args:
            nodes: descriptions of the live nodes, as in `living` of the driver's state.

        Raises:
            ConfigError: too few nodes have the required resources; the message lists the resources of each node.
        """
        request = self.cluster
        minimum = {"CPU": max(1, request.cores), "GPU": request.gpus or 0, **self.node_resources}
        suitable = [
            node for node in nodes if all(node["resources"].get(name, 0) >= amount for name, amount in minimum.items())
        ]
        suitable.sort(key=lambda node: (node["gpus"], node["cores"]), reverse=True)
        count = request.nodes or max(1, len(suitable))
        if len(suitable) < count:
            minimums = ", ".join(f"{name} {amount:g}" for name, amount in minimum.items() if amount)
            listing = "; ".join(f"{node['name']}: {node['cores']} cores, {node['gpus']} GPUs" for node in nodes)
            raise ConfigError(
                f"launcher.kind=ray: expected {count} nodes with {minimums} each, found {len(suitable)} among "
                f"{len(nodes)} ({listing or 'none'}). Lower cluster.nodes, cluster.cores, cluster.devices or "
                "launcher.options.node_resources, or add nodes to the Ray cluster."
            )
        gpus = request.gpus
        return [
            (
                node,
                {"CPU": float(request.cores or node["cores"])}
                | ({"GPU": float(num_gpus)} if (num_gpus := node["gpus"] if gpus is None else gpus) else {})
                | self.node_resources,
            )
            for node in suitable[:count]
        ]

    def _configured_address(self) -> str:
        return self.address or os.environ.get("RAY_ADDRESS", "")

    def _bundle_resources(self, live_nodes: Sequence[Mapping[str, Any]]) -> Resources:
        """Return the resources that the bundles hold in a cluster with these nodes."""
        bundles = self.bundles(live_nodes)
        nodes = [
            Node(node["name"], node["host"], int(bundle["CPU"]), int(bundle.get("GPU", 0))) for node, bundle in bundles
        ]
        return Resources(sum(node.gpus for node in nodes), sum(node.cores for node in nodes), tuple(nodes))


def living_nodes_at(address: str) -> list[dict[str, Any]]:
    """Return the live nodes of the cluster at an address, or of Ray's default cluster for an empty address.

    The list is empty if a cluster will be started.

    Raises:
        ConfigError: the cluster does not answer, or Ray is not installed.
    """
    nodes: list[dict[str, Any]] = describe_cluster(address)["living"]
    return nodes


@cache
def describe_cluster(address: str) -> dict[str, Any]:
    """Return the state of a cluster from `driver.connect`. The result is cached, because the call takes seconds.

    Raises:
        ConfigError: the cluster does not answer, or Ray is not installed.
    """
    try:
        connection = DriverConnection(address, "look")
        try:
            if not connection.wait("found"):
                raise connection.silent()
        finally:
            connection.close()
    except LaunchError as error:
        raise ConfigError(str(error)) from error
    return connection.state


def this_machine() -> dict[str, Any]:
    """Return the description of this machine as the node of a cluster that is started for the run."""
    return _describe_this_machine(usable_cores(), len(visible_gpus(os.environ)))


def _describe_this_machine(cores: int, gpus: int) -> dict[str, Any]:
    description = {"name": "this machine", "host": LOOPBACK, "cores": cores, "gpus": gpus}
    return description | {"resources": {"CPU": cores, "GPU": gpus}}


def agent_environment(node: Mapping[str, str], launcher: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of an agent: the node's, updated with the launcher's, without the variables of Ray."""
    node_values = {name: node[name] for name in NODE_RESOURCES if name in node}
    in_job = "RAY_JOB_CONFIG_JSON_ENV_VAR" in launcher
    merged = {name: value for name, value in node.items() if name not in BY_RAY}
    merged |= {name: value for name, value in launcher.items() if not (in_job and name in BY_RAY)}
    return {name: value for name, value in (merged | node_values).items() if not name.startswith("RAY_")}


class DriverConnection:
    """Connection to the Ray driver process, which this class starts; see `rl_launchers.ray.driver`.

    Args:
        address: address of the cluster; empty for Ray's default.
        purpose: `look`, or `hold`, which starts a cluster if none runs.
        log: file to which the error output of the process is appended; None to discard it.

    Raises:
        LaunchError: Ray is not installed, or a driver cannot use this kind of address.
    """

    def __init__(self, address: str, purpose: str, log: Path | None = None) -> None:
        if importlib.util.find_spec("ray") is None:
            raise LaunchError(
                "launcher.kind=ray needs Ray, which is not installed. Install rl-launchers[ray], or in the repository "
                "use uv run --package rl-apps --extra ray ..."
            )
        if "://" in (configured := address or os.environ.get("RAY_ADDRESS", "")):
            raise LaunchError(
                f"Ray's address {configured}: expected host:port, as `ray start` prints it; addresses of the dashboard "
                "and of Ray's client do not work. Run the command on a machine of the cluster, or submit it with "
                "`ray job submit`."
            )
        self._address, self._log = address, log
        self.state: dict[str, Any] = {}
        """Latest value of each key in the driver's messages."""
        self._last_message = time.monotonic()
        with open(log or os.devnull, "ab") as file:
            self._process = subprocess.Popen(
                [sys.executable, "-c", "from rl_launchers.ray.driver import main; main()", address, purpose],
                env=os.environ | {"RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0"},  # else Ray packages the working directory
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=file,
                start_new_session=True,  # Ctrl-C in the terminal must not reach it
                text=True,
            )
        self._reader = threading.Thread(target=self._read_states, name="ray-driver", daemon=True)
        self._reader.start()

    def send(self, **order: Any) -> None:
        """Send an order. If it cannot be delivered, `problem` returns the reason."""
        assert self._process.stdin is not None
        if not self.problem():
            with suppress(OSError):
                self._process.stdin.write(json.dumps(order) + "\n")
                self._process.stdin.flush()

    def problem(self) -> str:
        """Return why the driver cannot be reached, or "" if it works."""
        if self._process.poll() is not None:
            self._reader.join(timeout=1.0)  # read the last messages, which may have the reason
            log = f" (log: {self._log})" if self._log else ""
            why = self.state.get("error") or exit_report.describe_exit(self._process.returncode)
            return f"the Ray driver process ended: {why}{log}"
        silence = time.monotonic() - self._last_message
        return f"Ray sent no state for {silence:.0f} s" if silence > SILENCE and "placed" in self.state else ""

    def wait(self, thing: str, seconds: float = CONNECT_SECONDS, tick: Callable[[], object] = lambda: None) -> bool:
        """Wait until the driver's state has a true value for a key, and return whether it does.

        Args:
            thing: key of the state.
            seconds: maximum time to wait.
            tick: function called repeatedly during the wait; an exception from it ends the wait.

        Raises:
            LaunchError: the driver process ended or does not respond.
        """
        deadline = time.monotonic() + seconds
        while not self.state.get(thing) and time.monotonic() < deadline:
            if (problem := self.problem()) and not self.state.get(thing):
                raise self.silent(problem)
            tick()
            time.sleep(TICK)
        return bool(self.state.get(thing))

    def silent(self, problem: str = f"Ray did not answer within {CONNECT_SECONDS:g} s") -> LaunchError:
        """Return the error for a cluster that does not answer."""
        return LaunchError(
            f"launcher.options.address={self._address or '(empty)'}: cannot connect to the Ray cluster: {problem}. Run "
            "the command on a machine of the cluster, or submit it with `ray job submit`. `ray stop` makes Ray forget "
            "a lost cluster; launcher.options.address=local starts one on this machine."
        )

    def close(self) -> None:
        """End the driver process and everything that it started."""
        assert self._process.stdin is not None
        with suppress(OSError):  # orders that the process did not read
            self._process.stdin.close()
        try:
            self._process.wait(timeout=30.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _read_states(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self.state |= json.loads(line)
            self._last_message = time.monotonic()


class RayNodes(NodeProvider):
    """Provides the nodes of a placement group.

    If Ray drains a node, this process sends itself SIGTERM, which stops the run. A second SIGTERM follows after a third
    of the time until the node's deadline, so that the trainers abandon the running step and save in the remaining time.

    Args:
        log_dir: directory of the driver's log, `ray.log`, on a file system that all nodes share.
        config: see `RaySchedulerConfig`.
    """

    def __init__(self, log_dir: Path, config: RaySchedulerConfig) -> None:
        self._log_dir, self._config = Path(log_dir), config
        self._connection: DriverConnection | None = None
        self._counter, self._agent_numbers = itertools.count(), dict[str, str]()
        self._has_claimed = False
        self._drain_signals: list[float] | None = None
        """Times at which this process will send itself SIGTERM, or None before a node is drained."""

    def nodes(self) -> list[Node]:
        """Return the live nodes with a bundle. The first call waits for the placement group."""
        state = self._cluster_state()
        fields = ("name", "host", "cores", "gpus")
        nodes = [Node(**{name: node[name] for name in fields}) for node in state["nodes"]]
        return [replace(node, host=LOOPBACK) for node in nodes] if state["local"] else nodes

    def start(self, node: Node, command: Sequence[str], env: Mapping[str, str], log: Path) -> None:
        """Start the agent through an actor in the node's bundle.

        The actor reads command and environment from a file that only the user can read. Arguments of an actor would be
        visible to the whole cluster.
        """
        number = str(next(self._counter))
        order_file = log.absolute().with_suffix(f".order-{number}")
        job = {"command": list(command), "env": dict(env), "directory": os.getcwd(), "log": str(log.absolute())}
        with open(os.open(order_file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
            json.dump(job, file)
        self._cluster_state()
        assert self._connection is not None
        self._agent_numbers[node.name] = number
        self._connection.send(do="start", name=node.name, number=number, order=str(order_file))

    def end_reason(self, node: Node) -> str:
        """Return why the agent ended, or "". All agents count as ended if Ray does not answer."""
        if self._connection is None:
            return "was stopped"
        self._stop_if_draining(self._connection.state["draining"])
        why: str = self._connection.state["ended"].get(self._agent_numbers.get(node.name, ""), "")
        return why or (f"is unreachable: {problem}" if (problem := self._connection.problem()) else "")

    def _stop_if_draining(self, draining: Mapping[str, int]) -> None:
        """Send this process the SIGTERM signals that are due.

        Args:
            draining: deadline of each drained node in ms since the epoch; 0 for no deadline.
        """
        now = time.time()
        if draining and self._drain_signals is None:
            logger.warning("Ray drains %s; stopping the run with SIGTERM.", ", ".join(draining))
            remaining = [deadline / 1000 - now for deadline in draining.values() if deadline]
            self._drain_signals = [now, *(now + max(min(remaining) / 3, ONE_REQUEST) for _ in remaining[:1])]
        while self._drain_signals and now >= self._drain_signals[0]:
            del self._drain_signals[0]
            os.kill(os.getpid(), signal.SIGTERM)

    def close(self) -> None:
        """End the agents, and free the placement group. A cluster that was started for the run ends, too."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()
        self._delete_orders()  # of agents that Ray did not start

    def address(self) -> str:
        """Return the address of this machine in the cluster."""
        state = self._cluster_state()
        return LOOPBACK if state["local"] else str(state["address"])

    def _delete_orders(self) -> None:
        for order in self._log_dir.glob("*.order-*"):
            order.unlink(missing_ok=True)

    def _cluster_state(self) -> dict[str, Any]:
        if self._connection is None:
            self._log_dir.mkdir(parents=True, exist_ok=True)
            self._delete_orders()  # of a launcher that was killed
            connection = DriverConnection(self._config.address, "hold", self._log_dir / "ray.log")
            try:
                self._claim(connection)
            except BaseException:
                connection.close()
                raise
            self._connection = connection
        return self._connection.state

    def _claim(self, connection: DriverConnection) -> None:
        if not connection.wait("found", tick=self.tick):
            raise connection.silent()
        state, seconds = connection.state, REPLACEMENT_SECONDS if self._has_claimed else PLACEMENT_SECONDS
        bundles, self._has_claimed = self._bundles(connection, seconds), True
        connection.send(do="claim", bundles=bundles)
        if not connection.wait("placed", seconds, self.tick):
            free, total = state["free"], state["total"]
            listing = ", ".join(f"{free.get(name, 0):g} of {total[name]:g} {name}" for name in sorted(bundles[0]))
            raise LaunchError(
                f"Ray could not place {len(bundles)} bundles ({bundles}) within {seconds:g} s; at the start, {listing} "
                "were free. Wait for other jobs to end, or lower cluster.nodes, cluster.cores or cluster.devices."
            )

    def _bundles(self, connection: DriverConnection, seconds: float) -> list[dict[str, float]]:
        """Return the bundles to claim. After an earlier claim, wait for new nodes if too few remain.

        Raises:
            ConfigError: the cluster has too few nodes, and there was no earlier claim.
            LaunchError: there was an earlier claim, and no new nodes came within `seconds`.
        """
        deadline = time.monotonic() + seconds
        while True:
            try:
                return [bundle for _, bundle in self._config.bundles(connection.state["living"] or [this_machine()])]
            except ConfigError as error:
                if not self._has_claimed:
                    raise
                if (problem := connection.problem()) or time.monotonic() > deadline:
                    raise LaunchError(f"{error} ({problem or f'no change within {seconds:g} s'})") from error
            self.tick()
            time.sleep(TICK)


class RayScheduler(ClusterScheduler):
    """Starts workers on the nodes of a Ray cluster; see `ClusterScheduler`.

    Args:
        log_dir: directory of the logs, on a file system that all nodes share.
        config: see `RaySchedulerConfig`.
    """

    def __init__(self, log_dir: Path, config: RaySchedulerConfig | None = None) -> None:
        config = config or RaySchedulerConfig()
        super().__init__(log_dir, config, RayNodes(log_dir, config))
