"""Parts of an algorithm that have settings of their own."""

from __future__ import annotations

from dataclasses import dataclass

from rl_contracts.config import require, require_choice

REWARD_NORMALISATIONS = ("none", "group", "batch")
KL_PLACES = ("none", "reward", "loss")
KL_ESTIMATORS = ("k1", "k2", "k3")


@dataclass
class RewardConfig:
    """Shaping of an episode's reward, in this order."""

    overlong_max: int = 0
    """Generated tokens at which the penalty for long answers reaches -1 (DAPO); 0 switches it off."""
    overlong_cache: int = 0
    """Tokens below `overlong_max` at which the penalty begins."""
    scale: float = 1.0
    """Multiplies the reward; 0 leaves only the KL penalty (distillation)."""
    bias: float = 0.0
    """Added to the scaled reward."""
    clip: float = 0.0
    """The result is clipped to [-clip, clip]; 0 switches clipping off."""
    normalise: str = "none"
    """(r - mean) / std over each `group`, over the whole `batch`, or `none`."""

    def __post_init__(self) -> None:
        require(self.overlong_max >= 0, "algorithm.reward.overlong_max", "0 (off) or more tokens", self.overlong_max)
        on = self.overlong_max > 0
        require(
            1 <= self.overlong_cache <= self.overlong_max if on else self.overlong_cache == 0,
            f"algorithm.reward.overlong_cache with algorithm.reward.overlong_max={self.overlong_max}",
            "1 to overlong_max tokens" if on else "0 (there is no penalty without overlong_max)",
            self.overlong_cache,
        )
        require(self.clip >= 0, "algorithm.reward.clip", "0 (off) or more", self.clip)
        require_choice("algorithm.reward.normalise", self.normalise, REWARD_NORMALISATIONS)


@dataclass
class KLConfig:
    """A penalty on the divergence from a frozen reference policy."""

    place: str = "none"
    """`reward`: subtracted from the reward of each trained token, between the policy that sampled and the reference;
    `loss`: added to the loss, between the policy that learns and the reference; `none`: no reference is loaded."""
    coef: float = 0.0
    """Its weight, beta."""
    estimator: str = "k3"
    """`k1`, `k2` or `k3` (Schulman, "Approximating KL divergence"). As a loss without `weighted`, k2 has the unbiased
    gradient and k3 GRPO's."""
    weighted: bool = False
    """In the loss: times the ratio to the proximal policy, which makes the gradients of k1 and k3 unbiased."""

    def __post_init__(self) -> None:
        require_choice("algorithm.kl.place", self.place, KL_PLACES)
        require_choice("algorithm.kl.estimator", self.estimator, KL_ESTIMATORS)
        require(
            self.coef > 0 if self.place != "none" else self.coef == 0,
            f"algorithm.kl.coef with algorithm.kl.place={self.place}",
            "0 (set kl.place to `reward` or `loss` for a penalty)" if self.place == "none" else "more than 0",
            self.coef,
        )
        require(
            self.place == "loss" or not self.weighted,
            f"algorithm.kl.weighted with algorithm.kl.place={self.place}",
            "false: only a KL in the loss can be weighted",
            self.weighted,
        )
        require(
            not (self.place == "loss" and self.estimator == "k1") or self.weighted,
            "algorithm.kl.estimator with algorithm.kl.place=loss",
            "`k2` or `k3`, or kl.weighted=true: the gradient of k1 alone is zero in the mean and holds nothing back",
            self.estimator,
        )
