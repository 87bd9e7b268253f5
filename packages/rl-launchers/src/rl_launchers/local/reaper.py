"""Reaper: a small process that kills the workers when their launcher dies for any reason.

The mechanism is the same on Linux and macOS. The kernel's parent-death signal exists only on Linux, misses the workers'
children, and fires when the *thread* that started a worker ends. The reaper has none of these limits.

It reads lines from a pipe: `+pid` (a session to watch), `-pid` (a session that the launcher ended) and `/path` (a
directory to remove after the workers). Every worker writes its own `+pid` before it executes its command
(`exec_worker.py`), so the reaper watches every worker from its start. The launcher counts as dead at the end of the
pipe, or when the reaper's parent process changes.
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
"""Seconds between two checks of the parent process. The pipe alone does not suffice: a process forked from the launcher
may hold a copy of the write end."""
LATE_REGISTRATION_SECONDS = 1.0
"""Seconds after the launcher's death in which a worker that was being started may still register."""


class Reaper:
    """Handle of the reaper process in the launcher: starts it and updates the sessions that it watches.

    Args:
        watched: ids of the sessions to watch from the start, if this reaper replaces one that was killed.
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
        """Return whether the reaper process runs."""
        return self._process.poll() is None

    def forget(self, pid: int) -> None:
        """Stop watching a session that has been ended."""
        with suppress(BrokenPipeError):  # the reaper died; the scheduler replaces it at its next poll
            os.write(self.fd, b"-%d\n" % pid)

    def remove_after(self, directory: str) -> None:
        """Make the reaper remove a directory after it has ended all sessions."""
        with suppress(BrokenPipeError):
            os.write(self.fd, os.path.abspath(directory).encode() + b"\n")

    def close(self) -> None:
        """End all sessions that the reaper still watches, then the reaper itself, and wait for its exit."""
        os.close(self.fd)
        self._process.wait(timeout=GRACE + 15.0)


def watch_until_orphaned(parent: int, sessions: dict[int, Session], directories: set[bytes]) -> None:
    """Update `sessions` and `directories` from the pipe on standard input until the launcher is dead."""
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
    """Return the inode number of a directory, or None if it does not exist."""
    try:
        return os.stat(directory).st_ino
    except OSError:
        return None


def main() -> None:
    """Run the reaper process. It ends only after its launcher, so it ignores SIGINT, SIGTERM and SIGHUP."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    parent, *watched = map(int, sys.argv[1:])
    sessions, directories = {pid: Session(pid) for pid in watched}, set[bytes]()
    watch_until_orphaned(parent, sessions, directories)
    identities = {directory: _identity(directory) for directory in directories}
    stop_sessions(sessions.values(), GRACE)
    for directory, identity in identities.items():
        if identity == _identity(directory):  # otherwise the next launcher has created a new one
            shutil.rmtree(directory, ignore_errors=True)


if __name__ == "__main__":
    main()
