"""Messages about the end of a process: its cause and the last lines of its log."""

from __future__ import annotations

import re
import shutil
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from rl_contracts.runtime.run_files import TAIL_BYTES, tail

if TYPE_CHECKING:
    from rl_contracts.scheduler import Worker


FULL_BYTES = 64 * 1024
"""Free bytes below which a disk counts as full."""

ERRORS_BEFORE = 5
"""Maximum number of earlier error lines shown before the last lines of a log.

A server with several processes logs the cause first and ends with the stack of a process that waited for the failed
one."""
_NAMES_AN_ERROR = re.compile(r"(?:^|\s)[\w.]*(?:Error|Exception): *(\S.*)")

LIKELY_CAUSES: dict[int, str] = {
    signal.SIGKILL: "out of memory?",
    signal.SIGSEGV: "a crash in native code",
    signal.SIGABRT: "an assertion in native code",
    signal.SIGBUS: "shared memory or disk full?",
    signal.SIGILL: "built for another processor?",
}
"""Likely causes by signal number, shown in parentheses."""


def describe_exit(code: int | None) -> str:
    """Return a predicate for an exit code as in `subprocess`, such as `"was killed by SIGKILL (out of memory?)"`."""
    if code is None:
        return "ended"
    number = -code if code < 0 else code - 128
    if number not in set(signal.Signals):
        return f"ended with exit code {code}"
    name = signal.Signals(number).name
    cause = f" ({LIKELY_CAUSES[number]})" if number in LIKELY_CAUSES else ""
    if code < 0:
        return f"was killed by {name}{cause}"
    return f"ended with exit code {code}, which a shell gives for {name}{cause}"


def describe_end(worker: Worker) -> str:
    """Return the end of a worker as the predicate of a sentence about it."""
    return worker.cause or describe_exit(worker.exit_code)


def not_ready(name: str, timeout: float, url: str, answer: str) -> str:
    """Return the message about a worker that was not ready in time.

    Args:
        name: name of the worker.
        timeout: time limit in seconds.
        url: URL of its readiness check.
        answer: result of the last check.
    """
    return (
        f"{name} was not ready within {timeout:g} s: {url} never returned status 200 (last: {answer}). See its log, "
        "or raise ready_timeout."
    )


def informative_tail(log: Path, lines: int, offset: int = 0) -> str:
    """Return the last lines of a log, preceded by the first earlier lines that name an error.

    Lines before byte `offset` are ignored. Each error text appears once, and at most `ERRORS_BEFORE` of them.
    """
    all_lines = tail(log, TAIL_BYTES, offset).splitlines()
    earlier, last = all_lines[:-lines] if lines > 0 else [], tail(log, lines, offset)
    errors: dict[str, str] = {}
    for line in earlier:
        if match := _NAMES_AN_ERROR.search(line):
            errors.setdefault(match[1], line)
    return "\n".join([*list(errors.values())[:ERRORS_BEFORE], "...", last]) if errors else last


def separate(log: Path, what: str) -> None:
    """Append a line to a log that separates two starts of a worker. Errors such as a full disk are ignored."""
    with suppress(OSError), log.open("a") as file:
        file.write(f"\n======== {time.strftime('%Y-%m-%d %H:%M:%S')} {what} ========\n")


def with_log(problem: str, log: Path, text: str) -> str:
    """Return a message followed by lines of the log, indented, and by a warning if the log's disk is full."""
    with suppress(OSError):
        if shutil.disk_usage(log.parent).free < FULL_BYTES:
            problem += f"\nNo space left on device: {log} may lack its last lines. Free disk space and start again."
    if not text.strip():
        return f"{problem}\nIts log, {log}, is empty."
    indented = "\n".join(f"    {line}" for line in text.splitlines())
    return f"{problem}\nThe last lines of {log}:\n{indented}"
