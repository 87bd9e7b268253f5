"""Run a real Ray cluster of several nodes on this machine, for tests and experiments.

    python infra/clusters/ray.py start [--nodes 2] [--cpus 2] [--gpus 0] [--dashboard] [DIRECTORY]
    python infra/clusters/ray.py add-node DIRECTORY
    python infra/clusters/ray.py kill-node DIRECTORY NODE
    python infra/clusters/ray.py stop DIRECTORY

`start` prints the directory and the environment variables of the cluster; `eval "$(... start)"` sets them in a shell.
Node 0 is Ray's head node. A node is one `ray start --block` and its child processes. It has a separate directory for
temporary files (`DIRECTORY/NODE/tmp`), a small object store, and the address 127.0.0.(n + 2) for node n. `kill-node`
sends SIGKILL to all processes of a node, which simulates a power failure. All connections need the token in
`DIRECTORY/token`. `stop` kills all nodes and deletes the directory. `--gpus` adds fake GPUs: Ray schedules them, but no
process can compute on them.
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
"""Environment variable that identifies the processes of a node; its value is unique to the node."""
ATTEMPTS = 3
"""Maximum number of starts of a node. On a busy machine, Ray's own time limit of 30 s may pass."""
SECONDS = 120.0
"""Time limit of each start in seconds."""
STARTED = "Ray runtime started."
LIGHT = {
    "RAY_AUTH_MODE": "token",
    "RAY_USAGE_STATS_ENABLED": "0",
    "SPT_NOENV": "1",  # processes that change their title keep their environment, and so MARK
    "RAY_memory_monitor_refresh_ms": "0",  # other programs on a small machine must not make Ray kill a worker
    "RAY_prestart_worker_first_driver": "0",  # no idle interpreters
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",  # otherwise a head under `uv run` packs its directory for jobs, and they fail
    "RAY_health_check_period_ms": "1000",  # a node counts as dead after 5 failed checks; Ray's default is 3 s
}
OBJECT_STORE = 80 * 1024 * 1024
"""Size of a node's object store in bytes; Ray's minimum."""


