"""Simulated cluster for tests: each node is a node agent on this machine."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import psutil

from rl_contracts.scheduler import Node
from rl_launchers.cluster.nodes import NodeProvider
from rl_launchers.local.sessions import Session, stop_sessions


class LocalNodes(NodeProvider):
    """Provider of nodes whose agents are all processes on this machine.

    Args:
        number: initial number of nodes.
        cores: CPU cores per node.
        gpus: GPUs per node.
    """

    def __init__(self, number: int = 2, cores: int = 2, gpus: int = 0) -> None:
        self.available = [Node(f"node{index}", "127.0.0.1", cores, gpus) for index in range(number)]
        self.agents: dict[str, subprocess.Popen[bytes]] = {}
        self.commands: list[list[str]] = []

    def nodes(self) -> list[Node]:
        return list(self.available)

    def address(self) -> str:
        return "127.0.0.1"

    def start(self, node: Node, command: Sequence[str], env: Mapping[str, str], log: Path) -> None:
        self.commands.append(list(command))
        with log.open("ab") as file:
            self.agents[node.name] = subprocess.Popen(
                list(command), env=dict(env), stdout=file, stderr=file, start_new_session=True
            )

    def end_reason(self, node: Node) -> str:
        code = self.agents[node.name].poll()
        return "" if code is None else f"ended with exit code {code}"

    def close(self) -> None:
        stop_sessions([Session(agent.pid) for agent in self.agents.values()], grace=0.0)
        for agent in self.agents.values():
            agent.wait(10)

    def kill(self, name: str) -> None:
        """Kill all processes of a node at once, like a power failure, and stop offering the node."""
        self.available = [node for node in self.available if node.name != name]
        agent = Session(self.agents[name].pid)
        members = agent.members()  # the reaper and the workers lead separate sessions
        processes = [*members, *(child for member in members for child in member.children(recursive=True))]
        for process in processes:
            with suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)
        self.agents[name].wait(10)
        psutil.wait_procs(processes, timeout=10)
