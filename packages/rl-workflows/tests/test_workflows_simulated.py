"""A million random events on the simulated clock: staleness, accounting and progress through crashes and resumptions.

Everything is the runtime's own: admission, the head, its prompts, batch assembly, saving and resuming. In the long runs
groups end by a random timer instead of by episodes (`Timers`), which is what makes a million events affordable; shorter
runs have real groups and the null engine.
"""

import json
import random
from collections import Counter
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_contracts.batch.trajectory import Trajectory, concatenate, from_response
from rl_contracts.config import GenerationConfig
from rl_contracts.data import ModelRequest, ServeSpec, WeightUpdateMeta
from rl_contracts.errors import RLError
from rl_contracts.testing import NullInferenceEngine, NullInferenceEngineConfig, SimulatedClock
from rl_contracts.workflow import RolloutWorkflow
from rl_workflows import RolloutConfig, RolloutScheduler, StalenessManager
from rl_workflows.rollout.batches import assemble, groups_from_state, groups_to_state
from rl_workflows.rollout.groups import FinishedGroup
from rl_workflows.rollout.resharding import reshard_groups

LONGEST = 400.0
"""Simulated seconds of the slowest group; most take about one."""
GENERATION = GenerationConfig(max_new_tokens=512)
IDS, MASK, LOGPROBS = np.array([5, 6, 7]), np.array([False, True, True]), np.zeros(3, np.float32)


@dataclass(frozen=True)
class Case:
    """One run: its settings, and how often what goes wrong."""

    batch: int
    """Groups per step, over all heads."""
    eta: int
    heads: tuple[int, ...] = (1,)
    """Numbers of heads, of which each life of the run has one."""
    concurrent: int | None = None
    bad_share: float = 0.1
    slow_share: float = 0.05
    skip_share: float = 0.1
    crash_share: float = 0.02
    uneven: bool = False
    """The first head's groups go wrong more often, so that it takes more prompts than the others."""


@dataclass
class World:
    """What outlives a process: servers, the saved state, and the books of what became of each prompt."""

    case: Case
    prompts: int
    rng: random.Random
    clock: SimulatedClock
    kind: type[StalenessManager]
    events: Counter = field(default_factory=Counter)
    heads: int = 1  # of this life
    served: int = 0  # version on the servers
    books: list = field(default_factory=list)  # prompts consumed, rejected or failed; a crash cuts it to its last save
    group_ids: list = field(default_factory=list)  # of groups that were consumed, likewise
    told: list = field(default_factory=list)  # what heads said became of prompts, likewise
    saved: tuple | None = None  # (version, lengths of the three, state of each head)
    engine: NullInferenceEngine | None = None  # where episodes are real

    @property
    def share(self):
        """Groups per step of each head."""
        return self.case.batch // self.heads


class Crash(Exception):  # noqa: N818 - not an error, but the end of a process
    pass


class Deck:
    """Rows that are dealt to the heads of every life anew; what a loader does, without epochs or an order."""

    def __init__(self, rows, rank, heads):
        self.rows, self.rank, self.heads = list(rows[rank::heads]), rank, heads

    def __iter__(self):
        return self

    def __next__(self):
        if not self.rows:
            raise StopIteration
        return self.rows.pop(0)

    def state_dict(self):
        return {"rows": list(self.rows)}

    def load_state_dict(self, state):
        self.rows = list(state["rows"])

    def load_states(self, states):
        rows = [row for state in states for row in state["rows"]]
        self.rows = rows[self.rank :: self.heads]


def rows_of(world, rank):
    """This head's prompts."""
    rows = [{"prompt_id": i} for i in range(world.prompts)]
    if len(world.case.heads) > 1:
        return Deck(rows, rank, world.heads)
    return rows[rank :: world.heads]  # with nothing to save them by


