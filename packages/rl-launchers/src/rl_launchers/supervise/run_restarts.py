"""Starting a run again from its newest recover point when trainers or all servers were lost: how often, and when it is
no use."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn

from rl_contracts.errors import LaunchError, RLError
from rl_launchers.supervise.server_health import RestartConfig, ServersLostError

IDLE_RESTARTS = 2
"""Restarts in a row that reach no further than before, after which another one would not either."""


class TrainersLostError(LaunchError):
    """A trainer ended that should not have, or hangs.

    Args:
        message: what happened, with its log.
        raised: whether all that ended did so with an error of their own; else somebody killed one, or its node is lost.
    """

    def __init__(self, message: str, raised: bool = False) -> None:
        super().__init__(message)
        self.raised = raised


class UserCodeError(LaunchError):
    """A trainer ended with an error that would come again."""


@dataclass(frozen=True)
class Resume:
    """What a launcher must know of a run, to start it again by itself."""

    reached: Callable[[], tuple[int, int]]
    """The last step that was taken, and the step of the newest recover point; 0 where there is none."""
    prepare: Callable[[], int]
    """Called when nothing runs any more: does what the command does before it launches, and returns the step after
    which the run goes on. Raises an `RLError` where it cannot, which says why."""
    step_seconds: Callable[[], float] = lambda: 0.0
    """Usual seconds of a step; 0: not known yet."""


class RunRestarts:
    """Decides whether a run is started again.

    Args:
        config: `trainer_restarts` within `restart_window`.
        resume: None: never.
    """

    def __init__(self, config: RestartConfig, resume: Resume | None) -> None:
        self._limit, self._window, self._resume = config.trainer_restarts, config.restart_window, resume
        self._furthest = resume.reached() if resume else (0, 0)
        self._times: deque[float] = deque()
        self._idle = -1
        self.count = 0
        """Restarts so far."""
        self.history: list[str] = []
        """What went wrong, first cause first: that one with its log, the others a sentence each."""

    def prepare_restart(self, error: LaunchError, ready: bool) -> str:
        """Make the run's directory ready for another start.

        Args:
            error: which ended the last one.
            ready: whether all servers were ready then.

        Returns:
            what happened, from where the run goes on, and which restart it is, in a sentence.

        Raises:
            LaunchError: it is not started again; with everything that went wrong. `error` itself, where it was the
                first and neither trainers nor all servers were lost.
        """
        began = self.count > 0 or self._furthest[1] > 0  # in another command too
        lost = isinstance(error, TrainersLostError | ServersLostError) or (began and not ready)
        lost = lost and not isinstance(error, UserCodeError)
        if self._resume is None or not self._limit or not lost:
            self._refuse(error, "")
        reached, now = self._resume.reached(), time.monotonic()
        further = any(step > before for step, before in zip(reached, self._furthest, strict=True))
        self._idle = 0 if further else self._idle + 1
        if not self.count and not further and isinstance(error, TrainersLostError) and error.raised:
            self._refuse(error, "It was not restarted, because it failed before its first step.")
        if self._idle >= IDLE_RESTARTS:
            self._refuse(error, f"It did not get past step {self._furthest[0]} in {self._idle + 1} starts.")
        while self._times and now - self._times[0] > self._window:
            self._times.popleft()
        if len(self._times) >= self._limit:
            used = f"launcher.trainer_restarts={self._limit} within {self._window:g} s: all restarts are used."
            self._refuse(error, used)
        try:
            step = self._resume.prepare()
        except RLError as reason:
            self._refuse(error, f"It was not restarted: {reason}")
        self._furthest = (max(self._furthest[0], reached[0]), max(self._furthest[1], reached[1]))
        self._times.append(now)
        self.count += 1
        nth = f"restart {len(self._times)} of {self._limit} within {self._window:g} s"
        where = f"after step {step}, the newest recovery checkpoint" if step else "from the beginning"
        self._remember(error, f"{time.strftime('%H:%M:%S')}, {nth}, {where}.")
        return f"{headline(error)} Restarting all processes {where} ({nth})."

    def headlines(self) -> list[str]:
        """The history, a line for each entry."""
        return [line.partition("\n")[0] for line in self.history]

    def _remember(self, error: LaunchError, then: str) -> None:
        self.history += [headline(error) if self.history else str(error), then]

    def _refuse(self, error: LaunchError, reason: str) -> NoReturn:
        if not self.history and not reason:
            raise error
        self._remember(error, reason)
        raise LaunchError("\n".join(filter(None, self.history))) from error


def headline(error: BaseException) -> str:
    """The first line of an error."""
    return str(error).partition("\n")[0]
