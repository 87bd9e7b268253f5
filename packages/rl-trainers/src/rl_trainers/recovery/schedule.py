"""Schedule of recovery checkpoints, in steps and minutes."""

from __future__ import annotations

import time
from collections.abc import Callable

from rl_trainers.recovery.lookup import RecoverConfig


class Schedule:
    """Schedule of saves. Every rank evaluates it, but only the result of rank 0 counts, because clocks differ.

    Args:
        config: the intervals.
        now: a clock, in seconds.
    """

    def __init__(self, config: RecoverConfig, now: Callable[[], float] = time.monotonic) -> None:
        self._config, self._now = config, now
        self.min_seconds = 0.0
        """Minimum number of seconds between two saves by `every_minutes`."""
        self.restart()

    def restart(self) -> None:
        """Count minutes from now."""
        self._begin = self._now()

    def is_due(self, step: int) -> bool:
        """Return whether a save is due after a step; if so, count minutes from now. Call it once per step."""
        every, minutes = self._config.every, self._config.every_minutes
        is_due = (every > 0 and step % every == 0) or (
            minutes > 0 and self._now() - self._begin >= max(60 * minutes, self.min_seconds)
        )
        if is_due:
            self.restart()
        return is_due
