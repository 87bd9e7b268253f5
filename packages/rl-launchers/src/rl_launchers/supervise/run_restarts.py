"""Restarts of a run from its newest recovery checkpoint after the loss of trainers or of all servers."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn

from rl_contracts.errors import LaunchError, RLError
from rl_launchers.supervise import restart_window
from rl_launchers.supervise.server_health import RestartConfig, ServersLostError

IDLE_RESTARTS = 2
"""Number of consecutive restarts without progress after which the run ends."""


class TrainersLostError(LaunchError):
    """Loss of a trainer, which ended unexpectedly or hangs.

    Args:
        message: the cause, with lines of the trainer's log.
        raised: whether all failed trainers raised an error; False if one was killed, hangs, or its node is lost.
    """

    def __init__(self, message: str, raised: bool = False) -> None:
        super().__init__(message)
        self.raised = raised


class UserCodeError(LaunchError):
    """Error of a trainer that would recur after a restart."""


@dataclass(frozen=True)
class Resume:
    """Functions with which a launcher restarts a run automatically."""

    reached: Callable[[], tuple[int, int]]
    """Function that returns the last finished step and the step of the newest recovery checkpoint; 0 for none."""
    prepare: Callable[[], int]
    """Function that prepares a restart after all processes have ended. It repeats the preparations of a launch and
    returns the step after which the run resumes. If the run cannot resume, it raises an `RLError` with the reason."""
    step_seconds: Callable[[], float] = lambda: 0.0
    """Function that returns the usual duration of a step in seconds; 0 if unknown."""


class RunRestarts:
    """Policy that decides whether to restart a run.

    Args:
        config: limit `trainer_restarts`.
        resume: functions of the run; None for no restarts.
    """

    def __init__(self, config: RestartConfig, resume: Resume | None) -> None:
        self._limit, self._resume = config.trainer_restarts, resume
        self._furthest = resume.reached() if resume else (0, 0)
        self._restarts = restart_window.RestartWindow(self._limit)
        self._idle = -1
        self.count = 0
        """Number of restarts so far."""
        self.steps: list[int] = []
        """Step after which each restart resumed; 0: from the beginning."""
        self.history: list[str] = []
        """Errors and restarts in order: the first error with lines of its log, the rest one sentence each."""

    def prepare_restart(self, error: LaunchError, ready: bool) -> str:
        """Prepare the run directory for a restart.

        Args:
            error: error that ended the last start.
            ready: whether all servers were ready in that start.

        Returns:
            a message with the error, the step after which the run resumes, and the number of the restart.

        Raises:
            LaunchError: the run is not restarted; the message has all errors of the run. If `error` is the run's first
                error and cannot cause a restart, `error` itself is raised.
        """
        began = self.count > 0 or self._furthest[1] > 0  # an earlier command may have saved the recovery checkpoint
        restartable = isinstance(error, TrainersLostError | ServersLostError) or (began and not ready)
        restartable = restartable and not isinstance(error, UserCodeError)
        if self._resume is None or not self._limit or not restartable:
            self._refuse(error, "")
        reached = self._resume.reached()
        progressed = any(step > before for step, before in zip(reached, self._furthest, strict=True))
        self._idle = 0 if progressed else self._idle + 1
        if not self.count and not progressed and isinstance(error, TrainersLostError) and error.raised:
            self._refuse(error, "The run was not restarted, because it failed before its first step.")
        if self._idle >= IDLE_RESTARTS:
            self._refuse(error, f"The run did not get past step {self._furthest[0]} in {self._idle + 1} starts.")
        if self._restarts.is_used_up():
            limit = f"launcher.trainer_restarts={self._limit} within {restart_window.WINDOW_SECONDS:g} s"
            self._refuse(error, f"{limit}: all restarts are used.")
        try:
            step = self._resume.prepare()
        except RLError as obstacle:
            self._refuse(error, f"The run was not restarted: {obstacle}")
        self._furthest = (max(self._furthest[0], reached[0]), max(self._furthest[1], reached[1]))
        self.count += 1
        self.steps.append(step)
        count = self._restarts.add()
        where = f"after step {step}, the newest recovery checkpoint" if step else "from the beginning"
        self._record(error, f"{time.strftime('%H:%M:%S')}, {count}, {where}.")
        return f"{headline(error)} Restarting all processes {where} ({count})."

    def headlines(self) -> list[str]:
        """Return the first line of each entry of the history."""
        return [entry.partition("\n")[0] for entry in self.history]

    def _record(self, error: LaunchError, outcome: str) -> None:
        self.history += [headline(error) if self.history else str(error), outcome]

    def _refuse(self, error: LaunchError, reason: str) -> NoReturn:
        """Raise the error with the history and the reason for which the run is not restarted."""
        if not self.history and not reason:
            raise error
        self._record(error, reason)
        raise LaunchError("\n".join(filter(None, self.history))) from error


def headline(error: BaseException) -> str:
    """Return the first line of an error's message."""
    return str(error).partition("\n")[0]
