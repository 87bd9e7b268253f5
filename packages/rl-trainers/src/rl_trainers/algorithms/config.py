"""Settings of an algorithm, which is composed of components with their own settings.

A preset is a set of values for these settings. Built-in and third-party components are looked up in the same way; see
`rl_contracts.config.ComponentConfig`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

from rl_contracts.config import ComponentConfig, Reads, Settings, bounded, choice, require
from rl_trainers.algorithms.functional.aggregation import AGGREGATIONS
from rl_trainers.algorithms.functional.correction import LEVELS
from rl_trainers.algorithms.functional.kl import ESTIMATORS
from rl_trainers.algorithms.proximal import PROXIMALS

__all__ = [
    "AdvantageConfig",
    "AggregationConfig",
    "AlgorithmConfig",
    "CorrectionConfig",
    "KLConfig",
    "LossConfig",
    "MaskConfig",
    "RewardConfig",
]

NORMALIZATION_SCOPES = ("none", "group", "batch")
"""Scopes of a mean or std: no statistic, the completions of one prompt, or the whole batch."""


@dataclass
class RewardConfig(Settings):
    """Shaping of an episode's reward, applied in the order of the fields."""

    setting: ClassVar[str] = "algorithm.reward"
    overlong_max: int = bounded(0, "0 (off) or more tokens", lambda tokens: tokens >= 0)
    """Generated tokens at which the penalty for long completions reaches -1 (DAPO); 0 disables the penalty."""
    overlong_cache: int = 0
    """Tokens below `overlong_max` at which the penalty begins; 0 means a fifth of `overlong_max`."""
    overlong_weight: float = bounded(1.0, "more than 0", lambda weight: weight > 0)
    """Factor of the penalty for long completions."""
    scale: float = 1.0
    """Factor of the reward; 0 leaves only the KL penalty (distillation)."""
    bias: float = 0.0
    """Offset added to the scaled reward."""
    clip: float = bounded(0.0, "0 (off) or more", lambda clip: clip >= 0)
    """Bound of the shaped reward, which is clipped to [-clip, clip]; 0 disables clipping."""
    normalize: str = choice("none", NORMALIZATION_SCOPES)
    """Scope of the normalization (r - mean) / std: each `group`, the whole `batch`, or `none`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        has_penalty = self.overlong_max > 0
        require(
            0 <= self.overlong_cache <= self.overlong_max,
            f"algorithm.reward.overlong_cache with algorithm.reward.overlong_max={self.overlong_max}",
            "0 to overlong_max tokens (0 means a fifth of overlong_max)"
            if has_penalty
            else "0, since the penalty is disabled",
            self.overlong_cache,
        )
        require(
            has_penalty or self.overlong_weight == 1,
            "algorithm.reward.overlong_weight with algorithm.reward.overlong_max=0",
            "1, since the penalty is disabled",
            self.overlong_weight,
        )


@dataclass
class AdvantageConfig(ComponentConfig):
    """Settings of the estimator that turns rewards into one advantage per trained token."""

    group: ClassVar[str] = "rl.advantages"
    setting: ClassVar[str] = "algorithm.advantage"
    reads: ClassVar[Reads] = {
        "kind": {
            "outcome": {"mean", "std", "leave_one_out"},
            "return": {"gamma"},
            "gae": {"gamma", "lam", "unit"},
            "gdpo": set(),
        }
    }
    kind: str = "outcome"
    """Estimator: `outcome` (GRPO and variants), `return` (REINFORCE), `gae` (PPO), `gdpo`, or a custom one. `outcome`:
    the normalized episode reward for each of its tokens. `return`: the discounted sum of the rewards from a token on.
    `gae` needs a critic. `gdpo` normalizes each reward component separately (`options.weights`)."""
    mean: str = choice("group", NORMALIZATION_SCOPES)
    """Scope of the mean that `outcome` subtracts: `group`, `batch` or `none`."""
    std: str = choice("group", (*NORMALIZATION_SCOPES, "mean"))
    """Divisor of `outcome`: the std over the `group` (GRPO) or the `batch` (LitePPO), `none` (Dr. GRPO), or the `mean`
    of the group (MaxRL)."""
    leave_one_out: bool = False
    """True if the subtracted mean excludes the completion itself (RLOO)."""
    whiten: bool = False
    """Normalize the advantages of any estimator, (A - mean) / std over all trained tokens of the batch
    (REINFORCE++)."""
    gamma: float = bounded(1.0, "in [0, 1]", lambda gamma: 0 <= gamma <= 1)
    """Discount of `return` and `gae` per trained token, or per turn with `unit=turn`."""
    lam: float = bounded(1.0, "in [0, 1]", lambda lam: 0 <= lam <= 1)
    """Lambda of `gae`, which trades bias (0) for variance (1)."""
    unit: str = choice("token", ("token", "turn"))
    """Time step of `gae`: `token`, or `turn` (a run of adjacent trained tokens)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            self.mean != "none" or not self.leave_one_out,
            "algorithm.advantage.leave_one_out with algorithm.advantage.mean=none",
            "false, since no mean is subtracted (or set algorithm.advantage.mean=group)",
            self.leave_one_out,
        )

    @property
    def compares_groups(self) -> bool:
        """True if completions of one prompt are compared, so that a group of one has no advantage."""
        return self.kind == "gdpo" or (self.kind == "outcome" and {"group", "mean"} & {self.mean, self.std} != set())

    @property
    def reads_tokens(self) -> bool:
        """True if the estimator reads rewards of tokens and turns; `outcome` and `gdpo` read one reward per episode."""
        return self.kind not in ("outcome", "gdpo")


