"""Where prompts come from: an iterator of rows, and before it the prompts that a stopped run had in flight."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from itertools import islice
from typing import Any

from rl_contracts.errors import ConfigError, DataError

Row = dict[str, Any]

MAX_DROPPED = 1_000_000
"""Rows that are read to say which they were."""


class PromptSource:
    """Hands out data rows once each, and can be saved between any two.

    An iterable with `state_dict` and `load_state_dict` is saved and restored by them. Any other must give the same rows
    in the same order in a new process: on restoring, the rows that were drawn before are skipped. To go on with another
    number of heads, the iterable needs `load_states`, which takes the states of the former heads' iterables, in order.

    Args:
        rows: dict rows with an integer `prompt_id`, finite or endless.
    """

    def __init__(self, rows: Iterable[Row]) -> None:
        self._rows = rows
        self._requeued: deque[Row] = deque()
        self._drawn = 0
        self._exhausted = False

    @cached_property
    def _iterator(self) -> Iterator[Row]:
        return iter(self._rows)  # not before a state is loaded into the rows

    @property
    def exhausted(self) -> bool:
        """Whether the last row was handed out."""
        return self._exhausted and not self._requeued

    def next_row(self) -> Row | None:
        """The next row; None at the end."""
        if self._requeued:
            return self._requeued.popleft()
        row = next(self._iterator, None)
        self._exhausted = row is None
        self._drawn += row is not None
        return row

    def drop_rest(self) -> list[Row]:
        """Hand out no more; the rows that there were still (up to `MAX_DROPPED`, where there is no end)."""
        rest = list(islice(self._iterator, MAX_DROPPED))
        left = [*self._requeued, *rest]
        self._requeued.clear()
        self._drawn, self._exhausted = self._drawn + len(rest), True
        return left

    def requeue_first(self, rows: Iterable[Row]) -> None:
        """Hand these rows out again, in this order, before all others."""
        self._requeued.extendleft(reversed(list(rows)))

    def state_dict(self) -> dict[str, Any]:
        """JSON values, as far as the iterable's own state is."""
        state = self._rows.state_dict() if hasattr(self._rows, "state_dict") else None
        return {"drawn": self._drawn, "requeued": list(self._requeued), "rows": state}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state` was taken.

        Raises:
            DataError: the data is shorter than what was drawn before, or cannot go on from its state.
        """
        if state["rows"] is not None:
            if not hasattr(self._rows, "load_state_dict"):
                raise DataError(
                    f"resuming: the data was saved with a state, but {type(self._rows).__name__} has no "
                    "load_state_dict. Resume with the data set of the saved run."
                )
            self._rows.load_state_dict(state["rows"])
            self._drawn = int(state["drawn"])
        else:
            for number in range(int(state["drawn"])):
                if self.next_row() is None:
                    raise DataError(
                        f"resuming: {state['drawn']} rows were drawn before, but the data ends after {number}. "
                        "Resume with the data set of the saved run."
                    )
        self._requeued.extend(state["requeued"])

    def load_states(self, states: Sequence[dict[str, Any]]) -> None:
        """Continue with this head's part of the rows that another number of heads had left. The rows that those were to
        hand out again are not among them.

        Raises:
            ConfigError: the rows cannot be divided anew.
        """
        if not hasattr(self._rows, "load_states") or any(state["rows"] is None for state in states):
            raise ConfigError(
                f"resuming {len(states)} trainer replicas with another number of them: what each had taken of the data "
                f"({type(self._rows).__name__}) cannot be divided anew without `load_states`. Resume with as many "
                "replicas as the run had, or give the prompts by an rl_datasets.PromptLoader."
            )
        self._rows.load_states([state["rows"] for state in states])
