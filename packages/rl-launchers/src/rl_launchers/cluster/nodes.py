"""Where the machines of a run come from: the one thing that differs between schedulers of clusters."""

from __future__ import annotations

import socket
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

from rl_contracts.scheduler import Node

LOOPBACK = "127.0.0.1"


class NodeProvider(ABC):
    """The machines that a scheduler gave to a run, on each of which one process, its agent, is started."""

    spares: int = 0
    """How many of `nodes`, the last ones, are left alone until others are lost or have no room."""
    tick: Callable[[], object] = staticmethod(lambda: None)
    """Called several times a second where `nodes` waits; what it raises ends the wait."""

    @abstractmethod
    def nodes(self) -> list[Node]:
        """The machines that are there now, always in the same order; lost ones are not among them. Asked several times
        a second.

        Raises:
            LaunchError: they cannot be had; why, and what to do.
        """

    @abstractmethod
    def start(self, node: Node, command: Sequence[str], env: Mapping[str, str], log: Path) -> None:
        """Start the agent on a machine and return at once.

        Args:
            node: one of `nodes`.
            command: program and arguments; no secrets.
            env: the variables of this process, for the agent and all that it starts; no run key.
            log: to which its output is appended.

        Raises:
            LaunchError: it cannot be started.
        """

    @abstractmethod
    def end_reason(self, node: Node) -> str:
        """Why the agent that was started on a machine is gone, in words that go on a sentence about the machine; empty
        while it is there, and where nobody here can know once it has called."""

    def agent_connected(self, node: Node) -> None:  # noqa: B027 - most have nothing to do
        """The agent of a machine has called the launcher, which hears from it from now on. Said again and again."""

    @abstractmethod
    def close(self) -> None:
        """End whatever was started and is still there. May be called twice."""

    def on_nodes_lost(self, lost: Collection[str], why: str) -> None:  # noqa: B027 - most can do nothing
        """There are fewer machines than there were. Where the scheduler can start the whole job again it is asked to.

        Args:
            lost: names of machines that are of no use any more, whether or not `nodes` still tells of them.
            why: the same as a sentence, without its full stop.

        Raises:
            LaunchError: it does; this process will be told to end.
        """

    def address(self) -> str:
        """Under which the machines reach this one."""
        return socket.gethostbyname(socket.gethostname())
