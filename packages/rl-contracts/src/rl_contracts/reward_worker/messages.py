"""Protocol between a reward worker and its owner: one JSON value per line, prefixed by the number of its call.

A worker processes one call at a time. Its reply has the number of the call.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, BinaryIO

LONGEST_REPLY = 1 << 20
"""Maximum length of a reply in bytes."""


def encode(value: Any) -> bytes:
    """Return a frame without its number.

    Raises:
        TypeError, ValueError: `value` is not a JSON value.
    """
    return json.dumps(value).encode() + b"\n"  # JSON escapes line breaks in strings


def numbered(number: int, frame: bytes) -> bytes:
    """Return the frame of call `number`."""
    return b"%d %s" % (number, frame)


def calls(stream: BinaryIO) -> Iterator[tuple[int, Any]]:
    """Yield the number and value of each call, until the owner closes the stream."""
    for line in stream:
        if line.endswith(b"\n"):  # otherwise the owner died during the write
            number, _, text = line.partition(b" ")
            yield int(number), json.loads(text)


def reply(buffer: bytearray, number: int) -> dict[str, Any] | None:
    """Return the reply to call `number`, or None if the buffer does not have all of it yet.

    Raises:
        ValueError: `buffer` contains something else, or too many bytes.
    """
    if len(buffer) > LONGEST_REPLY:
        raise ValueError(f"a reply of more than {LONGEST_REPLY:,} bytes")
    if b"\n" not in buffer:
        return None
    call_number, _, text = buffer.partition(b" ")
    try:
        value = json.loads(text)
        if int(call_number) == number and isinstance(value, dict):
            return value
    except (ValueError, RecursionError):
        pass
    raise ValueError(repr(bytes(buffer[:100])))
