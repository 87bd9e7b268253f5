"""Credit assignment: computes one advantage per trained token from the rewards.

Statistics are taken over the whole batch, so the result does not depend on how the batch is split. Ranks exchange a few
numbers per sequence (ids, rewards, lengths), so a group may be spread over several ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from rl_contracts.batch.trajectory import COMPONENT_PREFIX
from rl_contracts.errors import DataError
from rl_contracts.registry import load_component
from rl_trainers.algorithms.functional.advantages import EPS, Groups, gae, group_by_id, moments, normalize, whiten
from rl_trainers.algorithms.functional.kl import kl_estimate
from rl_trainers.algorithms.functional.reward_shaping import (
    overlong_penalty,
    shape,
    terminal_rewards,
    to_trained_tokens,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tensordict import TensorDict

    from rl_contracts.batch.parallel import ParallelContext
    from rl_trainers.algorithms.config import AlgorithmConfig, RewardConfig

    Advantages = tuple[torch.Tensor, torch.Tensor | None]
    """Advantages of tokens, [B, T], and returns, [B, T], the targets of a critic; None if no values are read."""


@dataclass(slots=True)
class EpisodeRewards:
    """Input of an advantage estimator: the batch's episodes over all replicas, and this replica's sequences.

    The E episodes have the same order on every replica.
    """

    rewards: torch.Tensor
    """float32 [E]: shaped reward of each episode, counted once however many sequences the episode has."""
    groups: torch.Tensor
    """int64 [E]: group id of each episode."""
    lengths: torch.Tensor
    """int64 [E]: sampled tokens over all sequences of each episode; shared tokens count once."""
    penalties: torch.Tensor
    """float32 [E]: KL penalty summed over all trained tokens of each episode; at most 0 in expectation."""
    episode_of_sequence: torch.Tensor
    """int64 [B]: index of the episode of each of this replica's sequences."""
    token_rewards: torch.Tensor
    """float32 [B, T]: sum of three rewards per token.

    The shaped reward is on the last trained token of a sequence; each sequence of an episode has the whole reward. Each
    of the workflow's `token_rewards` is on the last trained token at or before its own. The KL penalty is on its own
    token.
    """
    reward_components: dict[str, torch.Tensor]
    """Unshaped reward components by name, float32 [E] each; empty if the reward function returns plain numbers."""
    batch: TensorDict
    """This replica's sequences; with `values` if there is a critic."""

    def to_tokens(self, advantages: torch.Tensor) -> torch.Tensor:
        """Copy the advantage of each episode, [E], to all its trained tokens, [B, T]."""
        return torch.where(self.batch["loss_mask"], advantages[self.episode_of_sequence][:, None], 0.0)


def normalized_rewards(outcomes: EpisodeRewards, *, mean: str, std: str, leave_one_out: bool) -> Advantages:
    """Return the normalized reward of each episode, including its KL penalty, as the advantage of its trained tokens.

    See `normalize`. Rewards per turn are ignored. With `std="mean"`, the result is (r - mean) / (mean + 1e-6), with
    the mean of the group as the divisor. It is 0 if that mean is not positive. This is MaxRL (arXiv 2602.02710), for
    rewards of at least 0.
    """
    rewards = outcomes.rewards + outcomes.penalties
    scopes = normalization_scope(rewards, outcomes.groups)
    advantages = normalize(rewards, scopes[mean], scopes.get(std), leave_one_out)
    if std == "mean":
        groups = group_by_id(rewards, outcomes.groups)
        group_mean = groups.mean[groups.index]
        advantages = torch.where(group_mean > 0, advantages / (group_mean + EPS), 0.0)
    return outcomes.to_tokens(advantages), None