async def timer_group(world, prompt, ticket, rank):
    """In place of `run_group`: a group ends after a random time, well or not."""
    rng = world.rng
    begun = world.served
    seconds = rng.expovariate(1.0)
    if rng.random() < world.case.slow_share:
        seconds *= rng.choice([20.0, 20.0, 300.0])
    await world.clock.sleep(min(seconds, LONGEST))
    versions = np.array([-1, begun, world.served], np.int32)
    row = Trajectory(IDS, MASK, LOGPROBS, versions, 1.0, 1.0, False, None, prompt["prompt_id"], ticket.group_id, 0)
    group = FinishedGroup(ticket, prompt, [row])
    if rng.random() < world.case.bad_share * (3 if world.case.uneven and not rank else 1):
        group.rejected, group.error = rng.choice([("filter", None), (None, RLError("planted"))])
    return group


def make_head(world, rank):
    """A head whose groups end by timers."""
    case = world.case
    manager = world.kind(world.share, case.eta, case.concurrent, first_id=rank, id_stride=world.heads)
    config = RolloutConfig(max_staleness=case.eta, group_size=1, failure_budget=1.0, stall_timeout=100 * LONGEST)
    engine = NullInferenceEngine(NullInferenceEngineConfig(read_weights=False), clock=world.clock)
    head = RolloutScheduler(engine, Answer(), rows_of(world, rank), manager, config, world.clock)
    head._run = lambda prompt, ticket: timer_group(world, prompt, ticket, rank)
    return watch(world, head)


def watch(world, head):
    """Put every admission and every end of a group into the books, and check the limits."""
    book, run, manager = head._record_group, head._run, head.manager

    def on_group(group):
        what = "failed" if group.error is not None else "rejected" if group.rejected else "accepted"
        world.events[what] += 1
        if what != "accepted":
            world.books.append(group.prompt["prompt_id"])
        book(group)

    def on_admission(prompt, ticket):
        world.events["admitted"] += 1
        assert manager.outstanding <= (world.case.eta + 1) * world.share
        assert world.case.concurrent is None or manager.running <= world.case.concurrent
        return run(prompt, ticket)

    head._record_group, head._run = on_group, on_admission
    return head


async def live(world, make):
    """One process: resumes from what was saved, and trains until the data ends or it crashes."""
    case, rng, clock = world.case, world.rng, world.clock
    world.heads = rng.choice(case.heads) if len(case.heads) > 1 else case.heads[0]
    heads = [make(world, rank) for rank in range(world.heads)]
    version, accounted, consumed, told, states = world.saved or (0, 0, 0, 0, ())
    del world.books[accounted:], world.group_ids[consumed:], world.told[told:]
    world.events["changes"] += len(states) not in (0, len(heads))
    for rank, head in enumerate(heads if states else ()):
        await head.load_states([restored(state) for state in states], rank, len(heads))
    world.served = version
    try:
        while True:
            maybe_crash(world)
            begun = clock.now()
            for head in heads:
                await head.begin_wait()
            sizes = [await head.fill() for head in heads]
            assert clock.now() - begun <= 60 * LONGEST, "no progress"
            if not sum(sizes):
                return await tell(world, heads)
            check_batch(world, version, [await head.take() for head in heads], sizes)
            await clock.sleep(rng.expovariate(0.2))  # training
            maybe_crash(world)
            version += rng.random() >= case.skip_share
            if version > world.served:
                await commit(world, heads[0].engine, version)
            await tell(world, heads)
            for head in heads:
                await head.end_step(version)
                await clock.sleep(rng.choice([0.0, rng.expovariate(1.0)]))  # heads hear of it one after the other
            world.events["steps"] += 1
            maybe_crash(world)
            if rng.random() < 0.2:
                await save(world, version, heads)
    finally:
        for head in heads:
            await head.close()


async def tell(world, heads):
    """What `Books` writes down."""
    world.told += [ending for head in heads for ending in await head.take_outcomes()]


def maybe_crash(world):
    if world.rng.random() < world.case.crash_share:
        world.events["crashes"] += 1
        raise Crash


