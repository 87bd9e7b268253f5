"""The policy that learns: from a batch of answers to one new version of the weights."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from rl_contracts.config import require
from rl_contracts.engine import TrainEngine
from rl_contracts.errors import ConfigError, DataError
from rl_contracts.sharding import MINIBATCH_KEY
from rl_contracts.trajectory import select, validate
from rl_trainers.advantages import compute_advantages
from rl_trainers.algorithm import AlgorithmConfig
from rl_trainers.critic import RETURNS_KEY, VALUES_KEY, Critic
from rl_trainers.functional.aggregation import denominator, token_weights
from rl_trainers.objective import KEPT_KEY, PolicyLoss, effective_share, load_policy_loss
from rl_trainers.trust_region import second_moment_mask

if TYPE_CHECKING:
    from tensordict import TensorDict


class PolicyActor:
    """Computes advantages and proximal log-probs once per batch, then takes `minibatches` optimizer steps.

    Every rank makes the same calls; a rank's batch is its share of the rows, with the entry `minibatch`.

    Args:
        engine: holds the policy.
        algorithm: advantages, loss, aggregation and correction.
        minibatches: optimizer steps per training batch.
        reference: holds the frozen reference policy, where `algorithm.kl` asks for one.
        critic: estimates values, where `algorithm.baseline` is `gae`; learns with the policy.

    Raises:
        ConfigError: the algorithm needs a reference or critic that is not given, or its policy loss is not installed.
    """

    def __init__(
        self,
        engine: TrainEngine,
        algorithm: AlgorithmConfig,
        minibatches: int = 1,
        reference: TrainEngine | None = None,
        critic: Critic | None = None,
    ) -> None:
        require(minibatches >= 1, "actor.minibatches", "at least 1", minibatches)
        if algorithm.needs_reference and reference is None:
            raise ConfigError(
                f"algorithm.kl.place={algorithm.kl.place} needs a reference policy, but there is no `ref`; give one, "
                "or set algorithm.kl.place=none and algorithm.kl.coef=0."
            )
        if algorithm.needs_critic and critic is None:
            raise ConfigError(
                "algorithm.baseline=gae needs values, but there is no `critic`; give one, or take a baseline without "
                "(group_mean_std, leave_one_out, none)."
            )
        load_policy_loss(algorithm)
        self.engine, self.algorithm, self.minibatches = engine, algorithm, minibatches
        self.reference, self.critic = reference, critic
        self.proximal = algorithm.resolve_proximal(minibatches)

    @property
    def version(self) -> int:
        """Training batches applied."""
        return self.engine.version

    def prepare(self, batch: TensorDict) -> dict[str, float | None]:
        """Add `advantages`, `loss_weights` and, where they are needed, `prox_logprobs`, `ref_logprobs`, `values`,
        `returns` and `moment_kept`, [B, T] each (collective).

        Returns:
            `groups/singleton` and `groups/zero_variance`, counted over all ranks; `reward/shaped` (mean over episodes);
            with a critic, `critic/explained_variance`.

        Raises:
            DataError: the batch is not valid, or holds a trained token from a version later than the current one.
        """
        validate(batch)
        algorithm, parallel = self.algorithm, self.engine.parallel
        if bool((batch["versions"] > self.version)[batch["loss_mask"]].any()):
            raise DataError(
                f"batch holds tokens of versions later than {self.version}, the trainer's; were servers rolled back?"
            )
        self._run_other_models(batch)
        figures = self._add_advantages(batch)
        batch["loss_weights"] = self._weights(batch)
        if self.proximal == "recompute":
            batch["prox_logprobs"] = self.engine.forward(batch, lambda outputs, _: outputs.logprobs)
        elif self.proximal == "behaviour":
            batch["prox_logprobs"] = batch["logprobs"]
        if algorithm.second_moment:
            batch[KEPT_KEY] = second_moment_mask(batch, algorithm.second_moment, self.minibatches, parallel)
        return figures

    def update(self, batch: TensorDict) -> dict[str, float | None]:
        """Learn from a prepared batch; the version advances by one unless every minibatch was skipped (collective).

        Returns:
            the engine's statistics, averaged over the minibatches (`.../max`: the largest); and the critic's, under
            `critic/`.
        """
        loss = PolicyLoss(self.algorithm, self.proximal, self.version)
        steps = []
        for number in range(self.minibatches):
            rows = select(batch, (batch[MINIBATCH_KEY] == number).nonzero().flatten())
            steps.append(self.engine.train_batch(rows, loss, self._denominator))
            effective_share(steps[-1])
        figures = _combine(steps)
        if self.critic is not None and self.algorithm.needs_critic:
            figures |= self.critic.update(batch)
        if any(step["applied"] for step in steps):
            self.engine.version += 1
        return figures

    def _denominator(self, minibatch: TensorDict) -> torch.Tensor:
        return denominator(minibatch["loss_mask"], self.algorithm.aggregation)

    def _run_other_models(self, batch: TensorDict) -> None:
        if self.algorithm.needs_reference:
            assert self.reference is not None
            batch["ref_logprobs"] = self.reference.forward(batch, lambda outputs, _: outputs.logprobs)
        if self.algorithm.needs_critic:
            assert self.critic is not None
            batch[VALUES_KEY] = self.critic.values(batch)

    def _add_advantages(self, batch: TensorDict) -> dict[str, float | None]:
        advantages, returns, groups, rewards = compute_advantages(batch, self.algorithm, self.engine.parallel)
        batch["advantages"] = advantages
        figures: dict[str, float | None] = {
            "groups/singleton": float(groups.singletons),
            "groups/zero_variance": float(groups.zero_variance),
            "reward/shaped": float(rewards.double().mean()) if len(rewards) else None,
        }
        if returns is not None:
            batch[RETURNS_KEY] = returns
            assert self.critic is not None
            figures["critic/explained_variance"] = self.critic.explained_variance(batch)
        return figures

    def _weights(self, batch: TensorDict) -> torch.Tensor:
        """Weight of each token's loss, by aggregation and staleness, float32 [B, T]."""
        algorithm, learn = self.algorithm, batch["loss_mask"]
        weights = token_weights(learn, algorithm.aggregation, algorithm.constant_length)
        if algorithm.staleness_coef:
            age = (self.version - batch["versions"]).float()
            weights = weights * torch.where(learn, torch.exp(-algorithm.staleness_coef * age), 0.0)
        return weights


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