def gdpo_advantages(outcomes: EpisodeRewards, *, weights: Mapping[str, float] | None = None) -> Advantages:
    """Return the advantages of GDPO (arXiv 2601.05242, section 3).

    Each reward component is normalized within its group. The weighted sum of the components is then normalized over the
    batch. A component that does not vary within a group therefore does not hide differences in another one.

    Args:
        outcomes: episodes with `reward_components`.
        weights: weight of each component by name, 1 by default.

    Raises:
        DataError: the rewards have no components, or a weight names a component that does not exist.
    """
    weights = weights or {}
    if len(outcomes.rewards) and not (
        outcomes.reward_components and weights.keys() <= outcomes.reward_components.keys()
    ):
        raise DataError(
            f"algorithm.advantage.kind=gdpo: expected reward components {sorted(weights) or '(at least one)'}, "
            f"found {sorted(outcomes.reward_components) or 'none'}; "
            "return `rl_contracts.reward.CompositeReward` from the reward."
        )
    total = torch.zeros_like(outcomes.rewards)
    for name, rewards in outcomes.reward_components.items():
        group_statistics = group_by_id(rewards, outcomes.groups)
        total += weights.get(name, 1.0) * normalize(rewards, group_statistics, group_statistics)
    batch_statistics = group_by_id(total)
    return outcomes.to_tokens(normalize(total, batch_statistics, batch_statistics)), None


def discounted_return(outcomes: EpisodeRewards, *, gamma: float) -> Advantages:
    """Return the discounted sum of the rewards of a token and all later tokens (Williams 1992)."""
    rewards = outcomes.token_rewards
    return gae(rewards, torch.zeros_like(rewards), outcomes.batch["loss_mask"], gamma, 1.0)[0], None


def gae_advantages(outcomes: EpisodeRewards, *, gamma: float, lam: float, unit: str) -> Advantages:
    """Return `gae` of the rewards per token, with the critic's values."""
    batch = outcomes.batch
    return gae(outcomes.token_rewards, batch[VALUES_KEY], batch["loss_mask"], gamma, lam, unit)


def normalization_scope(values: torch.Tensor, group_ids: torch.Tensor) -> dict[str, Groups | None]:
    """Return the statistics of each scope of `NORMALIZATION_SCOPES`, by its name; None for `none`."""
    return {"none": None, "group": group_by_id(values, group_ids), "batch": group_by_id(values)}


def assign_credit(batch: TensorDict, config: AlgorithmConfig, parallel: ParallelContext) -> dict[str, float | None]:
    """Shape the rewards of a batch and add `advantages`, and `returns` with a critic (collective).

    Both entries are [B, T] and 0 where not trained.

    Returns:
        `groups/trained`, `groups/singleton` (groups of one episode) and `groups/zero_variance` (groups of several
        episodes with equal rewards), counted over all replicas. Also `reward/shaped` and `length/mean` (sampled
        tokens), means over episodes.

    Raises:
        DataError: the batch has rewards of single turns, and the estimator does not read them.
    """
    if "token_rewards" in batch and not config.advantage.reads_tokens:  # on all ranks or on none
        raise DataError(
            f"algorithm.advantage.kind={config.advantage.kind} uses one reward per episode, but the batch has rewards "
            "of single turns (`token_rewards`); set it to `return` or `gae`, or remove the rewards of turns."
        )
    trained, outcomes = batch["loss_mask"], gather_outcomes(batch, config, parallel)
    advantages, returns = load_component(config.advantage)(outcomes)
    if config.advantage.whiten:
        advantages = whiten(advantages, trained, parallel.sum_over_replicas(moments(advantages, trained)))
    batch["advantages"] = advantages
    if returns is not None:
        batch[RETURNS_KEY] = returns
    groups, rewards = group_by_id(outcomes.rewards, outcomes.groups), outcomes.rewards
    is_singleton = groups.size == 1
    return {
        "groups/trained": float(len(is_singleton)),
        "groups/singleton": float(is_singleton.sum()),
        "groups/zero_variance": float((groups.is_constant & ~is_singleton).sum()),
        "reward/shaped": float(rewards.double().mean()) if len(rewards) else None,
        "length/mean": float(outcomes.lengths.double().mean()) if len(rewards) else None,
    }


