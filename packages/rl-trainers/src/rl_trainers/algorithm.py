"""An algorithm is a composition of parts: reward shaping, advantages, policy loss, aggregation, corrections, KL.

A preset is data: the values of `AlgorithmConfig` that make it. Every part can be set alone; what cannot work together
is refused, with both fields named.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

from rl_contracts.config import require, require_choice
from rl_trainers.algorithm_parts import KLConfig, RewardConfig

GROUP_BASELINES = ("group_mean_std", "group_mean", "group_mean_batch_std", "leave_one_out")
BASELINES = (*GROUP_BASELINES, "none", "gae")
NORMALISATIONS = ("none", "batch")
AGGREGATIONS = ("token_mean", "sequence_mean_token_mean", "sequence_mean_token_sum", "constant_length")
PROXIMALS = ("auto", "recompute", "current", "behaviour", "interpolate")
LEVELS = ("token", "sequence", "geometric")


@dataclass
class AlgorithmConfig:
    """Which parts, and their constants. The defaults: GRPO with token-mean aggregation, decoupled objective."""

    reward: RewardConfig = field(default_factory=RewardConfig)
    """What becomes of rewards before anything is learned from them."""
    baseline: str = "group_mean_std"
    """Advantage estimator: `group_mean_std` (GRPO), `group_mean` (Dr. GRPO), `group_mean_batch_std` (LitePPO),
    `leave_one_out` (RLOO), `none` (REINFORCE) or `gae` (PPO; needs a critic)."""
    advantage_norm: str = "none"
    """`batch`: advantages are normalised over all trained tokens of the batch (REINFORCE++); `none`."""
    gamma: float = 1.0
    """Discount per trained token; read by the baselines `gae` and `none`."""
    gae_lambda: float = 1.0
    """Lambda of `gae`."""
    gae_unit: str = "token"
    """Time step of `gae`: `token`, or `turn` (a run of neighbouring trained tokens)."""
    policy_loss: str = "clip"
    """Installed policy loss (entry points `rl.policy_losses`), or a dotted path: `clip` (PPO, GRPO; GSPO with
    `ratio_level=sequence`), `importance` (no clip; M2PO), `cispo`, `sapo`, `reinforce`."""
    options: dict[str, Any] = field(default_factory=dict)
    """Constants of a policy loss that is not ours, by the names of its keyword arguments."""
    ratio_level: str = "token"
    """Whose ratio to the proximal policy the loss sees: each `token`'s, or its row's geometric mean (`sequence`,
    GSPO)."""
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
    """Bound c of the dual clip for negative advantages, more than 1; 0 switches it off. `clip` only."""
    tau_positive: float = 1.0
    """Sharpness of `sapo`'s gate where the advantage is positive."""
    tau_negative: float = 1.05
    """... and where it is not."""
    proximal: str = "auto"
    """Where the proximal ("old") log-probs come from: `recompute` (a forward pass before the update), `current` (the
    policy that learns, without gradient; needs one minibatch a step), `behaviour` (the sampler's; no correction is left
    to do), `interpolate` (between the sampler's and the current ones, by version; A-3PO), or `auto`: `current` with one
    minibatch and no `second_moment`, else `recompute`."""
    correction: str = "truncate"
    """What is made of pi_proximal / pi_behaviour as a token's weight: `truncate` (at `correction_cap`; TIS), `mask`
    (outside [correction_floor, correction_cap] the token is dropped; IcePop), `plain` (the ratio itself) or `none`."""
    correction_level: str = "token"
    """Of what that ratio is: `token`, `sequence` (product over the row) or `geometric` (its mean per token)."""
    correction_cap: float = 5.0
    """Upper bound of `truncate` and `mask`; 0 leaves the weight out, as `correction=none` does."""
    correction_floor: float = 0.0
    """Lower bound of `mask`."""
    row_mask: str = "none"
    """A second mask, of whole rows, by pi_proximal / pi_behaviour: `sequence`, `geometric` or `none`."""
    row_mask_low: float = 0.5
    """A row whose ratio is below is dropped."""
    row_mask_high: float = 2.0
    """... and above."""
    second_moment: float = 0.0
    """Bound of the mean squared log-ratio: tokens with the largest are dropped until it holds over the minibatch (M2PO
    takes 0.04); 0 switches it off."""
    staleness_coef: float = 0.0
    """A token's weight is multiplied by exp(-coef * (current version - its version))."""
    kl: KLConfig = field(default_factory=KLConfig)
    """Keeping the policy near a reference."""
    entropy_coef: float = 0.0
    """Weight of the entropy bonus, nats; 0 switches it off. The train engine must then give entropy a gradient."""

    def __post_init__(self) -> None:
        self._check_choices()
        self._check_numbers()
        self._check_combinations()

    @property
    def needs_reference(self) -> bool:
        """Whether a KL to a reference policy is asked for."""
        return self.kl.place != "none"

    @property
    def needs_critic(self) -> bool:
        """Whether values are needed."""
        return self.baseline == "gae"

    @property
    def weighs(self) -> bool:
        """Whether tokens are weighted by the ratio of the proximal to the behaviour policy."""
        return self.correction != "none" and self.correction_cap > 0

    def _check_choices(self) -> None:
        require_choice("algorithm.baseline", self.baseline, BASELINES)
        require_choice("algorithm.advantage_norm", self.advantage_norm, NORMALISATIONS)
        require_choice("algorithm.gae_unit", self.gae_unit, ("token", "turn"))
        require_choice("algorithm.ratio_level", self.ratio_level, ("token", "sequence"))
        require_choice("algorithm.aggregation", self.aggregation, AGGREGATIONS)
        require_choice("algorithm.proximal", self.proximal, PROXIMALS)
        require_choice("algorithm.correction", self.correction, ("none", "truncate", "mask", "plain"))
        require_choice("algorithm.correction_level", self.correction_level, LEVELS)
        require_choice("algorithm.row_mask", self.row_mask, ("none", "sequence", "geometric"))

    def _check_numbers(self) -> None:
        require(0 <= self.gamma <= 1, "algorithm.gamma", "in [0, 1]", self.gamma)
        require(0 <= self.gae_lambda <= 1, "algorithm.gae_lambda", "in [0, 1]", self.gae_lambda)
        require(self.constant_length >= 1, "algorithm.constant_length", "at least 1", self.constant_length)
        require(0 < self.clip_low <= 1, "algorithm.clip_low", "in (0, 1]", self.clip_low)
        require(self.clip_high > 0, "algorithm.clip_high", "more than 0", self.clip_high)
        dual = self.dual_clip == 0 or self.dual_clip > 1
        require(dual, "algorithm.dual_clip", "0 (off) or more than 1", self.dual_clip)
        require(self.tau_positive > 0, "algorithm.tau_positive", "more than 0", self.tau_positive)
        require(self.tau_negative > 0, "algorithm.tau_negative", "more than 0", self.tau_negative)
        require(self.correction_cap >= 0, "algorithm.correction_cap", "0 (off) or more", self.correction_cap)
        bounds = 0 <= self.row_mask_low < self.row_mask_high
        require(bounds, "algorithm.row_mask_low", f"0 to row_mask_high ({self.row_mask_high:g})", self.row_mask_low)
        require(self.second_moment >= 0, "algorithm.second_moment", "0 (off) or more", self.second_moment)
        require(self.staleness_coef >= 0, "algorithm.staleness_coef", "0 (off) or more", self.staleness_coef)
        require(self.entropy_coef >= 0, "algorithm.entropy_coef", "0 (off) or more", self.entropy_coef)

    def _check_combinations(self) -> None:
        masks = self.correction == "mask"
        require(
            (0 <= self.correction_floor < self.correction_cap) if masks else self.correction_floor == 0,
            f"algorithm.correction_floor with algorithm.correction={self.correction}",
            f"0 or more, below correction_cap ({self.correction_cap:g})" if masks else "0 (only `mask` has a floor)",
            self.correction_floor,
        )
        require(
            not self.dual_clip or self.policy_loss == "clip",
            f"algorithm.dual_clip with algorithm.policy_loss={self.policy_loss}",
            "0: only policy_loss=clip has a dual clip",
            self.dual_clip,
        )
        require(
            self.ratio_level == "token" or self.policy_loss != "reinforce",
            "algorithm.ratio_level with algorithm.policy_loss=reinforce",
            "`token`: that loss has no ratio; take policy_loss=importance",
            self.ratio_level,
        )
        needs_old = self.second_moment > 0 or self.row_mask != "none" or (masks and self.weighs)
        require(
            not needs_old or self.proximal != "behaviour",
            "algorithm.proximal with a mask by pi_proximal / pi_behaviour (correction=mask, row_mask or second_moment)",
            "`recompute`, or `auto`: with the sampler's own log-probs the ratio is 1 and nothing is masked",
            self.proximal,
        )
        require(
            not self.second_moment or self.proximal in ("auto", "recompute"),
            "algorithm.proximal with algorithm.second_moment",
            "`recompute` or `auto`: the mask is made over the whole minibatch before its loss",
            self.proximal,
        )

    def resolve_proximal(self, minibatches: int) -> str:
        """`recompute`, `current`, `behaviour` or `interpolate`, for a number of minibatches a step."""
        if self.proximal == "auto":
            return "current" if minibatches == 1 and not self.second_moment else "recompute"
        require(
            self.proximal != "current" or minibatches == 1,
            "algorithm.proximal",
            "`recompute`, `interpolate` or `behaviour` when actor.minibatches is more than 1 (the policy moves within "
            "the step)",
            self.proximal,
        )
        return self.proximal

    def constants(self) -> dict[str, Any]:
        """What a policy loss may name as its keyword arguments: the settings here, and `options`."""
        return {item.name: getattr(self, item.name) for item in fields(self)} | self.options
