"""Files that grow by lines, and outlive a disk that is full or away for a while."""

from __future__ import annotations

import errno
import json
import math
import os
from collections.abc import Iterator
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

from rl_contracts.runtime.logging import get_logger

logger = get_logger("lines")

FOR_A_WHILE = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.ESTALE)
"""Errors of a disk that may go by themselves."""


def append(path: Path, text: str) -> None:
    """Append to a file, all of it or nothing; what was written is flushed to the system when this returns.

    Raises:
        OSError: it cannot be written; the file is as it was.
    """
    data = text.encode()
    with path.open("ab", buffering=0) as file:
        begin = file.tell()
        try:
            if file.write(data) < len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        except OSError:
            with suppress(OSError):
                file.truncate(begin)
            raise


def json_lines(path: Path) -> Iterator[Any]:
    """The objects of a file of JSON lines, but for half a line at its end, which is being written or whose writer died.

    Lines end with a line feed and nothing else: JSON leaves U+2028 and U+0085 as they are in a string, at which
    `str.splitlines` would cut it.

    Raises:
        OSError: it cannot be read.
        ValueError: a whole line is no JSON.
    """
    with path.open("rb") as file:
        for line in file:
            with nullcontext() if line.endswith(b"\n") else suppress(ValueError):
                yield json.loads(line)


def to_json(value: Any, **options: Any) -> str:
    """Return JSON of a value, with null for numbers that are not finite: JSON has no NaN and no infinity.

    Args:
        value: of types that JSON has.
        options: of `json.dumps`.

    Raises:
        TypeError: it holds a value of another type.
    """
    options = {"ensure_ascii": False, "allow_nan": False} | options
    try:
        return json.dumps(value, **options)
    except ValueError:
        return json.dumps(_finite(value), **options)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key if _finite(key) == key else str(key): _finite(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


class LineFile:
    """A file of lines. What cannot be written now waits for the next time.

    Args:
        path: made with its directory if it does not exist, else continued; a last line that a killed process left
            unfinished is cut off.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._waiting = ""
        written = self.path.read_bytes() if self.path.exists() else b""
        if written and not written.endswith(b"\n"):
            os.truncate(self.path, written.rfind(b"\n") + 1)

    def write(self, text: str) -> None:
        """Append lines, now or, where the disk is full, later.

        Raises:
            OSError: they cannot be written, and that will not go by itself.
        """
        before, self._waiting = self._waiting, self._waiting + text
        try:
            self.flush()
        except OSError as error:
            if error.errno not in FOR_A_WHILE:
                raise
            if not before:
                logger.warning("%s cannot be written, and will be again: %s", self.path, error)

    def flush(self) -> None:
        """Write what waits.

        Raises:
            OSError: it still cannot be written.
        """
        if self._waiting:
            append(self.path, self._waiting)
            self._waiting = ""
