"""Resumption of a run with another number of data-parallel leaders.

The previous leaders stopped at different positions in the data and held different numbers of groups. Their state is
distributed round-robin to the new leaders, so that each item is used once:

- accepted groups with their trajectories, by age;
- prompts that were in flight or requeued;
- remaining examples, which the loader distributes (`load_states` of the iterable of prompts).

Sampling seeds derive from (seed, prompt, epoch, sample), so they do not change. Group ids stay unique: the new leaders
use ids above all previous ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from rl_contracts.errors import ConfigError

if TYPE_CHECKING:
    from rl_workflows.rollout.groups import FinishedGroup


def leader_states(states: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the states of all data-parallel leaders in order, out of the states of all ranks of a saved run.

    Raises:
        ConfigError: states are missing, or were saved at different versions.
    """
    by_leader = {int(state["layout"]["head"]): state for state in states if "manager" in state}
    count = max((int(state["layout"]["heads"]) for state in by_leader.values()), default=0)
    if not by_leader or by_leader.keys() != set(range(count)):
        raise ConfigError(f"rollout state: expected the states of {count} leaders, found leaders {sorted(by_leader)}.")
    versions = {int(state["manager"]["version"]) for state in by_leader.values()}
    if len(versions) > 1:
        raise ConfigError(f"rollout state: expected one version for all leaders, found {sorted(versions)}.")
    return [by_leader[leader] for leader in range(count)]


def reshard_groups(states: Sequence[dict[str, Any]], leader: int, leaders: int) -> dict[str, Any]:
    """Return the state of one new data-parallel leader, out of the states of all previous leaders.

    The position in the data is not included.

    Args:
        states: results of `RolloutScheduler.state_dict` of all previous leaders.
        leader: index of this new leader.
        leaders: number of new leaders.
    """
    managers = [state["manager"] for state in states]
    groups: list[FinishedGroup] = sorted((g for state in states for g in state["groups"]), key=lambda g: g.ticket)
    prompts = [prompt for state in states for prompt in state["in_flight"]]
    prompts += [prompt for state in states for prompt in state["source"]["requeued"]]
    shard = groups[leader::leaders]
    return {
        "manager": {
            "version": managers[0]["version"],
            "steps": managers[0]["steps"],
            "next_id": max(int(manager["next_id"]) for manager in managers) + leader,
            "accepted": [list(group.ticket) for group in shard],
        },
        "budget": _merge_budgets([state.get("budget", {}) for state in states]),
        "in_flight": prompts[(leader - len(groups)) % leaders :: leaders],
        "groups": shard,
        "outcomes": [] if leader else [outcome for state in states for outcome in state.get("outcomes", ())],
    }


def _merge_budgets(budgets: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Merge the failure budgets of all leaders.

    The outcomes are aligned at their ends, so that the latest outcomes of each leader come last.
    """
    outcomes_by_leader = [budget.get("recent", ()) for budget in budgets]
    by_age = [
        (len(outcomes) - position, entry) for outcomes in outcomes_by_leader for position, entry in enumerate(outcomes)
    ]
    by_age.sort(key=lambda pair: -pair[0])
    in_row = {
        name: min(int(budget.get(name, 0)) for budget in budgets) for name in ("failed_in_row", "rejected_in_row")
    }
    return {"recent": [entry for _, entry in by_age], **in_row}
