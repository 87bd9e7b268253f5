"""Limits on the failed and rejected groups of a run."""

from __future__ import annotations

import traceback
from collections import Counter, deque
from typing import TYPE_CHECKING, Any

from rl_contracts.errors import RLError, boundary_of

if TYPE_CHECKING:
    from rl_workflows.rollout.config import RolloutConfig

WINDOW = 1000
"""Number of recent groups to which the budget applies: few enough to detect a change within hours, many enough for a
stable rate."""
MIN_GROUPS = 16
"""Number of groups that must finish before the budget is checked, so that one failure at the start is tolerated."""
MAX_FAILED_IN_ROW = 100
"""Consecutive failed groups after which the run stops, even with a `failure_budget` of 1: a working run does not fail
this often in succession."""


class FailureBudget:
    """Budget for failed groups: compares the failure rate of recent groups with the limits of the settings.

    Only recent groups count, so that the limit is equally sensitive at any time of the run.

    Args:
        config: allowed fraction of failures, and limit of consecutive rejections.
        total: total number of groups, if known; the fraction then refers to all groups.
    """

    def __init__(self, config: RolloutConfig, total: int | None = None) -> None:
        self._config = config
        self._min_groups = MIN_GROUPS if total is None else min(MIN_GROUPS, total)
        # boundary and trace of a failed group, else None
        self._recent: deque[tuple[str, str] | None] = deque(maxlen=WINDOW if total is None else total)
        self._failed_in_row = self._rejected_in_row = 0

    def accepted(self) -> None:
        """Record an accepted group."""
        self._recent.append(None)
        self._failed_in_row = self._rejected_in_row = 0

    def rejected(self) -> None:
        """Record a rejected group.

        Raises:
            RLError: too many consecutive groups were rejected, so training would wait forever.
        """
        self._recent.append(None)
        self._failed_in_row = 0
        self._rejected_in_row += 1
        if self._rejected_in_row >= self._config.max_rejected_in_row:
            raise RLError(
                f"{self._rejected_in_row} groups in a row were rejected. Either all rewards of each group are equal, "
                "or should_accept or the workflow is too strict. Disable rollout.dynamic_sampling, change the data, "
                "or raise rollout.max_rejected_in_row."
            )

    def failed(self, error: BaseException) -> None:
        """Record a failed group.

        Raises:
            RLError: too many recent or consecutive groups failed. The message contains the trace of the first of them.
        """
        trace = "".join(traceback.format_exception(error))
        self._recent.append((boundary_of(error), f"{type(error).__name__}: {str(error).partition('\n')[0]}\n{trace}"))
        self._failed_in_row += 1
        if self._failed_in_row >= MAX_FAILED_IN_ROW:
            failed = [entry for entry in self._recent if entry][-self._failed_in_row :]
            self._raise_exceeded(f"{self._failed_in_row} groups in a row", failed, str(MAX_FAILED_IN_ROW), error)
        if len(self._recent) >= self._min_groups:
            self.check(error)

    def check(self, last: BaseException | None = None) -> None:
        """Compare the fraction of failed groups with the budget, regardless of `MIN_GROUPS`.

        Raises:
            RLError: the budget is exceeded. The message contains the trace of the first failure.
        """
        failed = [entry for entry in self._recent if entry]
        if len(failed) > self._config.failure_budget * len(self._recent):
            limit = f"rollout.failure_budget={self._config.failure_budget:g}"
            self._raise_exceeded(f"{len(failed)} of the last {len(self._recent)} groups", failed, limit, last)

    def _raise_exceeded(
        self, groups: str, failed: list[tuple[str, str]], limit: str, cause: BaseException | None
    ) -> None:
        by_boundary = ", ".join(f"{name} {count}" for name, count in Counter(name for name, _ in failed).most_common())
        raise RLError(
            f"{groups} failed ({by_boundary}); the limit is {limit}. The first failure was {failed[0][1]}"
        ) from cause

    def state_dict(self) -> dict[str, Any]:
        """Return the state as JSON values."""
        return {
            "recent": list(self._recent),
            "failed_in_row": self._failed_in_row,
            "rejected_in_row": self._rejected_in_row,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state of `state_dict`. Missing keys, as in states of earlier releases, count as no failures."""
        self._recent.extend(entry and (str(entry[0]), str(entry[1])) for entry in state.get("recent", ()))
        self._failed_in_row = int(state.get("failed_in_row", 0))
        self._rejected_in_row = int(state.get("rejected_in_row", 0))
