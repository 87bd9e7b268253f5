"""The policy actor, which turns a batch of completions into the next version of the policy's weights."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch

from rl_contracts.batch.redistribution import shard_batch
from rl_contracts.batch.trajectory import load_batch, validate
from rl_contracts.engine import TrainEngine
from rl_contracts.errors import ConfigError, DataError, StopRequestedError
from rl_trainers.algorithms.config import AlgorithmConfig
from rl_trainers.algorithms.credit import VALUES_KEY, assign_credit
from rl_trainers.algorithms.functional.aggregation import denominator, token_weights
from rl_trainers.algorithms.objective import effective_fraction, make_policy_loss
from rl_trainers.learners.critic import Critic
from rl_trainers.learners.optimizer_steps import take_steps

if TYPE_CHECKING:
    from tensordict import TensorDict

GROUP_TOKENS_KEY = "group_tokens"
"""Batch entry, float32 [B]: trained tokens of a sequence's group in the whole batch; only for `prompt_mean`."""


class PolicyActor:
    """Computes advantages and proximal log-probs once per batch, then takes `minibatches` optimizer steps.

    Every rank makes the same calls. A rank's batch holds the sequences assigned to it, with the entry `minibatch`.

    Args:
        engine: holds the policy.
        algorithm: advantages, loss, aggregation and correction.
        minibatches: optimizer steps per training batch.
        reference: holds the frozen reference policy; required unless `algorithm.kl.place=none`.
        critic: estimates values and learns with the policy; required with `algorithm.advantage.kind=gae`.
        constant_length: the maximum length of a completion, in tokens; required with
            `algorithm.aggregation.kind=constant_length`, which divides by it.

    Raises:
        ConfigError: a required reference, critic or `constant_length` is missing, or a component of the algorithm is
            not installed.
    """

    def __init__(
        self,
        engine: TrainEngine,
        algorithm: AlgorithmConfig,
        minibatches: int = 1,
        reference: TrainEngine | None = None,
        critic: Critic | None = None,
        constant_length: int | None = None,
    ) -> None:
        if algorithm.needs_reference and reference is None:
            raise ConfigError(
                f"algorithm.kl.place={algorithm.kl.place} needs a reference policy, but `reference` is None; pass one, "
                "or set algorithm.kl.place=none and algorithm.kl.coef=0."
            )
        if algorithm.needs_critic and critic is None:
            raise ConfigError(
                "algorithm.advantage.kind=gae needs values, but `critic` is None; pass a critic, or set "
                "algorithm.advantage.kind to an estimator without values (outcome, return)."
            )
        if algorithm.aggregation.kind == "constant_length" and constant_length is None:
            raise ConfigError(
                "algorithm.aggregation.kind=constant_length divides by the maximum length of a completion, but "
                "`constant_length` is None; pass it, or choose another kind."
            )
        self.loss = make_policy_loss(algorithm, minibatches)
        self.engine, self.algorithm, self.minibatches = engine, algorithm, minibatches
        self.reference, self.critic = reference, critic if algorithm.needs_critic else None
        self.constant_length = constant_length or 1

    @property
    def version(self) -> int:
        """Number of training batches applied."""
        return self.engine.version

    @property
    def engines(self) -> dict[str, TrainEngine]:
        """Engines that learn, by name: `actor`, and `critic` if there is one."""
        return {"actor": self.engine} | ({"critic": self.critic.engine} if self.critic else {})

    def prepare(self, batch: TensorDict) -> dict[str, float | None]:
        """Add the entries that `update` reads, [B, T] each (collective).

        These are `advantages`, `loss_weights` and the entries that the proximal policy and the masks need. A reference
        adds `ref_logprobs`; a critic adds `values` and `returns`.

        Returns:
            The metrics of `assign_credit`, and `critic/explained_variance` with a critic.

        Raises:
            DataError: the batch is not valid, or has a trained token from a version later than the current one.
        """
        validate(batch)
        if bool((batch["versions"] > self.version)[batch["loss_mask"]].any()):
            raise DataError(
                f"batch has trained tokens of versions later than the trainer's version {self.version}; the servers "
                "must not serve newer weights than the trainer has."
            )
        if self.algorithm.mask.truncated:
            batch["loss_mask"] = batch["loss_mask"] & ~batch["truncated"][:, None]
        if self.algorithm.needs_reference:
            assert self.reference is not None
            batch["ref_logprobs"] = self.reference.forward(batch, lambda outputs, _: outputs.logprobs)
        if self.critic is not None:
            batch[VALUES_KEY] = self.critic.values(batch)
        metrics = assign_credit(batch, self.algorithm, self.engine.parallel)
        if self.critic is not None:
            metrics["critic/explained_variance"] = self.critic.explained_variance(batch)
        batch["loss_weights"] = self._weights(batch)
        self.loss.proximal.prepare(batch, self.engine)
        for mask in self.loss.masks:
            if hasattr(mask, "prepare"):
                mask.prepare(batch, self.engine.parallel)
        return metrics

    def update(self, batch: TensorDict) -> dict[str, float | None]:
        """Learn from a prepared batch (collective).

        The version advances by one unless every minibatch was skipped.

        Returns:
            The engine's statistics over the minibatches (see `take_steps`), and the critic's under `critic/`.
        """
        metrics = take_steps(self.engine, batch, self.loss, self._denominator, self.minibatches)
        effective_fraction(metrics)
        if self.critic is None:
            return metrics
        try:
            return metrics | self.critic.update(batch)
        except StopRequestedError as stop:
            stop.weights_unchanged = False  # the policy has already been updated
            raise

    def _denominator(self, minibatch: TensorDict) -> torch.Tensor:
        kind, replicas = self.algorithm.aggregation.kind, self.engine.parallel.dp_size
        return denominator(minibatch["loss_mask"], kind, minibatch.get(GROUP_TOKENS_KEY), replicas)

    def _group_tokens(self, batch: TensorDict) -> torch.Tensor:
        """Return the trained tokens of each sequence's group over all replicas, float32 [B] (collective)."""
        local_tokens = {"group_ids": batch["group_ids"], "tokens": batch["loss_mask"].sum(-1).float()}
        shards = self.engine.parallel.gather_tensors(local_tokens)
        group_ids, index = torch.unique(torch.cat([shard["group_ids"] for shard in shards]), return_inverse=True)
        tokens = torch.zeros(len(group_ids)).index_add(0, index, torch.cat([shard["tokens"] for shard in shards]))
        return tokens[torch.searchsorted(group_ids, batch["group_ids"])]

    def _weights(self, batch: TensorDict) -> torch.Tensor:
        """Return the weight of each token's loss from aggregation and staleness, float32 [B, T]."""
        learn, kind = batch["loss_mask"], self.algorithm.aggregation.kind
        if kind == "prompt_mean":
            batch[GROUP_TOKENS_KEY] = self._group_tokens(batch)
        weights = token_weights(learn, kind, self.constant_length, batch.get(GROUP_TOKENS_KEY))
        if self.algorithm.staleness_coef:
            age = (self.version - batch["versions"]).float()
            weights = weights * torch.where(learn, torch.exp(-self.algorithm.staleness_coef * age), 0.0)
        return weights


def replay_batch(actor: PolicyActor, path: str | Path, version: int | None = None) -> dict[str, float | None]:
    """Repeat one training step on a saved batch, without servers, to debug its numbers (collective).

    Args:
        actor: holds the weights to start from.
        path: a batch file saved by `RunLog` (`batches/step_<n>-version_<v>.safetensors`).
        version: the trainer's version at that step, or None for the latest version of a token in the batch.

    Returns:
        Metrics of `prepare` and `update`, the same on every rank and for every number of ranks.

    Raises:
        DataError: the file is not a saved batch.
    """
    batch = load_batch(path)
    actor.engine.version = int(batch["versions"].max()) if version is None else version
    local = shard_batch(batch, actor.engine.parallel, actor.minibatches)
    return actor.prepare(local) | actor.update(local)
