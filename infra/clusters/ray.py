"""A real Ray cluster of several nodes on this machine, for tests and for trying things out.

    python infra/clusters/ray.py start [--nodes 2] [--cpus 2] [--gpus 0] [--dashboard] [DIRECTORY]
    python infra/clusters/ray.py add-node DIRECTORY
    python infra/clusters/ray.py kill-node DIRECTORY NODE
    python infra/clusters/ray.py stop DIRECTORY

`start` prints the directory, and the variables that a program needs to find the cluster: `eval "$(... start)"` sets
them in a shell. Node 0 is Ray's head. A node is a `ray start --block` with everything below it, has temporary files of
its own (`DIRECTORY/NODE/tmp`), a small object store, and may be killed at any time: `kill-node` sends SIGKILL to its
raylet and to all that runs below it, as a power cut would. Node n has the address 127.0.0.(n + 2), and everything asks
for a token, which lies in `DIRECTORY/token`. `stop` leaves nothing behind. GPUs are made up (`--gpus`): Ray counts them
and hands them out, but nothing can compute on them.
"""

from __future__ import annotations

import argparse
import os
import secrets
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NoReturn

import psutil

from rl_contracts.testing.processes import free_port

MARK = "TMPDIR"
"""Environment variable by which everything that runs on a node is found: no two nodes have the same."""
ATTEMPTS = 3
"""Starts of a node, each of which Ray gives up after 30 s: a machine may be busy."""
SECONDS = 120.0
"""For each of them."""
STARTED = "Ray runtime started."
LIGHT = {
    "RAY_AUTH_MODE": "token",
    "RAY_USAGE_STATS_ENABLED": "0",
    "SPT_NOENV": "1",  # processes that rename themselves keep the environment by which they are found
    "RAY_memory_monitor_refresh_ms": "0",  # a small machine's other programs are no reason to kill a worker
    "RAY_prestart_worker_first_driver": "0",  # no idle interpreters
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",  # else a head below `uv run` packs up its directory for the jobs, which fail
    "RAY_health_check_period_ms": "1000",  # 5 refusals make a node dead; Ray's own period is 3 s
}
OBJECT_STORE = 80 * 1024 * 1024
"""Bytes; the least that Ray takes."""


