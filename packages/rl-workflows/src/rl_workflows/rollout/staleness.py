"""Admission: which groups may start, and which may leave in a batch, so that none is ever too old.

Pure bookkeeping, one per data-parallel head: no clock, no event loop, no tensors. Everything is counted in groups.

With B groups per step, eta = `max_staleness` and the trainer's version v, a group that was admitted at version s is
*due* at s + eta: a batch that leaves later may not hold it.

    outstanding = running + accepted + in the batch that is being trained on
    capacity    = min(max_concurrent - running, (eta + 1) * B - outstanding)

Look-ahead: a batch leaves only if, for every k >= 0, at most k * B of the groups that stay behind (running or
accepted) are due by v + k. Otherwise it waits for groups that are due instead of leaving with younger ones. Batches
take the oldest start first.

**Why no consumed group is older than eta versions.** When no batch is out, "at most (k + 1) * B outstanding groups are
due by v + k, for every k" always holds; call it I(v). With k = 0 the look-ahead leaves nothing behind that is due by v,
so at version v + 1 nothing is overdue. It remains to see that I survives:

- *Admission while no batch is out.* The new group is due at v + eta, so it counts for k >= eta only, and there all
  outstanding groups together are at most (eta + 1) * B.
- *Admission while a batch is out.* The batch holds its places, so the groups outside of it are at most eta * B. The new
  group is due at v + eta = (v + 1) + (eta - 1): for the next version, k = eta - 1 allows eta * B.
- *The step ends at v + 1.* The look-ahead left at most k * B groups due by v + k, that is (k + 1) * B due by
  (v + 1) + k: I(v + 1). *The step is skipped, v stays*: k * B is less than (k + 1) * B.
- *A group is rejected or fails.* It leaves; its replacement is an admission.

- *n heads with B / n places each are resumed as m with B / m.* The accepted groups are dealt by age. Over all heads at
  most (k + 1) * B are due by v + k, so no new head gets more than (k + 1) * B / m of them. What ran is admitted anew.

**Why it cannot deadlock.** While a batch is awaited and fewer than B groups are outstanding, capacity is positive
unless `max_concurrent` groups run, and those end. With B or more outstanding, I(v) says that once the B oldest of them
are accepted the batch may leave: of the groups due by v + k, at most (k + 1) * B - B stay behind. Nothing but the end
of running groups is waited for, and every running group ends, because an episode has deadlines of its own. (If all
groups are rejected for ever, the executor ends the run.) Places that are freed let groups in that are younger than all
others, so they never come before the B oldest.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

from rl_contracts.errors import RLError


class Ticket(NamedTuple):
    """One admission. Tickets order by age: start version, then admission."""

    start: int
    """Version that was committed on all live servers when the group was admitted."""
    group_id: int
    """Unique over all heads and the whole run."""


class StalenessManager:
    """Counts groups from their admission to the end of the step that trains on them.

    Each event costs O(log n) at most, and a check of the look-ahead O(eta).

    Args:
        batch_size: groups per step of this head, B; at least 1.
        max_staleness: eta; 0 is exactly on-policy. `RolloutConfig` checks it and the next.
        max_concurrent: groups that run at the same time; None: no further limit.
        version: version that is committed now.
        first_id: id of the first group.
        id_stride: distance between two ids, so that heads share the numbers.
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
        """Committed version, and batches that have left."""
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
        """Groups admitted and neither accepted nor rejected nor failed."""
        return len(self._running)

    @property
    def accepted(self) -> int:
        """Groups that wait for a batch."""
        return len(self._accepted)

    @property
    def outstanding(self) -> int:
        """Groups that hold a place."""
        return len(self._running) + len(self._accepted) + self.in_step

    @property
    def capacity(self) -> int:
        """Groups that may start now."""
        places = (self.max_staleness + 1) * self.batch_size - self.outstanding
        if self.max_concurrent is not None:
            places = min(places, self.max_concurrent - len(self._running))
        return max(places, 0)

    def admit(self, group_id: int | None = None) -> Ticket:
        """Start a group at the current version.

        Args:
            group_id: that of a group which a stopped run had in flight; None: the next one.

        Raises:
            RLError: there is no capacity.
        """
        if self.capacity < 1:
            raise RLError(f"admit: no place is free; {self.describe()}. Ask `capacity` first.")
        ticket = Ticket(self.version, self._next_id if group_id is None else group_id)
        self._next_id += self._id_stride if group_id is None else 0
        self._running[ticket.group_id] = ticket
        self._running_by_start[ticket.start] += 1
        return ticket

    def accept(self, ticket: Ticket) -> None:
        """A running group is finished and waits for a batch.

        Raises:
            RLError: it does not run (any more).
        """
        self._end(ticket, "accepted")
        heapq.heappush(self._accepted, ticket)
        self._accepted_by_start[ticket.start] += 1

    def reject(self, ticket: Ticket) -> None:
        """A running group was refused; its place is free.

        Raises:
            RLError: it does not run (any more).
        """
        self._end(ticket, "rejected")

    def fail(self, ticket: Ticket) -> None:
        """A running group failed; its place is free.

        Raises:
            RLError: it does not run (any more).
        """
        self._end(ticket, "failed")

    def ready(self, closed: bool = False) -> bool:
        """Whether a batch may leave now.

        Args:
            closed: no further group will be admitted, so the batch may be smaller than B once nothing runs.
        """
        if self._step_is_open:
            return False
        if len(self._accepted) < self.batch_size:
            return closed and not self._running
        return self._may_leave_behind()

    def take_batch(self, closed: bool = False) -> list[Ticket]:
        """The groups of the next batch, oldest first. They keep their places until `end_step`.

        Args:
            closed: as in `ready`; the batch may then be smaller than B, or empty.

        Raises:
            RLError: it is not ready, or a group is older than `max_staleness` (which the rule makes impossible).
        """
        if not self.ready(closed):
            raise RLError(f"take_batch: no batch may leave yet; {self.describe()}.")
        taken = [heapq.heappop(self._accepted) for _ in range(min(self.batch_size, len(self._accepted)))]
        for ticket in taken:
            self._decrement(self._accepted_by_start, ticket.start)
        if taken and taken[0].start + self.max_staleness < self.version:
            raise RLError(
                f"group {taken[0].group_id} started at version {taken[0].start} and would be trained on at "
                f"{self.version}, more than max_staleness={self.max_staleness} later. This is a bug in admission."
            )
        self.in_step, self._step_is_open = len(taken), True
        self.steps += 1
        return taken

    def return_batch(self, tickets: Sequence[Ticket]) -> None:
        """Undo `take_batch`, which returned these: their groups wait for a batch again.

        Raises:
            RLError: no batch of so many groups is out.
        """
        if not self._step_is_open or self.in_step != len(tickets):
            raise RLError(f"return_batch: no batch of {len(tickets)} groups is being trained on.")
        for ticket in tickets:
            heapq.heappush(self._accepted, ticket)
            self._accepted_by_start[ticket.start] += 1
        self.in_step, self._step_is_open = 0, False
        self.steps -= 1

    def end_step(self, version: int) -> None:
        """The step of the last batch is over at `version`: one more than before, or the same if it was skipped.

        Raises:
            RLError: no batch is out, or the version is neither.
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
        """Forget the groups that run or wait for a batch: none follows."""
        for kept in (self._running, self._running_by_start, self._accepted, self._accepted_by_start):
            kept.clear()

    def describe(self) -> str:
        """One line for errors."""
        return (
            f"version {self.version}: {self.running} groups running, {self.accepted} accepted, {self.in_step} in the "
            f"step, batch of {self.batch_size}, max_staleness {self.max_staleness}"
        )

    def state_dict(self) -> dict[str, Any]:
        """JSON values. Running groups are in it by id only: a new process starts their prompts again.

        Raises:
            RLError: a batch is being trained on, so that it is unclear whether its groups are in the weights.
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
        """Continue a fresh manager from `state_dict`.

        Returns:
            accepted groups that have become too old, because B or `max_staleness` is smaller now; they are not kept.

        Raises:
            RLError: groups were admitted already.
        """
        if self.outstanding or self._step_is_open:
            raise RLError("load_state_dict: groups were admitted already; load before the first next_batch.")
        self.version, self.steps = int(state["version"]), int(state["steps"])
        self._next_id = int(state["next_id"])
        refused: list[Ticket] = []
        for ticket in sorted(Ticket(int(start), int(group_id)) for start, group_id in state["accepted"]):
            leaves_at = self.version + len(self._accepted) // self.batch_size
            if ticket.start + self.max_staleness < leaves_at:
                refused.append(ticket)
                continue
            heapq.heappush(self._accepted, ticket)
            self._accepted_by_start[ticket.start] += 1
        return refused

    def _may_leave_behind(self) -> bool:
        """The look-ahead, for a batch of the oldest B accepted groups."""
        to_take, behind = self.batch_size, 0
        for start in sorted({*self._running_by_start, *self._accepted_by_start}):
            accepted = self._accepted_by_start.get(start, 0)
            taken = min(to_take, accepted)
            to_take -= taken
            behind += self._running_by_start.get(start, 0) + accepted - taken
            batches_until_due = max(start + self.max_staleness - self.version, 0)
            if behind > batches_until_due * self.batch_size:
                return False
        return True

    def _end(self, ticket: Ticket, how: str) -> None:
        if self._running.pop(ticket.group_id, None) is None:
            raise RLError(f"group {ticket.group_id} cannot be {how}: it is not running.")
        self._decrement(self._running_by_start, ticket.start)

    @staticmethod
    def _decrement(counts: Counter[int], start: int) -> None:
        counts[start] -= 1
        if not counts[start]:
            del counts[start]
