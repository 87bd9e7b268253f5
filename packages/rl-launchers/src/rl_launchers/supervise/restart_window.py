"""Limit on restarts within a sliding window of time."""

from __future__ import annotations

import time
from collections import deque


class RestartWindow:
    """Restarts of one server or of a run, of which only those of the last `seconds` count.

    Args:
        limit: maximum number of restarts within the window.
        seconds: length of the window.
    """

    def __init__(self, limit: int, seconds: float) -> None:
        self._limit, self._seconds = limit, seconds
        self._times: deque[float] = deque()

    def is_used_up(self) -> bool:
        """Return whether no further restart is allowed now."""
        now = time.monotonic()
        while self._times and now - self._times[0] > self._seconds:
            self._times.popleft()
        return len(self._times) >= self._limit

    def add(self) -> str:
        """Count a restart, and return its number and the limit, for messages."""
        self._times.append(time.monotonic())
        return f"restart {len(self._times)} of {self._limit} within {self._seconds:g} s"

    def remove_last(self) -> None:
        """Do not count the last restart, because it failed."""
        self._times.pop()
