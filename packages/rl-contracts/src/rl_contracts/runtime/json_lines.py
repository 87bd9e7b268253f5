"""Append-only files of lines that tolerate a disk that is temporarily full or unavailable."""

from __future__ import annotations

import errno
import json
import math
import os
from collections.abc import Iterator
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any, BinaryIO

from rl_contracts.runtime.logging import get_logger

logger = get_logger("lines")

FOR_A_WHILE = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.ESTALE)
"""Error numbers of a disk that may recover without intervention."""


def append(path: Path, text: str) -> None:
    """Append all of a text to a file, or nothing. When this returns, the operating system has the text.

    Raises:
        OSError: the text cannot be written; the file is unchanged.
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
    """Yield the objects of a file of JSON lines. Skip an unfinished last line, which a writer may still complete.

    Lines end with a line feed only. JSON strings may contain U+2028 and U+0085, at which `str.splitlines` would split.

    Raises:
        OSError: the file cannot be read.
        ValueError: a complete line is not JSON.
    """
    with path.open("rb") as file:
        for line in file:
            with nullcontext() if line.endswith(b"\n") else suppress(ValueError):
                yield json.loads(line)


class LineReader:
    """Reader of a file of JSON lines that grows, and that its writer may replace by another file.

    Args:
        path: path of the file, which may not exist yet.
        skip: whether to skip the lines that the file has now.
    """

    def __init__(self, path: Path, skip: bool = False) -> None:
        self._path = path
        self._file: BinaryIO | None = None
        if skip:
            for _ in self.read():
                pass

    def read(self) -> Iterator[Any]:
        """Yield the objects of complete lines that were not read yet; skip lines that are not JSON."""
        if self._file is None and self._path.exists():
            self._file = self._path.open("rb")
        while self._file is not None:
            start = self._file.tell()
            line = self._file.readline()
            if not line.endswith(b"\n"):
                self._file.seek(start)
                return
            with suppress(ValueError):
                yield json.loads(line)

    def replaced(self) -> bool:
        """Return whether the path now names another file, or none."""
        if self._file is None:
            return False
        inode = self._path.stat().st_ino if self._path.exists() else None
        return inode != os.fstat(self._file.fileno()).st_ino

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()


def to_json(value: Any, **options: Any) -> str:
    """Serialize a value to JSON, with null for non-finite numbers: JSON has neither NaN nor infinity.

    Args:
        value: value of types that JSON has.
        options: keyword arguments of `json.dumps`.

    Raises:
        TypeError: the value contains a type that JSON lacks.
    """
    options = {"ensure_ascii": False, "allow_nan": False} | options
    try:
        return json.dumps(value, **options)
    except ValueError:
        return json.dumps(_finite(value), **options)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key if _finite(key) == key else str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


class LineFile:
    """Append-only file of lines. Lines that cannot be written are kept in memory and retried at the next write.

    Args:
        path: file to append to, created with its directory if missing. An unfinished last line, which a killed
            process leaves, is cut off.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._pending = ""
        content = self.path.read_bytes() if self.path.exists() else b""
        if content and not content.endswith(b"\n"):
            os.truncate(self.path, content.rfind(b"\n") + 1)

    def write(self, text: str) -> None:
        """Append lines now or, if the disk is temporarily full or unavailable, at a later write.

        Raises:
            OSError: the lines cannot be written, for a reason that is not temporary (see `FOR_A_WHILE`).
        """
        pending_before, self._pending = self._pending, self._pending + text
        try:
            self.flush()
        except OSError as error:
            if error.errno not in FOR_A_WHILE:
                raise
            if not pending_before:
                logger.warning("%s cannot be written; retrying at the next write: %s", self.path, error)

    def flush(self) -> None:
        """Write the pending lines.

        Raises:
            OSError: the lines still cannot be written.
        """
        if self._pending:
            append(self.path, self._pending)
            self._pending = ""
