"""The settings of an algorithm: a composition of parts, each with its own few.

A preset is data: the values that make it. What is ours about a part and what somebody else adds to it are found alike:
see `rl_contracts.config.ComponentConfig`.
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
"""Of what a mean or std is taken: of nothing, of the answers to one prompt, of the whole batch."""


@dataclass
class RewardConfig(Settings):
    """Shaping of an episode's reward, in this order."""

    setting: ClassVar[str] = "algorithm.reward"
    overlong_max: int = bounded(0, "0 (off) or more tokens", lambda tokens: tokens >= 0)
    """Generated tokens at which the penalty for long answers reaches -1 (DAPO); 0 switches it off."""
    overlong_cache: int = 0
    """Tokens below `overlong_max` at which the penalty begins; 0: a fifth of it."""
    overlong_weight: float = bounded(1.0, "more than 0", lambda weight: weight > 0)
    """Multiplies the penalty."""
    scale: float = 1.0
    """Multiplies the reward; 0 leaves only the KL penalty (distillation)."""
    bias: float = 0.0
    """Added to the scaled reward."""
    clip: float = bounded(0.0, "0 (off) or more", lambda clip: clip >= 0)
    """The result is clipped to [-clip, clip]; 0 switches clipping off."""
    normalise: str = choice("none", NORMALIZATION_SCOPES)
    """(r - mean) / std over each `group`, over the whole `batch`, or `none`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        on = self.overlong_max > 0
        require(
            0 <= self.overlong_cache <= self.overlong_max,
            f"algorithm.reward.overlong_cache with algorithm.reward.overlong_max={self.overlong_max}",
            "0 (a fifth) to overlong_max tokens" if on else "0 (there is no penalty without overlong_max)",
            self.overlong_cache,
        )
        require(
            on or self.overlong_weight == 1,
            "algorithm.reward.overlong_weight with algorithm.reward.overlong_max=0",
            "1 (there is no penalty without overlong_max)",
            self.overlong_weight,
        )


@dataclass
class AdvantageConfig(ComponentConfig):
    """From rewards to one advantage per trained token."""

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
    """Estimator: `outcome` (an episode's reward, normalised, for each of its tokens: GRPO and its relatives), `return`
    (the discounted sum of the rewards that follow a token: REINFORCE), `gae` (PPO; needs a critic), `gdpo` (each part
    of the reward normalized separately; `options.weights`), or your own."""
    mean: str = choice("group", NORMALIZATION_SCOPES)
    """Subtracted from an `outcome`: the mean over its `group` or the `batch`, or `none`."""
    std: str = choice("group", (*NORMALIZATION_SCOPES, "mean"))
    """By what the difference is divided: the std over its `group` (GRPO) or the `batch` (LitePPO), `none` (Dr. GRPO),
    or the `mean` of its group (MaxRL)."""
    leave_one_out: bool = False
    """The mean is that of the *other* answers (RLOO)."""
    whiten: bool = False
    """Whatever the estimator: (A - mean) / std over all trained tokens of the batch (REINFORCE++)."""
    gamma: float = bounded(1.0, "in [0, 1]", lambda gamma: 0 <= gamma <= 1)
    """Discount per trained token, of `return` and `gae`."""
    lam: float = bounded(1.0, "in [0, 1]", lambda lam: 0 <= lam <= 1)
    """Lambda of `gae`."""
    unit: str = choice("token", ("token", "turn"))
    """Time step of `gae`: `token`, or `turn` (a run of neighbouring trained tokens)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            self.mean != "none" or not self.leave_one_out,
            "algorithm.advantage.leave_one_out with algorithm.advantage.mean=none",
            "false: there is no mean to leave the answer out of (or take mean=group)",
            self.leave_one_out,
        )

    @property
    def compares_groups(self) -> bool:
        """Whether answers to one prompt are compared, so that one alone has no advantage."""
        return self.kind == "gdpo" or (self.kind == "outcome" and {"group", "mean"} & {self.mean, self.std} != set())

    @property
    def reads_tokens(self) -> bool:
        """Whether rewards of tokens, so of single turns, count: `outcome` has one number per episode."""
        return self.kind not in ("outcome", "gdpo")


@dataclass
class LossConfig(ComponentConfig):
    """The policy loss of a token."""

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
    """`clip` (PPO, GRPO; GSPO with `ratio=sequence`), `importance` (no clip; M2PO), `cispo`, `sapo`, `reinforce`, or
    anybody's."""
    clip_low: float = bounded(0.2, "in (0, 1]", lambda clip: 0 < clip <= 1)
    """The ratio to the proximal policy is clipped below at 1 - clip_low (`clip`, `cispo`)."""
    clip_high: float = bounded(0.2, "more than 0", lambda clip: clip > 0)
    """... and above at 1 + clip_high (DAPO takes 0.28)."""
    options: dict[str, Any] = field(default_factory=dict)
    """Further constants of a loss: `dual_clip` of `clip`, `tau_positive` and `tau_negative` of `sapo`, those of your
    own; null stands for the loss's default."""


