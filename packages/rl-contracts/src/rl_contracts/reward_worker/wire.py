"""What goes through the pipes between the wrapper and a worker: JSON values, each after its length (4 bytes)."""

from __future__ import annotations

import json
from typing import Any, BinaryIO

HEADER = 4
"""Bytes of the length, big-endian."""


def encode(value: Any) -> bytes:
    """One frame.

    Raises:
        TypeError, ValueError: not a JSON value.
    """
    body = json.dumps(value).encode()
    return len(body).to_bytes(HEADER) + body


def read(stream: BinaryIO) -> Any:
    """Wait for the next frame and return its value.

    Raises:
        EOFError: the other side is gone.
    """
    header = stream.read(HEADER)
    body = stream.read(int.from_bytes(header)) if len(header) == HEADER else b""
    if not body:
        raise EOFError("the pipe was closed")
    return json.loads(body)


def complete(buffer: bytearray) -> Any:
    """The value of the frame in `buffer`; None while a part of it is missing."""
    if len(buffer) < HEADER or len(buffer) < HEADER + int.from_bytes(buffer[:HEADER]):
        return None
    return json.loads(buffer[HEADER:])
