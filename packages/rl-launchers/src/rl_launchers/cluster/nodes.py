"""Interface through which a cluster scheduler gets its machines; the only part that differs between clusters."""

from __future__ import annotations

import socket
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

from rl_contracts.scheduler import Node

LOOPBACK = "127.0.0.1"


class NodeProvider(ABC):
    """Provides the machines that a cluster allocated to a run, and starts a node agent on each."""

    spares: int = 0
    """Number of spare machines: the last ones of `nodes`, used only if others are lost or full."""
    start_seconds: float = 120.0
    """Seconds within which a started agent must connect to the launcher. It needs this long only on a slow file system
    or an unresponsive machine; `end_reason` reports an agent that ends earlier."""
    tick: Callable[[], object] = staticmethod(lambda: None)
    """Function called several times a second while `nodes` waits. An exception from it ends the wait."""

    @abstractmethod
    def nodes(self) -> list[Node]:
        """Return the available machines without lost ones, always in the same order.

        The scheduler may call this several times a second.

        Raises:
            LaunchError: the machines are unavailable; the message has the reason and the remedy.
        """

    @abstractmethod
    def start(self, node: Node, command: Sequence[str], env: Mapping[str, str], log: Path) -> None:
        """Start the agent on a machine and return at once.

        Args:
            node: one of `nodes`.
            command: program and arguments, without secrets.
            env: environment of this process without the run key, for the agent and its child processes.
            log: file to which the agent's output is appended.

        Raises:
            LaunchError: the agent cannot be started.
        """

    @abstractmethod
    def end_reason(self, node: Node) -> str:
        """Return why the agent of a machine ended, or "" while it runs.

        The text is a predicate whose subject is the machine, for example `was killed by SIGKILL`. A provider may also
        return "" if it cannot observe an agent after `agent_connected`.
        """

    def agent_connected(self, node: Node) -> None:  # noqa: B027 - optional
        """React to a connected agent. Called repeatedly while the agent of the machine is connected to the launcher."""

    @abstractmethod
    def close(self) -> None:
        """Stop all agents that still run. May be called twice."""

    def on_nodes_lost(self, lost: Collection[str], why: str) -> None:  # noqa: B027 - optional
        """Restart the whole job if the cluster supports it, because machines were lost without replacement.

        Args:
            lost: names of the lost machines. `nodes` may still list them.
            why: a sentence that describes the loss, without the final period.

        Raises:
            LaunchError: the job restarts, so the cluster will stop this process.
        """

    def address(self) -> str:
        """Return the address at which the other machines reach this one."""
        return socket.gethostbyname(socket.gethostname())
