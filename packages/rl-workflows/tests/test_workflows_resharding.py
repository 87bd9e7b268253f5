"""Resharding of saved leader states to another number of leaders; test_workflows_simulated covers whole runs."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl_contracts.batch.parallel import ParallelContext
from rl_contracts.errors import ConfigError, DataError
from rl_contracts.testing import NullInferenceEngine
from rl_workflows import DistRollout, RolloutConfig, RolloutScheduler, StalenessManager, Ticket
from rl_workflows.rollout.failure_budget import FailureBudget
from rl_workflows.rollout.groups import FinishedGroup
from rl_workflows.rollout.prompt_source import PromptSource
from rl_workflows.rollout.resharding import leader_states, reshard_groups


def state_of(leader, leaders, starts=(), in_flight=(), requeued=(), version=5, budget=None):
    """Return the state of a previous leader with accepted groups of these start versions, and prompts by id."""
    tickets = [Ticket(start, leader + leaders * number) for number, start in enumerate(starts)]
    return {
        "layout": {"heads": leaders, "head": leader},
        "manager": {
            "version": version,
            "steps": 7,
            "next_id": leader + leaders * len(tickets),
            "accepted": [list(t) for t in sorted(tickets)],
        },
        "source": {"drawn": 9, "requeued": [{"prompt_id": i} for i in requeued], "rows": {}},
        "in_flight": [{"prompt_id": i} for i in in_flight],
        "groups": [FinishedGroup(ticket, {"prompt_id": 100 + ticket.group_id}) for ticket in sorted(tickets)],
    } | ({} if budget is None else {"budget": budget})


@given(st.data())
def test_reshard_any_leader_counts_keeps_each_item_once(data):
    previous_leaders, leaders = (
        data.draw(st.integers(1, 4), "previous leaders"),
        data.draw(st.integers(1, 4), "leaders"),
    )
    eta, batch, version = data.draw(st.integers(0, 3), "eta"), 12, 5
    states, prompts = [], itertools.count()
    for leader in range(previous_leaders):
        batch_per_leader, starts = batch // previous_leaders, []
        for k in range(eta + 1):  # at most (k + 1) * B are due by version + k
            free = (k + 1) * batch_per_leader - len(starts)
            starts += [version - eta + k] * data.draw(st.integers(0, free), "due groups")
        in_flight, requeued = ([next(prompts) for _ in range(data.draw(st.integers(0, 5)))] for _ in range(2))
        states.append(state_of(leader, previous_leaders, starts, in_flight, requeued))

    resharded = [reshard_groups(states, leader, leaders) for leader in range(leaders)]

    groups = [group for state in resharded for group in state["groups"]]
    assert sorted(g.ticket for g in groups) == sorted(g.ticket for state in states for g in state["groups"])
    assert sorted(prompt["prompt_id"] for state in resharded for prompt in state["in_flight"]) == list(
        range(next(prompts))
    )
    sizes = [len(state["groups"]) + len(state["in_flight"]) for state in resharded]
    assert max(sizes) - min(sizes) <= 1
    highest = max((group.ticket.group_id for group in groups), default=-1)
    first_ids = [state["manager"]["next_id"] for state in resharded]
    assert first_ids == list(range(first_ids[0], first_ids[0] + leaders))
    assert first_ids[0] > highest
    for state in resharded:
        manager = StalenessManager(batch // leaders, eta, id_stride=leaders)
        assert manager.load_state_dict(state["manager"]) == []
        assert (manager.version, manager.steps) == (5, 7)


def test_reshard_groups_too_old_are_returned_by_load():
    states = [state_of(leader, 2, starts=[4, 4, 5], in_flight=[leader]) for leader in range(2)]
    manager = StalenessManager(1, 1)  # a batch of 1 instead of 4: only one group of version 4 can be used

    too_old = manager.load_state_dict(reshard_groups(states, 0, 1)["manager"])

    assert [ticket.start for ticket in too_old] == [4, 4, 4, 5]
    assert manager.accepted == 2


def test_reshard_budgets_merges_latest_outcomes_last():
    budgets = [
        {"recent": [["a", ""], ["b", ""], None], "failed_in_row": 0, "rejected_in_row": 4},
        {"recent": [["c", ""]], "failed_in_row": 1, "rejected_in_row": 2},
        {},
    ]
    resharded = reshard_groups([state_of(leader, 3, budget=budget) for leader, budget in enumerate(budgets)], 1, 2)

    assert [entry and entry[0] for entry in resharded["budget"]["recent"]] == ["a", "b", None, "c"]
    budget = FailureBudget(RolloutConfig())
    budget.load_state_dict(resharded["budget"])
    assert budget.state_dict() == {
        "recent": [("a", ""), ("b", ""), None, ("c", "")],
        "failed_in_row": 0,
        "rejected_in_row": 0,
    }


def test_leader_states_orders_leaders_and_skips_other_ranks():
    ranks = [state_of(1, 2), {"layout": {"heads": 2, "head": 1}}, state_of(0, 2), {"layout": {"heads": 2, "head": 0}}]

    assert [state["layout"]["head"] for state in leader_states(ranks)] == [0, 1]


@pytest.mark.parametrize(
    ("states", "message"),
    [
        ([state_of(0, 2)], r"the states of 2 leaders, .* \[0\]"),
        ([state_of(0, 2), state_of(1, 2, version=6)], r"one version .* \[5, 6\]"),
    ],
)
def test_leader_states_inconsistent_states_are_rejected(states, message):
    with pytest.raises(ConfigError, match=message):
        leader_states(states)


class Unread:
    """Sequence of states that may be read only at the indices in `readable`."""

    def __init__(self, states, readable):
        self.states, self.readable = states, readable

    def __len__(self):
        return len(self.states)

    def __getitem__(self, rank):
        assert rank in self.readable
        return self.states[rank]


def rollout_of(leader, leaders, rank, ranks, is_leader=True):
    return DistRollout(
        NullInferenceEngine(),
        None,
        iter(()),
        batch_size=12,
        config=RolloutConfig(group_size=1),
        parallel=ParallelContext(rank, ranks, leader, leaders, is_dp_leader=is_leader),
    )


def rank_states(leaders, ranks_per_leader):
    """Return the states of all ranks of `leaders` replicas with `ranks_per_leader` ranks each."""
    ranks = range(leaders * ranks_per_leader)
    rollouts = [
        rollout_of(rank // ranks_per_leader, leaders, rank, len(ranks), rank % ranks_per_leader == 0) for rank in ranks
    ]
    states = [rollout.state_dict() for rollout in rollouts]
    for rollout in rollouts:
        rollout.destroy()
    return states


def test_load_states_same_layout_reads_only_own_rank():
    states = rank_states(2, 2)
    for rank in range(4):
        rollout = rollout_of(rank // 2, 2, rank, 4, is_leader=rank % 2 == 0)
        rollout.load_states(Unread(states, {rank}))
        assert rollout.state_dict().keys() == states[rank].keys()
        rollout.destroy()


def test_load_states_same_leader_count_other_ranks_takes_same_leader():
    states = rank_states(2, 1)
    states[1]["source"]["requeued"] = [{"prompt_id": 8}]
    states[1]["manager"]["next_id"] = 31
    rollout = rollout_of(1, 2, 2, 4)

    rollout.load_states(states)

    restored = rollout.state_dict()
    assert restored["source"]["requeued"] == [{"prompt_id": 8}]
    assert restored["manager"]["next_id"] == 31
    rollout.destroy()


def test_load_states_rank_that_is_no_leader_reads_nothing():
    rollout = rollout_of(0, 1, 1, 2, is_leader=False)
    rollout.load_states(Unread(rank_states(1, 1), set()))
    rollout.destroy()


def test_load_states_indivisible_data_is_rejected():
    states = rank_states(2, 1)
    rollout = rollout_of(0, 1, 0, 1)

    with pytest.raises(ConfigError, match=r"2 trainer replicas.*tuple_iterator.* without `load_states`.*PromptLoader"):
        rollout.load_states(states)
    rollout.destroy()


def test_prompt_source_stateless_data_rejects_loader_state():
    source = PromptSource([{"prompt_id": 0}])

    with pytest.raises(DataError, match="list has no load_state_dict"):
        source.load_state_dict({"drawn": 1, "requeued": [], "rows": {"at": 1}})


def test_load_states_same_leader_count_equals_load_state_dict(clock, null_engine):
    async def load_both():
        schedulers = []
        for _ in range(2):
            config = RolloutConfig(group_size=1)
            schedulers.append(RolloutScheduler(null_engine, None, [], StalenessManager(4, 1), config, clock))
        state = state_of(0, 1, starts=[4, 5], in_flight=[3]) | {"budget": {}}
        state["source"]["rows"] = None
        state["source"]["drawn"] = 0
        await schedulers[0].load_state_dict(state)
        await schedulers[1].load_states([state], 0, 1)
        return [await scheduler.state_dict() for scheduler in schedulers]

    by_load_state_dict, by_load_states = clock.run(load_both())
    assert by_load_state_dict == by_load_states