async def commit(world, engine, version):
    """Servers change at one moment, which trainer and heads hear of later."""
    await world.clock.sleep(world.rng.expovariate(1.0))
    await engine.stage_weights(WeightUpdateMeta("shm", version))
    await engine.commit_weights(version)
    world.served = version
    await world.clock.sleep(world.rng.choice([0.0, 0.0, world.rng.expovariate(0.05)]))  # a slow acknowledgement


async def save(world, version, heads):
    states = [await head.state_dict() for head in heads]
    groups = [groups_to_state(state.pop("groups")) for state in states]
    parts = [
        {"json": state, "tensors": kept.pop("tensors"), "groups": kept}
        for state, kept in zip(states, groups, strict=True)
    ]
    world.saved = (version, len(world.books), len(world.group_ids), len(world.told), parts)
    world.events["saves"] += 1


def restored(state):
    """A head's state as a new process reads it."""
    groups = groups_from_state({**json.loads(json.dumps(state["groups"])), "tensors": state["tensors"]})
    return {**json.loads(json.dumps(state["json"])), "groups": groups}


def check_batch(world, version, shares, sizes):
    """The promises about one batch; `assemble` itself compares every token's version with the group's admission."""
    batches = [assemble(groups, version) for groups in shares]
    batch = concatenate([b for b in batches if b.batch_size[0]])
    for groups, size in zip(shares, sizes, strict=True):
        assert len(groups) == size <= world.share
        assert groups == sorted(groups, key=lambda group: group.ticket), "not oldest first"
        assert all(version - group.ticket.start <= world.case.eta for group in groups), "a group is too old"
    stamped = batch["versions"][batch["loss_mask"]]
    assert version - int(stamped.min()) <= world.case.eta, "a token is too old"
    assert int(stamped.max()) <= version
    groups = batch["group_ids"].unique()
    assert len(groups) == sum(sizes), "a group is in the batch twice"
    world.books += [group.prompt["prompt_id"] for share in shares for group in share]
    world.group_ids += [group.ticket.group_id for share in shares for group in share]
    world.events["batches"] += 1


def simulate(seed, prompts, case, *, make=make_head, kind=StalenessManager):
    """Train on all prompts, through any number of crashes; the counted events."""
    clock = SimulatedClock()
    world = World(case, prompts, random.Random(seed), clock, kind)

    async def lives():
        while True:
            try:
                return await live(world, make)
            except Crash:
                continue

    clock.run(lives())
    assert len(world.books) == prompts, "a prompt was lost or repeated"
    assert set(world.books) == set(range(prompts)), "a prompt was lost, and another repeated"
    assert len(world.group_ids) == len(set(world.group_ids)), "two groups have one id"
    assert sorted(ending["prompt_id"] for ending in world.told) == list(range(prompts)), "one was not told of once"
    trained = [ending["group_id"] for ending in world.told if ending["ending"] == "trained"]
    assert sorted(trained) == sorted(world.group_ids)
    return world.events


LONG_CASES = [
    Case(batch=64, eta=0, bad_share=0.2),
    Case(batch=128, eta=1, heads=(2,)),
    Case(batch=32, eta=1, slow_share=0.3, skip_share=0.5),
    Case(batch=96, eta=2, heads=(3,), concurrent=40, crash_share=0.01),
    Case(batch=48, eta=3, bad_share=0.6),
    Case(batch=48, eta=4, heads=(2,), slow_share=0.2, crash_share=0.05),
    Case(batch=48, eta=2, heads=(1, 2, 3, 4), slow_share=0.2, bad_share=0.2, crash_share=0.05, uneven=True),
    Case(batch=16, eta=8, concurrent=12, slow_share=0.02),
    Case(batch=128, eta=2, slow_share=0.1),
]


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("prompts", [5_000, pytest.param(50_000, marks=pytest.mark.nightly)])
def test_million_events_consume_nothing_too_old_and_every_prompt_once(prompts):
    """A million at night, a hundred thousand for each commit."""
    events: Counter = Counter()
    for seed, case in enumerate(LONG_CASES):
        events += simulate(seed, prompts, case)
    print(dict(events))
    assert events.total() >= 20 * prompts
    assert min(events[what] for what in ("rejected", "failed", "batches", "crashes", "saves")) > prompts / 500


