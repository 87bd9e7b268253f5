"""The launcher's side of the agents: starts them, hears them, and knows which are lost."""

from __future__ import annotations

import itertools
import json
import os
import queue
import secrets
import selectors
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing import AuthenticationError
from pathlib import Path
from typing import Any

from rl_contracts.errors import ConfigError, LaunchError
from rl_contracts.runtime import run_files
from rl_contracts.runtime.logging import get_logger
from rl_contracts.scheduler import Node
from rl_launchers.cluster.messages import MESSAGE_SECONDS, Message, MessageConnection, accept_agent
from rl_launchers.cluster.nodes import NodeProvider
from rl_launchers.supervise import exit_report

logger = get_logger("launcher")

SAY_EVERY = 1.0
"""Seconds after which every agent is told that the launcher is there."""
LOOK_EVERY = 0.1
"""Seconds between two looks at what is waited for."""
END_SECONDS = 10.0
"""Time for agents to end by themselves."""
LOG_LINES = 20
"""Last lines of an agent's log shown in an error."""
CALLERS = 256
"""Callers at most that have not proven yet that they know the secret; others wait."""


@dataclass(eq=False)
class Machine:
    """A machine from the start of its agent on. One that is lost stays so: started again, it is another."""

    node: Node
    started: float = field(default_factory=time.monotonic)
    wire: MessageConnection | None = None
    """To its agent, once that has called."""
    heard: float = 0.0
    """When its agent said something last."""
    lost: str = ""
    """What happened to it, in words that go on a sentence about it; empty while it is there."""
    asked: dict[int, Future[Any]] = field(default_factory=dict)
    """What its agent has not answered yet. Whoever takes something out settles it."""


