"""Launcher side of the node agents: starts them, exchanges messages with them and detects lost machines."""

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

HEARTBEAT_SECONDS = 1.0
"""Seconds between two heartbeats to every agent."""
HEARTBEAT_TIMEOUT = 20.0
"""Seconds without a message after which a machine counts as lost; its agent applies the same limit to the launcher.
Both sides send heartbeats from a separate thread, so only a long network failure or a stopped process is silent for as
long."""
POLL_SECONDS = 0.1
"""Seconds between two polls of a condition."""
END_SECONDS = 10.0
"""Seconds that `NodeAgents.close` waits for all agents to end, and then for each thread."""
LOG_LINES = 20
"""Number of last lines of an agent's log shown in an error."""
CALLERS = 256
"""Maximum number of connections that are being authenticated; further ones wait."""


@dataclass(eq=False)
class Machine:
    """Machine on which an agent was started.

    A lost machine stays lost: a new start of its agent creates a new object.
    """

    node: Node
    started: float = field(default_factory=time.monotonic)
    wire: MessageConnection | None = None
    """Connection to its agent, or None before the agent connects and after it disconnects."""
    last_message: float = 0.0
    """Time of the last message from its agent, by `time.monotonic`."""
    lost: str = ""
    """Reason of the loss, as the predicate of a sentence about the machine; empty if the machine is not lost."""
    pending: dict[int, Future[Any]] = field(default_factory=dict)
    """Pending results of orders, by id. The code that removes an entry sets its result or exception."""


