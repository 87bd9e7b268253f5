"""Run one command and kill all of its descendants afterwards. This Linux script needs only the standard library.

Run as `reaper.py SETTINGS`, where SETTINGS is the JSON object that `main` reads. The reaper waits until its command
exits, or until its owner writes to the pipe `owner`, closes it or dies. The reaper then kills all of its descendants,
including those in another session, and exits.

With `confine`, the path of `rl_contracts.sandbox.confine`, the command can write files only in `directory`. With
`stderr_bytes`, stderr must be a file opened for appending; the reaper drops the beginning of a file above this size.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import math
import os
import runpy
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

_PR_SET_CHILD_SUBREAPER = 36
_POLL_SECONDS = 0.02
_CLEANUP_TIMEOUT = 30.0


def main() -> int:
    """Run one command and return its exit code, or 128 plus the number of the signal that killed it."""
    settings = json.loads(sys.argv[1])
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # orphans become children of the reaper
    signal.signal(signal.SIGTERM, lambda *_: None)  # a cluster sends SIGTERM to all processes; only the owner decides
    if settings["confine"]:
        runpy.run_path(settings["confine"])["write_only_below"](settings["directory"], settings["shared_memory"])
    try:
        command = subprocess.Popen(settings["command"], cwd=settings["directory"])
    except OSError as error:
        sys.stderr.write(f"{settings['command'][0]!r} cannot be started: {error}\n")
        return 127
    for stream in (0, 1):  # only the command may keep stdin and stdout open, so that the owner sees when they close
        os.close(stream)
    owner = select.poll()
    owner.register(settings["owner"], select.POLLIN)
    while command.poll() is None and not owner.poll(1000 * _POLL_SECONDS):
        _trim(2, settings.get("stderr_bytes", math.inf))
        _reap(command.pid)
    _kill_descendants()
    if settings["after"]:
        null = subprocess.DEVNULL
        subprocess.run(settings["after"], stdin=null, stdout=null, timeout=_CLEANUP_TIMEOUT)
    code = command.returncode or 0
    return code if code >= 0 else 128 - code


def _trim(file: int, limit: float) -> None:
    """Shorten a file that has more than `limit` bytes to its last `limit // 2` bytes."""
    size = os.fstat(file).st_size
    if size > limit:
        half = int(limit // 2)
        tail = os.pread(file, half, size - half) + os.pread(file, half, size)  # plus bytes written meanwhile
        os.ftruncate(file, 0)
        os.write(file, tail)


def _reap(command: int) -> None:
    """Reap exited children, except the command, whose exit code is still needed."""
    with contextlib.suppress(ChildProcessError):
        while (exited := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) and exited.si_pid != command:
            os.waitpid(exited.si_pid, os.WNOHANG)


def _kill_descendants() -> None:
    """Kill all descendants, including those that start meanwhile, until none remain."""
    while True:
        for pid in _descendants(os.getpid()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        time.sleep(0.001)


def _descendants(pid: int) -> list[int]:
    children: dict[int, list[int]] = {}
    for status in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            parent = int(status.read_bytes().rpartition(b")")[2].split()[1])
            children.setdefault(parent, []).append(int(status.parent.name))
    descendants = list(children.get(pid, ()))
    for child in descendants:
        descendants += children.get(child, ())
    return descendants


if __name__ == "__main__":
    sys.exit(main())
