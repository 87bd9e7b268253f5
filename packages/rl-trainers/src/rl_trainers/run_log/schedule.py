"""When something is due that a run does now and then: every so many steps, epochs or minutes."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rl_contracts.config import Settings, bounded
from rl_contracts.errors import ConfigError


@dataclass
class EveryConfig(Settings):
    """When something is done; each that is set counts, and what is done for one of them restarts the minutes."""

    every: int = bounded(0, "0 (none) or more steps", lambda steps: steps >= 0)
    """Steps between two of them; 0: steps do not count."""
    every_epochs: int = bounded(0, "0 (none) or more passes over the data", lambda epochs: epochs >= 0)
    """Passes over the data between two of them, at the first step after the last row was handed out; 0: they do not
    count."""
    every_minutes: float = bounded(0.0, "0 (none) or more minutes", lambda minutes: minutes >= 0)
    """Minutes between two of them, at the first step after that; 0: the clock does not count."""

    @property
    def regular(self) -> bool:
        """Whether any of them is set."""
        return bool(self.every or self.every_epochs or self.every_minutes)


class Schedule:
    """Says after which steps something is due. Ranks ask it alike, and go by what rank 0's says: its clock counts.

    Args:
        config: when.
        epochs: passes over the data that are over; needed for `every_epochs`.
        now: a clock, in seconds.

    Raises:
        ConfigError: `every_epochs` is set, and nobody says which epoch it is.
    """

    def __init__(
        self, config: EveryConfig, epochs: Callable[[], int] | None = None, now: Callable[[], float] = time.monotonic
    ) -> None:
        if config.every_epochs and epochs is None:
            raise ConfigError(
                f"{config.setting}.every_epochs={config.every_epochs}: expected data whose epochs are counted, found "
                "none here (the argument `epochs`). Use every or every_minutes."
            )
        self._config, self._epochs, self._now = config, epochs or (lambda: 0), now
        self.least = 0.0
        """Seconds at least between two that the clock asks for."""
        self.restart()

    def restart(self) -> None:
        """Count from here."""
        self._begin, self._passed = self._now(), self._epochs()

    def is_due(self, step: int) -> bool:
        """Whether it is due after a step, which is asked about once. If so, minutes and epochs are counted from
        here."""
        config = self._config
        due = (
            (config.every > 0 and step % config.every == 0)
            or (config.every_epochs > 0 and self._epochs() // config.every_epochs > self._passed // config.every_epochs)
            or (config.every_minutes > 0 and self._now() - self._begin >= max(60 * config.every_minutes, self.least))
        )
        if due:
            self.restart()
        return due

    def state_dict(self) -> dict[str, Any]:
        """What has passed since the last one."""
        return {"seconds": self._now() - self._begin, "passed": self._passed}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on counting."""
        self._begin, self._passed = self._now() - float(state["seconds"]), int(state["passed"])
