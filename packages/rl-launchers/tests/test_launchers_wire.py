"""Connection between launcher and node agents: peers with a wrong secret and invalid messages are rejected."""

from __future__ import annotations

import os
import pickle
import socket
import struct
import threading
from collections.abc import Callable
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client
from pathlib import Path
from typing import Any

import pytest

from rl_contracts.errors import LaunchError
from rl_launchers.cluster import messages
from rl_launchers.cluster.messages import LARGEST, accept_agent, connect_to_launcher

SECRET = b"of this run"


class Launcher:
    """Launcher side of the connection. For each peer, it records the first message or the error."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address: tuple[str, int] = self._listener.getsockname()[:2]
        self.messages: list[Any] = []
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        while True:
            try:
                peer, _ = self._listener.accept()
            except OSError:
                return
            try:
                self.messages.append(accept_agent(peer, SECRET).receive())
            except Exception as error:
                self.messages.append(error)

    def wait_for_messages(self, number: int) -> list[Any]:
        pause = threading.Event()
        for _ in range(200):
            if len(self.messages) >= number:
                return self.messages
            pause.wait(0.1)
        raise AssertionError(f"expected {number} messages, received {self.messages}")

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join(10)


@pytest.fixture
def launcher(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(messages, "MESSAGE_SECONDS", 2)
    server = Launcher()
    yield server
    server.close()


def test_connect_with_wrong_secret_fails_on_both_sides(launcher: Launcher) -> None:
    with pytest.raises(LaunchError, match=str(launcher.address[1])):
        connect_to_launcher(*launcher.address, b"another")
    (error,) = launcher.wait_for_messages(1)
    assert isinstance(error, AuthenticationError)


def test_connect_to_launcher_without_secret_is_rejected_by_agent(launcher: Launcher) -> None:
    """The agent also authenticates the launcher: a launcher without the secret fails the agent's challenge."""

    def impersonate_launcher(listener: socket.socket) -> None:
        from multiprocessing.connection import Connection

        peer, _ = listener.accept()
        connection = Connection(peer.detach())
        connection.send_bytes(b"#CHALLENGE#{sha256}" + os.urandom(32))
        connection.recv_bytes(256)
        connection.send_bytes(b"#WELCOME#")
        connection.recv_bytes(256)  # the agent's challenge
        connection.send_bytes(b"{sha256}" + os.urandom(32))
        connection.close()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=impersonate_launcher, args=(listener,))
        thread.start()
        with pytest.raises(LaunchError, match=str(listener.getsockname()[1])):
            connect_to_launcher(*listener.getsockname()[:2], SECRET)
        thread.join(10)


def test_accept_replayed_authentication_is_rejected(launcher: Launcher) -> None:
    """A recording of an agent's bytes is useless, because each connection gets a new challenge."""
    recorded = bytearray()

    def relay(listener: socket.socket) -> None:
        agent, _ = listener.accept()
        server = socket.create_connection(launcher.address)

        def pump(source: socket.socket, sink: socket.socket, record: bool) -> None:
            while data := source.recv(4096):
                if record:
                    recorded.extend(data)
                sink.sendall(data)

        replies = threading.Thread(target=pump, args=(server, agent, False), daemon=True)
        replies.start()
        pump(agent, server, True)
        server.close()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=relay, args=(listener,))
        thread.start()
        agent = connect_to_launcher(*listener.getsockname()[:2], SECRET)
        agent.send({"hello": "node0"})
        assert launcher.wait_for_messages(1) == [{"hello": "node0"}]
        agent.close()
        thread.join(10)
    assert SECRET not in recorded

    with socket.create_connection(launcher.address) as attacker:
        attacker.sendall(bytes(recorded))
        _, error = launcher.wait_for_messages(2)
    assert isinstance(error, AuthenticationError)


class Bomb:
    """Object that creates a file when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self._marker = marker

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str]]:
        return os.mknod, (str(self._marker),)


@pytest.mark.parametrize("message", [b"{", b"[1]", b"x" * (LARGEST + 1)], ids=lambda m: f"{m[:6]!r}-{len(m)}")
def test_receive_of_invalid_or_too_large_message_raises(launcher: Launcher, message: bytes) -> None:
    connection = Client(launcher.address, authkey=SECRET)
    connection.send_bytes(message)
    (error,) = launcher.wait_for_messages(1)
    assert isinstance(error, ValueError | OSError)


def test_receive_pickle_from_authenticated_peer_is_not_executed(launcher: Launcher, tmp_path: Path) -> None:
    connection = Client(launcher.address, authkey=SECRET)
    connection.send(Bomb(tmp_path / "executed"))  # `send` pickles its argument
    (error,) = launcher.wait_for_messages(1)
    assert isinstance(error, ValueError)
    assert not (tmp_path / "executed").exists()
    pickle.loads(pickle.dumps(Bomb(tmp_path / "executed")))
    assert (tmp_path / "executed").exists()


@pytest.mark.parametrize("first_bytes", [struct.pack("!i", 100), struct.pack("!i", -1) + struct.pack("!Q", 1 << 40)])
def test_accept_silent_or_oversized_peer_fails_after_timeout(launcher: Launcher, first_bytes: bytes) -> None:
    with socket.create_connection(launcher.address) as peer:
        peer.sendall(first_bytes)
        (error,) = launcher.wait_for_messages(1)
        assert isinstance(error, OSError | EOFError)
