"""How the end of a process is told: what it died of, and the last lines of its log."""

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
"""A disk with less room is full."""

ERRORS_BEFORE = 5
"""Lines that name an error, shown at most from before the last lines: servers of several processes end with the stack
of the one that waited, long after the one that failed has said why."""
_NAMES_AN_ERROR = re.compile(r"(?:^|\s)[\w.]*(?:Error|Exception): *(\S.*)")

LIKELY_CAUSES: dict[int, str] = {
    signal.SIGKILL: "out of memory?",
    signal.SIGSEGV: "a crash in native code",
    signal.SIGABRT: "an assertion in native code",
    signal.SIGBUS: "shared memory or disk full?",
    signal.SIGILL: "built for another processor?",
}


def describe_exit(code: int | None) -> str:
    """An exit code as `subprocess` gives it, in words: `"was killed by SIGKILL (out of memory?)"`."""
    if code is None:
        return "ended"
    number = -code if code < 0 else code - 128
    if number not in set(signal.Signals):
        return f"ended with exit code {code}"
    name = signal.Signals(number).name
    likely = f" ({LIKELY_CAUSES[number]})" if number in LIKELY_CAUSES else ""
    if code < 0:
        return f"was killed by {name}{likely}"
    return f"ended with exit code {code}, which a shell gives for {name}{likely}"


def describe_end(worker: Worker) -> str:
    """How a worker ended, in words that go on a sentence about it."""
    return worker.cause or describe_exit(worker.exit_code)


def not_ready(name: str, timeout: float, asked: str, answer: str) -> str:
    """That a worker was not ready in time, and what it said last when `asked` (a URL)."""
    return (
        f"{name} was not ready within {timeout:g} s: {asked} gave no 200; last: {answer}. See its log, or raise "
        "ready_timeout."
    )


def informative_tail(log: Path, lines: int, offset: int = 0) -> str:
    """The last lines of a log from byte `offset` on, and before them the first earlier ones that name an error, each
    error once."""
    everything = tail(log, TAIL_BYTES, offset).splitlines()
    earlier, last = everything[:-lines] if lines > 0 else [], tail(log, lines, offset)
    errors: dict[str, str] = {}
    for line in earlier:
        if found := _NAMES_AN_ERROR.search(line):
            errors.setdefault(found[1], line)
    return "\n".join([*list(errors.values())[:ERRORS_BEFORE], "...", last]) if errors else last


def separate(log: Path, what: str) -> None:
    """Append a line that tells one life of a worker from the next; where the disk is full, do without."""
    with suppress(OSError), log.open("a") as file:
        file.write(f"\n======== {time.strftime('%Y-%m-%d %H:%M:%S')} {what} ========\n")


def with_log(problem: str, log: Path, text: str) -> str:
    """A message followed by what the log says, indented; and that its disk is full, where it may end too early."""
    with suppress(OSError):
        if shutil.disk_usage(log.parent).free < FULL_BYTES:
            problem += f"\nNo space left on device: {log} may lack what was said last. Make room, and start again."
    if not text.strip():
        return f"{problem}\nIts log, {log}, is empty."
    shown = "\n".join(f"    {line}" for line in text.splitlines())
    return f"{problem}\nThe last lines of {log}:\n{shown}"
