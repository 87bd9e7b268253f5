"""Schedules of periodic work, in steps, epochs or minutes."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rl_contracts.config import Settings, bounded
from rl_contracts.errors import ConfigError


@dataclass
class ScheduleConfig(Settings):
    """Intervals between saves. Each interval that is set applies, and every save restarts the minutes."""

    every: int = bounded(0, "0 (none) or more steps", lambda steps: steps >= 0)
    """Steps between saves; 0 disables this interval."""
    every_epochs: int = bounded(0, "0 (none) or more passes over the data", lambda epochs: epochs >= 0)
    """Passes over the data between saves; a save follows the first step after the last example is handed out. 0
    disables this interval."""
    every_minutes: float = bounded(0.0, "0 (none) or more minutes", lambda minutes: minutes >= 0)
    """Minutes between saves; a save follows the first step after that time. 0 disables this interval."""

    @property
    def regular(self) -> bool:
        """True if any interval is set."""
        return bool(self.every or self.every_epochs or self.every_minutes)


class Schedule:
    """Schedule of saves. Every rank evaluates it, but only the result of rank 0 counts, because clocks differ.

    Args:
        config: the intervals.
        epochs: returns the number of completed passes over the data; needed for `every_epochs`.
        now: a clock, in seconds.

    Raises:
        ConfigError: `every_epochs` is set without `epochs`.
    """

    def __init__(
        self, config: ScheduleConfig, epochs: Callable[[], int] | None = None, now: Callable[[], float] = time.monotonic
    ) -> None:
        if config.every_epochs and epochs is None:
            raise ConfigError(
                f"{config.setting}.every_epochs={config.every_epochs} needs data whose epochs are counted (argument "
                f"`epochs`); use {config.setting}.every or {config.setting}.every_minutes."
            )
        self._config, self._epochs, self._now = config, epochs or (lambda: 0), now
        self.min_seconds = 0.0
        """Minimum number of seconds between two saves by `every_minutes`."""
        self.restart()

    def restart(self) -> None:
        """Count minutes and epochs from now."""
        self._begin, self._epochs_at_restart = self._now(), self._epochs()

    def is_due(self, step: int) -> bool:
        """Return whether a save is due after a step; if so, count minutes and epochs from now.

        Call it once per step.
        """
        config = self._config
        is_due = (
            (config.every > 0 and step % config.every == 0)
            or (
                config.every_epochs > 0
                and self._epochs() // config.every_epochs > self._epochs_at_restart // config.every_epochs
            )
            or (
                config.every_minutes > 0
                and self._now() - self._begin >= max(60 * config.every_minutes, self.min_seconds)
            )
        )
        if is_due:
            self.restart()
        return is_due

    def state_dict(self) -> dict[str, Any]:
        """Return the seconds since the last save, and the completed epochs at that time."""
        return {"seconds": self._now() - self._begin, "passed": self._epochs_at_restart}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue to count from a state that `state_dict` returned."""
        self._begin, self._epochs_at_restart = self._now() - float(state["seconds"]), int(state["passed"])
