"""How many failures a run puts up with, and what it says when that is exceeded."""

from __future__ import annotations

import traceback
from collections import Counter

from rl_contracts.errors import RLError, boundary_of


class FailureBudget:
    """Counts finished and failed groups by boundary and keeps the first failure's trace.

    Args:
        share: failed over finished groups that is tolerated.
        min_groups: finished groups before the share is looked at; fewer say little.
        max_rejected_in_row: groups rejected without one accepted in between, after which the run stops.
    """

    def __init__(self, share: float, min_groups: int, max_rejected_in_row: int) -> None:
        self._share, self._min_groups, self._max_rejected = share, min_groups, max_rejected_in_row
        self._finished = 0
        self._failed: Counter[str] = Counter()
        self._rejected_in_row = 0
        self._first: BaseException | None = None
        self._first_trace = ""

    def accepted(self) -> None:
        """A group was accepted."""
        self._finished += 1
        self._rejected_in_row = 0

    def rejected(self) -> None:
        """A group was rejected.

        Raises:
            RLError: too many in a row; training would wait for ever.
        """
        self._finished += 1
        self._rejected_in_row += 1
        if self._rejected_in_row >= self._max_rejected:
            raise RLError(
                f"{self._rejected_in_row} groups in a row were rejected. Nothing is left to learn from these prompts "
                "with this filter: all answers of a group may be right (or wrong), or should_accept is too strict. "
                "Switch rollout.dynamic_sampling off, change the data, or raise rollout.max_rejected_in_row."
            )

    def episode_failed(self, error: BaseException) -> None:
        """Remember the first failure of all."""
        if self._first is None:
            self._first, self._first_trace = error, "".join(traceback.format_exception(error))

    def failed(self, error: BaseException) -> None:
        """A group failed.

        Raises:
            RLError: the share of failed groups exceeds the budget; its message holds the first trace.
        """
        self.episode_failed(error)
        self._finished += 1
        self._failed[boundary_of(error)] += 1
        if self._finished >= self._min_groups:
            self.check()

    def check(self) -> None:
        """Compare the share of failed groups with the budget, however few have finished.

        Raises:
            RLError: it is exceeded; the message holds the first trace.
        """
        total = self._failed.total()
        if total <= self._share * self._finished:
            return
        by_boundary = ", ".join(f"{name} {count}" for name, count in self._failed.most_common())
        raise RLError(
            f"{total} of {self._finished} groups failed ({by_boundary}), more than rollout.failure_budget="
            f"{self._share:g} allows. The first failure was:\n{self._first_trace}"
        ) from self._first
