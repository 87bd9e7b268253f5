"""Ray driver process of a run: holds a placement group, and an actor with the node agent on each of its nodes.

The launcher itself is not a Ray driver. Ray takes over a driver's SIGTERM handler, packages its working directory under
`uv run`, and ends the driver if the head of the cluster is gone. This process reads orders from standard input and
writes states to standard output, both as lines of JSON. The first state describes the cluster. The following ones,
twice a second, describe the placement group, the agents and the nodes. At the end of its input, the process and
everything that it started end.
"""

from __future__ import annotations

import json
import logging
import os
import queue
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import ray
from ray._common.utils import get_ray_address_file
from ray._private.state import state as state_of_ray
from ray.util.placement_group import placement_group, placement_group_table
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from rl_contracts.scheduler import Worker
from rl_launchers.local.process import LocalProcess
from rl_launchers.local.reaper import Reaper
from rl_launchers.ray.scheduler import agent_environment
from rl_launchers.supervise.exit_report import describe_exit

LOOK_SECONDS = 0.5
"""Seconds between two polls of the cluster."""
CALL_SECONDS = 10.0
"""Seconds to wait for a TCP connection to the cluster."""
END_SECONDS = 20.0
"""Seconds after the end of its input until this process exits forcibly."""
OBJECT_STORE = 100 * 1024 * 1024
"""Size in bytes of the object store of a cluster started for the run, which does not use the store."""


class NodeAgent:
    """Actor on a node that starts the node agent and waits for its end. If the actor dies, a reaper kills the agent.

    Args:
        order: path of a file with the agent's command, environment, working directory and log. Ray shows the arguments
            of an actor to other users of the cluster, so the secrets in the environment are passed in this file.
    """

    def __init__(self, order: str) -> None:
        job = json.loads(Path(order).read_text(encoding="utf-8"))
        Path(order).unlink()
        gpus = {"CUDA_VISIBLE_DEVICES": ",".join(map(str, ray.get_gpu_ids()))}
        with suppress(PermissionError):  # Ray gives its workers a low priority on the node
            os.setpriority(os.PRIO_PROCESS, 0, 0)
        with suppress(OSError):  # the working directory may not exist on this node
            os.chdir(job["directory"])
        self._reaper = Reaper()
        self._process = LocalProcess(
            Worker("agent", 0, "", None, Path(job["log"])),
            job["command"],
            agent_environment(os.environ, job["env"]) | gpus,
            self._reaper.fd,
        )

    def wait(self) -> str:
        """Wait for the end of the agent and return a description of its exit."""
        while self._process.worker.exit_code is None:
            self._process.collect(timeout=1.0)
        return describe_exit(self._process.worker.exit_code)


class PlacementGang:
    """Placement group of a run, with the actors of its node agents."""

    def __init__(self) -> None:
        self._group: Any = None
        self._bundles: list[dict[str, float]] = []
        self._actors: dict[str, Any] = {}
        self._pending: dict[Any, tuple[str, str]] = {}
        self._ended: dict[str, str] = {}
        self._lost: set[str] = set()

    def claim(self, bundles: list[dict[str, float]]) -> None:
        """Request a placement group that puts each bundle on a separate node."""
        self._group, self._bundles = placement_group(bundles, "STRICT_SPREAD"), bundles

    def start(self, name: str, number: str, order: str) -> None:
        """Start an agent on a node; `number` identifies it in `ended` of `status`."""
        index = next((index for index, node in self._nodes_by_bundle().items() if name_of(node) == name), None)
        if index is None:
            self._ended[number] = "was lost before its agent was started"
            return
        bundle = self._bundles[index]
        actor = ray.remote(NodeAgent).options(
            num_cpus=bundle.get("CPU", 0),
            num_gpus=bundle.get("GPU", 0),
            scheduling_strategy=PlacementGroupSchedulingStrategy(self._group, index),
        )
        self._actors[number] = actor.remote(order)
        self._pending[self._actors[number].wait.remote()] = (number, name)

    def status(self) -> dict[str, Any]:
        """Return the state to send to the launcher."""
        for wait in ray.wait([*self._pending], num_returns=len(self._pending), timeout=0)[0] if self._pending else []:
            self._record_end(*self._pending.pop(wait), wait)
        nodes = self._nodes_by_bundle()
        draining = state_of_ray.get_draining_nodes()
        return {
            "placed": bool(self._bundles) and len(nodes) == len(self._bundles),
            "nodes": [
                describe_node(nodes[index], self._bundles[index])
                for index in sorted(nodes)
                if name_of(nodes[index]) not in self._lost
            ],
            "ended": self._ended,
            "draining": {
                name_of(node): draining[node["NodeID"]] for node in nodes.values() if node["NodeID"] in draining
            },
            "living": living_nodes(),
        }

    def _record_end(self, number: str, name: str, wait: Any) -> None:
        ray.kill(self._actors.pop(number))  # free its bundle
        try:
            self._ended[number] = ray.get(wait)
        except ray.exceptions.ActorUnavailableError:  # Ray does not know the cause yet
            self._ended[number] = "no longer responds to Ray"
            self._lost.add(name)
        except ray.exceptions.RayError as error:
            self._ended[number] = f"was lost, according to Ray: {' '.join(str(error).split())}"

    def _nodes_by_bundle(self) -> dict[int, dict[str, Any]]:
        """Return the live nodes by the index of their bundle."""
        if self._group is None:
            return {}
        live_nodes = {node["NodeID"]: node for node in ray.nodes() if node["Alive"]}
        node_ids = placement_group_table(self._group)["bundles_to_node_id"]
        return {int(index): live_nodes[node] for index, node in node_ids.items() if node in live_nodes}


