"""Admission: every promise of `rl_workflows.rollout.staleness`, under any order of events."""

import heapq
import random
from collections import Counter
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_contracts.errors import ConfigError, RLError
from rl_workflows.rollout.config import RolloutConfig, groups_per_replica
from rl_workflows.rollout.staleness import StalenessManager, Ticket


@dataclass
class Head:
    """One data-parallel head: its manager, and what became of each of its prompts."""

    manager: StalenessManager
    prompts: dict[int, int] = field(default_factory=dict)  # running group -> prompt
    finished: dict[int, int] = field(default_factory=dict)  # accepted group -> prompt
    again: list[int] = field(default_factory=list)
    fate: Counter = field(default_factory=Counter)
    drawn: int = 0
    in_step: list[int] = field(default_factory=list)

    def admit(self, slow_share: float, rng: random.Random) -> None:
        ticket = self.manager.admit()
        prompt = self.again.pop() if self.again else self.drawn
        self.drawn += prompt == self.drawn
        self.prompts[ticket.group_id] = prompt
        (self.slow if rng.random() < slow_share else self.quick).append(ticket)

    def __post_init__(self):
        self.quick: list[Ticket] = []
        self.slow: list[Ticket] = []

    def end(self, ticket: Ticket, rng: random.Random, bad_share: float) -> None:
        prompt = self.prompts.pop(ticket.group_id)
        how = rng.choice(["reject", "fail"]) if rng.random() < bad_share else "accept"
        getattr(self.manager, how)(ticket)
        if how == "accept":
            self.finished[ticket.group_id] = prompt
        else:
            self.fate[prompt] += 1

    def restart(self, make) -> None:
        """A new process: running prompts begin again, accepted groups stay."""
        state = self.manager.state_dict()
        self.again += self.prompts.values()
        self.manager = make()
        refused = self.manager.load_state_dict(state)
        assert not refused, "nothing has become too old: the settings are the same"
        self.prompts, self.quick, self.slow = {}, [], []

    def accounted(self) -> None:
        held = Counter([*self.prompts.values(), *self.finished.values(), *self.again, *self.in_step])
        assert max((self.fate + held).values(), default=1) == 1, "a prompt was repeated"
        assert len(self.fate) + held.total() == self.drawn, "a prompt was lost"


def drive(
    seed: int,
    events: int,
    *,
    batch: int,
    eta: int,
    concurrent: int | None = None,
    heads: int = 1,
    bad_share: float = 0.1,
    slow_share: float = 0.1,
    skip_share: float = 0.1,
    restart_share: float = 0.0,
    kind: type[StalenessManager] = StalenessManager,
) -> int:
    """Random events until their number is reached; asserts every promise, and returns the batches that left.

    Slow groups end only when nothing else can happen, often the youngest first: the worst order for the look-ahead.
    """
    rng = random.Random(seed)

    def make(rank: int):
        return kind(batch, eta, concurrent, first_id=rank, id_stride=heads)

    world = [Head(make(rank)) for rank in range(heads)]
    version, training, steps, ids = 0, False, 0, set()
    for number in range(events):
        assert all(h.manager.capacity >= 0 and h.manager.outstanding <= (eta + 1) * batch for h in world)
        head = rng.choice(world)
        can = ["end"] * bool(head.quick) + ["admit"] * (head.manager.capacity > 0)
        can += ["commit"] * training
        ready = not training and all(h.manager.ready() for h in world)
        can += ["leave", "leave"] * ready
        if not can:
            active = [h for h in world if h.quick or h.manager.capacity > 0]
            if active or training:
                continue
            stuck = [h for h in world if h.slow]
            assert stuck, f"deadlock: {[h.manager.describe() for h in world]}"
            head = rng.choice(stuck)
            youngest = len(head.slow) - 1
            head.end(head.slow.pop(rng.choice([youngest, rng.randint(0, youngest)])), rng, bad_share)
            continue
        match rng.choice(can):
            case "admit":
                head.admit(slow_share, rng)
            case "end":
                position = rng.randrange(len(head.quick))
                head.quick[position], head.quick[-1] = head.quick[-1], head.quick[position]
                head.end(head.quick.pop(), rng, bad_share)
            case "leave":
                for h in world:
                    taken = h.manager.take_batch()
                    assert len(taken) == batch
                    assert taken == sorted(taken), "not oldest first"
                    assert all(version - eta <= ticket.start <= version for ticket in taken), "too old"
                    assert not ids & {ticket.group_id for ticket in taken}, "a group was trained on twice"
                    ids |= {ticket.group_id for ticket in taken}
                    h.in_step = [h.finished.pop(ticket.group_id) for ticket in taken]
                training, steps = True, steps + 1
            case "commit":
                version += rng.random() >= skip_share
                for h in world:
                    h.manager.end_step(version)
                    h.fate.update(h.in_step)
                    h.in_step = []
                training = False
                if rng.random() < restart_share:
                    for rank, h in enumerate(world):
                        h.restart(lambda rank=rank: make(rank))
        if number % 997 == 0:
            for h in world:
                h.accounted()
    for h in world:
        h.accounted()
    return steps


