"""What the heads of a saved run had, dealt to another number of them. How whole runs fare: test_workflows_simulated."""

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


def state_of(head, heads, starts=(), in_flight=(), requeued=(), version=5, budget=None):
    """A former head's state: accepted groups with these start versions, and prompts by id."""
    tickets = [Ticket(start, head + heads * number) for number, start in enumerate(starts)]
    return {
        "layout": {"heads": heads, "head": head},
        "manager": {
            "version": version,
            "steps": 7,
            "next_id": head + heads * len(tickets),
            "accepted": [list(t) for t in sorted(tickets)],
        },
        "source": {"drawn": 9, "requeued": [{"prompt_id": i} for i in requeued], "rows": {}},
        "in_flight": [{"prompt_id": i} for i in in_flight],
        "groups": [FinishedGroup(ticket, {"prompt_id": 100 + ticket.group_id}) for ticket in sorted(tickets)],
    } | ({} if budget is None else {"budget": budget})


@given(st.data())
def test_deal_any_heads_to_any_others_keeps_everything_once_and_nothing_too_old(data):
    former, heads = data.draw(st.integers(1, 4), "former heads"), data.draw(st.integers(1, 4), "heads")
    eta, batch, version = data.draw(st.integers(0, 3), "eta"), 12, 5
    states, prompts = [], itertools.count()
    for head in range(former):
        share, starts = batch // former, []
        for k in range(eta + 1):  # at most (k + 1) * B are due by version + k
            room = (k + 1) * share - len(starts)
            starts += [version - eta + k] * data.draw(st.integers(0, room), "groups that are due")
        flying, waiting = ([next(prompts) for _ in range(data.draw(st.integers(0, 5)))] for _ in range(2))
        states.append(state_of(head, former, starts, flying, waiting))

    dealt = [reshard_groups(states, head, heads) for head in range(heads)]

    groups = [group for state in dealt for group in state["groups"]]
    assert sorted(g.ticket for g in groups) == sorted(g.ticket for state in states for g in state["groups"])
    assert sorted(row["prompt_id"] for state in dealt for row in state["in_flight"]) == list(range(next(prompts)))
    parts = [len(state["groups"]) + len(state["in_flight"]) for state in dealt]
    assert max(parts) - min(parts) <= 1
    highest = max((group.ticket.group_id for group in groups), default=-1)
    first_ids = [state["manager"]["next_id"] for state in dealt]
    assert first_ids == list(range(first_ids[0], first_ids[0] + heads))
    assert first_ids[0] > highest
    for state in dealt:
        manager = StalenessManager(batch // heads, eta, id_stride=heads)
        assert manager.load_state_dict(state["manager"]) == []
        assert (manager.version, manager.steps) == (5, 7)


def test_deal_groups_that_no_new_head_may_keep_are_asked_again_first():
    states = [state_of(head, 2, starts=[4, 4, 5], in_flight=[head]) for head in range(2)]
    manager = StalenessManager(1, 1)  # a batch of 1 instead of 4: of those from version 4, only one can be used

    refused = manager.load_state_dict(reshard_groups(states, 0, 1)["manager"])

    assert [ticket.start for ticket in refused] == [4, 4, 4, 5]
    assert manager.accepted == 2


def test_deal_budgets_together_ending_with_the_latest_of_each():
    budgets = [
        {"recent": [["a", ""], ["b", ""], None], "failed_in_row": 0, "rejected_in_row": 4},
        {"recent": [["c", ""]], "failed_in_row": 1, "rejected_in_row": 2},
        {},
    ]
    dealt = reshard_groups([state_of(head, 3, budget=budget) for head, budget in enumerate(budgets)], 1, 2)

    assert [entry and entry[0] for entry in dealt["budget"]["recent"]] == ["a", "b", None, "c"]
    budget = FailureBudget(RolloutConfig())
    budget.load_state_dict(dealt["budget"])
    assert budget.state_dict() == {
        "recent": [("a", ""), ("b", ""), None, ("c", "")],
        "failed_in_row": 0,
        "rejected_in_row": 0,
    }


def test_states_of_heads_come_in_their_order_without_the_ranks_that_are_none():
    ranks = [state_of(1, 2), {"layout": {"heads": 2, "head": 1}}, state_of(0, 2), {"layout": {"heads": 2, "head": 0}}]

    assert [state["layout"]["head"] for state in leader_states(ranks)] == [0, 1]


@pytest.mark.parametrize(
    ("states", "message"),
    [
        ([state_of(0, 2)], r"the states of 2 leaders, .* \[0\]"),
        ([{"layout": {"heads": 1, "head": 0}}], r"the states of 0 leaders, .* \[\]"),
        ([state_of(0, 2), state_of(1, 2, version=6)], r"one version .* \[5, 6\]"),
    ],
)
def test_states_of_heads_that_do_not_belong_together_are_refused(states, message):
    with pytest.raises(ConfigError, match=message):
        leader_states(states)


class Unread:
    """States, of which some may not be read."""

    def __init__(self, states, readable):
        self.states, self.readable = states, readable

    def __len__(self):
        return len(self.states)

    def __getitem__(self, rank):
        assert rank in self.readable
        return self.states[rank]


def rollout_of(head, heads, rank, ranks, is_head=True):
    return DistRollout(
        NullInferenceEngine(),
        None,
        iter(()),
        batch_size=12,
        config=RolloutConfig(group_size=1),
        parallel=ParallelContext(rank, ranks, head, heads, is_dp_leader=is_head),
    )


def rank_states(heads, each):
    """States of `heads` replicas of `each` ranks."""
    ranks = range(heads * each)
    made = [rollout_of(rank // each, heads, rank, len(ranks), rank % each == 0) for rank in ranks]
    states = [rollout.state_dict() for rollout in made]
    for rollout in made:
        rollout.destroy()
    return states


def test_load_states_of_the_same_layout_reads_this_ranks_alone():
    states = rank_states(2, 2)
    for rank in range(4):
        rollout = rollout_of(rank // 2, 2, rank, 4, is_head=rank % 2 == 0)
        rollout.load_states(Unread(states, {rank}))
        assert rollout.state_dict().keys() == states[rank].keys()
        rollout.destroy()


def test_load_states_of_as_many_heads_on_other_ranks_takes_that_of_the_same_head():
    states = rank_states(2, 1)
    states[1]["source"]["requeued"] = [{"prompt_id": 8}]
    states[1]["manager"]["next_id"] = 31
    rollout = rollout_of(1, 2, 2, 4)

    rollout.load_states(states)

    found = rollout.state_dict()
    assert found["source"]["requeued"] == [{"prompt_id": 8}]
    assert found["manager"]["next_id"] == 31
    rollout.destroy()


def test_load_states_rank_that_is_no_head_reads_none():
    rollout = rollout_of(0, 1, 1, 2, is_head=False)
    rollout.load_states(Unread(rank_states(1, 1), set()))
    rollout.destroy()


def test_load_states_of_data_that_cannot_be_divided_anew_is_refused():
    states = rank_states(2, 1)
    rollout = rollout_of(0, 1, 0, 1)

    with pytest.raises(ConfigError, match=r"2 trainer replicas.*tuple_iterator.* without `load_states`.*PromptLoader"):
        rollout.load_states(states)
    rollout.destroy()


def test_source_state_of_a_loader_is_refused_by_rows_that_have_none():
    source = PromptSource([{"prompt_id": 0}])

    with pytest.raises(DataError, match="list has no load_state_dict"):
        source.load_state_dict({"drawn": 1, "requeued": [], "rows": {"at": 1}})


def test_head_of_the_same_number_goes_on_by_load_state_dict(clock, null_engine):
    async def both():
        heads = []
        for _ in range(2):
            config = RolloutConfig(group_size=1)
            heads.append(RolloutScheduler(null_engine, None, [], StalenessManager(4, 1), config, clock))
        state = state_of(0, 1, starts=[4, 5], in_flight=[3]) | {"budget": {}}
        state["source"]["rows"] = None
        state["source"]["drawn"] = 0
        await heads[0].load_state_dict(state)
        await heads[1].load_states([state], 0, 1)
        return [await head.state_dict() for head in heads]

    one, other = clock.run(both())
    assert one == other
