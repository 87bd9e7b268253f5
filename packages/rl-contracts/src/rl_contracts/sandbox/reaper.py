"""Run one command, and end all processes that it started: a script that needs the standard library only. Linux alone.

`reaper.py SETTINGS`, a JSON object as `main` reads it. The reaper ends with its command, or when the other side of the
descriptor `owner` is written to or closed, as it is when the owner dies. All processes below the reaper end then, also
those that left its session. With `confine`, the path of `rl_contracts.sandbox.confine`, they can write in `directory`
only. With `stderr_bytes`, stderr is a file opened to append, of which the reaper keeps the end.
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
_AFTER_SECONDS = 30.0


def main() -> int:
    """Run one command; return its exit code, or 128 plus the signal that ended it."""
    settings = json.loads(sys.argv[1])
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # what its processes leave behind is this one's child
    signal.signal(signal.SIGTERM, lambda *_: None)  # a cluster sends it to all processes; the owner decides
    if settings["confine"]:
        runpy.run_path(settings["confine"])["write_only_below"](settings["directory"], settings["shared_memory"])
    try:
        command = subprocess.Popen(settings["command"], cwd=settings["directory"])
    except OSError as error:
        sys.stderr.write(f"{settings['command'][0]!r} cannot be started: {error}\n")
        return 127
    for stream in (0, 1):  # the command's alone, so that their ends are seen
        os.close(stream)
    owner = select.poll()
    owner.register(settings["owner"], select.POLLIN)
    while command.poll() is None and not owner.poll(1000 * _POLL_SECONDS):
        _trim(2, settings.get("stderr_bytes", math.inf))
        _reap(command.pid)
    _end_all()
    if settings["after"]:
        null = subprocess.DEVNULL
        subprocess.run(settings["after"], stdin=null, stdout=null, timeout=_AFTER_SECONDS)
    code = command.returncode or 0
    return code if code >= 0 else 128 - code


def _trim(file: int, limit: float) -> None:
    """Remove the first half of a file that has more than `limit` bytes."""
    size = os.fstat(file).st_size
    if size > limit:
        half = int(limit // 2)
        end = os.pread(file, half, size - half) + os.pread(file, half, size)  # the second was written meanwhile
        os.ftruncate(file, 0)
        os.write(file, end)


def _reap(command: int) -> None:
    """Collect processes that ended below this one, except the command, whose exit code is still needed."""
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) and ended.si_pid != command:
            os.waitpid(ended.si_pid, os.WNOHANG)


def _end_all() -> None:
    """Kill all processes below this one, also those that are started meanwhile, until there are none."""
    while True:
        for pid in _below(os.getpid()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        time.sleep(0.001)


def _below(pid: int) -> list[int]:
    children: dict[int, list[int]] = {}
    for status in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            parent = int(status.read_bytes().rpartition(b")")[2].split()[1])
            children.setdefault(parent, []).append(int(status.parent.name))
    found = list(children.get(pid, ()))
    for child in found:
        found += children.get(child, ())
    return found


if __name__ == "__main__":
    sys.exit(main())
