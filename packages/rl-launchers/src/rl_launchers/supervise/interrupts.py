"""SIGINT, SIGTERM and SIGHUP turned into something that a loop can look at."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

import psutil


def uv_parent() -> int:
    """Process id of the `uv run` that waits for this program; 0 where there is none."""
    with suppress(psutil.Error):
        if psutil.Process(os.getppid()).name().startswith("uv"):
            return os.getppid()
    return 0


class Interrupted(BaseException):
    """The user, or whoever runs the launcher, asked it to stop. Not an error, so no `Exception`."""

    def __init__(self, number: int) -> None:
        super().__init__(f"interrupted by {signal.Signals(number).name}")
        self.number = number


class SecondInterrupt(Interrupted):
    """A second request to stop, which is not to wait for anything."""


COALESCE_SECONDS = 0.5
"""Seconds within which signals count as one."""

ONE_REQUEST = 3.0
"""Seconds within which a trainer takes signals for one request: a preemption may signal it as well as its launcher. The
launcher waits a second longer before its second request."""

TICK = 0.02
"""Seconds in which a wait notices a signal."""


class Interrupts:
    """Catches SIGINT, SIGTERM and SIGHUP (unless that is ignored, as by nohup) while it is entered and puts the former
    handlers back afterwards.

    The first signal only sets a flag: an exception out of nowhere could fall between the start of a process and its
    entry into the books. `check` raises it as `Interrupted` where the loop is ready for it. Further ones are raised at
    once, as `SecondInterrupt`, within `raise_on_second`, and only counted elsewhere. What comes within `TOGETHER`
    seconds of another is the same: a signal to a whole group of processes reaches a program below `uv run` twice.

    Signals reach only the main thread; in any other this does nothing. A program that `uv run` started is asked to stop
    as well when that is gone, which hands on signals but cannot hand on its own SIGKILL.

    Args:
        parent: what `uv_parent` said when the program began; None: it is asked now.
    """

    def __init__(self, parent: int | None = None) -> None:
        self._received: list[int] = []
        self._former: dict[int, Any] = {}
        self._parent = uv_parent() if parent is None else parent
        self._impatient = False
        self._last = 0.0

    @property
    def requests(self) -> int:
        """Signals so far."""
        return len(self._received)

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is threading.main_thread():
            hangup = [] if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else [signal.SIGHUP]
            for number in (signal.SIGINT, signal.SIGTERM, *hangup):
                self._former[number] = signal.signal(number, self._receive)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._former.items():
            signal.signal(number, handler)

    def check(self) -> None:
        """Raise `Interrupted` if a signal came, or nobody waits for this program any more."""
        if self._parent not in (0, os.getppid()):
            raise Interrupted(signal.SIGTERM)
        if self._received:
            raise Interrupted(self._received[0])

    @contextmanager
    def raise_on_second(self) -> Iterator[None]:
        """Here a further signal after the first is raised at once."""
        former, self._impatient = self._impatient, True
        try:
            yield
        finally:
            self._impatient = former

    def wait(self, seconds: float) -> None:
        """Return after `seconds`, or soon after a signal came. No lock is held meanwhile: the handler runs in this very
        thread, and would wait for it forever."""
        end = time.monotonic() + seconds
        while not self._received and (left := end - time.monotonic()) > 0:
            time.sleep(min(left, TICK))

    def _receive(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self._received and now < self._last + COALESCE_SECONDS:
            return
        self._last = now
        self._received.append(number)
        if len(self._received) > 1 and self._impatient:
            raise SecondInterrupt(self._received[0])
