"""What goes through the pipes between the wrapper and a worker: JSON values, each after its length (4 bytes)."""

from __future__ import annotations

import json
from collections.abc import Iterator
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


def frames(stream: BinaryIO) -> Iterator[Any]:
    """The values of the frames that come, until the other side is gone."""
    while len(header := stream.read(HEADER)) == HEADER:
        yield json.loads(stream.read(int.from_bytes(header)))


def complete(buffer: bytearray) -> Any:
    """The value of the frame in `buffer`; None while a part of it is missing."""
    if len(buffer) < HEADER or len(buffer) < HEADER + int.from_bytes(buffer[:HEADER]):
        return None
    return json.loads(buffer[HEADER:])
