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


def take(buffer: bytearray) -> list[Any]:
    """Remove every complete frame from the front of `buffer` and return their values."""
    values = []
    start = 0
    while len(buffer) - start >= HEADER:
        end = start + HEADER + int.from_bytes(buffer[start : start + HEADER])
        if len(buffer) < end:
            break
        values.append(json.loads(bytes(buffer[start + HEADER : end])))
        start = end
    del buffer[:start]
    return values
