"""A million random events on the simulated clock: staleness, accounting and progress despite crashes.

Admission, scheduler, prompts, batch assembly and checkpoints are the real code. In long runs, groups end after a random
time instead of running episodes (`timer_group`), so that a million events are affordable. Shorter runs use real groups
and the null engine.
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
"""Simulated seconds of the slowest group; most groups take about one second."""
GENERATION = GenerationConfig(max_new_tokens=512)
IDS, MASK, LOGPROBS = np.array([5, 6, 7]), np.array([False, True, True]), np.zeros(3, np.float32)


@dataclass(frozen=True)
class Case:
    """Settings of one run and probabilities of its failures."""

    batch: int
    """Groups per step, over all leaders."""
    eta: int
    leaders: tuple[int, ...] = (1,)
    """Possible numbers of leaders; each process of the run has one of them."""
    concurrent: int | None = None
    failure_rate: float = 0.1
    slow_rate: float = 0.05
    skip_rate: float = 0.1
    crash_rate: float = 0.02
    uneven: bool = False
    """True if groups of the first leader fail more often, so that it takes more prompts than the others."""


@dataclass
class World:
    """State that outlives a process: servers, the saved state, and the outcomes of all prompts."""

    case: Case
    prompts: int
    rng: random.Random
    clock: SimulatedClock
    manager_class: type[StalenessManager]
    events: Counter = field(default_factory=Counter)
    leaders: int = 1  # number of leaders of this process
    served: int = 0  # version that the servers serve
    ended_prompts: list = field(default_factory=list)  # truncated to the last save in a crash, like the next two
    group_ids: list = field(default_factory=list)  # ids of consumed groups
    outcomes: list = field(default_factory=list)  # outcomes reported by leaders
    saved: tuple | None = None  # (version, lengths of the three lists, state of each leader)
    engine: NullInferenceEngine | None = None  # if episodes are real

    @property
    def groups_per_leader(self):
        """Number of groups per step of each leader."""
        return self.case.batch // self.leaders


class Crash(Exception):  # noqa: N818 - not an error, but the end of a process
    pass


class ShardedExamples:
    """Examples that are distributed again to the leaders of each process, like a loader without shuffling."""

    def __init__(self, examples, rank, leaders):
        self.examples, self.rank, self.leaders = list(examples[rank::leaders]), rank, leaders

    def __iter__(self):
        return self

    def __next__(self):
        if not self.examples:
            raise StopIteration
        return self.examples.pop(0)

    def state_dict(self):
        return {"rows": list(self.examples)}

    def load_state_dict(self, state):
        self.examples = list(state["rows"])

    def load_states(self, states):
        examples = [example for state in states for example in state["rows"]]
        self.examples = examples[self.rank :: self.leaders]


def examples_of(world, rank):
    """Return the examples of this leader."""
    examples = [{"prompt_id": i} for i in range(world.prompts)]
    if len(world.case.leaders) > 1:
        return ShardedExamples(examples, rank, world.leaders)
    return examples[rank :: world.leaders]  # an iterable without a state


async def timer_group(world, prompt, ticket, rank):
    """Replace `run_group` with a group that ends after a random time, successfully or not."""
    rng = world.rng
    start_version = world.served
    seconds = rng.expovariate(1.0)
    if rng.random() < world.case.slow_rate:
        seconds *= rng.choice([20.0, 20.0, 300.0])
    await world.clock.sleep(min(seconds, LONGEST))
    versions = np.array([-1, start_version, world.served], np.int32)
    trajectory = Trajectory(
        IDS, MASK, LOGPROBS, versions, 1.0, 1.0, False, None, prompt["prompt_id"], ticket.group_id, 0
    )
    group = FinishedGroup(ticket, prompt, [trajectory])
    if rng.random() < world.case.failure_rate * (3 if world.case.uneven and not rank else 1):
        group.rejected, group.error = rng.choice([("filter", None), (None, RLError("injected"))])
    return group


def make_scheduler(world, rank):
    """Return a scheduler whose groups end by timers."""
    case = world.case
    manager = world.manager_class(
        world.groups_per_leader, case.eta, case.concurrent, first_id=rank, id_stride=world.leaders
    )
    config = RolloutConfig(max_staleness=case.eta, group_size=1, failure_budget=1.0, stall_timeout=100 * LONGEST)
    engine = NullInferenceEngine(NullInferenceEngineConfig(read_weights=False), clock=world.clock)
    scheduler = RolloutScheduler(engine, Answer(), examples_of(world, rank), manager, config, world.clock)
    scheduler._run = lambda prompt, ticket: timer_group(world, prompt, ticket, rank)
    return instrument(world, scheduler)


def instrument(world, scheduler):
    """Record each admission and each end of a group, and check the limits."""
    record_group, run_group, manager = scheduler._record_group, scheduler._run, scheduler.manager

    def on_group(group):
        outcome = "failed" if group.error is not None else "rejected" if group.rejected else "accepted"
        world.events[outcome] += 1
        if outcome != "accepted":
            world.ended_prompts.append(group.prompt["prompt_id"])
        record_group(group)

    def on_admission(prompt, ticket):
        world.events["admitted"] += 1
        assert manager.outstanding <= (world.case.eta + 1) * world.groups_per_leader
        assert world.case.concurrent is None or manager.running <= world.case.concurrent
        return run_group(prompt, ticket)

    scheduler._record_group, scheduler._run = on_group, on_admission
    return scheduler


async def run_process(world, make):
    """Run one process: resume from the saved state, and train until the data is exhausted or the process crashes."""
    case, rng, clock = world.case, world.rng, world.clock
    world.leaders = rng.choice(case.leaders) if len(case.leaders) > 1 else case.leaders[0]
    schedulers = [make(world, rank) for rank in range(world.leaders)]
    version, ended, consumed, outcomes, states = world.saved or (0, 0, 0, 0, ())
    del world.ended_prompts[ended:], world.group_ids[consumed:], world.outcomes[outcomes:]
    world.events["changes"] += len(states) not in (0, len(schedulers))
    for rank, scheduler in enumerate(schedulers if states else ()):
        await scheduler.load_states([restored(state) for state in states], rank, len(schedulers))
    world.served = version
    try:
        while True:
            maybe_crash(world)
            start = clock.now()
            for scheduler in schedulers:
                await scheduler.begin_wait()
            sizes = [await scheduler.fill() for scheduler in schedulers]
            assert clock.now() - start <= 60 * LONGEST, "no progress"
            if not sum(sizes):
                return await record_outcomes(world, schedulers)
            check_batch(world, version, [await scheduler.take() for scheduler in schedulers], sizes)
            await clock.sleep(rng.expovariate(0.2))  # training
            maybe_crash(world)
            version += rng.random() >= case.skip_rate
            if version > world.served:
                await commit(world, schedulers[0].engine, version)
            await record_outcomes(world, schedulers)
            for scheduler in schedulers:
                await scheduler.end_step(version)
                await clock.sleep(rng.choice([0.0, rng.expovariate(1.0)]))  # leaders are notified one after the other
            world.events["steps"] += 1
            maybe_crash(world)
            if rng.random() < 0.2:
                await save(world, version, schedulers)
    finally:
        for scheduler in schedulers:
            await scheduler.close()


async def record_outcomes(world, schedulers):
    """Record the outcomes, as the run log does."""
    world.outcomes += [outcome for scheduler in schedulers for outcome in await scheduler.take_outcomes()]


def maybe_crash(world):
    if world.rng.random() < world.case.crash_rate:
        world.events["crashes"] += 1
        raise Crash


async def commit(world, engine, version):
    """Switch the servers to a version at once; the trainer and the leaders continue only after a delay."""
    await world.clock.sleep(world.rng.expovariate(1.0))
    await engine.stage_weights(WeightUpdateMeta("shm", version))
    await engine.commit_weights(version)
    world.served = version
    await world.clock.sleep(world.rng.choice([0.0, 0.0, world.rng.expovariate(0.05)]))  # a slow acknowledgement


async def save(world, version, schedulers):
    states = [await scheduler.state_dict() for scheduler in schedulers]
    groups = [groups_to_state(state.pop("groups")) for state in states]
    saved_states = [
        {"json": state, "tensors": group_state.pop("tensors"), "groups": group_state}
        for state, group_state in zip(states, groups, strict=True)
    ]
    world.saved = (version, len(world.ended_prompts), len(world.group_ids), len(world.outcomes), saved_states)
    world.events["saves"] += 1


def restored(state):
    """Return the state of a leader as a new process reads it."""
    groups = groups_from_state({**json.loads(json.dumps(state["groups"])), "tensors": state["tensors"]})
    return {**json.loads(json.dumps(state["json"])), "groups": groups}


def check_batch(world, version, groups_by_leader, sizes):
    """Check the guarantees for one batch; `assemble` compares each token's version with the admission of its group."""
    batches = [assemble(groups, version) for groups in groups_by_leader]
    batch = concatenate([b for b in batches if b.batch_size[0]])
    for groups, size in zip(groups_by_leader, sizes, strict=True):
        assert len(groups) == size <= world.groups_per_leader
        assert groups == sorted(groups, key=lambda group: group.ticket), "not oldest first"
        assert all(version - group.ticket.start <= world.case.eta for group in groups), "a group is too old"
    stamped = batch["versions"][batch["loss_mask"]]
    assert version - int(stamped.min()) <= world.case.eta, "a token is too old"
    assert int(stamped.max()) <= version
    groups = batch["group_ids"].unique()
    assert len(groups) == sum(sizes), "a group is in the batch twice"
    world.ended_prompts += [group.prompt["prompt_id"] for leader_groups in groups_by_leader for group in leader_groups]
    world.group_ids += [group.ticket.group_id for leader_groups in groups_by_leader for group in leader_groups]
    world.events["batches"] += 1


