"""The objective of one packed micro-batch: policy loss, corrections, KL and entropy, as one weighted sum."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import torch

from rl_contracts import registry
from rl_contracts.engine import Stats, TokenOutputs
from rl_contracts.errors import ConfigError, EngineError
from rl_contracts.trajectory import PackedBatch
from rl_trainers.algorithm import AlgorithmConfig
from rl_trainers.functional.correction import effective_sample_sums, level_ratio, masked_weights, truncated_weights
from rl_trainers.functional.kl import kl_estimate, weighted_kl
from rl_trainers.functional.old_policy import interpolated_logprobs
from rl_trainers.functional.terms import PolicyTerms, TokenLoss, policy_terms

KEPT_KEY = "moment_kept"
"""bool [B, T]: tokens that the second-moment mask leaves."""
GROUP = "rl.policy_losses"


def load_policy_loss(config: AlgorithmConfig) -> Callable[[PolicyTerms], TokenLoss]:
    """The policy loss of an algorithm with its constants bound.

    A loss takes `PolicyTerms` and keyword arguments, each the name of a setting of `AlgorithmConfig` or of an entry of
    `algorithm.options`.

    Raises:
        ConfigError: nothing of that name is installed, an option is none of its keyword arguments, or one that it needs
            is missing.
    """
    loss = _find(config.policy_loss)
    known = {n: p for n, p in inspect.signature(loss).parameters.items() if p.kind is p.KEYWORD_ONLY}
    name, constants = f"algorithm.policy_loss={config.policy_loss}", config.constants()
    unknown = sorted(set(config.options) - set(known))
    if unknown:
        raise ConfigError(f"algorithm.options: {unknown} are no constants of {name}; it takes {sorted(known)}.")
    missing = sorted(n for n, p in known.items() if p.default is p.empty and n not in constants)
    if missing:
        raise ConfigError(f"{name} needs the constants {missing}; give them as algorithm.options.<name>=<value>.")
    bound: dict[str, Any] = {n: constants[n] for n in known if n in constants}
    return partial(loss, **bound)


@cache
def _find(name: str) -> Callable[..., TokenLoss]:
    found: Callable[..., TokenLoss] = registry.load(GROUP, name)
    return found


@dataclass(frozen=True)
class PolicyLoss:
    """What the engine minimises: see `__call__`. Every factor that is not theta's is detached."""

    config: AlgorithmConfig
    proximal: str
    """`recompute` or `behaviour` (both read `prox_logprobs`), `current` or `interpolate`."""
    version: int = 0
    """The trainer's at the start of the update; read by `interpolate`."""
    policy_loss: Callable[[PolicyTerms], TokenLoss] = field(init=False)
    """What `config.policy_loss` names."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "policy_loss", load_policy_loss(self.config))

    def __call__(self, outputs: TokenOutputs, packed: PackedBatch) -> tuple[torch.Tensor, Stats]:
        """`(loss_sum, stats)`, over the trained tokens t of the micro-batch:

        sum of w_t c_t loss_t + w_t (kl.coef KL_t - entropy_coef H_t), where w is the weight of aggregation and
        staleness (`loss_weights`), c the correction between server and trainer with its masks, loss the policy loss. KL
        and entropy are not corrected: they are properties of the policy at a token, whoever sampled it.

        Statistics, means over trained tokens: the loss's marks (`clip/low`, ...), `ratio/mean`, `ratio/max`,
        `correction/mean`, `correction/capped`, `correction/masked`, `entropy/mean`, `kl/old_k1`, `kl/old_k3`,
        `kl/beh_...`, `kl/ref_...`, and `weight/mean`, `weight/square` (see `effective_share`).
        """
        trained, weights = packed["loss_mask"], packed["loss_weights"]
        old = torch.where(trained, self._old(outputs, packed), 0.0)
        rows = packed if self.config.ratio_level == "sequence" else None
        terms = policy_terms(outputs.logprobs, old, packed["advantages"], trained, rows)
        losses, marks = self.policy_loss(terms)
        correction, stats = self._correction(old, packed)
        loss = (losses * (weights * correction)).sum()
        loss = loss + self._regularisers(outputs, terms, packed)
        count = trained.sum().float()
        stats |= {name: ((mark & trained).sum().float(), count) for name, mark in marks.items()}
        stats |= self._diagnostics(terms, old, correction, packed)
        entropy = torch.where(trained, outputs.entropy.detach(), 0.0)
        stats["entropy/mean"] = (entropy.sum(), count)
        return loss, stats

    def _old(self, outputs: TokenOutputs, packed: PackedBatch) -> torch.Tensor:
        if self.proximal == "current":
            return outputs.logprobs.detach()
        if self.proximal == "interpolate":
            return interpolated_logprobs(outputs.logprobs, packed["logprobs"], packed["versions"], self.version)
        return packed["prox_logprobs"]

    def _correction(self, old: torch.Tensor, packed: PackedBatch) -> tuple[torch.Tensor, Stats]:
        """The detached weight of each token, [N], 0 where not trained, and its statistics."""
        config, trained = self.config, packed["loss_mask"]
        count = trained.sum().float()
        log_ratio = torch.where(trained, old - packed["logprobs"], 0.0)
        weight, stats = trained.to(log_ratio.dtype), Stats()
        dropped = torch.zeros_like(trained)
        if config.weighs:
            weight = level_ratio(log_ratio, trained, packed, config.correction_level)
            if config.correction == "truncate":
                weight, capped = truncated_weights(weight, config.correction_cap)
                stats["correction/capped"] = ((capped & trained).sum().float(), count)
            elif config.correction == "mask":
                weight, dropped = masked_weights(weight, config.correction_floor, config.correction_cap)
            weight = torch.where(trained, weight, 0.0)
            stats["correction/mean"] = (weight.sum(), count)
        if config.row_mask != "none":
            ratio = level_ratio(log_ratio, trained, packed, config.row_mask)
            dropped = dropped | masked_weights(ratio, config.row_mask_low, config.row_mask_high)[1]
        if config.second_moment:
            dropped = dropped | ~packed[KEPT_KEY]
        if config.second_moment or config.row_mask != "none" or config.correction == "mask":
            stats["correction/masked"] = ((dropped & trained).sum().float(), count)
        return torch.where(dropped, 0.0, weight), stats

    def _regularisers(self, outputs: TokenOutputs, terms: PolicyTerms, packed: PackedBatch) -> torch.Tensor:
        """Sum of w_t (kl.coef KL_t - entropy_coef H_t)."""
        kl, weights = self.config.kl, packed["loss_weights"]
        total = weights.new_zeros(())
        if kl.place == "loss":
            reference = torch.where(terms.trained, packed["ref_logprobs"], 0.0)
            divergence = kl_estimate(terms.logprobs, reference, kl.estimator)
            divergence = weighted_kl(divergence, terms.ratio) if kl.weighted else divergence
            total = total + kl.coef * (divergence * weights).sum()
        if self.config.entropy_coef:
            if outputs.logprobs.requires_grad and not outputs.entropy.requires_grad:
                raise EngineError(
                    "algorithm.entropy_coef: the engine's entropy carries no gradient, so the bonus would do nothing. "
                    "Make the engine with entropy_grad=true."
                )
            entropy = torch.where(terms.trained, outputs.entropy, 0.0)
            total = total - self.config.entropy_coef * (entropy * weights).sum()
        return total

    @torch.no_grad()
    def _diagnostics(
        self, terms: PolicyTerms, old: torch.Tensor, correction: torch.Tensor, packed: PackedBatch
    ) -> Stats:
        trained, count = terms.trained, terms.trained.sum().float()
        ratio = torch.where(trained, terms.ratio, 0.0)
        stats: Stats = {
            "ratio/mean": (ratio.sum(), count),
            "ratio/max": (ratio.amax() if len(ratio) else count, count),
        }
        for name, other in (("kl/old", old), ("kl/beh", packed["logprobs"])):
            # of KL(other || theta): its samples are (nearly) the other's
            d = torch.where(trained, other - terms.logprobs, 0.0)
            stats[f"{name}_k1"] = (d.sum(), count)
            stats[f"{name}_k3"] = (((-d).exp() - 1 + d).sum(), count)
        if "ref_logprobs" in packed:
            d = torch.where(trained, terms.logprobs - packed["ref_logprobs"], 0.0)
            stats["kl/ref_k1"] = (d.sum(), count)
            stats["kl/ref_k3"] = (((-d).exp() - 1 + d).sum(), count)
        weight, square = effective_sample_sums(correction * terms.ratio, trained)
        return stats | {"weight/mean": (weight, count), "weight/square": (square, count)}


def effective_share(stats: dict[str, Any]) -> None:
    """Replace `weight/mean` and `weight/square` of a minibatch by `weight/effective`: the effective sample size of its
    tokens' weights pi_theta / pi_behaviour as a share of the tokens (Kish 1965), 1 where all weigh the same."""
    if "weight/mean" in stats:
        mean, square = stats.pop("weight/mean"), stats.pop("weight/square")
        stats["weight/effective"] = mean**2 / square if square else 0.0
