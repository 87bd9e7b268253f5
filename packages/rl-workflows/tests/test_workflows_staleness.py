"""Guarantees of `rl_workflows.rollout.staleness` for any order of events."""

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
class Leader:
    """One data-parallel leader: its manager, and the outcomes of its prompts."""

    manager: StalenessManager
    prompts: dict[int, int] = field(default_factory=dict)  # running group -> prompt
    finished: dict[int, int] = field(default_factory=dict)  # accepted group -> prompt
    requeued: list[int] = field(default_factory=list)
    outcomes: Counter = field(default_factory=Counter)
    drawn: int = 0
    in_step: list[int] = field(default_factory=list)

    def admit(self, slow_rate: float, rng: random.Random) -> None:
        ticket = self.manager.admit()
        prompt = self.requeued.pop() if self.requeued else self.drawn
        self.drawn += prompt == self.drawn
        self.prompts[ticket.group_id] = prompt
        (self.slow if rng.random() < slow_rate else self.quick).append(ticket)

    def __post_init__(self):
        self.quick: list[Ticket] = []
        self.slow: list[Ticket] = []

    def end(self, ticket: Ticket, rng: random.Random, failure_rate: float) -> None:
        prompt = self.prompts.pop(ticket.group_id)
        outcome = rng.choice(["reject", "fail"]) if rng.random() < failure_rate else "accept"
        getattr(self.manager, outcome)(ticket)
        if outcome == "accept":
            self.finished[ticket.group_id] = prompt
        else:
            self.outcomes[prompt] += 1

    def restart(self, make) -> None:
        """Simulate a new process: running prompts start again, accepted groups are kept."""
        state = self.manager.state_dict()
        self.requeued += self.prompts.values()
        self.manager = make()
        too_old = self.manager.load_state_dict(state)
        assert not too_old, "no group is too old, because the settings are unchanged"
        self.prompts, self.quick, self.slow = {}, [], []

    def check_accounting(self) -> None:
        pending = Counter([*self.prompts.values(), *self.finished.values(), *self.requeued, *self.in_step])
        assert max((self.outcomes + pending).values(), default=1) == 1, "a prompt was repeated"
        assert len(self.outcomes) + pending.total() == self.drawn, "a prompt was lost"


def drive(
    seed: int,
    events: int,
    *,
    batch: int,
    eta: int,
    concurrent: int | None = None,
    leader_count: int = 1,
    failure_rate: float = 0.1,
    slow_rate: float = 0.1,
    skip_rate: float = 0.1,
    restart_rate: float = 0.0,
    manager_class: type[StalenessManager] = StalenessManager,
) -> int:
    """Run a number of random events, check all guarantees, and return the number of batches released.

    Slow groups end only when no other event is possible, often the youngest first. This is the worst order for the
    look-ahead.
    """
    rng = random.Random(seed)

    def make(rank: int):
        return manager_class(batch, eta, concurrent, first_id=rank, id_stride=leader_count)

    leaders = [Leader(make(rank)) for rank in range(leader_count)]
    version, training, steps, ids = 0, False, 0, set()
    for number in range(events):
        assert all(
            leader.manager.capacity >= 0 and leader.manager.outstanding <= (eta + 1) * batch for leader in leaders
        )
        chosen = rng.choice(leaders)
        possible = ["end"] * bool(chosen.quick) + ["admit"] * (chosen.manager.capacity > 0)
        possible += ["commit"] * training
        ready = not training and all(leader.manager.ready() for leader in leaders)
        possible += ["release", "release"] * ready
        if not possible:
            active = [leader for leader in leaders if leader.quick or leader.manager.capacity > 0]
            if active or training:
                continue
            waiting = [leader for leader in leaders if leader.slow]
            assert waiting, f"deadlock: {[leader.manager.describe() for leader in leaders]}"
            chosen = rng.choice(waiting)
            youngest = len(chosen.slow) - 1
            chosen.end(chosen.slow.pop(rng.choice([youngest, rng.randint(0, youngest)])), rng, failure_rate)
            continue
        match rng.choice(possible):
            case "admit":
                chosen.admit(slow_rate, rng)
            case "end":
                position = rng.randrange(len(chosen.quick))
                chosen.quick[position], chosen.quick[-1] = chosen.quick[-1], chosen.quick[position]
                chosen.end(chosen.quick.pop(), rng, failure_rate)
            case "release":
                for leader in leaders:
                    taken = leader.manager.take_batch()
                    assert len(taken) == batch
                    assert taken == sorted(taken), "not oldest first"
                    assert all(version - eta <= ticket.start <= version for ticket in taken), "too old"
                    assert not ids & {ticket.group_id for ticket in taken}, "a group was trained on twice"
                    ids |= {ticket.group_id for ticket in taken}
                    leader.in_step = [leader.finished.pop(ticket.group_id) for ticket in taken]
                training, steps = True, steps + 1
            case "commit":
                version += rng.random() >= skip_rate
                for leader in leaders:
                    leader.manager.end_step(version)
                    leader.outcomes.update(leader.in_step)
                    leader.in_step = []
                training = False
                if rng.random() < restart_rate:
                    for rank, leader in enumerate(leaders):
                        leader.restart(lambda rank=rank: make(rank))
        if number % 997 == 0:
            for leader in leaders:
                leader.check_accounting()
    for leader in leaders:
        leader.check_accounting()
    return steps