@dataclass
class LossConfig(ComponentConfig):
    """Settings of the policy loss of a token."""

    group: ClassVar[str] = "rl.policy_losses"
    setting: ClassVar[str] = "algorithm.loss"
    reads: ClassVar[Reads] = {
        "kind": {
            "clip": {"clip_low", "clip_high"},
            "cispo": {"clip_low", "clip_high"},
            "importance": set(),
            "reinforce": set(),
            "sapo": set(),
        }
    }
    kind: str = "clip"
    """Policy loss: `clip` (PPO, GRPO; GSPO with `ratio=sequence`), `importance` (no clip; M2PO), `cispo`, `sapo`,
    `reinforce`, or a custom one."""
    clip_low: float = bounded(0.2, "in (0, 1]", lambda clip: 0 < clip <= 1)
    """Lower clip distance: `clip` and `cispo` clip the ratio to the proximal policy below at 1 - clip_low."""
    clip_high: float = bounded(0.2, "more than 0", lambda clip: clip > 0)
    """Upper clip distance: `clip` and `cispo` clip the ratio above at 1 + clip_high (DAPO uses 0.28)."""
    options: dict[str, Any] = field(default_factory=dict)
    """Other constants of the loss: `dual_clip` for `clip`, `tau_positive` and `tau_negative` for `sapo`, or parameters
    of a custom loss; null selects the loss's default."""


@dataclass
class AggregationConfig(Settings):
    """Settings of the reduction of token losses to one number."""

    setting: ClassVar[str] = "algorithm.aggregation"
    kind: str = choice("token_mean", AGGREGATIONS)
    """Reduction: `token_mean`, `token_sum`, `prompt_mean`, `sequence_mean_token_mean`, `sequence_mean_token_sum` or
    `constant_length`. `prompt_mean`: the mean over the tokens of a group, averaged over groups. `constant_length`:
    `sequence_mean_token_sum` divided by the maximum length of a completion, `rollout.generation.max_new_tokens` (Dr.
    GRPO)."""


