"""Service discovery: where the processes of a run find each other's addresses.

Keys are paths such as `run/servers/0`; values are short strings such as an address. No secrets belong here.
"""

from __future__ import annotations

import os
import re
import threading
import time
import uuid
from abc import ABC, abstractmethod
from contextlib import suppress
from pathlib import Path

from rl_contracts.errors import ConfigError, LaunchError, StalledError

_SEGMENT = re.compile(r"[A-Za-z0-9_.-]+")
_VALUE_FILE = "=value"  # "=" cannot be in a key, so a key may have a value and others below it
_LISTED = 20


class NameTakenError(LaunchError):
    """Another process has added this key."""


class UnknownNameError(LaunchError):
    """Nobody has added this key, or it was deleted."""


class NameService(ABC):
    """Keys and values that all processes of a run see."""

    @abstractmethod
    def add(self, key: str, value: str, replace: bool = False) -> None:
        """Publish a value; whoever sees the key sees all of it.

        Raises:
            NameTakenError: the key exists and `replace` is not set. Of several that add at once, one succeeds.
            ConfigError: the key is not a path of letters, digits, `_`, `.` and `-`.
        """

    @abstractmethod
    def get(self, key: str) -> str:
        """The value of a key.

        Raises:
            UnknownNameError: there is none.
        """

    @abstractmethod
    def children(self, prefix: str = "") -> dict[str, str]:
        """All keys below `prefix` (not itself) with their values, sorted by key; empty if there are none."""

    @abstractmethod
    def delete(self, key: str) -> None:
        """Take a key back; nothing happens if it is not there."""

    def wait(self, key: str, timeout: float) -> str:
        """The value of a key as soon as it is there.

        Args:
            key: what to wait for.
            timeout: seconds until giving up.

        Raises:
            StalledError: it did not appear; the message lists the keys beside it.
        """
        deadline = time.monotonic() + timeout
        pause = 0.005
        while True:
            try:
                return self.get(key)
            except UnknownNameError as error:
                left = deadline - time.monotonic()
                if left <= 0:
                    raise StalledError(self._missing(key, timeout)) from error
            time.sleep(min(pause, left))
            pause = min(2 * pause, 0.25)

    def _missing(self, key: str, timeout: float) -> str:
        parent = key.rpartition("/")[0]
        where, found = (parent, list(self.children(parent))) if parent else ("", [])
        if not found:
            where, found = "", list(self.children())
        more = f" and {len(found) - _LISTED} more" if len(found) > _LISTED else ""
        there = ", ".join(found[:_LISTED]) + more if found else "nothing"
        return f"names: {key!r} did not appear within {timeout:g} s. There is under {where + '/'!r}: {there}"


class MemoryNames(NameService):
    """Names of one process, for tests and runs within one process. Safe for threads."""

    def __init__(self) -> None:
        self._values: dict[str, str] = {}
        self._lock = threading.Lock()

    def add(self, key: str, value: str, replace: bool = False) -> None:
        segments(key)
        with self._lock:
            if not replace and key in self._values:
                raise NameTakenError(name_taken_message(key, self._values[key]))
            self._values[key] = value

    def get(self, key: str) -> str:
        segments(key)
        with self._lock:
            if key not in self._values:
                raise UnknownNameError(f"names: nobody has added {key!r}")
            return self._values[key]

    def children(self, prefix: str = "") -> dict[str, str]:
        below = f"{'/'.join(segments(prefix))}/" if prefix else ""
        with self._lock:
            return {key: self._values[key] for key in sorted(self._values) if key.startswith(below)}

    def delete(self, key: str) -> None:
        segments(key)
        with self._lock:
            self._values.pop(key, None)


class FileNames(NameService):
    """Names as files under a directory that all processes see, for example on a cluster's shared file system.

    A value appears whole or not at all: it is written to a temporary file first, then linked (new keys, which only
    one process can win) or renamed (replaced keys). Only the owner may read or write.

    Args:
        root: directory of this run's names; made by the first who adds one.
    """

    def __init__(self, root: str | Path) -> None:
        self.root = Path(root).absolute()

    def add(self, key: str, value: str, replace: bool = False) -> None:
        directory, parts = self.root, segments(key)
        self.root.parent.mkdir(parents=True, exist_ok=True)
        self.root.mkdir(mode=0o700, exist_ok=True)
        for part in parts:
            directory = directory / part
            directory.mkdir(mode=0o700, exist_ok=True)
        target, temporary = directory / _VALUE_FILE, directory / f"=new-{uuid.uuid4().hex}"
        try:
            with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                file.write(value.encode())
                file.flush()
                os.fsync(file.fileno())
            if replace:
                temporary.replace(target)
            else:
                os.link(temporary, target)
        except FileExistsError as error:
            try:
                current = self.get(key)
            except UnknownNameError:  # freed meanwhile
                self.add(key, value)
            else:
                raise NameTakenError(name_taken_message(key, current)) from error
        finally:
            temporary.unlink(missing_ok=True)

    def get(self, key: str) -> str:
        directory = self.root.joinpath(*segments(key))
        try:
            # Listing makes a network file system look again; it may remember for long that a file was not there.
            os.listdir(directory)
            return (directory / _VALUE_FILE).read_bytes().decode()
        except (FileNotFoundError, NotADirectoryError) as error:
            raise UnknownNameError(f"names: nobody has added {key!r} under {self.root}") from error

    def children(self, prefix: str = "") -> dict[str, str]:
        directory = self.root.joinpath(*segments(prefix)) if prefix else self.root
        paths = [path.parent for path in directory.rglob(_VALUE_FILE) if path.parent != directory]
        values: dict[str, str] = {}
        for key in sorted(path.relative_to(self.root).as_posix() for path in paths):
            # deleted meanwhile, or nothing of ours
            with suppress(UnknownNameError, ConfigError, UnicodeDecodeError):
                values[key] = self.get(key)
        return values

    def delete(self, key: str) -> None:
        # The directories stay: removing them would race with somebody who is adding below.
        with suppress(FileNotFoundError):
            self.root.joinpath(*segments(key), _VALUE_FILE).unlink()


def segments(key: str) -> list[str]:
    """The parts of a key, each a plain file name, so that no key leads out of the root.

    Raises:
        ConfigError: it is no path of letters, digits, `_`, `.` and `-`.
    """
    parts = key.split("/")
    if not all(_SEGMENT.fullmatch(part) and part.strip(".") for part in parts):
        raise ConfigError(
            f"names: expected a key like 'run/servers/0' (parts of letters, digits, '_', '.', '-'), found {key!r}"
        )
    return parts


def name_taken_message(key: str, value: str) -> str:
    """What a `NameTakenError` says."""
    return f"names: {key!r} is already taken by {value!r}; delete it, or add it with replace=True"
