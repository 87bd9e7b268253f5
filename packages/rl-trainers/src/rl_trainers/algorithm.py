"""An algorithm is a named composition of parts: an advantage estimator, a policy loss, an aggregation and a correction.

A preset is data: the values of `AlgorithmConfig` that make it. Every part can be set alone.
"""

from __future__ import annotations

from dataclasses import dataclass

from rl_contracts.config import require, require_choice

BASELINES = ("group_mean_std", "group_mean", "leave_one_out", "none")
AGGREGATIONS = ("token_mean", "sequence_mean_token_mean", "sequence_mean_token_sum", "constant_length")
PROXIMALS = ("auto", "recompute", "current", "behaviour")


@dataclass
class AlgorithmConfig:
    """Which parts, and their constants. The defaults: GRPO with token-mean aggregation, decoupled objective."""

    baseline: str = "group_mean_std"
    """Advantage estimator: `group_mean_std` (GRPO), `group_mean` (Dr. GRPO), `leave_one_out` (RLOO) or `none`
    (REINFORCE)."""
    aggregation: str = "token_mean"
    """`token_mean`, `sequence_mean_token_mean`, `sequence_mean_token_sum` or `constant_length` (divided by
    `constant_length`)."""
    constant_length: int = 256
    """Tokens; read by the `constant_length` aggregation only."""
    clip_low: float = 0.2
    """The ratio to the proximal policy is clipped below at 1 - clip_low."""
    clip_high: float = 0.2
    """... and above at 1 + clip_high (DAPO takes 0.28)."""
    dual_clip: float = 0.0
    """Bound c of the dual clip for negative advantages, more than 1; 0 switches it off."""
    proximal: str = "auto"
    """Where the proximal ("old") log-probs come from: `recompute` (a forward pass before the update), `current` (the
    policy that learns,
    without gradient; needs one minibatch a step), `behaviour` (the sampler's; no correction is left to do), or `auto`:
    `current` with
    one minibatch, else `recompute`."""
    correction_cap: float = 5.0
    """The decoupled objective's weight pi_proximal / pi_behaviour is truncated here; 0 leaves the weight out."""
    staleness_coef: float = 0.0
    """A token's weight is multiplied by exp(-coef * (current version - its version))."""

    def __post_init__(self) -> None:
        require_choice("algorithm.baseline", self.baseline, BASELINES)
        require_choice("algorithm.aggregation", self.aggregation, AGGREGATIONS)
        require_choice("algorithm.proximal", self.proximal, PROXIMALS)
        require(self.constant_length >= 1, "algorithm.constant_length", "at least 1", self.constant_length)
        require(0 < self.clip_low <= 1, "algorithm.clip_low", "in (0, 1]", self.clip_low)
        require(self.clip_high > 0, "algorithm.clip_high", "more than 0", self.clip_high)
        require(
            self.dual_clip == 0 or self.dual_clip > 1, "algorithm.dual_clip", "0 (off) or more than 1", self.dual_clip
        )
        require(self.correction_cap >= 0, "algorithm.correction_cap", "0 (off) or more", self.correction_cap)
        require(self.staleness_coef >= 0, "algorithm.staleness_coef", "0 (off) or more", self.staleness_coef)

    def resolve_proximal(self, minibatches: int) -> str:
        """`recompute`, `current` or `behaviour`, for a number of minibatches a step."""
        if self.proximal == "auto":
            return "current" if minibatches == 1 else "recompute"
        require(
            self.proximal != "current" or minibatches == 1,
            "algorithm.proximal",
            "`recompute` or `behaviour` when actor.minibatches is more than 1 (the policy moves within the step)",
            self.proximal,
        )
        return self.proximal
