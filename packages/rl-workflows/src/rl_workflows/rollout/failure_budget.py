"""How many failures a run puts up with, and what it says when that is exceeded."""

from __future__ import annotations

import traceback
from collections import Counter, deque
from typing import TYPE_CHECKING, Any

from rl_contracts.errors import RLError, boundary_of

if TYPE_CHECKING:
    from rl_workflows.rollout.config import RolloutConfig


class FailureBudget:
    """Remembers what became of the last groups, so that it notices late in a run what it notices early.

    Args:
        config: how many of how many may fail, and how many in a row may fail or be rejected.
        total: groups that there will be at all; the fraction is then taken over all of them.
    """

    def __init__(self, config: RolloutConfig, total: int | None = None) -> None:
        self._config = config
        self._enough = config.failure_min_groups if total is None else min(config.failure_min_groups, total)
        # of a group that failed its boundary and trace, else nothing
        self._recent: deque[tuple[str, str] | None] = deque(maxlen=config.failure_window if total is None else total)
        self._failed_in_row = self._rejected_in_row = 0

    def accepted(self) -> None:
        """A group was accepted."""
        self._recent.append(None)
        self._failed_in_row = self._rejected_in_row = 0

    def rejected(self) -> None:
        """A group was rejected.

        Raises:
            RLError: too many in a row; training would wait for ever.
        """
        self._recent.append(None)
        self._failed_in_row = 0
        self._rejected_in_row += 1
        if self._rejected_in_row >= self._config.max_rejected_in_row:
            raise RLError(
                f"{self._rejected_in_row} groups in a row were rejected. Nothing is left to learn from these prompts "
                "with this filter: all answers of a group may be right (or wrong), or should_accept is too strict. "
                "Switch rollout.dynamic_sampling off, change the data, or raise rollout.max_rejected_in_row."
            )

    def failed(self, error: BaseException) -> None:
        """A group failed.

        Raises:
            RLError: too many did, of the last ones or in a row; its message holds the first trace of them.
        """
        trace = "".join(traceback.format_exception(error))
        self._recent.append((boundary_of(error), f"{type(error).__name__}: {str(error).partition('\n')[0]}\n{trace}"))
        self._failed_in_row += 1
        if self._failed_in_row >= self._config.max_failed_in_row:
            failed = [entry for entry in self._recent if entry][-self._failed_in_row :]
            self._stop(f"{self._failed_in_row} groups in a row", failed, "max_failed_in_row", error)
        if len(self._recent) >= self._enough:
            self.check(error)

    def check(self, last: BaseException | None = None) -> None:
        """Compare the fraction of failed groups with the budget, however few have finished.

        Raises:
            RLError: it is exceeded; the message holds the first trace.
        """
        failed = [entry for entry in self._recent if entry]
        if len(failed) > self._config.failure_budget * len(self._recent):
            self._stop(f"{len(failed)} of the last {len(self._recent)} groups", failed, "failure_budget", last)

    def _stop(self, how_many: str, failed: list[tuple[str, str]], limit: str, last: BaseException | None) -> None:
        by_boundary = ", ".join(f"{name} {count}" for name, count in Counter(name for name, _ in failed).most_common())
        raise RLError(
            f"{how_many} failed ({by_boundary}), more than rollout.{limit}={getattr(self._config, limit):g} allows. "
            f"The first failure was {failed[0][1]}"
        ) from last

    def state_dict(self) -> dict[str, Any]:
        """JSON values."""
        return {
            "recent": list(self._recent),
            "failed_in_row": self._failed_in_row,
            "rejected_in_row": self._rejected_in_row,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from `state_dict`. Of what an earlier version did not save, nothing is remembered: the run then puts up
        with a few failures more."""
        self._recent.extend(entry and (str(entry[0]), str(entry[1])) for entry in state.get("recent", ()))
        self._failed_in_row = int(state.get("failed_in_row", 0))
        self._rejected_in_row = int(state.get("rejected_in_row", 0))
