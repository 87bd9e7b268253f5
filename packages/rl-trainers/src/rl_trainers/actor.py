"""The policy that learns: from a batch of answers to one new version of the weights."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from rl_contracts.config import require
from rl_contracts.engine import Stats, TokenOutputs, TrainEngine
from rl_contracts.errors import DataError
from rl_contracts.sharding import MINIBATCH_KEY
from rl_contracts.trajectory import PackedBatch, select, validate
from rl_trainers import fresh
from rl_trainers.algorithm import AlgorithmConfig
from rl_trainers.functional.advantages import GroupAdvantages, group_advantages
from rl_trainers.functional.aggregation import denominator, token_weights
from rl_trainers.functional.policy import clipped_policy_loss, importance_weights

if TYPE_CHECKING:
    from tensordict import TensorDict


class PolicyActor:
    """Computes advantages and proximal log-probs once per batch, then takes `minibatches` optimizer steps.

    Every rank makes the same calls; a rank's batch is its share of the rows, with the entry `minibatch`.

    Args:
        engine: holds the policy.
        algorithm: advantages, loss, aggregation and correction.
        minibatches: optimizer steps per training batch.
    """

    def __init__(self, engine: TrainEngine, algorithm: AlgorithmConfig, minibatches: int = 1) -> None:
        require(minibatches >= 1, "actor.minibatches", "at least 1", minibatches)
        self.engine, self.algorithm, self.minibatches = engine, algorithm, minibatches
        self.proximal = algorithm.resolve_proximal(minibatches)

    @property
    def version(self) -> int:
        """Training batches applied."""
        return self.engine.version

    def prepare(self, batch: TensorDict) -> dict[str, float | None]:
        """Add `advantages`, `loss_weights`, `fresh` and, where recomputed, `prox_logprobs`, [B, T] each (collective).

        Returns:
            `groups/singleton` and `groups/zero_variance`, counted over all ranks; where proximal log-probs are
            recomputed, `gap/fresh_...` (see `rl_trainers.fresh`).

        Raises:
            DataError: the batch is not valid, or holds a trained token from a version later than the current one.
        """
        validate(batch)
        algorithm, learn = self.algorithm, batch["loss_mask"]
        if bool((batch["versions"] > self.version)[learn].any()):
            raise DataError(
                f"batch holds tokens of versions later than {self.version}, the trainer's; were servers rolled back?"
            )
        advantages, groups = self._advantages(batch)
        batch["advantages"] = torch.where(learn, advantages[:, None], 0.0)
        weights = token_weights(learn, algorithm.aggregation, algorithm.constant_length)
        if algorithm.staleness_coef:
            age = (self.version - batch["versions"]).float()
            weights = weights * torch.where(learn, torch.exp(-algorithm.staleness_coef * age), 0.0)
        batch["loss_weights"] = weights
        fresh.mark(batch, self.version)
        figures: dict[str, float | None] = {
            "groups/singleton": float(groups.singletons),
            "groups/zero_variance": float(groups.zero_variance),
        }
        if self.proximal == "recompute":
            batch["prox_logprobs"] = self.engine.forward(batch, lambda outputs, _: outputs.logprobs)
            figures |= fresh.of_proximal(batch, self.engine.parallel)
        elif self.proximal == "behaviour":
            batch["prox_logprobs"] = batch["logprobs"]
        return figures

    def update(self, batch: TensorDict) -> dict[str, float | None]:
        """Learn from a prepared batch; the version advances by one unless every minibatch was skipped (collective).

        Returns:
            the engine's statistics, averaged over the minibatches (`.../max`: the largest); and `gap/fresh_...`, where
            `prepare` could not give it.
        """
        in_loss = self.proximal != "recompute"
        loss = PolicyLoss(self.algorithm, self.proximal, compare=in_loss)
        steps = []
        for number in range(self.minibatches):
            rows = select(batch, (batch[MINIBATCH_KEY] == number).nonzero().flatten())
            steps.append(self.engine.train_batch(rows, loss, self._denominator))
            loss = replace(loss, compare=False)  # from the first step on the policy is not the sampler's any more
        figures = fresh.of_loss(steps[0], batch, self.engine.parallel) if in_loss else {}
        if any(step["applied"] for step in steps):
            self.engine.version += 1
        return _combine(steps) | figures

    def _denominator(self, minibatch: TensorDict) -> torch.Tensor:
        return denominator(minibatch["loss_mask"], self.algorithm.aggregation)

    def _advantages(self, batch: TensorDict) -> tuple[torch.Tensor, GroupAdvantages]:
        """One advantage per row, [B]; ranks exchange (group, episode, reward), so a group may lie on several."""
        names = ("group_ids", "episode_ids", "rewards")
        parts = self.engine.parallel.gather_tensors({name: batch[name] for name in names})
        group, episode, reward = (torch.cat([part[name] for part in parts]) for name in names)
        # an episode may have several rows; it counts once in its group
        key, of_row = torch.unique(torch.stack([group, episode], 1), dim=0, return_inverse=True)
        first = torch.full((len(key),), len(of_row)).scatter_reduce(0, of_row, torch.arange(len(of_row)), "amin")
        result = group_advantages(reward[first], key[:, 0], self.algorithm.baseline)
        start = sum(len(part["rewards"]) for part in parts[: self.engine.parallel.dp_rank])
        return result.advantages[of_row[start : start + batch.batch_size[0]]], result


@dataclass(frozen=True)
class PolicyLoss:
    """The clipped policy loss of one packed micro-batch, with the decoupled objective's weight."""

    config: AlgorithmConfig
    proximal: str
    """`recompute` or `behaviour` (both read `prox_logprobs`) or `current`."""
    compare: bool = False
    """Compare the log-probs of fresh tokens with the recorded ones."""

    def __call__(self, outputs: TokenOutputs, packed: PackedBatch) -> tuple[torch.Tensor, Stats]:
        """`(loss_sum, stats)`; see `clipped_policy_loss`. Adds `entropy/mean`, `correction/mean` and
        `correction/capped`."""
        config, weights = self.config, packed["loss_weights"]
        trained = weights > 0
        old = outputs.logprobs.detach() if self.proximal == "current" else packed["prox_logprobs"]
        stats: Stats = {}
        count = trained.sum().float()
        if config.correction_cap and self.proximal != "behaviour":
            correction, capped = importance_weights(old, packed["logprobs"], config.correction_cap)
            correction = torch.where(trained, correction, 0.0)
            weights = weights * correction
            stats["correction/mean"] = (correction.sum(), count)
            stats["correction/capped"] = ((capped & trained).sum().float(), count)
        loss, policy_stats = clipped_policy_loss(
            outputs.logprobs,
            old,
            packed["advantages"],
            weights,
            clip_low=config.clip_low,
            clip_high=config.clip_high,
            dual_clip=config.dual_clip or None,
        )
        if self.compare:
            stats |= fresh.in_loss(outputs, packed)
        stats["entropy/mean"] = (torch.where(trained, outputs.entropy, 0.0).detach().sum(), count)
        return loss, stats | policy_stats


def _combine(steps: list[dict[str, float]]) -> dict[str, float | None]:
    """Statistics of several optimizer steps as one: means, and the largest of `.../max`; `tokens` add up."""
    result: dict[str, float | None] = {}
    for name in steps[0]:
        values = [step[name] for step in steps]
        if name.endswith("/max"):
            result[name] = max(values)
        else:
            result[name] = sum(values) / (1 if name == "tokens" else len(values))
    return result
