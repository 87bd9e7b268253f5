"""JSON messages between the launcher and its node agents, over mutually authenticated connections.

Each end proves that it knows the secret with an HMAC of the other end's random challenge
(`multiprocessing.connection`). The secret itself is never sent. Messages are JSON, so nothing is unpickled. Each
message has a length prefix and at most `LARGEST` bytes. A connection fails if the peer pauses too long within a
message.
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
"""Maximum size of a message, in bytes."""
MESSAGE_SECONDS = 10
"""Maximum seconds to wait for the rest of a message, or for each step of the authentication."""
CALL_SECONDS = 60
"""Seconds within which the launcher must answer a new connection."""

Message = dict[str, Any]


class MessageConnection:
    """One end of an authenticated connection.

    Args:
        connection: a connection that both sides have authenticated.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._send_lock = threading.Lock()

    def fileno(self) -> int:
        """Return the file descriptor, for `multiprocessing.connection.wait` and `select`."""
        return self._connection.fileno()

    def send(self, message: Message) -> None:
        """Send a message. Several threads may call this.

        Raises:
            OSError: the peer has closed the connection, or did not read for too long.
        """
        with self._send_lock:
            self._connection.send_bytes(json.dumps(message).encode())

    def receive(self) -> Message:
        """Wait for the next message and return it.

        Raises:
            OSError, EOFError: the peer has closed the connection, or paused too long within a message.
            ValueError: the message is not a JSON object.
        """
        message = json.loads(self._connection.recv_bytes(LARGEST))
        if not isinstance(message, dict):
            raise ValueError(f"expected a JSON object, found {type(message).__name__}")
        return message

    def close(self) -> None:
        """Close the connection. A concurrent `send` raises OSError. Repeated calls are allowed."""
        with suppress(OSError), socket.socket(fileno=os.dup(self.fileno())) as peer:
            peer.shutdown(socket.SHUT_RDWR)
        with self._send_lock, suppress(OSError):  # without the lock, `send` could write to a reused descriptor
            self._connection.close()


def accept_agent(peer: socket.socket, secret: bytes, patience: float = MESSAGE_SECONDS) -> MessageConnection:
    """Authenticate a peer that connected to this process, and return the connection.

    Args:
        peer: its socket. It stays open, so that another thread can shut it down during the authentication.
        secret: the secret of the run.
        patience: seconds to wait for the peer within a message; at most `MESSAGE_SECONDS`.

    Raises:
        OSError, EOFError, AuthenticationError: the peer does not know the secret, or does not prove it in time.
    """
    _set_timeout(peer, min(MESSAGE_SECONDS, patience))
    connection = Connection(os.dup(peer.fileno()))
    try:
        deliver_challenge(connection, secret)
        answer_challenge(connection, secret)
    except BaseException:
        connection.close()
        raise
    return MessageConnection(connection)


def connect_to_launcher(host: str, port: int, secret: bytes, patience: float = MESSAGE_SECONDS) -> MessageConnection:
    """Connect to the launcher and authenticate both ends.

    Args:
        host, port: address on which the launcher listens.
        secret: the secret of the run.
        patience: seconds to wait for the launcher within a message; at most `MESSAGE_SECONDS`.

    Raises:
        LaunchError: no process listens there, or the process does not know the secret or does not answer within
            `CALL_SECONDS`.
    """
    try:
        with socket.create_connection((host, port), CALL_SECONDS) as peer:
            peer.settimeout(None)
            _set_timeout(peer, CALL_SECONDS)
            connection = Connection(os.dup(peer.fileno()))
            answer_challenge(connection, secret)
            deliver_challenge(connection, secret)
            _set_timeout(peer, min(MESSAGE_SECONDS, patience))
            return MessageConnection(connection)
    except (OSError, EOFError, AuthenticationError) as error:
        raise LaunchError(f"cannot connect to the launcher at {host}:{port}: {error!r}") from error


def _set_timeout(peer: socket.socket, seconds: float) -> None:
    """Set the timeout of each send and receive."""
    for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
        peer.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", int(seconds), int(seconds % 1 * 1e6)))
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