@given(
    seed=st.integers(0, 2**32),
    batch=st.integers(1, 6),
    eta=st.integers(0, 4),
    concurrent=st.none() | st.integers(1, 12),
    heads=st.integers(1, 3),
    bad_share=st.sampled_from([0.0, 0.1, 0.6]),
    slow_share=st.sampled_from([0.0, 0.05, 0.5, 1.0]),
    skip_share=st.sampled_from([0.0, 0.2, 0.9]),
    restart_share=st.sampled_from([0.0, 0.1]),
)
@settings(max_examples=150, deadline=None)
def test_admission_any_order_of_events_keeps_every_promise(**case):
    assert drive(case.pop("seed"), 600, **case) >= 0


@pytest.mark.parametrize(
    ("batch", "eta", "heads"),
    [(16, 1, 2), *(pytest.param(*c, marks=pytest.mark.slow) for c in ((16, 0, 1), (8, 4, 1), (64, 2, 2)))],
)
def test_admission_long_runs_keep_every_promise_and_make_progress(batch, eta, heads):
    steps = drive(7, 40_000, batch=batch, eta=eta, heads=heads, slow_share=0.03, restart_share=0.05)
    assert steps > 40_000 / (batch * heads * 4)


class NoLookAhead(StalenessManager):
    """A planted fault: batches leave as soon as enough groups are accepted."""

    def _satisfies_look_ahead(self):
        return True


class PlacesFreedAtOnce(StalenessManager):
    """A planted fault: a batch gives its places back when it leaves."""

    def take_batch(self, closed=False):
        taken = super().take_batch(closed)
        self.in_step = 0
        return taken


class YoungestFirst(StalenessManager):
    """A planted fault: batches take the groups that started last."""

    def take_batch(self, closed=False):
        taken = sorted(self._accepted)[-self.batch_size :]
        self._accepted = [ticket for ticket in self._accepted if ticket not in taken]
        heapq.heapify(self._accepted)
        for ticket in taken:
            self._decrement(self._accepted_by_start, ticket.start)
        self.in_step, self._step_is_open = len(taken), True
        return taken


@pytest.mark.parametrize("fault", [NoLookAhead, PlacesFreedAtOnce, YoungestFirst])
def test_admission_planted_fault_is_noticed(fault):
    with pytest.raises((AssertionError, RLError)):
        drive(3, 20_000, batch=4, eta=2, slow_share=0.2, kind=fault)


def _started(manager, number):
    return [manager.admit() for _ in range(number)]


def test_ready_due_group_still_runs_waits_for_it_instead_of_taking_younger_ones():
    manager = StalenessManager(batch_size=2, max_staleness=1)
    slow, a, b, c = _started(manager, 4)
    for ticket in (a, b):
        manager.accept(ticket)
    assert manager.ready(), "slow and c are due by version 1, and one batch may hold both"
    manager.take_batch()
    manager.end_step(1)
    younger = _started(manager, 2)
    for ticket in younger:
        manager.accept(ticket)
    assert not manager.ready(), "slow and c are due now"
    manager.accept(c)
    assert not manager.ready()
    manager.accept(slow)
    assert manager.take_batch() == [slow, c]


