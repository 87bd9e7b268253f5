"""The objective of one packed micro-batch: a weighted sum of policy loss, correction, masks, KL and entropy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from rl_contracts.batch.trajectory import PackedBatch
from rl_contracts.engine import Stats, TokenOutputs
from rl_contracts.errors import ConfigError, EngineError
from rl_contracts.registry import load_component, load_components
from rl_trainers.algorithms.config import AlgorithmConfig, KLConfig
from rl_trainers.algorithms.functional.correction import OffPolicy
from rl_trainers.algorithms.functional.kl import ESTIMATORS, kl_estimate, weighted_kl
from rl_trainers.algorithms.functional.policy_terms import PolicyTerms, policy_terms
from rl_trainers.algorithms.proximal import PROXIMALS, Proximal

if TYPE_CHECKING:
    from rl_trainers.algorithms.functional.correction import Weights
    from rl_trainers.algorithms.functional.policy_terms import TokenLoss


Regularizer = Callable[[TokenOutputs, PolicyTerms, PackedBatch], torch.Tensor]
"""A loss term added to the policy loss, [N] with gradient, 0 where not trained.

It depends only on the current policy at each token, so corrections for the sampling policy do not apply to it.
"""


def kl_penalty(config: KLConfig, outputs: TokenOutputs, terms: PolicyTerms, packed: PackedBatch) -> torch.Tensor:
    """Return coef KL(policy || reference) of each token; a `Regularizer`."""
    reference = torch.where(terms.trained, packed["ref_logprobs"], 0.0)
    divergence = kl_estimate(terms.logprobs, reference, config.estimator)
    return config.coef * (weighted_kl(divergence, terms.ratio) if config.weighted else divergence)


def entropy_bonus(coef: float, outputs: TokenOutputs, terms: PolicyTerms, packed: PackedBatch) -> torch.Tensor:
    """Return -coef H(policy) of each token; a `Regularizer`.

    Raises:
        EngineError: the engine's entropy has no gradient.
    """
    if outputs.logprobs.requires_grad and not outputs.entropy.requires_grad:
        raise EngineError(
            "algorithm.entropy_coef: the engine's entropy has no gradient, so the bonus would have no effect; build "
            "the engine with entropy_grad=true."
        )
    return -coef * torch.where(terms.trained, outputs.entropy, 0.0)


@dataclass(frozen=True)
class PolicyLoss:
    """The loss that the engine minimizes; see `__call__`. Factors that do not depend on theta are detached."""

    loss: Callable[[PolicyTerms], TokenLoss]
    """Policy loss of each token."""
    proximal: Proximal
    """Source of the old log-probs."""
    uses_sequence_ratio: bool = False
    """True if the loss uses the ratio of a token's sequence instead of the token's ratio."""
    correction: Callable[[OffPolicy], Weights] | None = None
    """Correction weight of each token, or None for no correction."""
    masks: tuple[Callable[[OffPolicy], torch.Tensor], ...] = ()
    """Masks; each returns the tokens that it drops."""
    regularizers: tuple[Regularizer, ...] = ()
    """Added loss terms: KL penalty and entropy bonus."""

    def __call__(self, outputs: TokenOutputs, packed: PackedBatch) -> tuple[torch.Tensor, Stats]:
        """Return `(loss_sum, stats)` over the trained tokens t of the micro-batch.

        loss_sum = sum_t w_t (c_t loss_t + kl.coef KL_t - entropy_coef H_t)

        - w: weight from aggregation and staleness (`loss_weights`).
        - c: correction between server and trainer, including the masks.
        - loss: policy loss.

        All statistics except `ratio/max` are means over trained tokens:

        - marks of loss, correction and masks: `clip/low`, `correction/capped`, `correction/masked`, ...
        - ratio and correction weight: `ratio/mean`, `ratio/max`, `correction/mean`.
        - entropy and divergences: `entropy/mean`, `kl/old_k1`, `kl/old_k3`, `kl/beh_...`, `kl/ref_...`.
        - moments of the weights, for `effective_fraction`: `weight/mean`, `weight/square`.
        """
        trained, weights = packed["loss_mask"], packed["loss_weights"]
        old = torch.where(trained, self.proximal.logprobs(outputs, packed), 0.0)
        ratio_batch = packed if self.uses_sequence_ratio else None
        terms = policy_terms(outputs.logprobs, old, packed["advantages"], trained, ratio_batch, outputs.entropy)
        losses, marks = check_component_output("algorithm.loss", self.loss(terms), trained)
        off = OffPolicy(torch.where(trained, old - packed["logprobs"], 0.0).detach(), trained, packed)
        correction, stats = self._correct(off, marks)
        loss = (losses * (weights * correction)).sum()
        for regularizer in self.regularizers:
            loss = loss + (regularizer(outputs, terms, packed) * weights).sum()
        count = trained.sum().float()
        stats |= {name: ((mark & trained).sum().float(), count) for name, mark in marks.items()}
        return loss, stats | diagnostics(outputs, terms, old, correction, packed)

    def _correct(self, off: OffPolicy, marks: dict[str, torch.Tensor]) -> tuple[torch.Tensor, Stats]:
        """Return the detached weight of each token, [N], 0 where not trained, and its statistics; extend `marks`."""
        weight, stats = off.trained.to(off.log_ratio.dtype), Stats()
        if self.correction is not None:
            weight, correction_marks = check_component_output("algorithm.correction", self.correction(off), off.trained)
            weight = torch.where(off.trained, weight.detach(), 0.0)
            stats["correction/mean"] = (weight.sum(), off.trained.sum().float())
            marks |= correction_marks
        for mask in self.masks:
            dropped = check_component_output("algorithm.mask", (weight, {"correction/masked": mask(off)}), off.trained)[
                1
            ]
            weight = weight.masked_fill(dropped["correction/masked"], 0.0)
            marks |= {name: mark | marks.get(name, mark) for name, mark in dropped.items()}
        return weight, stats


def check_component_output(
    setting: str, output: Any, trained: torch.Tensor
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return the output of a component after checking that it is a pair `(values [N], marks)`.

    A tensor of another shape would broadcast silently and give a wrong loss.

    Args:
        setting: setting that selects the component, for the message.
        output: output of the component.
        trained: bool [N]; every tensor of the output must have its shape.

    Raises:
        ConfigError: the output has another type or shape.
    """
    pair = output if isinstance(output, tuple) and len(output) == 2 and isinstance(output[1], dict) else (output, {})
    shapes = [
        list(tensor.shape) if isinstance(tensor, torch.Tensor) else type(tensor).__name__
        for tensor in (pair[0], *pair[1].values())
    ]
    expected = list(trained.shape)
    if pair is not output or any(shape != expected for shape in shapes):
        raise ConfigError(
            f"{setting}: expected a pair (values, marks) with tensors of shape {expected}, found "
            f"{type(output).__name__} with shapes {shapes}. Return one value per token; algorithm.aggregation sums "
            "or averages them."
        )
    return pair


