"""Service discovery: a key-value store in which the processes of a run find each other's addresses.

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
_VALUE_FILE = "=value"  # a key cannot contain "=", so a key can have both a value and keys below it
_MAX_LISTED = 20


class NameTakenError(LaunchError):
    """Another process has added this key."""


class UnknownNameError(LaunchError):
    """The key was never added, or it was deleted."""


class NameService(ABC):
    """Keys and values that all processes of a run see."""

    @abstractmethod
    def add(self, key: str, value: str, replace: bool = False) -> None:
        """Publish a value. The key and its complete value become visible at once.

        Raises:
            NameTakenError: the key exists and `replace` is not set. Of several concurrent calls, one succeeds.
            ConfigError: the key is not a path of letters, digits, `_`, `.` and `-`.
        """

    @abstractmethod
    def get(self, key: str) -> str:
        """Return the value of a key.

        Raises:
            UnknownNameError: the key does not exist.
        """

    @abstractmethod
    def children(self, prefix: str = "") -> dict[str, str]:
        """Return all keys below `prefix` (without `prefix`) and their values, sorted by key."""

    @abstractmethod
    def delete(self, key: str) -> None:
        """Delete a key. Does nothing if the key does not exist."""

    def wait(self, key: str, timeout: float) -> str:
        """Wait until a key exists, and return its value.

        Args:
            key: key to wait for.
            timeout: seconds to wait.

        Raises:
            StalledError: the key did not appear in time; the message lists its siblings.
        """
        deadline = time.monotonic() + timeout
        pause = 0.005
        while True:
            try:
                return self.get(key)
            except UnknownNameError as error:
                remaining = deadline - time.monotonic()
                if remaining <= 0:
                    raise StalledError(self._missing_message(key, timeout)) from error
            time.sleep(min(pause, remaining))
            pause = min(2 * pause, 0.25)

    def _missing_message(self, key: str, timeout: float) -> str:
        parent = key.rpartition("/")[0]
        prefix, keys = (parent, list(self.children(parent))) if parent else ("", [])
        if not keys:
            prefix, keys = "", list(self.children())
        more = f" and {len(keys) - _MAX_LISTED} more" if len(keys) > _MAX_LISTED else ""
        listing = ", ".join(keys[:_MAX_LISTED]) + more if keys else "none"
        return f"names: {key!r} did not appear within {timeout:g} s. Keys under {prefix + '/'!r}: {listing}"


class MemoryNames(NameService):
    """Names in the memory of one process, for tests and runs within one process. Thread-safe."""

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
                raise UnknownNameError(f"names: key {key!r} does not exist")
            return self._values[key]

    def children(self, prefix: str = "") -> dict[str, str]:
        start = f"{'/'.join(segments(prefix))}/" if prefix else ""
        with self._lock:
            return {key: self._values[key] for key in sorted(self._values) if key.startswith(start)}

    def delete(self, key: str) -> None:
        segments(key)
        with self._lock:
            self._values.pop(key, None)


class FileNames(NameService):
    """Names as files under a directory that all processes see, for example on a cluster's shared file system.

    Values appear atomically: `add` writes a temporary file, then links it (new key) or renames it (replaced key). Of
    several processes that link the same key, only one succeeds. Only the owner can read or write the files.

    Args:
        root: directory of this run's names; created by the first process that adds one.
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
            except UnknownNameError:  # deleted meanwhile
                self.add(key, value)
            else:
                raise NameTakenError(name_taken_message(key, current)) from error
        finally:
            temporary.unlink(missing_ok=True)

    def get(self, key: str) -> str:
        directory = self.root.joinpath(*segments(key))
        try:
            # A network file system may cache for long that a file does not exist; listing refreshes that cache.
            os.listdir(directory)
            return (directory / _VALUE_FILE).read_bytes().decode()
        except (FileNotFoundError, NotADirectoryError) as error:
            raise UnknownNameError(f"names: key {key!r} does not exist under {self.root}") from error

    def children(self, prefix: str = "") -> dict[str, str]:
        directory = self.root.joinpath(*segments(prefix)) if prefix else self.root
        paths = [path.parent for path in directory.rglob(_VALUE_FILE) if path.parent != directory]
        values: dict[str, str] = {}
        for key in sorted(path.relative_to(self.root).as_posix() for path in paths):
            # The file was deleted meanwhile, or is not part of this service.
            with suppress(UnknownNameError, ConfigError, UnicodeDecodeError):
                values[key] = self.get(key)
        return values

    def delete(self, key: str) -> None:
        # The directories stay: removing them would race with a process that adds a key below.
        with suppress(FileNotFoundError):
            self.root.joinpath(*segments(key), _VALUE_FILE).unlink()


def segments(key: str) -> list[str]:
    """Split a key into its segments. Each is a plain file name, so that no key leads out of the root.

    Raises:
        ConfigError: the key is not a path of letters, digits, `_`, `.` and `-`.
    """
    parts = key.split("/")
    if not all(_SEGMENT.fullmatch(part) and part.strip(".") for part in parts):
        raise ConfigError(
            f"names: expected a key like 'run/servers/0' (segments of letters, digits, '_', '.', '-'), found {key!r}"
        )
    return parts


def name_taken_message(key: str, value: str) -> str:
    """Return the message of a `NameTakenError`."""
    return f"names: {key!r} is already taken by {value!r}; delete it, or add it with replace=True"
