"""The process that is Ray's driver for a run: it holds a placement group, and on each node an actor with the agent.

The launcher itself is no driver of Ray, which takes over a driver's SIGTERM, packs up the working directory of one that
`uv run` started, and ends it when the head of the cluster is gone. This process reads orders as lines of JSON from its
standard input, and writes lines of JSON to its standard output: first what the cluster holds, then, twice a second,
what became of the placement group, the agents and the nodes. When its input ends, so does everything that it started.
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
"""Between two looks at the cluster."""
CALL_SECONDS = 10.0
"""For a cluster to answer a call."""
END_SECONDS = 20.0
"""For this process to end by itself, when its input has."""
OBJECT_STORE = 100 * 1024 * 1024
"""Bytes of the object store of a cluster that is started on the spot: nothing of a run goes through it."""


class NodeAgent:
    """The actor on a node: starts the agent and waits for its end. When the actor is gone, a keeper ends the agent.

    Args:
        order: file with the command, environment, working directory and log. It may hold what others must not read,
            so it is what the actor is given in place of all that.
    """

    def __init__(self, order: str) -> None:
        asked = json.loads(Path(order).read_text(encoding="utf-8"))
        Path(order).unlink()
        gpus = {"CUDA_VISIBLE_DEVICES": ",".join(map(str, ray.get_gpu_ids()))}
        with suppress(PermissionError):  # Ray's workers yield to everything else there is on a node
            os.setpriority(os.PRIO_PROCESS, 0, 0)
        with suppress(OSError):  # a working directory that this node does not have
            os.chdir(asked["directory"])
        self._keeper = Reaper()
        self._process = LocalProcess(
            Worker("agent", 0, "", None, Path(asked["log"])),
            asked["command"],
            agent_environment(os.environ, asked["env"]) | gpus,
            self._keeper.fd,
        )

    def wait(self) -> str:
        """Return when the agent has ended, with how it did in words."""
        while self._process.worker.exit_code is None:
            self._process.collect(timeout=1.0)
        return describe_exit(self._process.worker.exit_code)


class PlacementGang:
    """The placement group, and what happens to the agents in it."""

    def __init__(self) -> None:
        self._group: Any = None
        self._bundles: list[dict[str, float]] = []
        self._actors: dict[str, Any] = {}
        self._waits: dict[Any, tuple[str, str]] = {}
        self._ended: dict[str, str] = {}
        self._lost: set[str] = set()

    def claim(self, bundles: list[dict[str, float]]) -> None:
        """Ask Ray for a node for each bundle."""
        self._group, self._bundles = placement_group(bundles, "STRICT_SPREAD"), bundles

    def start(self, name: str, number: str, order: str) -> None:
        """Start an agent on a node; `number` is what it is called from then on."""
        index = next((index for index, node in self._places().items() if name_of(node) == name), None)
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
        self._waits[self._actors[number].wait.remote()] = (number, name)

    def status(self) -> dict[str, Any]:
        """The state as it is told to the launcher."""
        for wait in ray.wait([*self._waits], num_returns=len(self._waits), timeout=0)[0] if self._waits else []:
            self._end(*self._waits.pop(wait), wait)
        places = self._places()
        draining = state_of_ray.get_draining_nodes()
        return {
            "placed": bool(self._bundles) and len(places) == len(self._bundles),
            "nodes": [
                described(places[index], self._bundles[index])
                for index in sorted(places)
                if name_of(places[index]) not in self._lost
            ],
            "ended": self._ended,
            "draining": [name_of(node) for node in places.values() if node["NodeID"] in draining],
            "living": living_nodes(),
        }

    def _end(self, number: str, name: str, wait: Any) -> None:
        ray.kill(self._actors.pop(number))  # it holds the bundle
        try:
            self._ended[number] = ray.get(wait)
        except ray.exceptions.ActorUnavailableError:  # and Ray does not know why yet
            self._ended[number] = "does not answer Ray any more"
            self._lost.add(name)
        except ray.exceptions.RayError as error:
            self._ended[number] = f"was lost. Ray says: {' '.join(str(error).split())}"

    def _places(self) -> dict[int, dict[str, Any]]:
        """Living nodes by the bundle that is on them."""
        if self._group is None:
            return {}
        living = {node["NodeID"]: node for node in ray.nodes() if node["Alive"]}
        where = placement_group_table(self._group)["bundles_to_node_id"]
        return {int(index): living[node] for index, node in where.items() if node in living}


def name_of(node: dict[str, Any]) -> str:
    """What a node is called here: as Ray calls it, which may be its address, and the beginning of its id."""
    return f"{node['NodeName']}-{node['NodeID'][:6]}"


def described(node: dict[str, Any], held: dict[str, float] | None = None) -> dict[str, Any]:
    """What the launcher is told of a node: all of it, or the part that is `held`."""
    amounts = node["Resources"] if held is None else held
    cores, gpus = int(amounts.get("CPU", 0)), int(amounts.get("GPU", 0))
    own = {"name": name_of(node), "host": node["NodeManagerAddress"], "cores": cores, "gpus": gpus}
    return own | {"resources": node["Resources"]}


def living_nodes() -> list[dict[str, Any]]:
    """The nodes of the cluster, as the launcher is told of them."""
    return [described(node) for node in ray.nodes() if node["Alive"]]


def connect(address: str, purpose: str, scratch: str) -> dict[str, Any]:
    """Join the cluster, or, to `hold` one where there is none, start one in the directory `scratch`.

    Returns:
        what there is, as it is told to the launcher.
    """
    last = Path(get_ray_address_file(None))  # that `ray start` wrote
    address_or_local = (
        address or os.environ.get("RAY_ADDRESS") or (last.read_text().strip() if last.exists() else "local")
    )
    local = address_or_local == "local"
    if local and purpose == "look":
        return {"found": True, "local": True, "living": []}
    host, _, port = address_or_local.rpartition(":")
    if port.isdecimal():
        socket.create_connection((host, int(port)), timeout=CALL_SECONDS).close()  # Ray would try for minutes
    started: dict[str, Any] = {"include_dashboard": False, "object_store_memory": OBJECT_STORE, "_temp_dir": scratch}
    ray.init(
        "local" if local else address or None,  # where Ray was told, it also knows whether to show its token
        log_to_driver=False,
        logging_level=logging.ERROR,
        **(started if local else {}),
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
    """The process. Its arguments: the address of the cluster (empty: that of which Ray was told), `look`
    or `hold`."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    output = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # where Ray writes
    orders: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(orders,), daemon=True).start()
    scratch = tempfile.mkdtemp(prefix="rl-ray-", dir="/tmp")  # where paths are short: Ray puts sockets there
    try:
        address, purpose = sys.argv[1:]
        output.write(json.dumps(connect(address, purpose, scratch)) + "\n")
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # which Ray took
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


def _read(orders: queue.SimpleQueue[dict[str, Any]]) -> None:
    for line in sys.stdin:
        orders.put(json.loads(line))
    orders.put({"do": "end"})
    time.sleep(END_SECONDS)
    os._exit(1)
