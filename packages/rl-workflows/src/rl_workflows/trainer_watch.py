"""Noticing a trainer that does not come back: finished groups wait, and nobody takes them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rl_contracts.errors import StalledError
from rl_contracts.logging import get_logger
from rl_workflows.stacks import stack_of_thread

if TYPE_CHECKING:
    from rl_contracts.clock import Clock

log = get_logger("workflows")

CHECKS = 8
"""Looks within the limit."""


class TrainerWatch:
    """Counts the time since the trainer's last call. Admission bounds what piles up meanwhile; this bounds the time.

    Args:
        clock: all time.
        limit: clock seconds after which a trainer that is elsewhere counts as stuck.
        describe: one line on the state of admission.
        on_stall: told once, on the loop; the trainer's own thread cannot be told anything.
    """

    def __init__(
        self, clock: Clock, limit: float, describe: Callable[[], str], on_stall: Callable[[StalledError], None]
    ) -> None:
        self._clock, self._limit = clock, limit
        self._describe, self._on_stall = describe, on_stall
        self._thread = ""
        self._calls = 0
        self._left_at = clock.now()

    @contextmanager
    def call(self, thread: str) -> Iterator[None]:
        """The trainer, in this thread, is inside of a call of the runtime. One thread at a time."""
        self._thread = thread
        self._calls += 1
        try:
            yield
        finally:
            self._left_at = self._clock.now()
            self._calls -= 1

    async def watch(self) -> None:
        """Watch until the alarm, or until it is cancelled."""
        while True:
            await self._clock.sleep(self._limit / CHECKS)
            away = self._clock.now() - self._left_at
            if not self._calls and away >= self._limit:
                self._on_stall(self._alarm(away))
                return

    def _alarm(self, away: float) -> StalledError:
        error = StalledError(
            f"stuck stage: trainer. It has not taken a batch for {away:.1f} s (rollout.trainer_timeout={self._limit:g})"
            f". {self._describe()}. Its thread {self._thread!r} is here:\n{stack_of_thread(self._thread)}"
        )
        log.error("%s", error)
        return error
