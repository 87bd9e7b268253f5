"""Signs of life of trainer ranks, which answer nobody: a number that each renews, and a launcher that looks at it.

A rank that was stopped, or lies on a machine that hangs, is seen by its own watchdogs only when others wait for it,
after minutes; a single one by nobody else.
"""

from __future__ import annotations

import threading
import time
from contextlib import suppress

from rl_contracts.runtime.name_service import NameService

LONGEST_BEAT = 10.0
"""Seconds between two signs of life of a rank, at most."""
MISSED_BEATS = 4
"""Signs of life within the time after which a rank counts as hung."""


def beat(names: NameService, worker: str, timeout: float) -> None:
    """Give signs of life from now on, until this process ends.

    Args:
        names: of the run.
        worker: name of this process for its launcher, `<role>-<index>`.
        timeout: seconds after which it would count as hung; 0: nobody looks.
    """

    def run() -> None:
        number = 0
        while True:
            number += 1
            with suppress(OSError):  # a full disk: the launcher sees that too
                names.add(f"pulse/{worker}", str(number), replace=True)
            time.sleep(min(LONGEST_BEAT, timeout / MISSED_BEATS))

    if timeout:
        threading.Thread(target=run, name="pulse", daemon=True).start()


class Heartbeats:
    """The launcher's look at them. Clocks are not compared: what counts is for how long a number has not changed, by
    the launcher's own time between readings that followed each other; after a longer pause all count anew.

    Args:
        names: of the run.
    """

    def __init__(self, names: NameService) -> None:
        self._names = names
        self.timeout = 0.0
        """Seconds after which a rank counts as hung; 0: nobody looks."""
        self._seen: dict[str, tuple[str, float]] = {}
        self._last = 0.0

    def read(self) -> None:
        """Look at all of them, unless that was a moment ago."""
        now = time.monotonic()
        if not self.timeout or now - self._last < self.timeout / (2 * MISSED_BEATS):
            return
        if now - self._last > self.timeout / 2:
            self._seen = {}  # this process, or its file system, was away, as theirs may have been
        before, found = self._seen, {}
        for key, value in self._names.children("pulse").items():
            former = before.get(key, ("", now))
            found[key] = former if former[0] == value else (value, now)
        if self._seen is before:  # and nobody forgot them meanwhile
            self._seen, self._last = found, now

    def forget(self) -> None:
        """Everybody counts anew."""
        self._seen = {}

    def clear(self) -> None:
        """The ranks are gone, and others will follow."""
        self.forget()
        with suppress(OSError):  # numbers of the dead: they count as hung only until others write
            for key in self._names.children("pulse"):
                self._names.delete(key)

    def is_hung(self, worker: str) -> bool:
        """Whether a worker has not renewed its number for too long; not where it never had one."""
        _, since = self._seen.get(f"pulse/{worker}", ("", self._last))
        return bool(self.timeout) and self._last - since > self.timeout