@dataclass
class AggregationConfig(Settings):
    """How the losses of tokens become one number."""

    setting: ClassVar[str] = "algorithm.aggregation"
    reads: ClassVar[Reads] = {"kind": {name: {"constant_length"} & {name} for name in AGGREGATIONS}}
    kind: str = choice("token_mean", AGGREGATIONS)
    """`token_mean`, `token_sum`, `prompt_mean` (the mean over the tokens of a group, averaged over groups),
    `sequence_mean_token_mean`, `sequence_mean_token_sum`, or `constant_length` (Dr. GRPO: that, divided by
    `constant_length`). A sequence is a row."""
    constant_length: int = bounded(256, "at least 1", lambda tokens: tokens >= 1)
    """Tokens; read by the kind `constant_length`."""


@dataclass
class CorrectionConfig(ComponentConfig):
    """A token's weight for having been sampled by another policy, made of pi_proximal / pi_behaviour."""

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
    """`truncate` (the ratio, at most `cap`; TIS), `mask` (outside [floor, cap] the token is dropped; IcePop), `plain`
    (the ratio itself), `none`, or anybody's."""
    level: str = choice("token", LEVELS)
    """Whose ratio: the `token`'s, its row's (`sequence`: the product) or its row's mean per token (`geometric`)."""
    cap: float = bounded(2.0, "more than 0 (kind=none leaves the weight out)", lambda cap: cap > 0)
    """Upper bound of `truncate` and `mask`."""
    floor: float = 0.0
    """... and lower bound."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(0 <= self.floor < self.cap, "algorithm.correction.floor", f"0 to below cap ({self.cap:g})", self.floor)


@dataclass
class MaskConfig(ComponentConfig):
    """Which tokens are left out of the loss."""

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
    """`ratio` (tokens whose pi_proximal / pi_behaviour is outside [low, high]), `divergence` (tokens or rows that are
    more than `options.bound` apart by `options.estimator`), `second_moment` (M2PO), `none`, your own, or several
    joined by `+`."""
    level: str = choice("geometric", LEVELS)
    """Whose ratio `ratio` looks at: `token`, or its row's `sequence` (the product) or `geometric` mean."""
    low: float = 0.5
    """Lower bound of `ratio`."""
    high: float = 2.0
    """... and upper bound."""
    threshold: float = bounded(0.04, "more than 0", lambda threshold: threshold > 0)
    """`second_moment` drops the tokens with the largest squared log-ratio until its mean over the minibatch is at most
    this."""
    truncated: bool = False
    """Learn nothing from answers that the length limit ended (DAPO's overlong filtering): they count in no denominator,
    but their rewards do in the mean and std of their group."""

    def __post_init__(self) -> None:
        super().__post_init__()
        bounds = 0 <= self.low < self.high
        require(bounds, "algorithm.mask.low", f"0 to algorithm.mask.high ({self.high:g})", self.low)