def name_of(node: dict[str, Any]) -> str:
    """Return the name of a node: its name in Ray, which may be its address, and the first digits of its id."""
    return f"{node['NodeName']}-{node['NodeID'][:6]}"


def describe_node(node: dict[str, Any], bundle: dict[str, float] | None = None) -> dict[str, Any]:
    """Return the description of a node for the launcher, with the cores and GPUs of `bundle`, or all if None."""
    amounts = node["Resources"] if bundle is None else bundle
    cores, gpus = int(amounts.get("CPU", 0)), int(amounts.get("GPU", 0))
    description = {"name": name_of(node), "host": node["NodeManagerAddress"], "cores": cores, "gpus": gpus}
    return description | {"resources": node["Resources"]}


def living_nodes() -> list[dict[str, Any]]:
    """Return the live nodes of the cluster, as `describe_node` describes them."""
    return [describe_node(node) for node in ray.nodes() if node["Alive"]]


def connect(address: str, purpose: str, scratch: str) -> dict[str, Any]:
    """Connect to the Ray cluster.

    Args:
        address: address of the cluster; empty for Ray's default.
        purpose: if there is no cluster, `hold` starts a local one, and `look` only returns `local: True`.
        scratch: temporary directory of a local cluster.

    Returns:
        the state to send to the launcher.
    """
    address_file = Path(get_ray_address_file(None))  # written by `ray start`
    address_or_local = (
        address
        or os.environ.get("RAY_ADDRESS")
        or (address_file.read_text().strip() if address_file.exists() else "local")
    )
    local = address_or_local == "local"
    if local and purpose == "look":
        return {"found": True, "local": True, "living": []}
    host, _, port = address_or_local.rpartition(":")
    if port.isdecimal():
        # fail early; Ray would retry for minutes
        socket.create_connection((host, int(port)), timeout=CALL_SECONDS).close()
    options: dict[str, Any] = {"include_dashboard": False, "object_store_memory": OBJECT_STORE, "_temp_dir": scratch}
    ray.init(
        "local" if local else address or None,  # with None, Ray reads RAY_ADDRESS itself, and the token with it
        log_to_driver=False,
        logging_level=logging.ERROR,
        **(options if local else {}),
    )
    return {
        "found": True,
        "local": local,
        "living": living_nodes(),
        "free": ray.available_resources(),
        "total": ray.cluster_resources(),
        "address": ray.util.get_node_ip_address(),
    }


def main() -> None:
    """Run the driver process.

    Command-line arguments: the address of the cluster, or "" for Ray's default; and the purpose, `look` or `hold`.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    output = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # Ray writes to standard output
    orders: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
    threading.Thread(target=_read_orders, args=(orders,), daemon=True).start()
    scratch = tempfile.mkdtemp(prefix="rl-ray-", dir="/tmp")  # Ray puts sockets there, whose paths must be short
    try:
        address, purpose = sys.argv[1:]
        output.write(json.dumps(connect(address, purpose, scratch)) + "\n")
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # Ray installed its own handler
        if purpose == "hold":
            _serve(PlacementGang(), orders, output)
    except Exception as error:
        with suppress(OSError):
            output.write(json.dumps({"error": f"{type(error).__name__}: {error}"}) + "\n")
        raise
    finally:
        ray.shutdown()
        shutil.rmtree(scratch, ignore_errors=True)


def _serve(gang: PlacementGang, orders: queue.SimpleQueue[dict[str, Any]], output: Any) -> None:
    while True:
        with suppress(queue.Empty):
            order = orders.get(timeout=LOOK_SECONDS)
            if order["do"] == "end":
                break
            getattr(gang, order.pop("do"))(**order)
        output.write(json.dumps(gang.status()) + "\n")


def _read_orders(orders: queue.SimpleQueue[dict[str, Any]]) -> None:
    for line in sys.stdin:
        orders.put(json.loads(line))
    orders.put({"do": "end"})
    time.sleep(END_SECONDS)
    os._exit(1)
