"""The scheduler of a Ray cluster: its nodes, held by a placement group."""

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

from rl_contracts.config import bounded, require
from rl_contracts.errors import ConfigError, LaunchError
from rl_contracts.runtime.logging import get_logger
from rl_contracts.runtime.machine import usable_cores, visible_gpus
from rl_contracts.scheduler import Node, Resources
from rl_launchers.cluster.nodes import LOOPBACK, NodeProvider
from rl_launchers.cluster.scheduler import ClusterScheduler, ClusterSchedulerConfig
from rl_launchers.supervise import exit_report

logger = get_logger("launcher")

TICK = 0.05
"""Seconds between two looks at what is waited for."""
CONNECT_SECONDS = 120.0
"""Time for Ray to answer, or for a cluster to start on the spot."""
SILENCE = 60.0
"""Seconds without a word about the cluster after which it counts as gone."""

NODE_RESOURCES = ("TMPDIR", "HOSTNAME")
"""Variables that are a node's own, where it has them; all others are the launcher's."""

BY_RAY = ("OMP_NUM_THREADS", "PYTHONBREAKPOINT", "SPT_NOENV")
"""Variables that Ray sets for its workers, and so for the commands of submitted jobs."""


@dataclass
class RaySchedulerConfig(ClusterSchedulerConfig):
    """Which Ray cluster, and what of it a run holds."""

    address: str = bounded("", "host:port, auto, local or empty", lambda text: "://" not in text)
    """Of the cluster, as `ray start` prints it. Empty: the one that RAY_ADDRESS names, or else that `ray start` started
    on this machine; where there is neither, one of this machine alone is started for the run. `local` always starts
    one. The command runs on a machine of the cluster, or there through `ray job submit`."""
    nodes: int = bounded(0, "0 or more", lambda count: count >= 0)
    """How many nodes to hold, each by a bundle of the placement group; 0: `cluster.nodes`, or all that have a core.
    Those that are left stand in for nodes that are lost."""
    cores_per_node: int = bounded(0, "0 or more", lambda count: count >= 0)
    """Cores to hold on each node; 0: all of it."""
    gpus_per_node: int | None = None
    """GPUs to hold on each node; None: all of it."""
    node_resources: dict[str, float] = field(default_factory=dict)
    """Further resources of Ray that each bundle takes, which only nodes of some kind have: `{rollout-pool: 1}`."""
    placement_timeout: float = bounded(60.0, "more than 0 seconds", lambda seconds: seconds > 0)
    """Seconds to wait for the placement group, for example while others use the nodes."""

    def resources(self) -> Resources:
        """What the bundles hold; this machine, where a cluster is to be started."""
        return self._held(living_nodes_at(self._told()) or [this_machine()])

    def use_nodes(self, number: int) -> None:
        """To hold; see the contract."""
        if number:
            agrees = f"{number} as cluster.nodes; set one of the two alone"
            require(self.nodes in (0, number), "launcher.options.nodes", agrees, self.nodes)
            self.nodes = number

    def planned(self) -> Resources:
        """As `resources`; where no cluster answers, or there is none of several nodes, what the settings say."""
        try:
            there = living_nodes_at(self._told())
        except ConfigError:
            there = []
        if there or self._told() == "local" or (self.nodes <= 1 and not self._told()):
            return self._held(there or [this_machine()])
        cores, gpus = self.cores_per_node, self.gpus_per_node or 0
        nodes = tuple(Node(f"node{index}", "", cores, gpus) for index in range(self.nodes or 1))
        return Resources(gpus * len(nodes), cores * len(nodes), nodes)

    def bundles(self, found: Sequence[Mapping[str, Any]]) -> list[tuple[Mapping[str, Any], dict[str, float]]]:
        """What to hold of a cluster: nodes, the largest first, each with its bundle. Ray may take others like them.

        Args:
            found: the living nodes, as `ray_driver` tells of them.

        Raises:
            ConfigError: there are too few nodes that have what is asked of each; the arithmetic.
        """
        least = {"CPU": max(1, self.cores_per_node), "GPU": self.gpus_per_node or 0, **self.node_resources}
        able = [node for node in found if all(node["resources"].get(name, 0) >= n for name, n in least.items())]
        able.sort(key=lambda node: (node["gpus"], node["cores"]), reverse=True)
        wanted = self.nodes or max(1, len(able))
        if len(able) < wanted:
            each = ", ".join(f"{name} {amount:g}" for name, amount in least.items() if amount)
            has = "; ".join(f"{node['name']}: {node['cores']} cores, {node['gpus']} GPUs" for node in found)
            raise ConfigError(
                f"launcher.options: expected {wanted} nodes with {each} each, found {len(able)} among {len(found)} "
                f"({has or 'none'}). Ask for less with launcher.options.nodes, cores_per_node, gpus_per_node or "
                "node_resources, or add nodes to the Ray cluster."
            )
        gpus = self.gpus_per_node
        return [
            (
                node,
                {"CPU": float(self.cores_per_node or node["cores"])}
                | ({"GPU": float(held)} if (held := node["gpus"] if gpus is None else gpus) else {})
                | self.node_resources,
            )
            for node in able[:wanted]
        ]

    def _told(self) -> str:
        return self.address or os.environ.get("RAY_ADDRESS", "")

    def _held(self, found: Sequence[Mapping[str, Any]]) -> Resources:
        """What the bundles hold of a cluster."""
        held = self.bundles(found)
        nodes = [Node(node["name"], node["host"], int(b["CPU"]), int(b.get("GPU", 0))) for node, b in held]
        return Resources(sum(node.gpus for node in nodes), sum(node.cores for node in nodes), tuple(nodes))


