"""Summary of the differences between two sets of log-probs of the same tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from rl_trainers.algorithms.functional.kl import k3

if TYPE_CHECKING:
    import torch

FAR_THRESHOLD = 1.0
"""Difference, in nats, above which a token counts as far off."""
NOISE = 1e-3
"""Difference, in nats, above which a token counts in `trainer_higher`."""


@dataclass(frozen=True, slots=True)
class LogprobGap:
    """Log-prob gap between two computations that should agree.

    The difference of a token is d = the trainer's log-prob - the other log-prob, in nats.
    """

    tokens: int
    """Number of tokens compared, more than 0."""
    mean_abs: float
    """Mean of |d|."""
    max_abs: float
    """Largest |d|."""
    k3: float = 0.0
    """Mean of `k3` of d, the estimate of KL(trainer || other) that is never negative."""
    bias: float = 0.0
    """Mean of d."""
    trainer_higher: float = 0.5
    """Fraction of tokens with a higher log-prob in the trainer (d > `NOISE`)."""
    far: float = 0.0
    """Fraction of tokens that are far off (|d| > `FAR_THRESHOLD`)."""
    near_mean: float = 0.0
    """Mean of |d| over the tokens that are not far off."""

    @classmethod
    def from_differences(cls, d: torch.Tensor) -> LogprobGap | None:
        """Return the gap of the differences of all tokens, float64 [N], or None without tokens."""
        if not len(d):
            return None
        size = d.abs()
        far = size > FAR_THRESHOLD
        near = size.where(~far, 0.0).sum() / max(int((~far).sum()), 1)
        higher = (d > NOISE).double().mean()
        means = (size.mean(), size.amax(), k3(d).mean(), d.mean(), higher, far.double().mean(), near)
        return cls(len(d), *(float(mean) for mean in means))


def current_version_mask(versions: torch.Tensor, version: int) -> torch.Tensor:
    """Return the mask of tokens of the current version.

    A token counts if it and all generated tokens before it in its sequence carry `version`. A trainer at that version
    must give these tokens the log-probs that the sampler recorded.

    Args:
        versions: int32 [B, T], -1 where not generated.
        version: the current version.

    Returns:
        bool [B, T].
    """
    generated = versions >= 0
    return generated & ((generated & (versions != version)).cumsum(-1) == 0)
