"""Limit on restarts within a sliding window of time."""

from __future__ import annotations

import time
from collections import deque

WINDOW_SECONDS = 600.0
"""Seconds after which a restart no longer counts, so that rare losses in a long run do not use up the restarts."""


class RestartWindow:
    """Restarts of one server or of a run, of which only those of the last `WINDOW_SECONDS` count.

    Args:
        limit: maximum number of restarts within the window.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._times: deque[float] = deque()

    def is_used_up(self) -> bool:
        """Return whether no further restart is allowed now."""
        now = time.monotonic()
        while self._times and now - self._times[0] > WINDOW_SECONDS:
            self._times.popleft()
        return len(self._times) >= self._limit

    def add(self) -> str:
        """Count a restart, and return its number and the limit, for messages."""
        self._times.append(time.monotonic())
        return f"restart {len(self._times)} of {self._limit} within {WINDOW_SECONDS:g} s"

    def remove_last(self) -> None:
        """Do not count the last restart, because it failed."""
        self._times.pop()