def simulate(seed, prompts, case, *, make=make_scheduler, manager_class=StalenessManager):
    """Train on all prompts through any number of crashes, and return the counted events."""
    clock = SimulatedClock()
    world = World(case, prompts, random.Random(seed), clock, manager_class)

    async def run_processes():
        while True:
            try:
                return await run_process(world, make)
            except Crash:
                continue

    clock.run(run_processes())
    assert len(world.ended_prompts) == prompts, "a prompt was lost or repeated"
    assert set(world.ended_prompts) == set(range(prompts)), "a prompt was lost, and another repeated"
    assert len(world.group_ids) == len(set(world.group_ids)), "two groups have one id"
    assert sorted(outcome["prompt_id"] for outcome in world.outcomes) == list(range(prompts)), (
        "an outcome was not reported once"
    )
    trained = [outcome["group_id"] for outcome in world.outcomes if outcome["outcome"] == "trained"]
    assert sorted(trained) == sorted(world.group_ids)
    return world.events


LONG_CASES = [
    Case(batch=64, eta=0, failure_rate=0.2),
    Case(batch=128, eta=1, leaders=(2,)),
    Case(batch=32, eta=1, slow_rate=0.3, skip_rate=0.5),
    Case(batch=96, eta=2, leaders=(3,), concurrent=40, crash_rate=0.01),
    Case(batch=48, eta=3, failure_rate=0.6),
    Case(batch=48, eta=4, leaders=(2,), slow_rate=0.2, crash_rate=0.05),
    Case(batch=48, eta=2, leaders=(1, 2, 3, 4), slow_rate=0.2, failure_rate=0.2, crash_rate=0.05, uneven=True),
    Case(batch=16, eta=8, concurrent=12, slow_rate=0.02),
    Case(batch=128, eta=2, slow_rate=0.1),
]


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("prompts", [5_000, pytest.param(50_000, marks=pytest.mark.nightly)])
def test_simulation_many_events_trains_each_prompt_once_in_time(prompts):
    """Simulate 100,000 events for each commit, and a million in nightly runs."""
    events: Counter = Counter()
    for seed, case in enumerate(LONG_CASES):
        events += simulate(seed, prompts, case)
    print(dict(events))
    assert events.total() >= 20 * prompts
    assert min(events[event] for event in ("rejected", "failed", "batches", "crashes", "saves")) > prompts / 500


