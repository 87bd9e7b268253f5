"""Source of prompts: first the prompts that a stopped run had in flight, then the examples of an iterator."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from itertools import islice
from typing import Any

from rl_contracts.errors import ConfigError, DataError

Example = dict[str, Any]

MAX_DROPPED = 1_000_000
"""Maximum number of remaining examples that are read to report them as left over."""


class PromptSource:
    """Iterator that returns each example once and can be saved between any two examples.

    The methods `state_dict` and `load_state_dict` of an iterable save and restore it. An iterable without them must
    yield the same examples in the same order in a new process, because restoring skips the examples drawn before. To
    resume with another number of data-parallel leaders, the iterable needs `load_states(states)`: the argument is the
    list of states of the previous leaders' iterables, in order.

    Args:
        rows: examples (dictionaries with an integer `prompt_id`), finite or endless.
    """

    def __init__(self, rows: Iterable[Example]) -> None:
        self._rows = rows
        self._requeued: deque[Example] = deque()
        self._drawn = 0
        self._exhausted = False

    @cached_property
    def _iterator(self) -> Iterator[Example]:
        return iter(self._rows)  # created lazily, after a state was loaded into the iterable

    @property
    def exhausted(self) -> bool:
        """True if the last example was returned."""
        return self._exhausted and not self._requeued

    def next_example(self) -> Example | None:
        """Return the next example, or None at the end of the data."""
        if self._requeued:
            return self._requeued.popleft()
        row = next(self._iterator, None)
        self._exhausted = row is None
        self._drawn += row is not None
        return row

    def drop_rest(self) -> list[Example]:
        """Return the remaining examples and end the source.

        At most `MAX_DROPPED` examples are read from the iterable, because it may be endless.
        """
        drawn = list(islice(self._iterator, MAX_DROPPED))
        remaining = [*self._requeued, *drawn]
        self._requeued.clear()
        self._drawn, self._exhausted = self._drawn + len(drawn), True
        return remaining

    def requeue_first(self, rows: Iterable[Example]) -> None:
        """Put examples at the front of the source, in this order."""
        self._requeued.extendleft(reversed(list(rows)))

    def state_dict(self) -> dict[str, Any]:
        """Return the state. It consists of JSON values if the state of the iterable does."""
        state = self._rows.state_dict() if hasattr(self._rows, "state_dict") else None
        return {"drawn": self._drawn, "requeued": list(self._requeued), "rows": state}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state of `state_dict`.

        Raises:
            DataError: the data has fewer examples than were drawn before, or its iterable cannot load the saved state.
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
            for drawn in range(int(state["drawn"])):
                if self.next_example() is None:
                    raise DataError(
                        f"resuming: {state['drawn']} examples were drawn before, but the data ends after {drawn}. "
                        "Resume with the data set of the saved run."
                    )
        self._requeued.extend(state["requeued"])

    def load_states(self, states: Sequence[dict[str, Any]]) -> None:
        """Load this leader's shard of the remaining examples from the states of all previous leaders.

        Requeued examples of the previous leaders are not included.

        Raises:
            ConfigError: the iterable cannot divide its remaining examples among another number of leaders.
        """
        if not hasattr(self._rows, "load_states") or any(state["rows"] is None for state in states):
            raise ConfigError(
                f"resuming: the run was saved with {len(states)} trainer replicas, and {type(self._rows).__name__} "
                "cannot divide its remaining examples among another number without `load_states`. Resume with the "
                "same number of replicas, or use an rl_datasets.PromptLoader for the prompts."
            )
        self._rows.load_states([state["rows"] for state in states])
