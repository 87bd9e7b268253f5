"""From rewards to one advantage per trained token: over the whole batch, so that no split of it matters.

Ranks exchange small numbers per row (ids, rewards, lengths), so a group may lie on several of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from rl_trainers.algorithm import GROUP_BASELINES, AlgorithmConfig
from rl_trainers.functional.advantages import GroupAdvantages, group_advantages, moments, whitened
from rl_trainers.functional.gae import gae
from rl_trainers.functional.kl import kl_estimate
from rl_trainers.functional.rewards import (
    normalised,
    overlong_penalty,
    shaped,
    terminal_rewards,
    to_trained_tokens,
)

if TYPE_CHECKING:
    from tensordict import TensorDict

    from rl_contracts.parallel import ParallelContext


@dataclass(slots=True)
class Episodes:
    """The episodes of a batch over all replicas, in an order that every replica computes alike."""

    group: torch.Tensor
    """int64 [E]."""
    reward: torch.Tensor
    """float32 [E]; an episode of several rows has it once."""
    length: torch.Tensor
    """int64 [E] generated tokens over all of its rows."""
    penalty: torch.Tensor
    """float32 [E] KL penalty over all of its trained tokens, at most 0 in the mean."""
    of_row: torch.Tensor
    """int64 [B] episode of each of this replica's rows."""


def episodes_of(batch: TensorDict, penalty: torch.Tensor, parallel: ParallelContext) -> Episodes:
    """Gather the episodes (collective). `penalty`: float32 [B, T], 0 where not trained."""
    mine = {name: batch[name] for name in ("group_ids", "episode_ids", "rewards")}
    mine |= {"length": (batch["versions"] >= 0).sum(-1), "penalty": penalty.sum(-1)}
    parts = parallel.gather_tensors(mine)
    whole = {name: torch.cat([part[name] for part in parts]) for name in mine}
    ids = torch.stack([whole["group_ids"], whole["episode_ids"]], 1)
    key, of_row = torch.unique(ids, dim=0, return_inverse=True)
    first = torch.full((len(key),), len(of_row)).scatter_reduce(0, of_row, torch.arange(len(of_row)), "amin")

    def added(name: str) -> torch.Tensor:
        return whole[name].new_zeros(len(key)).index_add(0, of_row, whole[name])

    begin = sum(len(part["rewards"]) for part in parts[: parallel.dp_rank])
    own = of_row[begin : begin + batch.batch_size[0]]
    return Episodes(key[:, 0], whole["rewards"][first], added("length"), added("penalty"), own)


def shape_rewards(episodes: Episodes, config: AlgorithmConfig) -> torch.Tensor:
    """Overlong penalty, scale, bias, clip and normalisation, in this order; float32 [E]."""
    settings, rewards = config.reward, episodes.reward
    if settings.overlong_max:
        rewards = rewards + overlong_penalty(episodes.length, settings.overlong_max, settings.overlong_cache)
    rewards = shaped(rewards, settings.scale, settings.bias, settings.clip)
    if settings.normalise == "none":
        return rewards
    group = torch.unique(episodes.group, return_inverse=True)[1] if settings.normalise == "group" else None
    return normalised(rewards, group)


def compute_advantages(
    batch: TensorDict, config: AlgorithmConfig, parallel: ParallelContext
) -> tuple[torch.Tensor, torch.Tensor | None, GroupAdvantages, torch.Tensor]:
    """Advantages of a batch (collective).

    Group baselines look at one number per episode: the shaped reward plus the episode's KL penalty, if there is one;
    each of its trained tokens has its advantage (rewards per turn are for `gae` and `none`). `none` and `gae` look at
    rewards per token: the shaped reward on the last trained token of each row, the workflow's `token_rewards`, and the
    KL penalty where it arises; `none` takes the discounted sum of what follows, `gae` the values in `batch["values"]`.

    Returns:
        advantages [B, T], 0 where not trained; returns [B, T], the critic's targets, with `gae` only; what was odd
        about the groups; and the shaped rewards [E] of all replicas' episodes.
    """
    learn = batch["loss_mask"]
    penalty = _kl_penalty(batch, config)
    episodes = episodes_of(batch, penalty, parallel)
    rewards = shape_rewards(episodes, config)
    returns = None
    if config.baseline in GROUP_BASELINES:
        found = group_advantages(rewards + episodes.penalty, episodes.group, config.baseline)
        advantages = torch.where(learn, found.advantages[episodes.of_row][:, None], 0.0)
    else:
        found = group_advantages(rewards, episodes.group, "none")
        per_token = terminal_rewards(rewards[episodes.of_row], learn) + penalty
        if "token_rewards" in batch:
            per_token = per_token + to_trained_tokens(batch["token_rewards"], learn)
        if config.baseline == "gae":
            advantages, returns = gae(
                per_token, batch["values"], learn, config.gamma, config.gae_lambda, config.gae_unit
            )
        else:
            advantages, _ = gae(per_token, torch.zeros_like(per_token), learn, config.gamma, 1.0)
    if config.advantage_norm == "batch":
        total = parallel.sum_over_replicas(moments(advantages, learn))
        advantages = whitened(advantages, learn, total)
    return advantages, returns, found, rewards


def _kl_penalty(batch: TensorDict, config: AlgorithmConfig) -> torch.Tensor:
    """-beta k(log pi_beh - log pi_ref) of each trained token, float32 [B, T]."""
    learn = batch["loss_mask"]
    if config.kl.place != "reward":
        return torch.zeros(learn.shape)
    behaviour, reference = (torch.where(learn, batch[name], 0.0) for name in ("logprobs", "ref_logprobs"))
    return -config.kl.coef * kl_estimate(behaviour, reference, config.kl.estimator)