def gather_outcomes(batch: TensorDict, config: AlgorithmConfig, parallel: ParallelContext) -> EpisodeRewards:
    """Gather the input of the advantage estimator from all replicas (collective)."""
    trained, kl_penalties = batch["loss_mask"], _kl_penalties(batch, config)
    component_names = sorted(str(name) for name in batch.keys() if str(name).startswith(COMPONENT_PREFIX))  # noqa: SIM118
    local = {name: batch[name] for name in ("group_ids", "episode_ids", "rewards", *component_names)}
    generated = batch["versions"] >= 0
    # a sequence without trained tokens, such as a masked one, counts all its generated tokens
    counted = generated & (trained | ~trained.any(-1, keepdim=True))
    local |= {"lengths": generated.sum(-1), "own_lengths": counted.sum(-1), "penalties": kl_penalties.sum(-1)}
    shards = parallel.gather_tensors(local)
    gathered = {name: torch.cat([shard[name] for shard in shards]) for name in local}
    ids = torch.stack([gathered["group_ids"], gathered["episode_ids"]], 1)
    episode_keys, episode_of_sequence = torch.unique(ids, dim=0, return_inverse=True)
    first_sequence = torch.full((len(episode_keys),), len(episode_of_sequence)).scatter_reduce(
        0, episode_of_sequence, torch.arange(len(episode_of_sequence)), "amin"
    )

    def episode_sums(name: str) -> torch.Tensor:
        return gathered[name].new_zeros(len(episode_keys)).index_add(0, episode_of_sequence, gathered[name])

    start = sum(len(shard["rewards"]) for shard in shards[: parallel.dp_rank])
    local_episodes = episode_of_sequence[start : start + batch.batch_size[0]]
    # sequences of one episode share tokens, each of which is trained in only one of them
    is_split = torch.bincount(episode_of_sequence) > 1
    groups, lengths = episode_keys[:, 0], torch.where(is_split, episode_sums("own_lengths"), episode_sums("lengths"))
    rewards = shape_rewards(gathered["rewards"][first_sequence], lengths, groups, config.reward)
    per_token = terminal_rewards(rewards[local_episodes], trained) + kl_penalties
    if "token_rewards" in batch:
        per_token = per_token + to_trained_tokens(batch["token_rewards"], trained)
    components = {name.removeprefix(COMPONENT_PREFIX): gathered[name][first_sequence] for name in component_names}
    return EpisodeRewards(
        rewards, groups, lengths, episode_sums("penalties"), local_episodes, per_token, components, batch
    )


def shape_rewards(
    rewards: torch.Tensor, lengths: torch.Tensor, groups: torch.Tensor, config: RewardConfig
) -> torch.Tensor:
    """Apply overlong penalty, scale, bias, clip and normalization, in this order; float32 [E]."""
    if config.overlong_max:
        # the default is a fifth, as in DAPO: 4096 of 20480 tokens
        cache = config.overlong_cache or max(config.overlong_max // 5, 1)
        rewards = rewards + config.overlong_weight * overlong_penalty(lengths, config.overlong_max, cache)
    rewards = shape(rewards, config.scale, config.bias, config.clip)
    scope = normalization_scope(rewards, groups)[config.normalize]
    return normalize(rewards, scope, scope)


def _kl_penalties(batch: TensorDict, config: AlgorithmConfig) -> torch.Tensor:
    """Return -beta k(log pi_beh - log pi_ref) of each trained token, float32 [B, T]."""
    trained = batch["loss_mask"]
    if config.kl.place != "reward":
        return torch.zeros(trained.shape)
    behavior, reference = (torch.where(trained, batch[name], 0.0) for name in ("logprobs", "ref_logprobs"))
    return -config.kl.coef * kl_estimate(behavior, reference, config.kl.estimator)


VALUES_KEY, RETURNS_KEY = "values", "returns"
