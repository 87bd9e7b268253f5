"""The protocol between a reward worker and its owner: JSON values, one a line, each after the number of its call.

A worker has one call at a time, and its reply has the number of the call.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, BinaryIO

LONGEST_REPLY = 1 << 20
"""Bytes of a reply, at most."""


def encode(value: Any) -> bytes:
    """Return a frame without its number.

    Raises:
        TypeError, ValueError: not a JSON value.
    """
    return json.dumps(value).encode() + b"\n"  # json escapes the line breaks of texts


def numbered(number: int, frame: bytes) -> bytes:
    """Return the frame of call `number`."""
    return b"%d %s" % (number, frame)


def calls(stream: BinaryIO) -> Iterator[tuple[int, Any]]:
    """Yield the number and value of each call, until the owner is gone."""
    for line in stream:
        if line.endswith(b"\n"):  # else the owner died while it wrote
            number, _, text = line.partition(b" ")
            yield int(number), json.loads(text)


def reply(buffer: bytearray, number: int) -> dict[str, Any] | None:
    """Return the reply to call `number`, or None while a part of it is missing.

    Raises:
        ValueError: `buffer` has something else.
    """
    if len(buffer) > LONGEST_REPLY:
        raise ValueError(f"more than {LONGEST_REPLY:,} bytes")
    if b"\n" not in buffer:
        return None
    found, _, text = buffer.partition(b" ")
    try:
        value = json.loads(text)
        if int(found) == number and isinstance(value, dict):
            return value
    except (ValueError, RecursionError):
        pass
    raise ValueError(repr(bytes(buffer[:100])))