@pytest.mark.slow
@given(
    seed=st.integers(0, 2**32),
    case=st.builds(
        Case,
        batch=st.sampled_from([6, 12, 18]),
        eta=st.integers(0, 4),
        leaders=st.sampled_from([(1,), (2,), (3,), (1, 2), (1, 2, 3, 6)]),
        concurrent=st.none() | st.integers(1, 12),
        failure_rate=st.sampled_from([0.0, 0.1, 0.6]),
        slow_rate=st.sampled_from([0.0, 0.05, 0.5, 1.0]),
        skip_rate=st.sampled_from([0.0, 0.2, 0.9]),
        crash_rate=st.sampled_from([0.0, 0.05, 0.3]),
        uneven=st.booleans(),
    ),
)
@settings(max_examples=60, deadline=None)
def test_simulation_any_settings_trains_each_prompt_once_in_time(seed, case):
    simulate(seed, 60, case)


class Answer(RolloutWorkflow):
    """Workflow with one completion."""

    async def arun_episode(self, engine, data):
        response = await engine.agenerate(ModelRequest([1 + data["prompt_id"] % 60], GENERATION))
        return [from_response(response, reward=1.0, temperature=1.0)]


def make_real_scheduler(world, rank):
    """Return a scheduler with real groups of three episodes and the null engine."""
    case = world.case
    if not rank:  # new servers, shared by the leaders of this process, at the saved version
        version = 0 if world.saved is None else world.saved[0]
        lengths = NullInferenceEngineConfig(mean_tokens=6, sigma=1.5, seconds_per_token=0.2, read_weights=False)
        world.engine = NullInferenceEngine(lengths, ServeSpec(version=version), clock=world.clock)
        world.engine.faults.generate = lambda request: (
            RLError("injected") if world.rng.random() < case.failure_rate / 3 else None
        )
    manager = world.manager_class(
        world.groups_per_leader, case.eta, case.concurrent, first_id=rank, id_stride=world.leaders
    )
    config = RolloutConfig(
        max_staleness=case.eta, group_size=3, min_group=2, failure_budget=1.0, stall_timeout=100 * LONGEST
    )
    accept = lambda trajectories: world.rng.random() >= case.failure_rate  # noqa: E731 - a filter
    return instrument(
        world, RolloutScheduler(world.engine, Answer(), examples_of(world, rank), manager, config, world.clock, accept)
    )


