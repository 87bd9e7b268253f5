"""The keeper: a small process that ends the workers when their launcher dies, however it dies.

One mechanism for Linux and macOS. The kernel's own parent-death signal exists on Linux only, misses the workers'
children, and fires when the *thread* that started a worker ends; the keeper has none of these limits. It reads
`+pid` (a session to watch), `-pid` (ended by the launcher) and `/path` (a directory that must not outlive the workers)
from a pipe. Every worker writes its own `+pid` before
it becomes its command (`enlist.py`), so there is no moment at which a worker exists that nobody watches. The end of
the pipe, or another parent than at the start, means that the launcher is gone.
"""

from __future__ import annotations

import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from contextlib import suppress

from rl_launchers.local.sessions import Session, stop_sessions

GRACE = 5.0
"""Seconds between SIGTERM and SIGKILL for the workers of a dead launcher."""
CHECK_PARENT_EVERY = 0.5
"""Seconds. The pipe alone is not enough: a process forked from the launcher may hold a copy of its end."""
LATE_REGISTRATION_SECONDS = 1.0
"""Seconds in which a worker that was being started when the launcher died may still enlist."""


class Reaper:
    """The launcher's end: starts the keeper process and tells it what it need not watch any more.

    Args:
        watched: sessions to watch from the start, for a keeper that replaces one that was killed.
    """

    def __init__(self, watched: Iterable[int] = ()) -> None:
        reader, self.fd = os.pipe()
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "rl_launchers.local.reaper", str(os.getpid()), *map(str, watched)],
                stdin=reader,
                stdout=subprocess.DEVNULL,
                start_new_session=True,  # a Ctrl-C in the terminal must not reach it
            )
        finally:
            os.close(reader)

    def is_alive(self) -> bool:
        """Whether the keeper process is there."""
        return self._process.poll() is None

    def forget(self, pid: int) -> None:
        """Remove a session that has been ended."""
        with suppress(BrokenPipeError):  # it died; the scheduler replaces it at its next poll
            os.write(self.fd, b"-%d\n" % pid)

    def remove_after(self, directory: str) -> None:
        """Remove a directory after the last session that it ends."""
        with suppress(BrokenPipeError):
            os.write(self.fd, os.path.abspath(directory).encode() + b"\n")

    def close(self) -> None:
        """End the keeper, and with it every session that it still watches. Returns when it is gone."""
        os.close(self.fd)
        self._process.wait(timeout=GRACE + 15.0)


def watch_until_orphaned(parent: int, sessions: dict[int, Session], directories: set[bytes]) -> None:
    """Keep `sessions` and `directories` up to date from the pipe on standard input until the launcher is gone."""
    buffer = b""
    orphaned_at: float | None = None
    while orphaned_at is None or time.monotonic() < orphaned_at + LATE_REGISTRATION_SECONDS:
        if select.select([0], [], [], CHECK_PARENT_EVERY)[0]:
            chunk = os.read(0, 4096)
            if not chunk:
                break
            *lines, buffer = (buffer + chunk).split(b"\n")
            for line in lines:
                if line.startswith(b"/"):
                    directories.add(line)
                    continue
                pid = int(line[1:])
                if line.startswith(b"+"):
                    sessions[pid] = Session(pid)
                else:
                    sessions.pop(pid, None)
        if orphaned_at is None and os.getppid() != parent:
            orphaned_at = time.monotonic()


def _identity(directory: bytes) -> int | None:
    """Number of the inode of a directory; None where there is none."""
    try:
        return os.stat(directory).st_ino
    except OSError:
        return None


def main() -> None:
    """The keeper process. It ends with its launcher and only then, so it ignores requests to end before."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    parent, *watched = map(int, sys.argv[1:])
    sessions, directories = {pid: Session(pid) for pid in watched}, set[bytes]()
    watch_until_orphaned(parent, sessions, directories)
    left = {directory: _identity(directory) for directory in directories}
    stop_sessions(sessions.values(), GRACE)
    for directory, identity in left.items():
        if identity == _identity(directory):  # else the next launcher has made its own
            shutil.rmtree(directory, ignore_errors=True)


if __name__ == "__main__":
    main()