@dataclass
class CorrectionConfig(ComponentConfig):
    """Settings of the importance weight that corrects for the sampling policy, based on pi_proximal / pi_behavior."""

    group: ClassVar[str] = "rl.corrections"
    setting: ClassVar[str] = "algorithm.correction"
    reads: ClassVar[Reads] = {
        "kind": {
            "truncate": {"level", "cap", "floor"},
            "mask": {"level", "cap", "floor"},
            "plain": {"level"},
            "none": set(),
        }
    }
    kind: str = "truncate"
    """Correction: `truncate` (TIS), `mask` (IcePop), `plain`, `none`, or a custom one. `truncate`: the ratio clipped to
    [floor, cap]. `mask`: drops tokens with a ratio outside [floor, cap]. `plain`: the ratio itself."""
    level: str = choice("token", LEVELS)
    """Scope of each ratio: one `token`, a `sequence` (product over its trained tokens), or `geometric` (geometric mean
    over them)."""
    cap: float = bounded(2.0, "more than 0 (kind=none disables the correction)", lambda cap: cap > 0)
    """Upper bound of the ratio for `truncate` and `mask`."""
    floor: float = 0.0
    """Lower bound of the ratio for `truncate` and `mask`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            0 <= self.floor < self.cap,
            "algorithm.correction.floor",
            f"at least 0 and below cap ({self.cap:g})",
            self.floor,
        )


@dataclass
class MaskConfig(ComponentConfig):
    """Settings of the masks that drop tokens from the loss."""

    group: ClassVar[str] = "rl.masks"
    setting: ClassVar[str] = "algorithm.mask"
    reads: ClassVar[Reads] = {
        "kind": {
            "ratio": {"level", "low", "high"},
            "divergence": set(),
            "second_moment": {"threshold"},
            "none": set(),
        }
    }
    kind: str = "none"
    """Mask: `ratio`, `divergence`, `second_moment` (M2PO), `none`, a custom one, or several joined by `+`. `ratio`:
    drops tokens with pi_proximal / pi_behavior outside [low, high]. `divergence`: drops tokens or sequences whose
    `options.estimator` exceeds `options.bound`."""
    level: str = choice("geometric", LEVELS)
    """Scope of each ratio in the mask `ratio`: one `token`, a `sequence` (product over its trained tokens), or
    `geometric` (geometric mean over them)."""
    low: float = 0.5
    """Lower bound of the mask `ratio`."""
    high: float = 2.0
    """Upper bound of the mask `ratio`."""
    threshold: float = bounded(0.04, "more than 0", lambda threshold: threshold > 0)
    """Bound of `second_moment`. The mask drops the tokens with the largest squared log-ratios, until the mean over the
    remaining tokens of the minibatch is at most this."""
    truncated: bool = False
    """Drop completions that reached the length limit (DAPO's overlong filtering). They count in no
    denominator, but their rewards count in the mean and std of their group."""

    def __post_init__(self) -> None:
        super().__post_init__()
        bounds = 0 <= self.low < self.high
        require(bounds, "algorithm.mask.low", f"0 to algorithm.mask.high ({self.high:g})", self.low)


@dataclass
class KLConfig(Settings):
    """Settings of the penalty on the divergence from a frozen reference policy."""

    setting: ClassVar[str] = "algorithm.kl"
    reads: ClassVar[Reads] = {
        "place": {"reward": {"estimator"}, "loss": {"estimator", "weighted"}, "none": set()},
    }
    place: str = choice("none", ("none", "reward", "loss"))
    """Use of the penalty: in the `reward`, in the `loss`, or `none`. `reward`: subtract the KL between sampling policy
    and reference from the reward of each trained token. `loss`: add the KL between current policy and reference to the
    loss. `none`: load no reference."""
    coef: float = 0.0
    """Weight of the KL penalty, beta."""
    estimator: str = choice("k3", ESTIMATORS)
    """KL estimator: `k1`, `k2` or `k3` (Schulman, "Approximating KL divergence"). In the loss without `weighted`, k2
    has the unbiased gradient, and k3 the gradient of GRPO."""
    weighted: bool = False
    """Multiply the KL in the loss by the ratio to the proximal policy, which makes the gradients of k1 and
    k3 unbiased."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            self.coef > 0 if self.place != "none" else self.coef == 0,
            f"algorithm.kl.coef with algorithm.kl.place={self.place}",
            "0 (for a penalty, set algorithm.kl.place to `reward` or `loss`)"
            if self.place == "none"
            else "more than 0",
            self.coef,
        )
        require(
            not (self.place == "loss" and self.estimator == "k1") or self.weighted,
            "algorithm.kl.estimator with algorithm.kl.place=loss",
            "`k2` or `k3`, or algorithm.kl.weighted=true; without it, the gradient of k1 is zero in expectation",
            self.estimator,
        )


