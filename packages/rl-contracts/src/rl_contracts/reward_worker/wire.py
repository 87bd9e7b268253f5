"""What goes through the pipes between the wrapper and a worker: JSON values, one a line."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, BinaryIO


def encode(value: Any) -> bytes:
    """One frame.

    Raises:
        TypeError, ValueError: not a JSON value.
    """
    return json.dumps(value).encode() + b"\n"  # json escapes the line breaks of texts


def frames(stream: BinaryIO) -> Iterator[Any]:
    """The values of the frames that come, until the other side is gone."""
    for line in stream:
        if line.endswith(b"\n"):  # else it is gone in the middle of it
            yield json.loads(line)


def complete(buffer: bytearray) -> Any:
    """The value of the frame in `buffer`; None while a part of it is missing."""
    return json.loads(buffer) if buffer.endswith(b"\n") else None