@torch.no_grad()
def diagnostics(
    outputs: TokenOutputs, terms: PolicyTerms, old: torch.Tensor, correction: torch.Tensor, packed: PackedBatch
) -> Stats:
    """Return the statistics that every policy loss reports; see `PolicyLoss.__call__`."""
    trained, count = terms.trained, terms.trained.sum().float()
    ratio = torch.where(trained, terms.ratio, 0.0)
    differences = {
        # KL(other || theta), since the tokens were sampled by the other policy or one close to it
        "kl/old": old - terms.logprobs,
        "kl/beh": packed["logprobs"] - terms.logprobs,
    }
    if "ref_logprobs" in packed:
        differences["kl/ref"] = terms.logprobs - packed["ref_logprobs"]
    stats: Stats = {
        "ratio/mean": (ratio.sum(), count),
        "ratio/max": (ratio.amax() if len(ratio) else count, count),
        "entropy/mean": (torch.where(trained, outputs.entropy, 0.0).sum(), count),
    }
    for name, difference in differences.items():
        difference = torch.where(trained, difference, 0.0)
        stats |= {f"{name}_{estimator}": (ESTIMATORS[estimator](difference).sum(), count) for estimator in ("k1", "k3")}
    weight = correction * ratio
    return stats | {"weight/mean": (weight.sum(), count), "weight/square": (weight.square().sum(), count)}


def make_policy_loss(config: AlgorithmConfig, minibatches: int) -> PolicyLoss:
    """Build one loss from the components of an algorithm.

    Args:
        config: settings of the algorithm.
        minibatches: optimizer steps per training batch.

    Raises:
        ConfigError: a component is not installed, has wrong constants, or is incompatible with another one.
    """
    masks = load_components(config.mask)
    reads_minibatch = any(hasattr(mask, "prepare") for mask in masks)
    regularizers = [partial(kl_penalty, config.kl)] if config.kl.place == "loss" else []
    if config.entropy_coef:
        regularizers.append(partial(entropy_bonus, config.entropy_coef))
    return PolicyLoss(
        load_component(config.loss),
        PROXIMALS[config.resolve_proximal(minibatches, reads_minibatch)],
        config.ratio == "sequence",
        load_component(config.correction, optional=True),
        tuple(masks),
        tuple(regularizers),
    )


def try_loss(loss: Callable[[PolicyTerms], TokenLoss]) -> None:
    """Call a policy loss on synthetic tokens, one of them untrained, and check its output.

    Raises:
        ConfigError: the output is not one loss per token with marks, or the losses have no gradient.
    """
    logprobs = torch.linspace(-3.0, -0.1, 8, requires_grad=True)
    trained = torch.arange(8) != 4
    terms = policy_terms(logprobs, logprobs.detach().flip(0) / 3, torch.linspace(-1.0, 1.0, 8), trained)
    losses, _ = check_component_output("algorithm.loss", loss(terms), trained)
    if not losses.requires_grad:
        raise ConfigError(
            "algorithm.loss: the losses have no gradient, so nothing would be learned; compute them from terms.ratio "
            "or terms.logprobs."
        )
    losses.sum().backward()


def effective_fraction(stats: dict[str, Any]) -> None:
    """Replace `weight/mean` and `weight/square` by `weight/effective`.

    This is the effective sample size of the tokens' weights pi_theta / pi_behavior as a fraction of the number of
    tokens (Kish 1965). It is 1 if all weights are equal.
    """
    if "weight/mean" in stats:
        mean, square = stats.pop("weight/mean"), stats.pop("weight/square")
        stats["weight/effective"] = mean**2 / square if square else 0.0