@pytest.mark.slow
@given(
    seed=st.integers(0, 2**32),
    case=st.builds(
        Case,
        batch=st.sampled_from([6, 12, 18]),
        eta=st.integers(0, 4),
        heads=st.sampled_from([(1,), (2,), (3,), (1, 2), (1, 2, 3, 6)]),
        concurrent=st.none() | st.integers(1, 12),
        bad_share=st.sampled_from([0.0, 0.1, 0.6]),
        slow_share=st.sampled_from([0.0, 0.05, 0.5, 1.0]),
        skip_share=st.sampled_from([0.0, 0.2, 0.9]),
        crash_share=st.sampled_from([0.0, 0.05, 0.3]),
        uneven=st.booleans(),
    ),
)
@settings(max_examples=60, deadline=None)
def test_any_settings_consume_nothing_too_old_and_every_prompt_once(seed, case):
    simulate(seed, 60, case)


class Answer(RolloutWorkflow):
    """One answer."""

    async def arun_episode(self, engine, data):
        response = await engine.agenerate(ModelRequest([1 + data["prompt_id"] % 60], GENERATION))
        return [from_response(response, reward=1.0, temperature=1.0)]


def make_real_head(world, rank):
    """A head with real groups and the null engine, three answers to a prompt."""
    case = world.case
    if not rank:  # a new process has new servers, shared by its heads, at the version that was saved
        version = 0 if world.saved is None else world.saved[0]
        lengths = NullInferenceEngineConfig(mean_tokens=6, sigma=1.5, seconds_per_token=0.2, read_weights=False)
        world.engine = NullInferenceEngine(lengths, ServeSpec(version=version), clock=world.clock)
        world.engine.faults.generate = lambda request: (
            RLError("planted") if world.rng.random() < case.bad_share / 3 else None
        )
    manager = world.kind(world.share, case.eta, case.concurrent, first_id=rank, id_stride=world.heads)
    config = RolloutConfig(
        max_staleness=case.eta, group_size=3, min_group=2, failure_budget=1.0, stall_timeout=100 * LONGEST
    )
    accept = lambda rows: world.rng.random() >= case.bad_share  # noqa: E731 - a filter
    return watch(
        world, RolloutScheduler(world.engine, Answer(), rows_of(world, rank), manager, config, world.clock, accept)
    )


@pytest.mark.nightly
@pytest.mark.parametrize(
    "case",
    [
        Case(batch=16, eta=0, crash_share=0.05),
        Case(batch=16, eta=1, heads=(2,), slow_share=0.0),
        Case(batch=12, eta=4, concurrent=20, bad_share=0.4),
        Case(batch=12, eta=2, heads=(1, 2, 3), crash_share=0.1),
    ],
    ids=str,
)
def test_real_episodes_consume_nothing_too_old_and_every_prompt_once(case):
    events = simulate(11, 4000, case, make=make_real_head)
    assert min(events[what] for what in ("accepted", "rejected", "failed", "steps", "crashes")) > 0


class NoLookAhead(StalenessManager):
    """A planted fault: batches leave as soon as enough groups are accepted."""

    def _satisfies_look_ahead(self):
        return True


class LookAheadOffByOne(StalenessManager):
    """A planted fault: the look-ahead counts on one batch more than there will be."""

    def _satisfies_look_ahead(self):
        self.max_staleness += 1
        try:
            return super()._satisfies_look_ahead()
        finally:
            self.max_staleness -= 1


class PlacesFreedAtOnce(StalenessManager):
    """A planted fault: a batch gives its places back when it leaves."""

    def take_batch(self, closed=False):
        taken = super().take_batch(closed)
        self.in_step = 0
        return taken