@pytest.mark.nightly
@pytest.mark.parametrize(
    "case",
    [
        Case(batch=16, eta=0, crash_rate=0.05),
        Case(batch=12, eta=4, concurrent=20, failure_rate=0.4),
        Case(batch=12, eta=2, leaders=(1, 2, 3), crash_rate=0.1),
    ],
    ids=str,
)
def test_simulation_real_episodes_trains_each_prompt_once_in_time(case):
    events = simulate(11, 4000, case, make=make_real_scheduler)
    assert min(events[event] for event in ("accepted", "rejected", "failed", "steps", "crashes")) > 0


class LookAheadOffByOne(StalenessManager):
    """Injected fault: the look-ahead expects one batch more than there will be."""

    def _satisfies_look_ahead(self):
        self.max_staleness += 1
        try:
            return super()._satisfies_look_ahead()
        finally:
            self.max_staleness -= 1


class SlotsFreedAtRelease(StalenessManager):
    """Injected fault: a batch frees its slots when it is released."""

    def take_batch(self, closed=False):
        taken = super().take_batch(closed)
        self.in_step = 0
        return taken


class YoungestFirst(StalenessManager):
    """Injected fault: batches take the groups that started last."""

    def take_batch(self, closed=False):
        accepted = sorted(self._accepted)
        taken, self._accepted = accepted[-self.batch_size :], accepted[: -self.batch_size]
        for ticket in taken:
            self._decrement(self._accepted_by_start, ticket.start)
        self.in_step, self._step_is_open = len(taken), True
        return taken