def living_nodes_at(address: str) -> list[dict[str, Any]]:
    """The living nodes of the cluster at an address, or that Ray was told of; none where one is to be started.

    Raises:
        ConfigError: the cluster does not answer, or Ray is not installed.
    """
    nodes: list[dict[str, Any]] = describe_cluster(address)["living"]
    return nodes


@cache
def describe_cluster(address: str) -> dict[str, Any]:
    """What `ray_driver.connect` says of a cluster. Asked once, for it takes seconds.

    Raises:
        ConfigError: as for `look`.
    """
    try:
        conversation = DriverConnection(address, "look")
        try:
            if not conversation.wait("found"):
                raise conversation.silent()
        finally:
            conversation.close()
    except LaunchError as error:
        raise ConfigError(str(error)) from error
    return conversation.state


def this_machine() -> dict[str, Any]:
    """The node of a cluster that is started on the spot."""
    cores, gpus = usable_cores(), len(visible_gpus(os.environ))
    own = {"name": "this machine", "host": LOOPBACK, "cores": cores, "gpus": gpus}
    return own | {"resources": {"CPU": cores, "GPU": gpus}}


def agent_environment(node: Mapping[str, str], launcher: Mapping[str, str]) -> dict[str, str]:
    """The launcher's environment on a node, over the node's, without what Ray put into either."""
    own = {name: node[name] for name in NODE_RESOURCES if name in node}
    in_job = "RAY_JOB_CONFIG_JSON_ENV_VAR" in launcher
    merged = {name: value for name, value in node.items() if name not in BY_RAY}
    merged |= {name: value for name, value in launcher.items() if not (in_job and name in BY_RAY)}
    return {name: value for name, value in (merged | own).items() if not name.startswith("RAY_")}