@pytest.mark.guarantee(
    "No consumed group is older than `max_staleness` versions, and admission never exceeds its capacity.",
    area="staleness",
)
@given(
    seed=st.integers(0, 2**32),
    batch=st.integers(1, 6),
    eta=st.integers(0, 4),
    concurrent=st.none() | st.integers(1, 12),
    leader_count=st.integers(1, 3),
    failure_rate=st.sampled_from([0.0, 0.1, 0.6]),
    slow_rate=st.sampled_from([0.0, 0.05, 0.5, 1.0]),
    skip_rate=st.sampled_from([0.0, 0.2, 0.9]),
    restart_rate=st.sampled_from([0.0, 0.1]),
)
@settings(max_examples=150, deadline=None)
def test_admission_any_event_order_keeps_invariants(**case):
    assert drive(case.pop("seed"), 600, **case) >= 0


@pytest.mark.parametrize(("batch", "eta", "leader_count"), [(16, 1, 2), pytest.param(16, 0, 1, marks=pytest.mark.slow)])
def test_admission_long_run_keeps_invariants_and_progresses(batch, eta, leader_count):
    steps = drive(7, 40_000, batch=batch, eta=eta, leader_count=leader_count, slow_rate=0.03, restart_rate=0.05)
    assert steps > 40_000 / (batch * leader_count * 4)


class NoLookAhead(StalenessManager):
    """Injected fault: batches are released as soon as enough groups are accepted."""

    def _satisfies_look_ahead(self):
        return True


class SlotsFreedAtRelease(StalenessManager):
    """Injected fault: a batch frees its slots when it is released."""

    def take_batch(self, closed=False):
        taken = super().take_batch(closed)
        self.in_step = 0
        return taken


class YoungestFirst(StalenessManager):
    """Injected fault: batches take the groups that started last."""

    def take_batch(self, closed=False):
        taken = sorted(self._accepted)[-self.batch_size :]
        self._accepted = [ticket for ticket in self._accepted if ticket not in taken]
        heapq.heapify(self._accepted)
        for ticket in taken:
            self._decrement(self._accepted_by_start, ticket.start)
        self.in_step, self._step_is_open = len(taken), True
        return taken


@pytest.mark.parametrize("fault", [NoLookAhead, SlotsFreedAtRelease, YoungestFirst])
def test_admission_injected_fault_is_detected(fault):
    with pytest.raises((AssertionError, RLError)):
        drive(3, 20_000, batch=4, eta=2, slow_rate=0.2, manager_class=fault)


def _started(manager, number):
    return [manager.admit() for _ in range(number)]


def test_take_batch_only_oldest_group_too_old_is_rejected():
    manager = NoLookAhead(batch_size=2, max_staleness=1)
    oldest, *others = _started(manager, 3)
    for version in (1, 2):
        for ticket in others:
            manager.accept(ticket)
        manager.take_batch()
        manager.end_step(version)
        others = _started(manager, 2)
    manager.accept(oldest)
    manager.accept(others[0])
    with pytest.raises(RLError, match="exceeds max_staleness=1"):
        manager.take_batch()


