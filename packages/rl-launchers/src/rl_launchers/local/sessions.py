"""Finding and ending everything that a worker started: its process group, its session and its descendants."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterable
from contextlib import suppress

import psutil

CHECK_EVERY = 0.02
"""Seconds between two looks at processes that are asked to end."""


class Session:
    """The session of a worker, which `start_new_session` made it lead; its id is the worker's process id.

    A session outlives its leader as long as a member lives, and so does the claim on its id. Found by session,
    children whose parent died are not lost; found by descent, children that opened a session of their own are not.
    """

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._leader: psutil.Process | None = None
        with suppress(psutil.NoSuchProcess):
            self._leader = psutil.Process(pid)

    def members(self) -> set[psutil.Process]:
        """Living processes of the session and living descendants of its leader."""
        pids = [pid for pid in psutil.pids() if _id_of(os.getsid, pid) == self.pid]
        if self.pid in pids and not (self._leader is not None and self._leader.is_running()):
            return set()  # the id went to a stranger, so nobody of this session is left
        found: set[psutil.Process] = set()
        for pid in pids:
            with suppress(psutil.NoSuchProcess):
                found.add(psutil.Process(pid))
        if self._leader is not None:
            with suppress(psutil.NoSuchProcess):
                found.update(self._leader.children(recursive=True))
        return _living(found)

    def stopped(self) -> bool:
        """Whether the leader has been stopped by a signal (not by a debugger)."""
        with suppress(psutil.NoSuchProcess):
            return self._leader is not None and self._leader.status() == psutil.STATUS_STOPPED
        return False

    def kill_leader(self) -> None:
        """Send it SIGKILL."""
        with suppress(psutil.NoSuchProcess):
            if self._leader is not None:
                self._leader.kill()

    def terminate(self) -> None:
        """Send SIGTERM to the process group, and to the members outside of it."""
        members = self.members()
        outside = {process for process in members if _id_of(os.getpgid, process.pid) != self.pid}
        if members - outside:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGTERM)
        for process in outside:
            with suppress(psutil.Error):
                process.terminate()


def stop_sessions(sessions: Iterable[Session], grace: float, patience: float = 10.0) -> list[psutil.Process]:
    """SIGTERM to the process groups; SIGKILL after `grace` seconds to whatever is left of the sessions.

    Args:
        sessions: those to end; ended ones are fine.
        grace: seconds between the signals; 0 sends SIGKILL at once.
        patience: seconds to wait for the effect of SIGKILL.

    Returns:
        processes that are still there (stuck in the kernel, or not ours to kill); normally none.
    """
    sessions = list(sessions)
    left = _members(sessions)
    if grace > 0:
        for session in sessions:
            session.terminate()
        left = _wait(left, grace)
    deadline = time.monotonic() + patience
    while left := _living(left | _members(sessions)):
        if time.monotonic() > deadline:
            return sorted(left, key=lambda process: process.pid)
        for process in left:
            with suppress(psutil.Error):
                process.kill()
        left = _wait(left, 10 * CHECK_EVERY)
    return []


def _members(sessions: list[Session]) -> set[psutil.Process]:
    return set().union(*(session.members() for session in sessions))


def _wait(processes: set[psutil.Process], seconds: float) -> set[psutil.Process]:
    """Those that still live after `seconds`; returns early once nobody does."""
    deadline = time.monotonic() + seconds
    while (processes := _living(processes)) and time.monotonic() < deadline:
        time.sleep(CHECK_EVERY)
    return processes


def _living(processes: set[psutil.Process]) -> set[psutil.Process]:
    return {process for process in processes if _is_alive(process)}


def _is_alive(process: psutil.Process) -> bool:
    """Whether it still runs. A zombie does not: it holds no memory and no port, and its parent will collect it."""
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def _id_of(group: Callable[[int], int], pid: int) -> int | None:
    """The id of the process group or session that a process belongs to; None: it is gone, or not ours to ask."""
    try:
        return group(pid)
    except (ProcessLookupError, PermissionError):
        return None
