"""Conversion of SIGINT, SIGTERM and SIGHUP into a flag that a loop can check."""

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
    """Return the process id of the `uv run` that waits for this program, or 0 if there is none."""
    with suppress(psutil.Error):
        if psutil.Process(os.getppid()).name().startswith("uv"):
            return os.getppid()
    return 0


class Interrupted(BaseException):
    """Request by a user or process to stop the launcher. It is not an error, so not an `Exception`."""

    def __init__(self, number: int) -> None:
        super().__init__(f"interrupted by {signal.Signals(number).name}")
        self.number = number


class SecondInterrupt(Interrupted):
    """Second request to stop, which must take effect without waiting."""


COALESCE_SECONDS = 0.5
"""Seconds within which several signals count as one."""

ONE_REQUEST = 3.0
"""Seconds within which a trainer counts signals as one request, because a preemption may signal both the trainer and
its launcher. The launcher waits a second longer before its second request."""

TICK = 0.02
"""Maximum seconds until a wait notices a signal."""


class Interrupts:
    """Context manager that catches SIGINT, SIGTERM and SIGHUP, and restores the previous handlers at its end.

    SIGHUP is not caught if it is ignored, for example by nohup.

    The first signal only sets a flag, because an exception at any line could lose a process that was just started.
    `check` raises `Interrupted` where the loop is ready for it. Further signals raise `SecondInterrupt` at once within
    `raise_on_second`, and are only counted elsewhere. A signal within `COALESCE_SECONDS` of another counts as the same
    one, because a signal to a process group reaches a program below `uv run` twice.

    Signals reach only the main thread, so this does nothing in other threads. The end of the `uv run` that started the
    program also counts as a stop request: `uv run` forwards signals, but cannot forward its own SIGKILL.

    Args:
        parent: result of `uv_parent` at the start of the program; None to call it now.
    """

    def __init__(self, parent: int | None = None) -> None:
        self._received: list[int] = []
        self._previous_handlers: dict[int, Any] = {}
        self._parent = uv_parent() if parent is None else parent
        self._raises = False
        self._last = 0.0

    @property
    def requests(self) -> int:
        """Number of signals so far."""
        return len(self._received)

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is threading.main_thread():
            hangup = [] if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else [signal.SIGHUP]
            for number in (signal.SIGINT, signal.SIGTERM, *hangup):
                self._previous_handlers[number] = signal.signal(number, self._receive)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous_handlers.items():
            signal.signal(number, handler)

    def check(self) -> None:
        """Raise `Interrupted` if a signal arrived, or if the parent `uv run` has ended."""
        if self._parent not in (0, os.getppid()):
            raise Interrupted(signal.SIGTERM)
        if self._received:
            raise Interrupted(self._received[0])

    @contextmanager
    def raise_on_second(self) -> Iterator[None]:
        """Raise further signals after the first at once within this context."""
        previous, self._raises = self._raises, True
        try:
            yield
        finally:
            self._raises = previous

    def wait(self, seconds: float) -> None:
        """Return after `seconds`, or soon after a signal arrives.

        This holds no lock, because the handler runs in the same thread and would wait for the lock forever.
        """
        end = time.monotonic() + seconds
        while not self._received and (remaining := end - time.monotonic()) > 0:
            time.sleep(min(remaining, TICK))

    def _receive(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self._received and now < self._last + COALESCE_SECONDS:
            return
        self._last = now
        self._received.append(number)
        if len(self._received) > 1 and self._raises:
            raise SecondInterrupt(self._received[0])