@dataclass
class KLConfig(Settings):
    """A penalty on the divergence from a frozen reference policy."""

    setting: ClassVar[str] = "algorithm.kl"
    reads: ClassVar[Reads] = {
        "place": {"reward": {"estimator"}, "loss": {"estimator", "weighted"}, "none": set()},
    }
    place: str = choice("none", ("none", "reward", "loss"))
    """`reward`: subtracted from the reward of each trained token, between the policy that sampled and the reference;
    `loss`: added to the loss, between the policy that learns and the reference; `none`: no reference is loaded."""
    coef: float = 0.0
    """Its weight, beta."""
    estimator: str = choice("k3", ESTIMATORS)
    """`k1`, `k2` or `k3` (Schulman, "Approximating KL divergence"). As a loss without `weighted`, k2 has the unbiased
    gradient and k3 GRPO's."""
    weighted: bool = False
    """In the loss: times the ratio to the proximal policy, which makes the gradients of k1 and k3 unbiased."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            self.coef > 0 if self.place != "none" else self.coef == 0,
            f"algorithm.kl.coef with algorithm.kl.place={self.place}",
            "0 (set kl.place to `reward` or `loss` for a penalty)" if self.place == "none" else "more than 0",
            self.coef,
        )
        require(
            not (self.place == "loss" and self.estimator == "k1") or self.weighted,
            "algorithm.kl.estimator with algorithm.kl.place=loss",
            "`k2` or `k3`, or kl.weighted=true: the gradient of k1 alone is zero in the mean and holds nothing back",
            self.estimator,
        )


@dataclass
class AlgorithmConfig(Settings):
    """Which parts. The defaults: GRPO with token-mean aggregation, on the decoupled objective."""

    setting: ClassVar[str] = "algorithm"
    reward: RewardConfig = field(default_factory=RewardConfig)
    """What becomes of rewards before anything is learned from them."""
    advantage: AdvantageConfig = field(default_factory=AdvantageConfig)
    """From rewards to advantages."""
    loss: LossConfig = field(default_factory=LossConfig)
    """The policy loss."""
    ratio: str = choice("token", ("token", "sequence"))
    """Whose ratio to the proximal policy the loss sees: each `token`'s, or its row's geometric mean (`sequence`,
    GSPO)."""
    aggregation: AggregationConfig = field(default_factory=AggregationConfig)
    """From the losses of tokens to one number."""
    proximal: str = choice("auto", ("auto", *PROXIMALS))
    """Where the proximal ("old") log-probs come from: `recompute` (a forward pass before the update), `current` (the
    policy that learns, without gradient; needs one minibatch a step), `behaviour` (the sampler's; no correction is left
    to do), `interpolate` (between the sampler's and the current ones, by version; A-3PO), or `auto`: `current` with one
    minibatch and no mask over the whole minibatch (`second_moment`), else `recompute`."""
    correction: CorrectionConfig = field(default_factory=CorrectionConfig)
    """Weights between server and trainer."""
    mask: MaskConfig = field(default_factory=MaskConfig)
    """Tokens that are left out."""
    kl: KLConfig = field(default_factory=KLConfig)
    """Keeping the policy near a reference."""
    entropy_coef: float = bounded(0.0, "0 (off) or more", lambda coef: coef >= 0)
    """Weight of the entropy bonus, nats; 0 switches it off. The train engine must then give entropy a gradient."""
    staleness_coef: float = bounded(0.0, "0 (off) or more", lambda coef: coef >= 0)
    """A token's weight is multiplied by exp(-coef * (current version - its version))."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            self.ratio == "token" or self.loss.kind != "reinforce",
            "algorithm.ratio with algorithm.loss.kind=reinforce",
            "`token`: that loss has no ratio; take algorithm.loss.kind=importance",
            self.ratio,
        )
        as_given = self.reward == RewardConfig() and self.kl.place != "reward"
        require(
            self.advantage.kind != "gdpo" or as_given,
            "algorithm.advantage.kind with algorithm.reward or algorithm.kl.place=reward",
            "another than gdpo, which compares the parts of a reward as they are",
            self.advantage.kind,
        )
        require(
            self.advantage.std != "mean" or as_given,
            "algorithm.advantage.std with algorithm.reward or algorithm.kl.place=reward",
            "another than `mean`, which is for rewards of at least 0, such as 0 and 1",
            self.advantage.std,
        )
        by_ratio = self.correction.kind == "mask" or {"ratio", "divergence", "second_moment"} & set(
            self.mask.kind.split("+")
        )
        require(
            not by_ratio or self.proximal != "behaviour",
            f"algorithm.proximal with algorithm.correction.kind={self.correction.kind} and "
            f"algorithm.mask.kind={self.mask.kind}, which mask by pi_proximal / pi_behaviour",
            "`recompute`, or `auto`: with the sampler's own log-probs the ratio is 1 and nothing is masked",
            self.proximal,
        )

    @property
    def needs_reference(self) -> bool:
        """Whether a KL to a reference policy is asked for."""
        return self.kl.place != "none"

    @property
    def needs_critic(self) -> bool:
        """Whether values are needed."""
        return self.advantage.kind == "gae"

    def resolve_proximal(self, minibatches: int, whole: bool = False) -> str:
        """`recompute`, `current`, `behaviour` or `interpolate`.

        Args:
            minibatches: optimizer steps per training batch.
            whole: whether something looks at the old log-probs of a whole minibatch before its loss.
        """
        if self.proximal == "auto":
            return "current" if minibatches == 1 and not whole else "recompute"
        require(
            self.proximal == "recompute" or not whole,
            f"algorithm.proximal with algorithm.mask.kind={self.mask.kind}",
            "`recompute` or `auto`: the mask is made over the whole minibatch before its loss",
            self.proximal,
        )
        require(
            self.proximal != "current" or minibatches == 1,
            "algorithm.proximal",
            "`recompute`, `interpolate` or `behaviour` when actor.minibatches is more than 1 (the policy moves within "
            "the step)",
            self.proximal,
        )
        return self.proximal
