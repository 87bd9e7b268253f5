"""The connection between launcher and agents: who cannot prove the secret, or talks nonsense, is refused."""

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
    """Accepts one caller after the other, and takes one message from each that proves the secret."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address: tuple[str, int] = self._listener.getsockname()[:2]
        self.heard: list[Any] = []
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        while True:
            try:
                peer, _ = self._listener.accept()
            except OSError:
                return
            try:
                self.heard.append(accept_agent(peer, SECRET).receive())
            except Exception as error:
                self.heard.append(error)

    def what_it_heard(self, number: int) -> list[Any]:
        deadline = threading.Event()
        for _ in range(200):
            if len(self.heard) >= number:
                return self.heard
            deadline.wait(0.1)
        raise AssertionError(f"heard {self.heard} only")

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join(10)


@pytest.fixture
def launcher(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(messages, "MESSAGE_SECONDS", 2)
    found = Launcher()
    yield found
    found.close()


def test_right_secret_is_heard(launcher: Launcher) -> None:
    connect_to_launcher(*launcher.address, SECRET).send({"hello": "node0"})
    assert launcher.what_it_heard(1) == [{"hello": "node0"}]


def test_wrong_secret_is_refused_on_both_sides(launcher: Launcher) -> None:
    with pytest.raises(LaunchError, match="cannot be reached"):
        connect_to_launcher(*launcher.address, b"another")
    (error,) = launcher.what_it_heard(1)
    assert isinstance(error, AuthenticationError)


def test_launcher_that_does_not_know_the_secret_is_refused_by_the_agent(launcher: Launcher) -> None:
    """Who listens in the launcher's place: it lets everybody in, and is asked for its own proof."""

    def pretend(listener: socket.socket) -> None:
        from multiprocessing.connection import Connection

        peer, _ = listener.accept()
        connection = Connection(peer.detach())
        connection.send_bytes(b"#CHALLENGE#{sha256}" + os.urandom(32))
        connection.recv_bytes(256)
        connection.send_bytes(b"#WELCOME#")
        connection.recv_bytes(256)  # its challenge
        connection.send_bytes(b"{sha256}" + os.urandom(32))
        connection.close()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=pretend, args=(listener,))
        thread.start()
        with pytest.raises(LaunchError, match="cannot be reached"):
            connect_to_launcher(*listener.getsockname()[:2], SECRET)
        thread.join(10)


def test_replayed_proof_of_an_agent_is_refused(launcher: Launcher) -> None:
    """What an agent once sent, bit for bit, recorded between the two: the challenge is another one."""
    sent = bytearray()

    def between(listener: socket.socket) -> None:
        agent, _ = listener.accept()
        server = socket.create_connection(launcher.address)

        def pump(source: socket.socket, sink: socket.socket, record: bool) -> None:
            while data := source.recv(4096):
                if record:
                    sent.extend(data)
                sink.sendall(data)

        back = threading.Thread(target=pump, args=(server, agent, False), daemon=True)
        back.start()
        pump(agent, server, True)
        server.close()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=between, args=(listener,))
        thread.start()
        agent = connect_to_launcher(*listener.getsockname()[:2], SECRET)
        agent.send({"hello": "node0"})
        launcher.what_it_heard(1)
        agent.close()
        thread.join(10)
    assert SECRET not in sent

    with socket.create_connection(launcher.address) as thief:
        thief.sendall(bytes(sent))
        _, error = launcher.what_it_heard(2)
    assert isinstance(error, AuthenticationError)


class Bomb:
    """Whoever unpickles it makes a file."""

    def __init__(self, marker: Path) -> None:
        self._marker = marker

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str]]:
        return os.mknod, (str(self._marker),)


@pytest.mark.parametrize(
    "message", [b"\xff\xfe", b"", b"{", b"[1]", b'"text"', b"x" * (LARGEST + 1)], ids=lambda m: f"{m[:6]!r}-{len(m)}"
)
def test_message_that_is_no_json_object_or_too_large_is_an_error(launcher: Launcher, message: bytes) -> None:
    connection = Client(launcher.address, authkey=SECRET)
    connection.send_bytes(message)
    (error,) = launcher.what_it_heard(1)
    assert isinstance(error, ValueError | OSError)


def test_pickle_of_one_who_knows_the_secret_is_not_executed(launcher: Launcher, tmp_path: Path) -> None:
    connection = Client(launcher.address, authkey=SECRET)
    connection.send(Bomb(tmp_path / "executed"))  # pickled, as `multiprocessing` does
    (error,) = launcher.what_it_heard(1)
    assert isinstance(error, ValueError)
    assert not (tmp_path / "executed").exists()
    pickle.loads(pickle.dumps(Bomb(tmp_path / "executed")))
    assert (tmp_path / "executed").exists()


@pytest.mark.parametrize("begin", [b"", struct.pack("!i", 100), struct.pack("!i", -1) + struct.pack("!Q", 1 << 40)])
def test_peer_that_is_silent_or_promises_too_much_is_given_up(launcher: Launcher, begin: bytes) -> None:
    with socket.create_connection(launcher.address) as peer:
        peer.sendall(begin)
        (error,) = launcher.what_it_heard(1)
        assert isinstance(error, OSError | EOFError)
