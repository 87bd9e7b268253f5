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
from multiprocessing import AuthenticationError
from pathlib import Path
from typing import Any

from rl_contracts.errors import ConfigError, LaunchError
from rl_contracts.logging import get_logger
from rl_contracts.scheduler import Node
from rl_launchers import report
from rl_launchers.nodes import NodeProvider
from rl_launchers.wire import Message, Wire, accepted

logger = get_logger("launcher")

SAY_EVERY = 1.0
"""Seconds after which every agent is told that the launcher is there."""
LOOK_EVERY = 0.1
"""Seconds between two looks at what is waited for."""
END_SECONDS = 10.0
"""Time for agents to end by themselves."""
LOG_LINES = 20
"""Last lines of an agent's log shown in an error."""


class Agents:
    """One agent on each machine. All methods are for one thread; others listen.

    Args:
        provider: starts them.
        log_dir: directory of their logs, `agent-<node>.log`, and of the file that carries the secrets to them, which
            only the user may read and which is deleted at `close`. The machines must share it.
        hidden: variables for workers that are not to be sent.
        host: address at which the launcher listens; empty: where the provider says that machines reach it.
        start_timeout: seconds within which an agent that was started must have called.
        silence: seconds without a word from an agent after which its machine counts as lost, and the launcher to it.
    """

    def __init__(
        self,
        provider: NodeProvider,
        log_dir: Path,
        hidden: Mapping[str, str],
        host: str,
        start_timeout: float,
        silence: float,
    ) -> None:
        self._provider, self._log_dir, self._start_timeout, self._silence = provider, log_dir, start_timeout, silence
        self._secret, self._hidden = secrets.token_bytes(32), set(hidden)
        self._wires: dict[str, Wire] = {}
        self._heard: dict[str, float] = {}
        self._lost: dict[str, str] = {}
        self._started: dict[str, tuple[Node, float]] = {}
        self._told: set[str] = set()
        self._asked: dict[int, tuple[str, Future[Any]]] = {}
        self._numbers = itertools.count()
        self._news: queue.SimpleQueue[tuple[str, Message]] = queue.SimpleQueue()
        self._callers: queue.SimpleQueue[tuple[str, Wire]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._listener = socket.create_server((host or provider.address(), 0), backlog=1024)
        self._address = "{}:{}".format(*self._listener.getsockname()[:2])
        log_dir.mkdir(parents=True, exist_ok=True)
        self._secrets_file = log_dir / f".agents-{secrets.token_hex(8)}"
        carried = {"agents": self._secret.hex(), "workers": dict(hidden), "patience": silence}
        with open(os.open(self._secrets_file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            json.dump(carried, file)
        threading.Thread(target=self._accept, name="agents-accept", daemon=True).start()
        self._listening = threading.Thread(target=self._listen, name="agents-listen", daemon=True)
        self._listening.start()

    def start(self, nodes: Sequence[Node]) -> None:
        """Start the agents of machines, and return at once.

        Raises:
            LaunchError: one cannot be started.
        """
        variables = {name: value for name, value in os.environ.items() if name not in self._hidden}
        for node in nodes:
            command = [sys.executable, "-m", "rl_launchers.agent", self._address, node.name, node.host]
            command += [str(self._log_dir.absolute()), str(self._secrets_file.absolute())]
            self._lost.pop(node.name, None)
            self._started[node.name] = (node, time.monotonic())
            self._provider.start(node, command, variables, self._log(node.name))

    def wait(self, names: Sequence[str], tick: Callable[[], object] = lambda: None) -> None:
        """Return when the agents of these machines are there.

        Raises:
            LaunchError: one ended, or did not call in time; shows the last lines of its log.
        """
        while missing := [name for name in names if name not in self._wires]:
            tick()
            self.find_lost()
            for name in missing:
                node, since = self._started[name]
                late = time.monotonic() - since > self._start_timeout
                if name in self._lost or late:
                    why = self._lost.get(name) or f"did not call within {self._start_timeout:g} s"
                    log = self._log(name)
                    problem = f"node {name} ({node.host}): its agent {why} (launcher.options.start_timeout)."
                    raise LaunchError(report.with_log(problem, log, report.tail(log, LOG_LINES)))
            time.sleep(LOOK_EVERY / 4)

    def ask(self, node: str, order: str, **arguments: Any) -> Future[Any]:
        """Give an order; its answer comes later. It fails with a LaunchError where the machine is lost."""
        answer: Future[Any] = Future()
        with self._lock:
            number = next(self._numbers)
            self._asked[number] = (node, answer)
        wire = self._wires.get(node)
        try:
            if wire is None:
                raise OSError("no agent")
            wire.send({"do": order, "id": number, "with": arguments})
        except OSError as error:
            self._lose(node, f"could not be asked ({error})")
            if not answer.done():
                answer.set_exception(LaunchError(f"node {node} {self._lost.get(node, 'was lost')}"))
        return answer

    def find_lost(self) -> dict[str, str]:
        """Machines that are lost, and what happened to each in words, once each."""
        for name, (node, _) in list(self._started.items()):
            if name not in self._lost and (why := self._provider.ended(node)):
                self._lose(name, why)
        new = {name: why for name, why in list(self._lost.items()) if name not in self._told}
        self._told |= new.keys()
        return new

    def news(self) -> list[tuple[str, Message]]:
        """What agents said of workers since the last call, in order: machine, and state of a worker."""
        found = []
        with suppress(queue.Empty):
            while True:
                found.append(self._news.get_nowait())
        return found

    def close(self) -> None:
        """End all agents, which end what is left of their workers. May be called twice."""
        for wire in list(self._wires.values()):
            with suppress(OSError):
                wire.send({"do": "end"})
        deadline = time.monotonic() + END_SECONDS
        there = [node for name, (node, _) in self._started.items() if name not in self._lost]
        while any(not self._provider.ended(node) for node in there) and time.monotonic() < deadline:
            time.sleep(LOOK_EVERY / 4)
        self._closing.set()
        self._listener.close()
        self._listening.join(END_SECONDS)
        self._provider.close()
        for wire in self._wires.values():
            wire.close()
        self._secrets_file.unlink(missing_ok=True)

    def _log(self, name: str) -> Path:
        return self._log_dir / f"agent-{name}.log"

    def _lose(self, name: str, why: str) -> None:
        with self._lock:
            if name in self._lost or self._closing.is_set():
                return
            self._lost[name] = why
            self._told.discard(name)
            waiting = [answer for node, answer in self._asked.values() if node == name and not answer.done()]
        self._wires.pop(name, None)  # the thread that listens closes it
        for answer in waiting:
            answer.set_exception(LaunchError(f"node {name} was lost: it {why}"))

    def _accept(self) -> None:
        """Take calls until the end; each proves itself in a thread of its own, so that none holds up another."""
        with suppress(OSError):  # closed
            while True:
                peer, _ = self._listener.accept()
                threading.Thread(target=self._prove, args=(peer,), daemon=True).start()

    def _prove(self, peer: socket.socket) -> None:
        with peer:
            try:
                wire = accepted(peer, self._secret)
                self._callers.put((str(wire.receive()["hello"]), wire))
            except (OSError, EOFError, ValueError, KeyError, AuthenticationError) as error:
                logger.warning("somebody called the launcher who is no agent of this run: %r", error)

    def _listen(self) -> None:
        selector = selectors.DefaultSelector()
        said = 0.0
        while not self._closing.is_set():
            with suppress(queue.Empty):
                while True:
                    name, wire = self._callers.get_nowait()
                    self._heard[name] = time.monotonic()
                    selector.register(wire, selectors.EVENT_READ, name)
                    self._wires[name] = wire
            for key, _ in selector.select(LOOK_EVERY):
                self._hear(key.data, key.fileobj)  # type: ignore[arg-type]
            now = time.monotonic()
            if now - said >= SAY_EVERY:
                said = now
                for name in list(self._wires):
                    self._say(name, now)
            gone = [key for key in list(selector.get_map().values()) if self._wires.get(key.data) is not key.fileobj]
            for key in gone:
                selector.unregister(key.fileobj)
                key.fileobj.close()  # type: ignore[union-attr]
        selector.close()

    def _hear(self, name: str, wire: Wire) -> None:
        try:
            message = wire.receive()
        except (OSError, EOFError, ValueError) as error:
            self._lose(name, f"is not heard any more ({str(error) or type(error).__name__})")
            return
        self._heard[name] = time.monotonic()
        for state in message.get("workers", ()):
            self._news.put((name, state))
        if "answer" in message:
            with self._lock:
                _, answer = self._asked.pop(int(message["answer"]))
            if "error" not in message:
                answer.set_result(message.get("result"))
            else:
                kind, text = message["error"]
                answer.set_exception((ConfigError if kind == "config" else LaunchError)(text))

    def _say(self, name: str, now: float) -> None:
        if now - self._heard[name] > self._silence:
            self._lose(name, f"said nothing for {self._silence:g} s (launcher.options.heartbeat_timeout)")
            return
        if (wire := self._wires.get(name)) is not None:
            try:
                wire.send({"do": "nothing"})
            except OSError as error:
                self._lose(name, f"cannot be reached any more ({error})")