class OneSlotTooMany(StalenessManager):
    """Injected fault: admission has one slot too many."""

    @property
    def capacity(self):
        return super().capacity + (not self._step_is_open)


class RejectedKeepTheirSlot(StalenessManager):
    """Injected fault: rejected groups are never replaced, until no group can start."""

    def reject(self, ticket):
        super().reject(ticket)
        self.lost_slots = getattr(self, "lost_slots", 0) + 1

    @property
    def capacity(self):
        return max(super().capacity - getattr(self, "lost_slots", 0), 0)


class ForgetsAcceptedWhenSaving(StalenessManager):
    """Injected fault: a resumed run lacks one accepted group."""

    def state_dict(self):
        state = super().state_dict()
        return {**state, "accepted": state["accepted"][1:]}


class RestartsIdsWhenLoading(StalenessManager):
    """Injected fault: ids restart at 0, so that two admissions get the same id."""

    def load_state_dict(self, state):
        return super().load_state_dict({**state, "next_id": 0})


@pytest.mark.parametrize(
    ("fault", "alarm"),
    [
        (LookAheadOffByOne, "This is a bug in admission"),
        (SlotsFreedAtRelease, "This is a bug in admission|nothing was"),
        (YoungestFirst, "not oldest first|too old|nothing was"),
        (OneSlotTooMany, "outstanding"),
        (RejectedKeepTheirSlot, "nothing was"),
        pytest.param(ForgetsAcceptedWhenSaving, "a prompt was lost", marks=pytest.mark.slow),
        (RestartsIdsWhenLoading, "is in the batch twice|not running|KeyError"),
    ],
)
def test_simulation_injected_admission_fault_is_detected(fault, alarm):
    # A group that is too old, or a stall: groups that can never be released are also a failure.
    case = Case(batch=8, eta=2, leaders=(2,), slow_rate=0.2, crash_rate=0.05)
    with pytest.raises((AssertionError, RLError, KeyError), match=alarm):
        simulate(3, 3000, case, manager_class=fault)


def _restarted_ids(states, leader, leaders):
    resharded = reshard_groups(states, leader, leaders)
    resharded["manager"]["next_id"] = leader
    return resharded


def _without_in_flight_of_last_leader(states, leader, leaders):
    return reshard_groups([*states[:-1], states[-1] | {"in_flight": []}], leader, leaders)


def _accepted_groups_to_every_leader(states, leader, leaders):
    return reshard_groups(states, leader, leaders) | {
        "groups": (resharded := reshard_groups(states, 0, 1))["groups"],
        "manager": resharded["manager"],
    }


def _without_pending_outcomes(states, leader, leaders):
    return reshard_groups(states, leader, leaders) | {"outcomes": []}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "alarm"),
    [
        (_restarted_ids, "is in the batch twice|have one id|not running|KeyError"),
        (_without_in_flight_of_last_leader, "a prompt was lost"),
        (_accepted_groups_to_every_leader, "is in the batch twice|lost or repeated"),
        (_without_pending_outcomes, "was not reported once"),
    ],
)
def test_simulation_injected_resharding_fault_is_detected(fault, alarm, monkeypatch):
    monkeypatch.setattr("rl_workflows.rollout.scheduler.reshard_groups", fault)
    case = Case(batch=12, eta=2, leaders=(1, 2, 3), slow_rate=0.2, crash_rate=0.1)
    with pytest.raises((AssertionError, RLError, KeyError), match=alarm):
        simulate(3, 1000, case)
