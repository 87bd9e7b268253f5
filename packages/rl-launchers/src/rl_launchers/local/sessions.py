"""Termination of all processes that a worker started: its process group, its session and its descendants."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterable
from contextlib import suppress

import psutil

CHECK_EVERY = 0.02
"""Seconds between two checks of processes that should end."""


class Session:
    """Session of a worker started with `start_new_session`. The worker is its leader, so its id is the worker's PID.

    A session exists as long as one of its members lives, and until then the kernel does not reuse its id. The lookup by
    session finds children whose parent died. The lookup by descent finds children that created a session.
    """

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._leader: psutil.Process | None = None
        with suppress(psutil.NoSuchProcess):
            self._leader = psutil.Process(pid)

    def members(self) -> set[psutil.Process]:
        """Return the living processes of the session and the living descendants of its leader."""
        pids = [pid for pid in psutil.pids() if _id_of(os.getsid, pid) == self.pid]
        if self.pid in pids and not (self._leader is not None and self._leader.is_running()):
            return set()  # the kernel reused the id for an unrelated process, so this session has no members
        processes: set[psutil.Process] = set()
        for pid in pids:
            with suppress(psutil.NoSuchProcess):
                processes.add(psutil.Process(pid))
        if self._leader is not None:
            with suppress(psutil.NoSuchProcess):
                processes.update(self._leader.children(recursive=True))
        return _living(processes)

    def stopped(self) -> bool:
        """Return whether a signal, not a debugger, has stopped the leader."""
        with suppress(psutil.NoSuchProcess):
            return self._leader is not None and self._leader.status() == psutil.STATUS_STOPPED
        return False

    def kill_leader(self) -> None:
        """Send SIGKILL to the leader."""
        with suppress(psutil.NoSuchProcess):
            if self._leader is not None:
                self._leader.kill()

    def terminate(self) -> None:
        """Send SIGTERM to the leader's process group and to members outside it."""
        members = self.members()
        outside = {process for process in members if _id_of(os.getpgid, process.pid) != self.pid}
        if members - outside:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGTERM)
        for process in outside:
            with suppress(psutil.Error):
                process.terminate()


def stop_sessions(sessions: Iterable[Session], grace: float, patience: float = 10.0) -> list[psutil.Process]:
    """Send SIGTERM to the process groups, and SIGKILL after `grace` seconds to the remaining members of the sessions.

    Args:
        sessions: sessions to end; ended ones are ignored.
        grace: seconds between the signals; 0 sends SIGKILL at once.
        patience: seconds to wait for the effect of SIGKILL.

    Returns:
        processes that still live, because they are stuck in the kernel or belong to another user; normally none.
    """
    sessions = list(sessions)
    remaining = _members(sessions)
    if grace > 0:
        for session in sessions:
            session.terminate()
        remaining = _wait(remaining, grace)
    deadline = time.monotonic() + patience
    while remaining := _living(remaining | _members(sessions)):
        if time.monotonic() > deadline:
            return sorted(remaining, key=lambda process: process.pid)
        for process in remaining:
            with suppress(psutil.Error):
                process.kill()
        remaining = _wait(remaining, 10 * CHECK_EVERY)
    return []


def _members(sessions: list[Session]) -> set[psutil.Process]:
    return set().union(*(session.members() for session in sessions))


def _wait(processes: set[psutil.Process], seconds: float) -> set[psutil.Process]:
    """Wait up to `seconds` for the processes to end, and return those that still live."""
    deadline = time.monotonic() + seconds
    while (processes := _living(processes)) and time.monotonic() < deadline:
        time.sleep(CHECK_EVERY)
    return processes


def _living(processes: set[psutil.Process]) -> set[psutil.Process]:
    return {process for process in processes if _is_alive(process)}


def _is_alive(process: psutil.Process) -> bool:
    """Return whether a process still runs. A zombie does not: it holds no memory or port until its parent reaps it."""
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def _id_of(group: Callable[[int], int], pid: int) -> int | None:
    """Return the id of a process's group or session, or None if the process ended or access is denied."""
    try:
        return group(pid)
    except (ProcessLookupError, PermissionError):
        return None
