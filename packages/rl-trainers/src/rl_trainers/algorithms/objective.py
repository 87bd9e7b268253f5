"""The objective of one packed micro-batch: policy loss, correction, masks, KL and entropy, as one weighted sum."""

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


Regulariser = Callable[[TokenOutputs, PolicyTerms, PackedBatch], torch.Tensor]
"""A term of the loss beside the policy loss, a property of the policy at a token whoever sampled it: [N] with gradient,
0 where not trained."""


def kl_penalty(config: KLConfig, outputs: TokenOutputs, terms: PolicyTerms, packed: PackedBatch) -> torch.Tensor:
    """coef KL(policy || reference); a `Regulariser`."""
    reference = torch.where(terms.trained, packed["ref_logprobs"], 0.0)
    divergence = kl_estimate(terms.logprobs, reference, config.estimator)
    return config.coef * (weighted_kl(divergence, terms.ratio) if config.weighted else divergence)


def entropy_bonus(coef: float, outputs: TokenOutputs, terms: PolicyTerms, packed: PackedBatch) -> torch.Tensor:
    """-coef H(policy); a `Regulariser`.

    Raises:
        EngineError: the engine's entropy has no gradient.
    """
    if outputs.logprobs.requires_grad and not outputs.entropy.requires_grad:
        raise EngineError(
            "algorithm.entropy_coef: the engine's entropy carries no gradient, so the bonus would do nothing. "
            "Make the engine with entropy_grad=true."
        )
    return -coef * torch.where(terms.trained, outputs.entropy, 0.0)


@dataclass(frozen=True)
class PolicyLoss:
    """What the engine minimises: see `__call__`. Every factor that is not theta's is detached."""

    loss: Callable[[PolicyTerms], TokenLoss]
    """The policy loss of tokens."""
    proximal: Proximal
    """Gives the old log-probs."""
    of_rows: bool = False
    """The loss sees the ratio of a token's row instead of its own."""
    correction: Callable[[OffPolicy], Weights] | None = None
    """Weights of tokens."""
    masks: tuple[Callable[[OffPolicy], torch.Tensor], ...] = ()
    """Each says which tokens are dropped."""
    regularisers: tuple[Regulariser, ...] = ()
    """KL and entropy."""

    def __call__(self, outputs: TokenOutputs, packed: PackedBatch) -> tuple[torch.Tensor, Stats]:
        """`(loss_sum, stats)`, over the trained tokens t of the micro-batch:

        sum of w_t (c_t loss_t + kl.coef KL_t - entropy_coef H_t), where w is the weight of aggregation and staleness
        (`loss_weights`), c the correction between server and trainer with its masks, loss the policy loss.

        Statistics, means over trained tokens: the marks of loss and correction (`clip/low`, `correction/capped`, ...),
        `ratio/mean`, `ratio/max`, `correction/mean`, `correction/masked`, `entropy/mean`, `kl/old_k1`, `kl/old_k3`,
        `kl/beh_...`, `kl/ref_...`, and `weight/mean`, `weight/square` (see `effective_fraction`).
        """
        trained, weights = packed["loss_mask"], packed["loss_weights"]
        old = torch.where(trained, self.proximal.logprobs(outputs, packed), 0.0)
        of_rows = packed if self.of_rows else None
        terms = policy_terms(outputs.logprobs, old, packed["advantages"], trained, of_rows, outputs.entropy)
        losses, marks = check_finite("algorithm.loss", self.loss(terms), trained)
        off = OffPolicy(torch.where(trained, old - packed["logprobs"], 0.0).detach(), trained, packed)
        correction, stats = self._correct(off, marks)
        loss = (losses * (weights * correction)).sum()
        for regulariser in self.regularisers:
            loss = loss + (regulariser(outputs, terms, packed) * weights).sum()
        count = trained.sum().float()
        stats |= {name: ((mark & trained).sum().float(), count) for name, mark in marks.items()}
        return loss, stats | diagnostics(outputs, terms, old, correction, packed)

    def _correct(self, off: OffPolicy, marks: dict[str, torch.Tensor]) -> tuple[torch.Tensor, Stats]:
        """The detached weight of each token, [N], 0 where not trained, and its statistics; adds to the marks."""
        weight, stats = off.trained.to(off.log_ratio.dtype), Stats()
        if self.correction is not None:
            weight, found = check_finite("algorithm.correction", self.correction(off), off.trained)
            weight = torch.where(off.trained, weight.detach(), 0.0)
            stats["correction/mean"] = (weight.sum(), off.trained.sum().float())
            marks |= found
        for mask in self.masks:
            dropped = check_finite("algorithm.mask", (weight, {"correction/masked": mask(off)}), off.trained)[1]
            weight = weight.masked_fill(dropped["correction/masked"], 0.0)
            marks |= {name: mark | marks.get(name, mark) for name, mark in dropped.items()}
        return weight, stats


