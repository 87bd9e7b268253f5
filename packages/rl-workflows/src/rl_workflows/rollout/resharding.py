"""How a run that was saved with n heads goes on with m.

The former heads stood at different places of the order, and held different numbers of groups. What they had is dealt to
the new ones like cards, so that each is used once: the accepted groups with their trajectories, by age; then the
prompts that were in flight or were to be asked again; then the rows that are left of the data, which the loader deals
(`load_states` of the iterable that the prompts come from).

Seeds of samples derive from (seed, prompt, epoch, sample), so they do not change. Ids of groups stay unique: the new
heads share the numbers above all former ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from rl_contracts.errors import ConfigError

if TYPE_CHECKING:
    from rl_workflows.rollout.groups import FinishedGroup


def leader_states(states: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """The states of all heads of a saved run in order of head, out of those of all its ranks.

    Raises:
        ConfigError: some are missing, or they are not of one moment.
    """
    heads = {int(state["layout"]["head"]): state for state in states if "manager" in state}
    count = max((int(state["layout"]["heads"]) for state in heads.values()), default=0)
    if not heads or heads.keys() != set(range(count)):
        raise ConfigError(f"rollout state: expected the states of {count} heads, found those of {sorted(heads)}.")
    versions = {int(state["manager"]["version"]) for state in heads.values()}
    if len(versions) > 1:
        raise ConfigError(f"rollout state: expected heads that were saved at one version, found {sorted(versions)}.")
    return [heads[head] for head in range(count)]


def reshard_groups(states: Sequence[dict[str, Any]], head: int, heads: int) -> dict[str, Any]:
    """One head's state, but for the data's, out of those of all former heads.

    Args:
        states: of `RolloutScheduler.state_dict`, of all former heads.
        head: which of the new heads this is.
        heads: how many there are.
    """
    managers = [state["manager"] for state in states]
    groups: list[FinishedGroup] = sorted((g for state in states for g in state["groups"]), key=lambda g: g.ticket)
    again = [prompt for state in states for prompt in state["in_flight"]]
    again += [prompt for state in states for prompt in state["source"]["requeued"]]
    shard = groups[head::heads]
    return {
        "manager": {
            "version": managers[0]["version"],
            "steps": managers[0]["steps"],
            "next_id": max(int(manager["next_id"]) for manager in managers) + head,
            "accepted": [list(group.ticket) for group in shard],
        },
        "budget": _merged([state.get("budget", {}) for state in states]),
        "in_flight": again[(head - len(groups)) % heads :: heads],
        "groups": shard,
        "endings": [] if head else [ending for state in states for ending in state.get("endings", ())],
    }


def _merged(budgets: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What became of the last groups of all heads, the latest of each last."""
    recents = [budget.get("recent", ()) for budget in budgets]
    before_last = [(len(recent) - number, entry) for recent in recents for number, entry in enumerate(recent)]
    before_last.sort(key=lambda aged: -aged[0])
    in_row = {
        name: min(int(budget.get(name, 0)) for budget in budgets) for name in ("failed_in_row", "rejected_in_row")
    }
    return {"recent": [entry for _, entry in before_last], **in_row}
