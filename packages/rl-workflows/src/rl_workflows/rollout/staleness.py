"""Admission of groups and release of batches under a bound on staleness.

This module only counts groups, separately for each data-parallel leader. It uses no clock, event loop or tensors.

Let B be the number of groups per step, eta = `max_staleness`, and v the trainer's version. A group that was admitted at
version s is *due* at s + eta: a batch released at a later version must not contain it.

    outstanding = running + accepted + in the batch that is being trained on
    capacity    = min(max_concurrent - running, (eta + 1) * B - outstanding)

Look-ahead: a batch consists of the B oldest accepted groups. It is released only if, for every k >= 0, at most k * B of
the other running and accepted groups are due by v + k. Otherwise the trainer waits until more of the due groups are
accepted.

**Why no group in a batch is older than eta versions.** The invariant I(v) holds while no batch is in training: for
every k >= 0, at most (k + 1) * B outstanding groups are due by v + k. The look-ahead with k = 0 leaves no group behind
that is due by v, so no group is overdue at version v + 1. Each event preserves the invariant:

- *A group is admitted while no batch is in training.* The group is due at v + eta, so it counts only for k >= eta. For
  these k, the capacity limits all outstanding groups to (eta + 1) * B.
- *A group is admitted while a batch is in training.* The batch keeps its B slots, so at most eta * B other groups are
  outstanding. The new group is due at v + eta = (v + 1) + (eta - 1). In I(v + 1) it counts only for k >= eta - 1, which
  allows at least eta * B groups.
- *The step ends at v + 1.* The look-ahead left at most (k + 1) * B groups due by v + k + 1 = (v + 1) + k, as I(v + 1)
  requires.
- *The step is skipped, and the version stays v.* The look-ahead left at most k * B groups due by v + k, and I(v) allows
  (k + 1) * B.
- *A group is rejected or fails.* Its removal lowers the counts. Its replacement is an admission.
- *A run with n leaders resumes with m leaders.* Here B is the sum over all leaders. The accepted groups are distributed
  round-robin by age. At most (k + 1) * B of all groups are due by v + k, so each new leader gets at most
  (k + 1) * B / m of these. Running groups are admitted again.

**Why the trainer cannot wait forever.** Running groups end, because episodes have deadlines. Two cases remain:

- *Fewer than B groups are outstanding.* The capacity is positive unless `max_concurrent` groups run, and these end.
- *At least B groups are outstanding.* The batch is released once the B oldest groups are accepted. By I(v), at most
  (k + 1) * B - B = k * B of the groups due by v + k stay behind, as the look-ahead requires.

A rejected or failed group frees its slot for a younger group, which never precedes the B oldest. If all groups are
rejected or fail, the failure budget stops the run.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

from rl_contracts.errors import RLError


class Ticket(NamedTuple):
    """Admission of one group. Tickets are ordered by age: start version, then group id."""

    start: int
    """Version committed on all live servers when the group was admitted."""
    group_id: int
    """Id of the group, unique over all leaders and the whole run."""


class StalenessManager:
    """Counter of groups, from their admission to the end of the step that trains on them.

    With n accepted groups, an admission or outcome costs at most O(log n). A look-ahead check costs O(eta log eta).

    Args:
        batch_size: groups per step of this leader, B; at least 1.
        max_staleness: eta; 0 is exactly on-policy. `RolloutConfig` validates this and `max_concurrent`.
        max_concurrent: maximum number of running groups; None sets no further limit.
        version: version that is committed now.
        first_id: id of the first group.
        id_stride: difference between consecutive ids, so that ids of several leaders are disjoint.
    """

    def __init__(
        self,
        batch_size: int,
        max_staleness: int,
        max_concurrent: int | None = None,
        *,
        version: int = 0,
        first_id: int = 0,
        id_stride: int = 1,
    ) -> None:
        self.batch_size, self.max_staleness = batch_size, max_staleness
        self.max_concurrent = max_concurrent
        self.version, self.steps = version, 0
        """Committed version, and number of batches released."""
        self._next_id, self._id_stride = first_id, id_stride
        self._running: dict[int, Ticket] = {}
        self._running_by_start: Counter[int] = Counter()
        self._accepted: list[Ticket] = []
        self._accepted_by_start: Counter[int] = Counter()
        self.in_step = 0
        """Groups in the batch that is being trained on."""
        self._step_is_open = False

    @property
    def running(self) -> int:
        """Number of groups that were admitted and have no outcome yet."""
        return len(self._running)

    @property
    def accepted(self) -> int:
        """Number of accepted groups that wait for a batch."""
        return len(self._accepted)

    @property
    def outstanding(self) -> int:
        """Number of groups that occupy a slot."""
        return len(self._running) + len(self._accepted) + self.in_step

    @property
    def capacity(self) -> int:
        """Number of groups that may start now."""
        slots = (self.max_staleness + 1) * self.batch_size - self.outstanding
        if self.max_concurrent is not None:
            slots = min(slots, self.max_concurrent - len(self._running))
        return max(slots, 0)

    def admit(self, group_id: int | None = None) -> Ticket:
        """Start a group at the current version.

        Args:
            group_id: id of a group that a stopped run had in flight; None assigns the next id.

        Raises:
            RLError: there is no capacity.
        """
        if self.capacity < 1:
            raise RLError(f"admit: no slot is free; {self.describe()}. Check `capacity` first.")
        ticket = Ticket(self.version, self._next_id if group_id is None else group_id)
        self._next_id += self._id_stride if group_id is None else 0
        self._running[ticket.group_id] = ticket
        self._running_by_start[ticket.start] += 1
        return ticket

    def accept(self, ticket: Ticket) -> None:
        """Move a running group to the accepted groups, which wait for a batch.

        Raises:
            RLError: the group is not running.
        """
        self._end(ticket, "accepted")
        heapq.heappush(self._accepted, ticket)
        self._accepted_by_start[ticket.start] += 1

    def reject(self, ticket: Ticket) -> None:
        """Remove a rejected group and free its slot.

        Raises:
            RLError: the group is not running.
        """
        self._end(ticket, "rejected")

    def fail(self, ticket: Ticket) -> None:
        """Remove a failed group and free its slot.

        Raises:
            RLError: the group is not running.
        """
        self._end(ticket, "failed")

    def ready(self, closed: bool = False) -> bool:
        """Return whether a batch may be released now.

        Args:
            closed: whether no further group will be admitted. The batch may then be smaller than B once no group runs.
        """
        if self._step_is_open:
            return False
        if len(self._accepted) < self.batch_size:
            return closed and not self._running
        return self._satisfies_look_ahead()

    def take_batch(self, closed: bool = False) -> list[Ticket]:
        """Release the next batch and return its groups, oldest first. They keep their slots until `end_step`.

        Args:
            closed: see `ready`; the batch may then be smaller than B, or empty.

        Raises:
            RLError: no batch is ready, or a group is older than `max_staleness`, which would be a bug in admission.
        """
        if not self.ready(closed):
            raise RLError(f"take_batch: no batch is ready; {self.describe()}. Check `ready` first.")
        taken = [heapq.heappop(self._accepted) for _ in range(min(self.batch_size, len(self._accepted)))]
        for ticket in taken:
            self._decrement(self._accepted_by_start, ticket.start)
        if taken and taken[0].start + self.max_staleness < self.version:
            raise RLError(
                f"group {taken[0].group_id} started at version {taken[0].start} and would be trained on at "
                f"version {self.version}, which exceeds max_staleness={self.max_staleness}. This is a bug in admission."
            )
        self.in_step, self._step_is_open = len(taken), True
        self.steps += 1
        return taken

    def return_batch(self, tickets: Sequence[Ticket]) -> None:
        """Undo `take_batch`: its groups wait for a batch again.

        Args:
            tickets: result of `take_batch`.

        Raises:
            RLError: no batch of this size is being trained on.
        """
        if not self._step_is_open or self.in_step != len(tickets):
            raise RLError(
                f"return_batch: no batch to return ({len(tickets)} groups given, {self.in_step} in the open step). "
                "Call it once, between next_batch and end_step, and not for the last batch of the data."
            )
        for ticket in tickets:
            heapq.heappush(self._accepted, ticket)
            self._accepted_by_start[ticket.start] += 1
        self.in_step, self._step_is_open = 0, False
        self.steps -= 1

    def end_step(self, version: int) -> None:
        """End the step of the last batch.

        Args:
            version: the current version plus 1, or the current version if the step was skipped.

        Raises:
            RLError: no batch is being trained on, or `version` is neither of these two values.
        """
        if not self._step_is_open:
            raise RLError("end_step: no batch is being trained on; call it once after each next_batch.")
        if version not in (self.version, self.version + 1):
            raise RLError(
                f"end_step: expected version {self.version + 1}, or {self.version} for a skipped step; "
                f"found {version}. The version counts training batches applied, one per step."
            )
        self.version = version
        self.in_step, self._step_is_open = 0, False

    def drop_rest(self) -> None:
        """Remove all running and accepted groups after the last batch."""
        for collection in (self._running, self._running_by_start, self._accepted, self._accepted_by_start):
            collection.clear()

    def describe(self) -> str:
        """Return one line that describes the state, for error messages."""
        return (
            f"version {self.version}: {self.running} groups running, {self.accepted} accepted, {self.in_step} in the "
            f"step, batch of {self.batch_size}, max_staleness {self.max_staleness}"
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the state as JSON values.

        Running groups are not included; the caller saves their prompts and restarts them.

        Raises:
            RLError: a batch is being trained on, so it is unknown whether the weights will include its groups.
        """
        if self._step_is_open:
            raise RLError("state_dict: a batch is being trained on; save between end_step and next_batch.")
        return {
            "version": self.version,
            "steps": self.steps,
            "next_id": self._next_id,
            "accepted": [list(t) for t in sorted(self._accepted)],
        }

    def load_state_dict(self, state: dict[str, Any]) -> list[Ticket]:
        """Restore the state of `state_dict` in a new manager.

        Returns:
            accepted groups that would be too old for their batch, because B or `max_staleness` decreased. They are not
            restored.

        Raises:
            RLError: groups were admitted already.
        """
        if self.outstanding or self._step_is_open:
            raise RLError("load_state_dict: groups were admitted already; load before the first next_batch.")
        self.version, self.steps = int(state["version"]), int(state["steps"])
        self._next_id = int(state["next_id"])
        too_old: list[Ticket] = []
        for ticket in sorted(Ticket(int(start), int(group_id)) for start, group_id in state["accepted"]):
            release_version = self.version + len(self._accepted) // self.batch_size
            if ticket.start + self.max_staleness < release_version:
                too_old.append(ticket)
                continue
            heapq.heappush(self._accepted, ticket)
            self._accepted_by_start[ticket.start] += 1
        return too_old

    def _satisfies_look_ahead(self) -> bool:
        """Return whether the look-ahead allows a batch of the B oldest accepted groups."""
        free, remaining_due = self.batch_size, 0
        for start in sorted({*self._running_by_start, *self._accepted_by_start}):
            accepted = self._accepted_by_start.get(start, 0)
            taken = min(free, accepted)
            free -= taken
            remaining_due += self._running_by_start.get(start, 0) + accepted - taken
            batches_until_due = max(start + self.max_staleness - self.version, 0)
            if remaining_due > batches_until_due * self.batch_size:
                return False
        return True

    def _end(self, ticket: Ticket, outcome: str) -> None:
        if self._running.pop(ticket.group_id, None) is None:
            raise RLError(f"group {ticket.group_id} cannot be {outcome}: it is not running.")
        self._decrement(self._running_by_start, ticket.start)

    @staticmethod
    def _decrement(counts: Counter[int], start: int) -> None:
        counts[start] -= 1
        if not counts[start]:
            del counts[start]
