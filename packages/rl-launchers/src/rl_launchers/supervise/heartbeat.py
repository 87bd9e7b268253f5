"""Heartbeats of trainer ranks, which have no port: each rank increases a number, and the launcher reads it.

The watchdogs of the other ranks notice a stopped rank, or one on a hung machine, only after minutes. A single rank has
no other ranks that could notice it.
"""

from __future__ import annotations

import threading
import time
from contextlib import suppress

from rl_contracts.runtime.name_service import NameService

LONGEST_BEAT = 10.0
"""Maximum number of seconds between two heartbeats of a rank."""
MISSED_BEATS = 4
"""Number of missed heartbeats after which a rank counts as hung."""


def beat(names: NameService, worker: str, timeout: float) -> None:
    """Start a thread that writes heartbeats until this process ends.

    Args:
        names: name service of the run.
        worker: name of this process in the launcher, `<role>-<index>`.
        timeout: seconds without a heartbeat after which this process counts as hung; 0 to write no heartbeats.
    """

    def run() -> None:
        number = 0
        while True:
            number += 1
            with suppress(OSError):  # for example a full disk, which the launcher notices too
                names.add(f"heartbeat/{worker}", str(number), replace=True)
            time.sleep(min(LONGEST_BEAT, timeout / MISSED_BEATS))

    if timeout:
        threading.Thread(target=run, name="heartbeat", daemon=True).start()


class Heartbeats:
    """Reader of the heartbeats in the launcher.

    A rank counts as hung if its number has not changed for `timeout` seconds, measured by the launcher's clock alone.
    If more than half of `timeout` passes between two reads, the time starts again for all ranks.

    Args:
        names: name service of the run.
    """

    def __init__(self, names: NameService) -> None:
        self._names = names
        self.timeout = 0.0
        """Seconds without a heartbeat after which a rank counts as hung; 0 disables the check."""
        self._seen: dict[str, tuple[str, float]] = {}
        self._last = 0.0

    def read(self) -> None:
        """Read all heartbeats, at most once in `timeout / (2 * MISSED_BEATS)` seconds."""
        now = time.monotonic()
        if not self.timeout or now - self._last < self.timeout / (2 * MISSED_BEATS):
            return
        if now - self._last > self.timeout / 2:
            self._seen = {}  # this process or its file system was suspended, and the ranks may have been too
        before, after = self._seen, {}
        for key, value in self._names.children("heartbeat").items():
            previous = before.get(key, ("", now))
            after[key] = previous if previous[0] == value else (value, now)
        if self._seen is before:  # no other thread has called `forget` meanwhile
            self._seen, self._last = after, now

    def forget(self) -> None:
        """Restart the time without a heartbeat for all ranks."""
        self._seen = {}

    def clear(self) -> None:
        """Delete the heartbeats of ranks that have ended, before others start."""
        self.forget()
        with suppress(OSError):  # if an old number remains, a new rank counts as hung only until it writes
            for key in self._names.children("heartbeat"):
                self._names.delete(key)

    def is_hung(self, worker: str) -> bool:
        """Return whether a worker's last heartbeat is older than `timeout`; False if it never sent one."""
        _, since = self._seen.get(f"heartbeat/{worker}", ("", self._last))
        return bool(self.timeout) and self._last - since > self.timeout
