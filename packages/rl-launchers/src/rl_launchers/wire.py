"""What the launcher and its agents say to each other: JSON messages over connections that both ends have proven.

Both ends prove that they know the secret by an HMAC of the other's random challenge (`multiprocessing.connection`), so
it crosses no wire. Messages are bytes of JSON: nothing is unpickled. Each has a length before it and at most
`LARGEST` bytes; a peer that is silent in the middle of one is given up.
"""

from __future__ import annotations

import json
import socket
import struct
import threading
from contextlib import suppress
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, answer_challenge, deliver_challenge
from typing import Any

from rl_contracts.errors import LaunchError

LARGEST = 1 << 20
"""Bytes of a message."""
PATIENCE = 10
"""Seconds for the rest of a message that has begun, or for the proof of a peer."""

Message = dict[str, Any]


class Wire:
    """One end of a connection.

    Args:
        connection: proven by both sides.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._sending = threading.Lock()

    def fileno(self) -> int:
        """For `multiprocessing.connection.wait` and `select`."""
        return self._connection.fileno()

    def send(self, message: Message) -> None:
        """Raises OSError where the peer is gone, or took nothing for `PATIENCE` seconds. For several threads."""
        with self._sending:
            self._connection.send_bytes(json.dumps(message).encode())

    def receive(self) -> Message:
        """The next message; waits for it.

        Raises:
            OSError, EOFError: the peer is gone, or was silent in the middle of one.
            ValueError: no JSON object.
        """
        message = json.loads(self._connection.recv_bytes(LARGEST))
        if not isinstance(message, dict):
            raise ValueError(f"expected a JSON object, found {type(message).__name__}")
        return message

    def close(self) -> None:
        """May be called twice."""
        with suppress(OSError):
            self._connection.close()


def accepted(peer: socket.socket, secret: bytes) -> Wire:
    """The connection of a peer that called and proves that it knows the secret.

    Raises:
        OSError, EOFError, AuthenticationError: it does not, or not in time.
    """
    for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
        peer.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", PATIENCE, 0))
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection = Connection(peer.detach())
    try:
        deliver_challenge(connection, secret)
        answer_challenge(connection, secret)
    except BaseException:
        connection.close()
        raise
    return Wire(connection)


def called(host: str, port: int, secret: bytes) -> Wire:
    """A connection to the launcher.

    Raises:
        LaunchError: nobody listens there, or it does not know the secret.
    """
    try:
        return Wire(Client((host, port), authkey=secret))  # type: ignore[arg-type]
    except (OSError, EOFError, AuthenticationError) as error:
        raise LaunchError(f"the launcher at {host}:{port} cannot be reached: {error!r}") from error