def test_capacity_batch_in_training_holds_its_places_until_the_step_ends():
    manager = StalenessManager(batch_size=2, max_staleness=0)
    for ticket in _started(manager, 2):
        manager.accept(ticket)
    manager.take_batch()
    assert manager.capacity == 0, "on-policy: nothing starts while the weights change"
    manager.end_step(1)
    assert manager.capacity == 2
    assert manager.admit().start == 1


def test_capacity_skipped_step_frees_places_at_the_same_version():
    manager = StalenessManager(batch_size=2, max_staleness=0)
    for ticket in _started(manager, 2):
        manager.accept(ticket)
    manager.take_batch()
    manager.end_step(0)
    assert (manager.version, manager.capacity) == (0, 2)


def test_capacity_rejected_or_failed_group_frees_its_place_at_once():
    manager = StalenessManager(batch_size=2, max_staleness=0)
    first, second = _started(manager, 2)
    manager.reject(first)
    manager.fail(second)
    assert manager.capacity == 2


def test_capacity_max_concurrent_limits_running_groups_only():
    manager = StalenessManager(batch_size=2, max_staleness=3, max_concurrent=3)
    tickets = _started(manager, 3)
    assert manager.capacity == 0
    manager.accept(tickets[0])
    assert manager.capacity == 1


def test_take_batch_end_of_data_gives_a_smaller_batch_once_nothing_runs():
    manager = StalenessManager(batch_size=4, max_staleness=1)
    first, second = _started(manager, 2)
    manager.accept(second)
    assert not manager.ready(closed=True)
    manager.accept(first)
    assert not manager.ready()
    assert manager.take_batch(closed=True) == [first, second]


@pytest.mark.parametrize("event", ["accept", "reject", "fail"])
def test_group_ended_twice_is_refused(event):
    manager = StalenessManager(batch_size=2, max_staleness=1)
    ticket = manager.admit()
    manager.accept(ticket)
    with pytest.raises(RLError, match="not running"):
        getattr(manager, event)(ticket)


def test_end_step_version_that_jumps_is_refused():
    manager = StalenessManager(batch_size=1, max_staleness=1)
    manager.accept(manager.admit())
    manager.take_batch()
    with pytest.raises(RLError, match="expected version 1, or 0"):
        manager.end_step(2)


def test_end_step_without_a_batch_is_refused():
    with pytest.raises(RLError, match="end_step: no batch"):
        StalenessManager(batch_size=1, max_staleness=1).end_step(0)


def test_state_dict_during_a_step_is_refused():
    manager = StalenessManager(batch_size=1, max_staleness=1)
    manager.accept(manager.admit())
    manager.take_batch()
    with pytest.raises(RLError, match="between end_step and next_batch"):
        manager.state_dict()


def test_load_state_dict_smaller_staleness_refuses_groups_that_would_be_too_old():
    manager = StalenessManager(batch_size=1, max_staleness=2)
    old, kept, later = _started(manager, 3)
    for ticket in (old, kept, later):
        manager.accept(ticket)
    resumed = StalenessManager(batch_size=1, max_staleness=1)
    assert resumed.load_state_dict(manager.state_dict()) == [later]
    assert resumed.accepted == 2
    assert resumed.take_batch() == [old]


def test_ids_of_two_heads_never_meet():
    heads = [StalenessManager(8, 1, first_id=rank, id_stride=2) for rank in range(2)]
    ids = [ticket.group_id for manager in heads for ticket in _started(manager, 8)]
    assert len(set(ids)) == 16


@pytest.mark.parametrize("settings", [{"max_staleness": -1}, {"max_concurrent": 0}], ids=str)
def test_settings_that_cannot_work_are_refused(settings):
    with pytest.raises(ConfigError, match=r"rollout\.max_"):
        RolloutConfig(**settings)


def test_groups_per_replica_without_groups_is_refused():
    with pytest.raises(ConfigError, match="batch_size=0"):
        groups_per_replica(0, 2, "batch_size")