class RayCluster:
    """A cluster in a directory, which holds all that is to know about it.

    Args:
        directory: of the cluster, empty or one that `start` was called for. Keep its path short: Ray puts sockets
            there, whose paths may have 107 characters.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory.resolve()
        self._token = self.directory / "token"
        self._commands: dict[int, list[str]] = {}

    @property
    def address(self) -> str:
        """`host:port` of the head."""
        return (self.directory / "address").read_text()

    @property
    def environment(self) -> dict[str, str]:
        """What a program has in its environment to use the cluster."""
        token = {"RAY_AUTH_MODE": LIGHT["RAY_AUTH_MODE"], "RAY_AUTH_TOKEN_PATH": str(self._token)}
        return {"RAY_ADDRESS": self.address, **token}

    @property
    def dashboard(self) -> str:
        """URL to which jobs are submitted, where `start` was told to have a dashboard."""
        return "http://" + (self.directory / "dashboard").read_text()

    def start(self, nodes: int = 2, cpus: int = 2, gpus: int = 0, dashboard: bool = False) -> None:
        """Start nodes 0 to `nodes` - 1 and return when all are there."""
        self.directory.mkdir(parents=True, exist_ok=True)
        self._token.touch(mode=0o600)
        self._token.write_text(secrets.token_hex(32))
        port, client, board = free_port(), free_port(), free_port()
        (self.directory / "address").write_text(f"{_host(0)}:{port}")
        (self.directory / "dashboard").write_text(f"127.0.0.1:{board}" if dashboard else "")
        head = ["--head", f"--port={port}", f"--ray-client-server-port={client}", f"--dashboard-port={board}"]
        self._start(0, [*head, f"--include-dashboard={dashboard}"], cpus, gpus)
        self._wait(0, lambda log: _listens(_host(0), port))
        for number in range(1, nodes):
            self._start(number, [f"--address={self.address}"], cpus, gpus)
        for number in range(nodes):
            self._wait(number, lambda log: STARTED in log)

    def add_node(self, cpus: int = 2, gpus: int = 0) -> int:
        """Start one more node and return its number."""
        number = len([*self.directory.glob("[0-9]*")])
        self._start(number, [f"--address={self.address}"], cpus, gpus)
        self._wait(number, lambda log: STARTED in log)
        return number

    def kill_node(self, number: int) -> None:
        """Kill a node and everything that runs on it, and return when nothing of it is left."""
        _kill(self._tmp(number))

    def processes(self, number: int) -> list[psutil.Process]:
        """Everything that runs on a node: Ray's own, and what was started through it."""
        return _marked(self._tmp(number))

    def stop(self) -> None:
        """Kill all nodes and delete the directory."""
        for path in self.directory.glob("[0-9]*"):
            self.kill_node(int(path.name))
        shutil.rmtree(self.directory, ignore_errors=True)

    def _tmp(self, number: int) -> str:
        return str(self.directory / str(number) / "tmp")

    def _start(self, number: int, arguments: list[str], cpus: int, gpus: int) -> None:
        host, place, agent = _host(number), self.directory / str(number), free_port()
        common = [
            "--block",
            f"--node-ip-address={host}",
            f"--temp-dir={place}",
            f"--dashboard-agent-listen-port={agent}",
        ]
        light = [f"--object-store-memory={OBJECT_STORE}", "--include-log-monitor=false", "--disable-usage-stats"]
        self._commands[number] = [*common, *light, *arguments, f"--num-cpus={cpus}", f"--num-gpus={gpus}"]
        self._launch(number)

    def _launch(self, number: int) -> None:
        Path(self._tmp(number)).mkdir(parents=True)
        plain = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
        with self._log(number).open("wb") as log:
            subprocess.Popen(
                [sys.executable, "-m", "ray.scripts.scripts", "start", *self._commands[number]],
                env=plain | LIGHT | {"RAY_AUTH_TOKEN_PATH": str(self._token), MARK: self._tmp(number)},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def _wait(self, number: int, condition: Callable[[str], bool]) -> None:
        """Return when a node is there; it is started anew where it ends, or is not there in time."""
        for left in reversed(range(ATTEMPTS)):
            deadline = time.monotonic() + SECONDS
            while self.processes(number) and time.monotonic() < deadline:
                if condition(self._log(number).read_text()):
                    return
                if number and not self.processes(0):  # for which a node would ask until the deadline
                    self._give_up("the head ended", 0)
                time.sleep(0.1)
            if not left:
                self._give_up(f"node {number} ended, or was not there within {SECONDS:g} s, {ATTEMPTS} times", number)
            self.kill_node(number)
            shutil.rmtree(self.directory / str(number))
            self._launch(number)

    def _give_up(self, why: str, number: int) -> NoReturn:
        said = self._log(number).read_text()
        self.stop()
        raise RuntimeError(f"{why}; its log:\n{said}")

    def _log(self, number: int) -> Path:
        return self.directory / str(number) / "node.log"


def _host(number: int) -> str:
    return f"127.0.0.{number + 2}"  # Ray takes 127.0.0.1 for this machine's address in its network


def _listens(host: str, port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex((host, port)) == 0


@contextmanager
def running(nodes: int = 2, cpus: int = 2, gpus: int = 0, dashboard: bool = False) -> Iterator[RayCluster]:
    """A cluster while the context is entered."""
    cluster = RayCluster(Path(tempfile.mkdtemp(prefix="rayc-", dir="/tmp")))
    try:
        cluster.start(nodes, cpus, gpus, dashboard)
        yield cluster
    finally:
        cluster.stop()


def _marked(mark: str) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.environ().get(MARK) == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def _kill(mark: str, patience: float = 30.0) -> None:
    deadline = time.monotonic() + patience
    while left := _marked(mark):
        if time.monotonic() > deadline:
            raise RuntimeError(f"these outlived SIGKILL: {left}")
        for process in left:
            with suppress(psutil.Error):
                process.kill()
        psutil.wait_procs(left, timeout=1.0)


def main() -> int:
    """The program; see the top of the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    start, add = commands.add_parser("start"), commands.add_parser("add-node")
    kill, stop = commands.add_parser("kill-node"), commands.add_parser("stop")
    start.add_argument("--nodes", type=int, default=2)
    start.add_argument("--dashboard", action="store_true")
    for each in (start, add):
        each.add_argument("--cpus", type=int, default=2, help="of each node")
        each.add_argument("--gpus", type=int, default=0, help="of each node")
    start.add_argument("directory", type=Path, nargs="?")
    for each in (add, kill, stop):
        each.add_argument("directory", type=Path)
    kill.add_argument("node", type=int)
    arguments = parser.parse_args()
    cluster = RayCluster(arguments.directory or Path(tempfile.mkdtemp(prefix="rayc-", dir="/tmp")))
    if arguments.command == "start":
        cluster.start(arguments.nodes, arguments.cpus, arguments.gpus, arguments.dashboard)
        print(f"# {cluster.directory}" + (f" {cluster.dashboard}" if arguments.dashboard else ""))
        for name, value in cluster.environment.items():
            print(f"export {name}={shlex.quote(value)}")
    elif arguments.command == "add-node":
        print(cluster.add_node(arguments.cpus, arguments.gpus))
    elif arguments.command == "kill-node":
        cluster.kill_node(arguments.node)
    else:
        cluster.stop()
    return 0


if __name__ == "__main__":
    sys.exit(main())