class DriverConnection:
    """With the process that is Ray's driver; see `ray_driver`.

    Args:
        address: of the cluster; empty: that of which Ray was told.
        purpose: `look`, or `hold`, which starts a cluster where there is none.
        log: of the process; None: nowhere.

    Raises:
        LaunchError: Ray is not installed, or the address is of a kind that is not for drivers.
    """

    def __init__(self, address: str, purpose: str, log: Path | None = None) -> None:
        if importlib.util.find_spec("ray") is None:
            raise LaunchError(
                "launcher.kind=ray needs Ray, which is not installed. Install rl-launchers[ray], or in the repository "
                "uv run --package rl-apps --extra ray ..."
            )
        if "://" in (told := address or os.environ.get("RAY_ADDRESS", "")):
            raise LaunchError(
                f"Ray's address {told}: expected host:port, as `ray start` prints it; a run cannot go through the "
                "dashboard or Ray's client. Start it on a machine of the cluster, or submit it with `ray job submit`."
            )
        self._address, self._log = address, log
        self.state: dict[str, Any] = {}
        """The last that it said of each thing."""
        self._heard = time.monotonic()
        with open(log or os.devnull, "ab") as file:
            self._process = subprocess.Popen(
                [sys.executable, "-c", "from rl_launchers.ray.driver import main; main()", address, purpose],
                env=os.environ | {"RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0"},  # else it packs up the directory of `uv run`
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=file,
                start_new_session=True,  # a Ctrl-C in the terminal must not reach it
                text=True,
            )
        self._listener = threading.Thread(target=self._listen, name="ray-driver", daemon=True)
        self._listener.start()

    def send(self, **order: Any) -> None:
        """Give an order; where nobody hears it, `problem` knows why."""
        assert self._process.stdin is not None
        if not self.problem():
            with suppress(OSError):
                self._process.stdin.write(json.dumps(order) + "\n")
                self._process.stdin.flush()

    def problem(self) -> str:
        """Why there is nobody to talk to, in words; empty while there is."""
        if self._process.poll() is not None:
            self._listener.join(timeout=1.0)  # it may have said why
            log = f" (log: {self._log})" if self._log else ""
            why = self.state.get("error") or exit_report.describe_exit(self._process.returncode)
            return f"Ray's driver is gone: {why}{log}"
        silence = time.monotonic() - self._heard
        return f"Ray has said nothing for {silence:.0f} s" if silence > SILENCE and "placed" in self.state else ""

    def wait(self, thing: str, seconds: float = CONNECT_SECONDS, tick: Callable[[], object] = lambda: None) -> bool:
        """Whether a thing was so within some time. What `tick`, called meanwhile, raises ends the wait.

        Raises:
            LaunchError: nobody is there who could say.
        """
        deadline = time.monotonic() + seconds
        while not self.state.get(thing) and time.monotonic() < deadline:
            if (problem := self.problem()) and not self.state.get(thing):
                raise self.silent(problem)
            tick()
            time.sleep(TICK)
        return bool(self.state.get(thing))

    def silent(self, problem: str = f"Ray has said nothing for {CONNECT_SECONDS:g} s") -> LaunchError:
        """The error for a cluster that does not answer."""
        return LaunchError(
            f"launcher.options.address={self._address or '(empty)'}: expected a Ray cluster that answers. {problem}. "
            "Start the command on a machine of the cluster, or through `ray job submit`; `ray stop` forgets a cluster "
            "that is gone; launcher.options.address=local starts one of this machine."
        )

    def close(self) -> None:
        """End the process, and so everything that it started."""
        assert self._process.stdin is not None
        with suppress(OSError):  # what it did not read
            self._process.stdin.close()
        try:
            self._process.wait(timeout=30.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self.state |= json.loads(line)
            self._heard = time.monotonic()


class RayNodes(NodeProvider):
    """The nodes of a placement group.

    A node that Ray drains ends the run as SIGTERM does: this process gets one.

    Args:
        log_dir: where `ray.log` tells what Ray said; all nodes share it.
        config: see `RaySchedulerConfig`.
    """

    def __init__(self, log_dir: Path, config: RaySchedulerConfig) -> None:
        self._log_dir, self._config = Path(log_dir), config
        self._ray: DriverConnection | None = None
        self._numbers, self._starts = itertools.count(), dict[str, str]()
        self._drained = self._claimed = False

    def nodes(self) -> list[Node]:
        """The living nodes on which there is a bundle. The first call waits for the placement group."""
        state = self._state()
        fields = ("name", "host", "cores", "gpus")
        nodes = [Node(**{name: node[name] for name in fields}) for node in state["nodes"]]
        return [replace(node, host=LOOPBACK) for node in nodes] if state["local"] else nodes

    def start(self, node: Node, command: Sequence[str], env: Mapping[str, str], log: Path) -> None:
        """Start the agent through an actor in the node's bundle, which is told of it by a file that only the user may
        read: what Ray is given, others of the cluster can see."""
        number = str(next(self._numbers))
        order = log.absolute().with_suffix(f".order-{number}")
        asked = {"command": list(command), "env": dict(env), "directory": os.getcwd(), "log": str(log.absolute())}
        with open(os.open(order, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
            json.dump(asked, file)
        self._state()
        assert self._ray is not None
        self._starts[node.name] = number
        self._ray.send(do="start", name=node.name, number=number, order=str(order))

    def end_reason(self, node: Node) -> str:
        """Why the agent is gone; every agent is where Ray does not answer."""
        if self._ray is None:
            return "was ended"
        if (draining := self._ray.state["draining"]) and not self._drained:
            self._drained = True
            logger.warning("Ray drains %s: the run ends as with SIGTERM.", ", ".join(draining))
            os.kill(os.getpid(), signal.SIGTERM)
        why: str = self._ray.state["ended"].get(self._starts.get(node.name, ""), "")
        return why or (f"cannot be reached: {problem}" if (problem := self._ray.problem()) else "")

    def close(self) -> None:
        """End the agents, and let go of the placement group and of a cluster that was started on the spot."""
        conversation, self._ray = self._ray, None
        if conversation is not None:
            conversation.close()
        self._forget_orders()  # of agents that Ray did not start

    def address(self) -> str:
        """Of this machine, as the cluster knows it."""
        state = self._state()
        return LOOPBACK if state["local"] else str(state["address"])

    def _forget_orders(self) -> None:
        for order in self._log_dir.glob("*.order-*"):
            order.unlink(missing_ok=True)

    def _state(self) -> dict[str, Any]:
        if self._ray is None:
            self._log_dir.mkdir(parents=True, exist_ok=True)
            self._forget_orders()  # of a launcher that was killed
            conversation = DriverConnection(self._config.address, "hold", self._log_dir / "ray.log")
            try:
                self._claim(conversation)
            except BaseException:
                conversation.close()
                raise
            self._ray = conversation
        return self._ray.state

    def _claim(self, conversation: DriverConnection) -> None:
        if not conversation.wait("found", tick=self.tick):
            raise conversation.silent()
        state, seconds = conversation.state, self._config.placement_timeout
        bundles, self._claimed = self._bundles(conversation, seconds), True
        conversation.send(do="claim", bundles=bundles)
        if not conversation.wait("placed", seconds, self.tick):
            free, total = state["free"], state["total"]
            has = ", ".join(f"{free.get(name, 0):g} of {total[name]:g} {name}" for name in sorted(bundles[0]))
            raise LaunchError(
                f"launcher.options.placement_timeout={seconds:g}: expected a node for each of {len(bundles)} bundles "
                f"({bundles}), found none in time; before, {has} were free. Wait until others have ended, or ask for "
                "less with launcher.options.nodes, cores_per_node or gpus_per_node."
            )

    def _bundles(self, conversation: DriverConnection, seconds: float) -> list[dict[str, float]]:
        """What to claim. Where nodes were lost meanwhile, for others there is some time to come.

        Raises:
            ConfigError: there were never enough.
            LaunchError: they do not come.
        """
        deadline = time.monotonic() + seconds
        while True:
            try:
                return [bundle for _, bundle in self._config.bundles(conversation.state["living"] or [this_machine()])]
            except ConfigError as error:
                if not self._claimed:
                    raise
                if (problem := conversation.problem()) or time.monotonic() > deadline:
                    late = f"not in launcher.options.placement_timeout={seconds:g} s"
                    raise LaunchError(f"{error} ({problem or late})") from error
            self.tick()
            time.sleep(TICK)


class RayScheduler(ClusterScheduler):
    """Starts workers on the nodes of a Ray cluster; see `ClusterScheduler`.

    Args:
        log_dir: directory of the logs, which all nodes share.
        config: see `RaySchedulerConfig`.
    """

    def __init__(self, log_dir: Path, config: RaySchedulerConfig | None = None) -> None:
        config = config or RaySchedulerConfig()
        super().__init__(log_dir, config, RayNodes(log_dir, config))