@dataclass
class AlgorithmConfig(Settings):
    """Settings of an algorithm, by component.

    The defaults are GRPO with token-mean aggregation and the decoupled objective.
    """

    setting: ClassVar[str] = "algorithm"
    reward: RewardConfig = field(default_factory=RewardConfig)
    """Reward shaping."""
    advantage: AdvantageConfig = field(default_factory=AdvantageConfig)
    """Advantage estimator."""
    loss: LossConfig = field(default_factory=LossConfig)
    """Policy loss."""
    ratio: str = choice("token", ("token", "sequence"))
    """Scope of each ratio to the proximal policy in the loss: one `token`, or a `sequence` (geometric mean over its
    trained tokens; GSPO)."""
    aggregation: AggregationConfig = field(default_factory=AggregationConfig)
    """Reduction of token losses to one number."""
    proximal: str = choice("auto", ("auto", *PROXIMALS))
    """Source of the proximal ("old") log-probs: `recompute`, `current`, `behavior`, `interpolate` or `auto`.
    `recompute`: a forward pass before the update. `current`: the current policy, detached; needs one minibatch per
    step. `behavior`: the sampler, which makes every correction 1. `interpolate`: between sampler and current policy,
    by version (A-3PO). `auto`: `current` with one minibatch and no mask over a whole minibatch (`second_moment`), else
    `recompute`."""
    correction: CorrectionConfig = field(default_factory=CorrectionConfig)
    """Importance weights for the difference between server and trainer."""
    mask: MaskConfig = field(default_factory=MaskConfig)
    """Masks that drop tokens from the loss."""
    kl: KLConfig = field(default_factory=KLConfig)
    """KL penalty towards a reference policy."""
    entropy_coef: float = bounded(0.0, "0 (off) or more", lambda coef: coef >= 0)
    """Weight of the entropy bonus, with entropy in nats; 0 disables it. A positive weight needs a train engine whose
    entropy has a gradient."""
    staleness_coef: float = bounded(0.0, "0 (off) or more", lambda coef: coef >= 0)
    """Staleness coefficient: multiplies the weight of a token by exp(-coef * (current version - its version))."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            self.ratio == "token" or self.loss.kind != "reinforce",
            "algorithm.ratio with algorithm.loss.kind=reinforce",
            "`token`, since this loss has no ratio (or set algorithm.loss.kind=importance)",
            self.ratio,
        )
        is_unshaped = self.reward == RewardConfig() and self.kl.place != "reward"
        require(
            self.advantage.kind != "gdpo" or is_unshaped,
            "algorithm.advantage.kind with algorithm.reward or algorithm.kl.place=reward",
            "another kind, since gdpo compares unshaped reward components",
            self.advantage.kind,
        )
        require(
            self.advantage.std != "mean" or is_unshaped,
            "algorithm.advantage.std with algorithm.reward or algorithm.kl.place=reward",
            "another value, since `mean` needs unshaped rewards of at least 0",
            self.advantage.std,
        )
        masks_by_ratio = self.correction.kind == "mask" or {"ratio", "divergence", "second_moment"} & set(
            self.mask.kind.split("+")
        )
        require(
            not masks_by_ratio or self.proximal != "behavior",
            f"algorithm.proximal with algorithm.correction.kind={self.correction.kind} and "
            f"algorithm.mask.kind={self.mask.kind}, which mask by pi_proximal / pi_behavior",
            "`recompute` or `auto`; with the sampler's log-probs the ratio is always 1 and nothing is masked",
            self.proximal,
        )

    @property
    def needs_reference(self) -> bool:
        """True if a reference policy is needed for a KL penalty."""
        return self.kl.place != "none"

    @property
    def needs_critic(self) -> bool:
        """True if a critic is needed to estimate values."""
        return self.advantage.kind == "gae"

    def resolve_proximal(self, minibatches: int, whole: bool = False) -> str:
        """Return `recompute`, `current`, `behavior` or `interpolate`, by resolving `auto`.

        Args:
            minibatches: optimizer steps per training batch.
            whole: whether a mask reads the old log-probs of a whole minibatch before its loss.

        Raises:
            ConfigError: the setting does not support the mask or the number of minibatches.
        """
        if self.proximal == "auto":
            return "current" if minibatches == 1 and not whole else "recompute"
        require(
            self.proximal == "recompute" or not whole,
            f"algorithm.proximal with algorithm.mask.kind={self.mask.kind}",
            "`recompute` or `auto`, since the mask reads the log-probs of a whole minibatch before its loss",
            self.proximal,
        )
        require(
            self.proximal != "current" or minibatches == 1,
            "algorithm.proximal",
            "`recompute`, `interpolate` or `behavior` if actor.minibatches is more than 1, since each minibatch "
            "changes the policy",
            self.proximal,
        )
        return self.proximal