def test_ready_due_group_running_waits_for_it():
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


def test_capacity_batch_in_training_keeps_slots_until_end_step():
    manager = StalenessManager(batch_size=2, max_staleness=0)
    for ticket in _started(manager, 2):
        manager.accept(ticket)
    manager.take_batch()
    assert manager.capacity == 0, "on-policy: nothing starts while the weights change"
    manager.end_step(1)
    assert manager.capacity == 2
    assert manager.admit().start == 1


def test_capacity_skipped_step_frees_slots_at_same_version():
    manager = StalenessManager(batch_size=2, max_staleness=0)
    for ticket in _started(manager, 2):
        manager.accept(ticket)
    manager.take_batch()
    manager.end_step(0)
    assert (manager.version, manager.capacity) == (0, 2)


def test_capacity_rejected_or_failed_group_frees_its_slot():
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


def test_take_batch_end_of_data_returns_smaller_batch():
    manager = StalenessManager(batch_size=4, max_staleness=1)
    first, second = _started(manager, 2)
    manager.accept(second)
    assert not manager.ready(closed=True)
    manager.accept(first)
    assert not manager.ready()
    assert manager.take_batch(closed=True) == [first, second]


@pytest.mark.parametrize("event", ["accept", "reject", "fail"])
def test_group_ended_twice_is_rejected(event):
    manager = StalenessManager(batch_size=2, max_staleness=1)
    ticket = manager.admit()
    manager.accept(ticket)
    with pytest.raises(RLError, match="not running"):
        getattr(manager, event)(ticket)


def test_return_batch_due_groups_are_released_again():
    manager = StalenessManager(batch_size=1, max_staleness=1)
    first, second = _started(manager, 2)
    manager.accept(first)
    manager.accept(second)
    manager.return_batch(manager.take_batch())
    released = []
    for version in (1, 2):
        released += manager.take_batch()
        manager.end_step(version)
    assert released == [first, second]


def test_end_step_version_jump_is_rejected():
    manager = StalenessManager(batch_size=1, max_staleness=1)
    manager.accept(manager.admit())
    manager.take_batch()
    with pytest.raises(RLError, match="expected version 1, or 0"):
        manager.end_step(2)


def test_end_step_without_batch_is_rejected():
    with pytest.raises(RLError, match="end_step: no batch"):
        StalenessManager(batch_size=1, max_staleness=1).end_step(0)


def test_state_dict_during_step_is_rejected():
    manager = StalenessManager(batch_size=1, max_staleness=1)
    manager.accept(manager.admit())
    manager.take_batch()
    with pytest.raises(RLError, match="between end_step and next_batch"):
        manager.state_dict()


def test_load_state_dict_smaller_staleness_drops_old_groups():
    manager = StalenessManager(batch_size=1, max_staleness=2)
    old, retained, later = _started(manager, 3)
    for ticket in (old, retained, later):
        manager.accept(ticket)
    resumed = StalenessManager(batch_size=1, max_staleness=1)
    assert resumed.load_state_dict(manager.state_dict()) == [later]
    assert resumed.accepted == 2
    assert resumed.take_batch() == [old]


def test_admit_given_group_id_keeps_next_id():
    manager = StalenessManager(8, 1, first_id=1, id_stride=2)
    assert [manager.admit(group_id).group_id for group_id in (None, 40, None)] == [1, 40, 3]


@pytest.mark.parametrize("settings", [{"max_staleness": -1}, {"max_concurrent": 0}, {"stall_timeout": 0.0}], ids=str)
def test_config_impossible_values_are_rejected(settings):
    with pytest.raises(ConfigError, match=rf"rollout\.{next(iter(settings))}"):
        RolloutConfig(**settings)


def test_groups_per_replica_zero_groups_is_rejected():
    with pytest.raises(ConfigError, match="batch_size=0"):
        groups_per_replica(0, 2, "batch_size")