class RayCluster:
    """A cluster whose state is in one directory.

    Args:
        directory: Directory of a running cluster, or an empty or missing one for `start`. Keep the path short: Ray
            creates sockets in it, and the path of a socket is limited to 107 characters.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory.resolve()
        self._token = self.directory / "token"
        self._commands: dict[int, list[str]] = {}

    @property
    def address(self) -> str:
        """Address of the head node, `host:port`."""
        return (self.directory / "address").read_text()

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables that a program needs to use the cluster."""
        token = {"RAY_AUTH_MODE": LIGHT["RAY_AUTH_MODE"], "RAY_AUTH_TOKEN_PATH": str(self._token)}
        return {"RAY_ADDRESS": self.address, **token}

    @property
    def dashboard(self) -> str:
        """URL for job submission, if `start` was called with `dashboard=True`."""
        return "http://" + (self.directory / "dashboard").read_text()

    def start(self, nodes: int = 2, cpus: int = 2, gpus: int = 0, dashboard: bool = False) -> None:
        """Start nodes 0 to `nodes` - 1 and return when all are ready."""
        self.directory.mkdir(parents=True, exist_ok=True)
        self._token.touch(mode=0o600)
        self._token.write_text(secrets.token_hex(32))
        port, client_port, dashboard_port = free_port(), free_port(), free_port()
        (self.directory / "address").write_text(f"{_host(0)}:{port}")
        (self.directory / "dashboard").write_text(f"127.0.0.1:{dashboard_port}" if dashboard else "")
        ports = [f"--port={port}", f"--ray-client-server-port={client_port}", f"--dashboard-port={dashboard_port}"]
        self._start(0, ["--head", *ports, f"--include-dashboard={dashboard}"], cpus, gpus)
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
        """Kill all processes of a node and return when they have ended."""
        _kill(self._tmp(number))

    def processes(self, number: int) -> list[psutil.Process]:
        """Return the processes of a node: those of Ray and those that Ray started."""
        return _marked(self._tmp(number))

    def stop(self) -> None:
        """Kill all nodes and delete the directory."""
        for path in self.directory.glob("[0-9]*"):
            self.kill_node(int(path.name))
        shutil.rmtree(self.directory, ignore_errors=True)

    def _tmp(self, number: int) -> str:
        return str(self.directory / str(number) / "tmp")

    def _start(self, number: int, arguments: list[str], cpus: int, gpus: int) -> None:
        common = [
            "--block",
            f"--node-ip-address={_host(number)}",
            f"--temp-dir={self.directory / str(number)}",
            f"--dashboard-agent-listen-port={free_port()}",
        ]
        light = [f"--object-store-memory={OBJECT_STORE}", "--include-log-monitor=false", "--disable-usage-stats"]
        self._commands[number] = [*common, *light, *arguments, f"--num-cpus={cpus}", f"--num-gpus={gpus}"]
        self._launch(number)

    def _launch(self, number: int) -> None:
        Path(self._tmp(number)).mkdir(parents=True)
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
        with self._log(number).open("wb") as log:
            subprocess.Popen(
                [sys.executable, "-m", "ray.scripts.scripts", "start", *self._commands[number]],
                env=inherited | LIGHT | {"RAY_AUTH_TOKEN_PATH": str(self._token), MARK: self._tmp(number)},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def _wait(self, number: int, condition: Callable[[str], bool]) -> None:
        """Return when the log of a node meets the condition; restart the node if it ends or exceeds the time limit."""
        for remaining in reversed(range(ATTEMPTS)):
            deadline = time.monotonic() + SECONDS
            while self.processes(number) and time.monotonic() < deadline:
                if condition(self._log(number).read_text()):
                    return
                if number and not self.processes(0):  # without a head, the node would retry until the deadline
                    self._fail("the head node ended", 0)
                time.sleep(0.1)
            if not remaining:
                self._fail(f"node {number} ended or was not ready within {SECONDS:g} s, {ATTEMPTS} times", number)
            self.kill_node(number)
            shutil.rmtree(self.directory / str(number))
            self._launch(number)

    def _fail(self, reason: str, number: int) -> NoReturn:
        log = self._log(number).read_text()
        self.stop()
        raise RuntimeError(f"{reason}; its log:\n{log}")

    def _log(self, number: int) -> Path:
        return self.directory / str(number) / "node.log"


def _host(number: int) -> str:
    return f"127.0.0.{number + 2}"  # Ray replaces 127.0.0.1 by the machine's network address


def _listens(host: str, port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex((host, port)) == 0


@contextmanager
def running(nodes: int = 2, cpus: int = 2, gpus: int = 0, dashboard: bool = False) -> Iterator[RayCluster]:
    """Run a cluster inside the context."""
    cluster = RayCluster(Path(tempfile.mkdtemp(prefix="rayc-", dir="/tmp")))
    try:
        cluster.start(nodes, cpus, gpus, dashboard)
        yield cluster
    finally:
        cluster.stop()


def _marked(mark: str) -> list[psutil.Process]:
    processes = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.environ().get(MARK) == mark and process.status() != psutil.STATUS_ZOMBIE:
                processes.append(process)
    return processes


def _kill(mark: str, timeout: float = 30.0) -> None:
    deadline = time.monotonic() + timeout
    while processes := _marked(mark):
        if time.monotonic() > deadline:
            raise RuntimeError(f"processes survived SIGKILL for {timeout:g} s: {processes}")
        for process in processes:
            with suppress(psutil.Error):
                process.kill()
        psutil.wait_procs(processes, timeout=1.0)


def main() -> int:
    """Run the command line and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    start, add = commands.add_parser("start"), commands.add_parser("add-node")
    kill, stop = commands.add_parser("kill-node"), commands.add_parser("stop")
    start.add_argument("--nodes", type=int, default=2)
    start.add_argument("--dashboard", action="store_true")
    for command in (start, add):
        command.add_argument("--cpus", type=int, default=2, help="CPUs per node")
        command.add_argument("--gpus", type=int, default=0, help="fake GPUs per node")
    start.add_argument("directory", type=Path, nargs="?")
    for command in (add, kill, stop):
        command.add_argument("directory", type=Path)
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