def check_finite(setting: str, found: Any, trained: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """What a part gave back, if it is `(values [N], marks)`: a wrong shape would broadcast, and train on nonsense.

    Raises:
        ConfigError: names the setting, what was expected and what was found.
    """
    pair = found if isinstance(found, tuple) and len(found) == 2 and isinstance(found[1], dict) else (found, {})
    shapes = [
        list(one.shape) if isinstance(one, torch.Tensor) else type(one).__name__ for one in (pair[0], *pair[1].values())
    ]
    right = list(trained.shape)
    if pair is not found or any(shape != right for shape in shapes):
        raise ConfigError(
            f"{setting}: expected a pair, one number per token and named marks ({right} each), found "
            f"{type(found).__name__} with {shapes}. Sums and means are algorithm.aggregation's."
        )
    return pair


@torch.no_grad()
def diagnostics(
    outputs: TokenOutputs, terms: PolicyTerms, old: torch.Tensor, correction: torch.Tensor, packed: PackedBatch
) -> Stats:
    """What is reported of every policy loss; see `PolicyLoss.__call__`."""
    trained, count = terms.trained, terms.trained.sum().float()
    ratio = torch.where(trained, terms.ratio, 0.0)
    apart = {
        # of KL(other || theta): its samples are (nearly) the other's
        "kl/old": old - terms.logprobs,
        "kl/beh": packed["logprobs"] - terms.logprobs,
    }
    if "ref_logprobs" in packed:
        apart["kl/ref"] = terms.logprobs - packed["ref_logprobs"]
    stats: Stats = {
        "ratio/mean": (ratio.sum(), count),
        "ratio/max": (ratio.amax() if len(ratio) else count, count),
        "entropy/mean": (torch.where(trained, outputs.entropy, 0.0).sum(), count),
    }
    for name, d in apart.items():
        d = torch.where(trained, d, 0.0)
        stats |= {f"{name}_{estimator}": (ESTIMATORS[estimator](d).sum(), count) for estimator in ("k1", "k3")}
    weight = correction * ratio
    return stats | {"weight/mean": (weight.sum(), count), "weight/square": (weight.square().sum(), count)}


def make_policy_loss(config: AlgorithmConfig, minibatches: int) -> PolicyLoss:
    """The parts of an algorithm as one loss.

    Args:
        minibatches: optimizer steps per training batch.

    Raises:
        ConfigError: a part is not installed, its constants are not those that it takes, or parts do not go together.
    """
    masks = load_components(config.mask)
    whole = any(hasattr(mask, "prepare") for mask in masks)
    regularisers = [partial(kl_penalty, config.kl)] if config.kl.place == "loss" else []
    if config.entropy_coef:
        regularisers.append(partial(entropy_bonus, config.entropy_coef))
    return PolicyLoss(
        load_component(config.loss),
        PROXIMALS[config.resolve_proximal(minibatches, whole)],
        config.ratio == "sequence",
        load_component(config.correction, optional=True),
        tuple(masks),
        tuple(regularisers),
    )


def try_loss(loss: Callable[[PolicyTerms], TokenLoss]) -> None:
    """Call a policy loss on made-up tokens, some of which are not trained, and look at what it gives.

    Raises:
        ConfigError: it gives something else than a number per token and marks, or numbers without a gradient, with
            which nothing would be learned.
    """
    logprobs = torch.linspace(-3.0, -0.1, 8, requires_grad=True)
    trained = torch.arange(8) != 4
    terms = policy_terms(logprobs, logprobs.detach().flip(0) / 3, torch.linspace(-1.0, 1.0, 8), trained)
    losses, _ = check_finite("algorithm.loss", loss(terms), trained)
    if not losses.requires_grad:
        raise ConfigError(
            "algorithm.loss: expected losses with a gradient, made of terms.ratio or terms.logprobs, found none: "
            "nothing would be learned."
        )
    losses.sum().backward()


def effective_fraction(stats: dict[str, Any]) -> None:
    """Replace `weight/mean` and `weight/square` of a minibatch by `weight/effective`: the effective sample size of its
    tokens' weights pi_theta / pi_behaviour as a fraction of the tokens (Kish 1965), 1 where all weigh the same."""
    if "weight/mean" in stats:
        mean, square = stats.pop("weight/mean"), stats.pop("weight/square")
        stats["weight/effective"] = mean**2 / square if square else 0.0