class YoungestFirst(StalenessManager):
    """A planted fault: batches take the groups that started last."""

    def take_batch(self, closed=False):
        accepted = sorted(self._accepted)
        taken, self._accepted = accepted[-self.batch_size :], accepted[: -self.batch_size]
        for ticket in taken:
            self._decrement(self._accepted_by_start, ticket.start)
        self.in_step, self._step_is_open = len(taken), True
        return taken


class OnePlaceTooMany(StalenessManager):
    """A planted fault: admission has room for one group more."""

    @property
    def capacity(self):
        return super().capacity + (not self._step_is_open)


class RejectedKeepTheirPlace(StalenessManager):
    """A planted fault: what was rejected is never replaced, until nothing can start."""

    def reject(self, ticket):
        super().reject(ticket)
        self.batch_places = getattr(self, "batch_places", 0) + 1

    @property
    def capacity(self):
        return max(super().capacity - getattr(self, "batch_places", 0), 0)


class ForgetsAcceptedWhenSaving(StalenessManager):
    """A planted fault: a resumed run lacks a group that waited for its batch."""

    def state_dict(self):
        state = super().state_dict()
        return {**state, "accepted": state["accepted"][1:]}


class ForgetsRunningWhenLoading(StalenessManager):
    """A planted fault: ids begin anew, so that two admissions have one id."""

    def load_state_dict(self, state):
        return super().load_state_dict({**state, "next_id": 0})


@pytest.mark.parametrize(
    ("fault", "alarm"),
    [
        (NoLookAhead, "This is a bug in admission"),
        (LookAheadOffByOne, "This is a bug in admission"),
        (PlacesFreedAtOnce, "This is a bug in admission|nothing was"),
        (YoungestFirst, "not oldest first|too old|nothing was"),
        (OnePlaceTooMany, "outstanding"),
        (RejectedKeepTheirPlace, "nothing was"),
        pytest.param(ForgetsAcceptedWhenSaving, "a prompt was lost", marks=pytest.mark.slow),
        (ForgetsRunningWhenLoading, "is in the batch twice|not running|KeyError"),
    ],
)
def test_planted_fault_in_admission_is_noticed(fault, alarm):
    # a group that is older than it may be, or the watchdog's alarm: what can never leave is as wrong
    case = Case(batch=8, eta=2, heads=(2,), slow_share=0.2, crash_share=0.05)
    with pytest.raises((AssertionError, RLError, KeyError), match=alarm):
        simulate(3, 3000, case, kind=fault)


def _ids_begin_anew(states, head, heads):
    dealt = reshard_groups(states, head, heads)
    dealt["manager"]["next_id"] = head
    return dealt


def _without_what_ran_on_the_last_head(states, head, heads):
    return reshard_groups([*states[:-1], states[-1] | {"in_flight": []}], head, heads)


def _accepted_groups_to_every_head(states, head, heads):
    return reshard_groups(states, head, heads) | {
        "groups": (dealt := reshard_groups(states, 0, 1))["groups"],
        "manager": dealt["manager"],
    }


def _without_what_was_not_told(states, head, heads):
    return reshard_groups(states, head, heads) | {"endings": []}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "alarm"),
    [
        (_ids_begin_anew, "is in the batch twice|have one id|not running|KeyError"),
        (_without_what_ran_on_the_last_head, "a prompt was lost"),
        (_accepted_groups_to_every_head, "is in the batch twice|lost or repeated"),
        (_without_what_was_not_told, "was not told of once"),
    ],
)
def test_planted_fault_in_dealing_to_other_heads_is_noticed(fault, alarm, monkeypatch):
    monkeypatch.setattr("rl_workflows.rollout.scheduler.reshard_groups", fault)
    case = Case(batch=12, eta=2, heads=(1, 2, 3), slow_share=0.2, crash_share=0.1)
    with pytest.raises((AssertionError, RLError, KeyError), match=alarm):
        simulate(3, 1000, case)