class NodeAgents:
    """The node agents of a run, one on each machine.

    Call the methods from one thread. Two internal threads accept connections and receive messages.

    Args:
        provider: starts the agents.
        machines: machines by name, including lost ones. `start` replaces the entries of the machines that it starts.
        log_dir: directory on a file system that the machines share. It has the logs, `agent-<node>.log`, and a file
            with the secrets that only the user can read. `close` deletes that file.
        hidden: environment variables of workers that are never sent over a connection.
        host: address on which the launcher listens; empty for `NodeProvider.address`.

    Raises:
        LaunchError: the launcher cannot listen on that address.
    """

    def __init__(
        self,
        provider: NodeProvider,
        machines: dict[str, Machine],
        log_dir: Path,
        hidden: Mapping[str, str],
        host: str,
    ) -> None:
        self._provider, self._log_dir = provider, log_dir
        self._secret, self._secret_names = secrets.token_bytes(32), set(hidden)
        self._machines = machines
        self._ids = itertools.count()
        self._worker_states: queue.SimpleQueue[tuple[Machine, Message]] = queue.SimpleQueue()
        self._new_connections: queue.SimpleQueue[tuple[str, MessageConnection]] = queue.SimpleQueue()
        self._authenticating: dict[socket.socket, float] = {}
        self._lock = threading.Lock()
        self._stop_threads = threading.Event()
        self._close_requested = False
        address = host or provider.address()
        try:
            family = socket.AF_INET6 if ":" in address else socket.AF_INET
            self._listener = socket.create_server((address, 0), family=family, backlog=1024)
        except OSError as error:
            raise LaunchError(
                f"launcher.options.host={host or '(empty)'}: cannot listen on {address}: {error}. Set an address of "
                "this machine that the other machines of the run can reach."
            ) from error
        self._address = "{}:{}".format(*self._listener.getsockname()[:2])
        log_dir.mkdir(parents=True, exist_ok=True)
        for stale in log_dir.glob(".agents-*"):  # from a launcher that was killed
            stale.unlink(missing_ok=True)
        self._secrets_file = log_dir / f".agents-{secrets.token_hex(8)}"
        secrets_content = {"agents": self._secret.hex(), "workers": dict(hidden), "patience": HEARTBEAT_TIMEOUT}
        with open(os.open(self._secrets_file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            json.dump(secrets_content, file)
        self._threads = [
            threading.Thread(target=run, name=name, daemon=True)
            for run, name in ((self._accept, "agents-accept"), (self._listen, "agents-listen"))
        ]
        for thread in self._threads:
            thread.start()

    def start(self, nodes: Sequence[Node]) -> None:
        """Start the agents of machines and return immediately. A machine whose agent cannot be started is lost."""
        variables = {name: value for name, value in os.environ.items() if name not in self._secret_names}
        for node in nodes:
            command = [sys.executable, "-m", "rl_launchers.cluster.node_agent", self._address, node.name, node.host]
            command += [str(self._log_dir.absolute()), str(self._secrets_file.absolute())]
            machine = self._machines[node.name] = Machine(node)
            try:
                self._provider.start(node, command, variables, self._log_path(node))
            except LaunchError as error:
                self._mark_lost(machine, f"could not be started ({error})")

    def wait(self, tick: Callable[[], object]) -> None:
        """Wait until each machine is connected or lost. A machine whose agent does not connect in time is lost.

        Args:
            tick: function called several times a second; an exception from it ends the wait.
        """
        while missing := [m for m in self._machines.values() if m.wire is None and not m.lost]:
            tick()
            self.check()
            for machine in missing:
                if time.monotonic() - machine.started > (limit := self._provider.start_seconds):
                    hint = "it must reach this address of the launcher's machine (launcher.options.host)"
                    self._mark_lost(machine, f"did not connect to {self._address} within {limit:g} s; {hint}")
            time.sleep(POLL_SECONDS / 4)

    def failure(self, machine: Machine) -> LaunchError:
        """Return the error for a machine lost before its agent connected, with the last lines of the agent's log."""
        log = self._log_path(machine.node)
        problem = f"node {machine.node.name} ({machine.node.host}): its agent {machine.lost}."
        return LaunchError(exit_report.with_log(problem, log, run_files.tail(log, LOG_LINES)))

    def request(self, machine: Machine, order: str, **arguments: Any) -> Future[Any]:
        """Send an order and return the future of its result, which fails with LaunchError if the machine is lost."""
        result: Future[Any] = Future()
        with self._lock:
            order_id = next(self._ids)
            machine.pending[order_id] = result
        try:
            if machine.wire is None or machine.lost:
                raise OSError("its agent is not connected")
            machine.wire.send({"do": order, "id": order_id, "with": arguments})
        except OSError as error:
            self._mark_lost(machine, f"could not receive an order ({error})")
        return result

    def check(self) -> None:
        """Mark each machine as lost whose agent has ended, according to the provider."""
        for machine in self._machines.values():
            if machine.lost:
                continue
            if machine.wire is not None:
                self._provider.agent_connected(machine.node)
            if why := self._provider.end_reason(machine.node):
                self._mark_lost(machine, why)

    def events(self) -> list[tuple[Machine, Message]]:
        """Return the worker states that agents sent since the last call, in order, each with its machine."""
        states = []
        with suppress(queue.Empty):
            while True:
                states.append(self._worker_states.get_nowait())
        return states

    def close(self) -> None:
        """End all agents; each stops its remaining workers and then disconnects.

        May be called again, also after an interruption.
        """
        self._close_requested = True
        connected = [machine for machine in self._machines.values() if machine.wire is not None and not machine.lost]
        for machine in connected:
            with suppress(OSError):
                machine.wire.send({"do": "end"})  # type: ignore[union-attr]
        deadline = time.monotonic() + END_SECONDS
        while any(machine.wire is not None for machine in connected) and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS / 4)
        self._stop_threads.set()
        for thread in self._threads:
            thread.join(END_SECONDS)
        self._provider.close()
        self._secrets_file.unlink(missing_ok=True)

    def _log_path(self, node: Node) -> Path:
        return self._log_dir / f"agent-{node.name}.log"

    def _mark_lost(self, machine: Machine, why: str) -> None:
        """Mark a machine as lost, unless `close` was called, and fail its pending orders.

        The first reason is kept. The listening thread closes the connection.
        """
        with self._lock:
            if not self._close_requested:
                machine.lost = machine.lost or why
            pending, machine.pending = machine.pending, {}
        for result in pending.values():
            result.set_exception(LaunchError(f"node {machine.node.name} was lost: it {machine.lost or why}"))

    def _accept(self) -> None:
        """Accept connections until `close`. Each is authenticated in a separate thread, so that none delays another."""
        self._listener.settimeout(POLL_SECONDS)
        warned = False
        with self._listener:
            while not self._stop_threads.is_set():
                for peer, since in list(self._authenticating.items()):
                    if time.monotonic() - since > MESSAGE_SECONDS:
                        with suppress(OSError):
                            peer.shutdown(socket.SHUT_RDWR)
                if len(self._authenticating) >= CALLERS:
                    self._stop_threads.wait(POLL_SECONDS)
                    continue
                try:
                    peer, _ = self._listener.accept()
                except TimeoutError:
                    continue
                except OSError as error:  # for example temporarily out of file descriptors
                    if not warned:
                        logger.warning("the launcher cannot accept connections of agents at the moment: %s", error)
                    warned = True
                    self._stop_threads.wait(POLL_SECONDS)
                    continue
                self._authenticating[peer] = time.monotonic()
                try:
                    threading.Thread(target=self._authenticate, args=(peer,), daemon=True).start()
                except RuntimeError:  # out of threads
                    self._authenticating.pop(peer)
                    peer.close()

    def _authenticate(self, peer: socket.socket) -> None:
        with peer:
            try:
                wire = accept_agent(peer, self._secret, HEARTBEAT_TIMEOUT / 2)
                self._new_connections.put((str(wire.receive()["hello"]), wire))
            except (OSError, EOFError, ValueError, KeyError, AuthenticationError) as error:
                logger.warning("rejected a connection to the launcher that is not from an agent of this run: %r", error)
            finally:
                self._authenticating.pop(peer)

    def _listen(self) -> None:
        last_heartbeat = 0.0
        with selectors.DefaultSelector() as selector:
            while not self._stop_threads.is_set():
                with suppress(queue.Empty):
                    while True:
                        name, wire = self._new_connections.get_nowait()
                        machine = self._machines.get(name)
                        if machine is None or machine.lost or machine.wire is not None:
                            wire.close()  # for example after start_seconds
                            continue
                        machine.last_message, machine.wire = time.monotonic(), wire
                        selector.register(wire, selectors.EVENT_READ, machine)
                for key, _ in selector.select(POLL_SECONDS):
                    self._receive(key.data, key.fileobj)  # type: ignore[arg-type]
                now = time.monotonic()
                if now - last_heartbeat >= HEARTBEAT_SECONDS:
                    last_heartbeat = now
                    for key in selector.get_map().values():
                        self._send_heartbeat(key.data, key.fileobj, now)  # type: ignore[arg-type]
                for key in [key for key in selector.get_map().values() if key.data.lost or key.data.wire is None]:
                    selector.unregister(key.fileobj)
                    key.fileobj.close()  # type: ignore[union-attr]
            for key in selector.get_map().values():
                key.fileobj.close()  # type: ignore[union-attr]

    def _receive(self, machine: Machine, wire: MessageConnection) -> None:
        try:
            message = wire.receive()
        except (OSError, EOFError, ValueError) as error:
            disconnected = f"lost its connection ({str(error) or type(error).__name__})"
            self._mark_lost(machine, self._provider.end_reason(machine.node) or disconnected)
            machine.wire = None
            return
        machine.last_message = time.monotonic()
        for state in message.get("workers", ()):
            self._worker_states.put((machine, state))
        if "answer" in message:
            with self._lock:
                result = machine.pending.pop(int(message["answer"]), None)
            if result is None:
                return  # the machine was lost in the meantime
            if "error" not in message:
                result.set_result(message.get("result"))
            else:
                kind, text = message["error"]
                result.set_exception((ConfigError if kind == "config" else LaunchError)(text))

    def _send_heartbeat(self, machine: Machine, wire: MessageConnection, now: float) -> None:
        if now - machine.last_message > HEARTBEAT_TIMEOUT:
            self._mark_lost(machine, f"sent no message for {HEARTBEAT_TIMEOUT:g} s")
            return
        try:
            wire.send({"do": "nothing"})
        except OSError as error:
            self._mark_lost(machine, f"is no longer reachable ({error})")
