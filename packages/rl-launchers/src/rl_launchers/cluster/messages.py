"""What the launcher and its agents say to each other: JSON messages over connections that both ends have proven.

Both ends prove that they know the secret by an HMAC of the other's random challenge (`multiprocessing.connection`), so
it crosses no wire. Messages are bytes of JSON: nothing is unpickled. Each has a length before it and at most
`LARGEST` bytes; a peer that is silent in the middle of one is given up.
"""

from __future__ import annotations

import json
import os
import socket
import struct
import threading
from contextlib import suppress
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from typing import Any

from rl_contracts.errors import LaunchError

LARGEST = 1 << 20
"""Bytes of a message."""
MESSAGE_SECONDS = 10
"""Seconds for the rest of a message that has begun, or for the proof of a peer, at most."""
CALL_SECONDS = 60
"""Seconds that the launcher may take to answer a call."""

Message = dict[str, Any]


class MessageConnection:
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
        """Raises OSError where the peer is gone, or took nothing for too long. For several threads."""
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
        """May be called twice. Another thread's `send` ends with an OSError."""
        with suppress(OSError), socket.socket(fileno=os.dup(self.fileno())) as peer:
            peer.shutdown(socket.SHUT_RDWR)
        with self._sending, suppress(OSError):  # else the descriptor could be another's by then
            self._connection.close()


def accept_agent(peer: socket.socket, secret: bytes, patience: float = MESSAGE_SECONDS) -> MessageConnection:
    """The connection of a peer that called and proves that it knows the secret.

    Args:
        peer: stays open, so that it can be shut down meanwhile.
        secret: of the run.
        patience: seconds; see `PATIENCE`, which is the most.

    Raises:
        OSError, EOFError, AuthenticationError: it does not, or not in time.
    """
    _limit(peer, min(MESSAGE_SECONDS, patience))
    connection = Connection(os.dup(peer.fileno()))
    try:
        deliver_challenge(connection, secret)
        answer_challenge(connection, secret)
    except BaseException:
        connection.close()
        raise
    return MessageConnection(connection)


def connect_to_launcher(host: str, port: int, secret: bytes, patience: float = MESSAGE_SECONDS) -> MessageConnection:
    """A connection to the launcher.

    Args:
        host, port: where it listens.
        secret: of the run.
        patience: as for `accepted`.

    Raises:
        LaunchError: nobody listens there, or it does not know the secret, or does not answer in `CALL_SECONDS`.
    """
    try:
        with socket.create_connection((host, port), CALL_SECONDS) as peer:
            peer.settimeout(None)
            _limit(peer, CALL_SECONDS)
            connection = Connection(os.dup(peer.fileno()))
            answer_challenge(connection, secret)
            deliver_challenge(connection, secret)
            _limit(peer, min(MESSAGE_SECONDS, patience))
            return MessageConnection(connection)
    except (OSError, EOFError, AuthenticationError) as error:
        raise LaunchError(f"the launcher at {host}:{port} cannot be reached: {error!r}") from error


def _limit(peer: socket.socket, seconds: float) -> None:
    """How long one end waits for the other within a message."""
    for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
        peer.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", int(seconds), int(seconds % 1 * 1e6)))
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