class NodeAgents:
    """One agent on each machine. All methods are for one thread; others listen.

    Args:
        provider: starts them.
        machines: by name, the last start of each; those that were lost before. Kept up to date.
        log_dir: directory of their logs, `agent-<node>.log`, and of the file that carries the secrets to them, which
            only the user may read and which is deleted at `close`. The machines must share it.
        hidden: variables for workers that are not to be sent.
        host: address at which the launcher listens; empty: where the provider says that machines reach it.
        start_timeout: seconds within which an agent that was started must have called.
        silence: seconds without a word from an agent after which its machine counts as lost, and the launcher to it.

    Raises:
        LaunchError: the launcher cannot listen there.
    """

    def __init__(
        self,
        provider: NodeProvider,
        machines: dict[str, Machine],
        log_dir: Path,
        hidden: Mapping[str, str],
        host: str,
        start_timeout: float,
        silence: float,
    ) -> None:
        self._provider, self._log_dir, self._start_timeout, self._silence = provider, log_dir, start_timeout, silence
        self._secret, self._hidden = secrets.token_bytes(32), set(hidden)
        self._machines = machines
        self._numbers = itertools.count()
        self._news: queue.SimpleQueue[tuple[Machine, Message]] = queue.SimpleQueue()
        self._callers: queue.SimpleQueue[tuple[str, MessageConnection]] = queue.SimpleQueue()
        self._proving: dict[socket.socket, float] = {}
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._leaving = False
        at = host or provider.address()
        try:
            family = socket.AF_INET6 if ":" in at else socket.AF_INET
            self._listener = socket.create_server((at, 0), family=family, backlog=1024)
        except OSError as error:
            raise LaunchError(
                f"launcher.options.host={host or '(empty)'}: expected an address of this machine, at which the "
                f"machines of the run reach it; cannot listen at {at}: {error}."
            ) from error
        self._address = "{}:{}".format(*self._listener.getsockname()[:2])
        log_dir.mkdir(parents=True, exist_ok=True)
        for left in log_dir.glob(".agents-*"):  # by a launcher that was killed
            left.unlink(missing_ok=True)
        self._secrets_file = log_dir / f".agents-{secrets.token_hex(8)}"
        carried = {"agents": self._secret.hex(), "workers": dict(hidden), "patience": silence}
        with open(os.open(self._secrets_file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            json.dump(carried, file)
        self._threads = [
            threading.Thread(target=run, name=name, daemon=True)
            for run, name in ((self._accept, "agents-accept"), (self._listen, "agents-listen"))
        ]
        for thread in self._threads:
            thread.start()

    def start(self, nodes: Sequence[Node]) -> None:
        """Start the agents of machines, and return at once; one that cannot be started is lost."""
        variables = {name: value for name, value in os.environ.items() if name not in self._hidden}
        for node in nodes:
            command = [sys.executable, "-m", "rl_launchers.cluster.node_agent", self._address, node.name, node.host]
            command += [str(self._log_dir.absolute()), str(self._secrets_file.absolute())]
            machine = self._machines[node.name] = Machine(node)
            try:
                self._provider.start(node, command, variables, self._log(node))
            except LaunchError as error:
                self._mark_lost(machine, f"could not be started ({error})")

    def wait(self, tick: Callable[[], object]) -> None:
        """Return when the agent of each machine is there, or the machine is lost, as one is whose agent does not call
        in time.

        Args:
            tick: called several times a second; what it raises ends the wait.
        """
        while missing := [m for m in self._machines.values() if m.wire is None and not m.lost]:
            tick()
            self.check()
            for machine in missing:
                if time.monotonic() - machine.started > self._start_timeout:
                    late = f"did not call within {self._start_timeout:g} s (launcher.options.start_timeout)"
                    self._mark_lost(machine, late)
            time.sleep(LOOK_EVERY / 4)

    def failure(self, machine: Machine) -> LaunchError:
        """The error for a machine that was lost before its agent was there, with the last lines of its log."""
        log = self._log(machine.node)
        problem = f"node {machine.node.name} ({machine.node.host}): its agent {machine.lost}."
        return LaunchError(exit_report.with_log(problem, log, run_files.tail(log, LOG_LINES)))

    def request(self, machine: Machine, order: str, **arguments: Any) -> Future[Any]:
        """Give an order; its answer comes later. It fails with a LaunchError where the machine is lost."""
        answer: Future[Any] = Future()
        with self._lock:
            number = next(self._numbers)
            machine.asked[number] = answer
        try:
            if machine.wire is None or machine.lost:
                raise OSError("no agent")
            machine.wire.send({"do": order, "id": number, "with": arguments})
        except OSError as error:
            self._mark_lost(machine, f"could not be asked ({error})")
        return answer

    def check(self) -> None:
        """Ask the provider whether agents have ended: their machines are lost."""
        for machine in self._machines.values():
            if machine.lost:
                continue
            if machine.wire is not None:
                self._provider.agent_connected(machine.node)
            if why := self._provider.end_reason(machine.node):
                self._mark_lost(machine, why)

    def events(self) -> list[tuple[Machine, Message]]:
        """What agents said of workers since the last call, in order: machine, and state of a worker."""
        found = []
        with suppress(queue.Empty):
            while True:
                found.append(self._news.get_nowait())
        return found

    def close(self) -> None:
        """End all agents, which end what is left of their workers and then hang up. May be called again, also after an
        interruption."""
        self._leaving = True
        there = [machine for machine in self._machines.values() if machine.wire is not None and not machine.lost]
        for machine in there:
            with suppress(OSError):
                machine.wire.send({"do": "end"})  # type: ignore[union-attr]
        deadline = time.monotonic() + END_SECONDS
        while any(machine.wire is not None for machine in there) and time.monotonic() < deadline:
            time.sleep(LOOK_EVERY / 4)
        self._closing.set()
        for thread in self._threads:
            thread.join(END_SECONDS)
        self._provider.close()
        self._secrets_file.unlink(missing_ok=True)

    def _log(self, node: Node) -> Path:
        return self._log_dir / f"agent-{node.name}.log"

    def _mark_lost(self, machine: Machine, why: str) -> None:
        """Lost, unless it was before or all are to end; what its agent was asked has failed. The thread that listens
        closes its wire."""
        with self._lock:
            if not self._leaving:
                machine.lost = machine.lost or why
            asked, machine.asked = machine.asked, {}
        for answer in asked.values():
            answer.set_exception(LaunchError(f"node {machine.node.name} was lost: it {machine.lost or why}"))

    def _accept(self) -> None:
        """Take calls until the end. Each proves itself in a thread of its own, so that none holds up another, and in
        time."""
        self._listener.settimeout(LOOK_EVERY)
        warned = False
        with self._listener:
            while not self._closing.is_set():
                for peer, since in list(self._proving.items()):
                    if time.monotonic() - since > MESSAGE_SECONDS:
                        with suppress(OSError):
                            peer.shutdown(socket.SHUT_RDWR)
                if len(self._proving) >= CALLERS:
                    self._closing.wait(LOOK_EVERY)
                    continue
                try:
                    peer, _ = self._listener.accept()
                except TimeoutError:
                    continue
                except OSError as error:  # out of descriptors, for a while
                    if not warned:
                        logger.warning("the launcher takes no calls of agents for now: %s", error)
                    warned = True
                    self._closing.wait(LOOK_EVERY)
                    continue
                self._proving[peer] = time.monotonic()
                try:
                    threading.Thread(target=self._prove, args=(peer,), daemon=True).start()
                except RuntimeError:  # out of threads
                    self._proving.pop(peer)
                    peer.close()

    def _prove(self, peer: socket.socket) -> None:
        with peer:
            try:
                wire = accept_agent(peer, self._secret, self._silence / 2)
                self._callers.put((str(wire.receive()["hello"]), wire))
            except (OSError, EOFError, ValueError, KeyError, AuthenticationError) as error:
                logger.warning("somebody called the launcher who is no agent of this run: %r", error)
            finally:
                self._proving.pop(peer)

    def _listen(self) -> None:
        said = 0.0
        with selectors.DefaultSelector() as selector:
            while not self._closing.is_set():
                with suppress(queue.Empty):
                    while True:
                        name, wire = self._callers.get_nowait()
                        machine = self._machines.get(name)
                        if machine is None or machine.lost or machine.wire is not None:
                            wire.close()  # too late
                            continue
                        machine.heard, machine.wire = time.monotonic(), wire
                        selector.register(wire, selectors.EVENT_READ, machine)
                for key, _ in selector.select(LOOK_EVERY):
                    self._receive(key.data, key.fileobj)  # type: ignore[arg-type]
                now = time.monotonic()
                if now - said >= SAY_EVERY:
                    said = now
                    for key in selector.get_map().values():
                        self._log_waiting(key.data, key.fileobj, now)  # type: ignore[arg-type]
                for key in [key for key in selector.get_map().values() if key.data.lost or key.data.wire is None]:
                    selector.unregister(key.fileobj)
                    key.fileobj.close()  # type: ignore[union-attr]
            for key in selector.get_map().values():
                key.fileobj.close()  # type: ignore[union-attr]

    def _receive(self, machine: Machine, wire: MessageConnection) -> None:
        try:
            message = wire.receive()
        except (OSError, EOFError, ValueError) as error:
            heard = f"is not heard any more ({str(error) or type(error).__name__})"
            self._mark_lost(machine, self._provider.end_reason(machine.node) or heard)
            machine.wire = None
            return
        machine.heard = time.monotonic()
        for state in message.get("workers", ()):
            self._news.put((machine, state))
        if "answer" in message:
            with self._lock:
                answer = machine.asked.pop(int(message["answer"]), None)
            if answer is None:
                return  # the machine was lost meanwhile
            if "error" not in message:
                answer.set_result(message.get("result"))
            else:
                kind, text = message["error"]
                answer.set_exception((ConfigError if kind == "config" else LaunchError)(text))

    def _log_waiting(self, machine: Machine, wire: MessageConnection, now: float) -> None:
        if now - machine.heard > self._silence:
            self._mark_lost(machine, f"said nothing for {self._silence:g} s (launcher.options.heartbeat_timeout)")
            return
        try:
            wire.send({"do": "nothing"})
        except OSError as error:
            self._mark_lost(machine, f"cannot be reached any more ({error})")
