"""How far two sets of log-probs of the same tokens are apart."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from rl_trainers.algorithms.functional.kl import k3

if TYPE_CHECKING:
    import torch

FAR_THRESHOLD = 1.0
"""Nats beyond which a token counts as far off."""
NOISE = 1e-3
"""Nats within which two log-probs count as equal where only the sign of their difference matters."""


@dataclass(frozen=True, slots=True)
class LogprobGap:
    """Two computations that ought to agree, with d = the trainer's log-prob - the other's, in nats."""

    tokens: int
    """Tokens compared; more than 0."""
    mean_abs: float
    """Mean of |d|."""
    max_abs: float
    """Largest |d|."""
    k3: float = 0.0
    """Mean of `k3` of d, the estimate of KL(trainer || other) that is never negative."""
    bias: float = 0.0
    """Mean of d."""
    ours_higher: float = 0.5
    """Share of tokens that the trainer rates higher (d > NOISE)."""
    far: float = 0.0
    """Share of tokens that are far off (|d| > FAR)."""
    near_mean: float = 0.0
    """Mean of |d| of the others."""

    @classmethod
    def from_differences(cls, d: torch.Tensor) -> LogprobGap | None:
        """From the differences of all tokens, float64 [N]; None without tokens."""
        if not len(d):
            return None
        size = d.abs()
        far = size > FAR_THRESHOLD
        near = size.where(~far, 0.0).sum() / max(int((~far).sum()), 1)
        higher = (d > NOISE).double().mean()
        means = (size.mean(), size.amax(), k3(d).mean(), d.mean(), higher, far.double().mean(), near)
        return cls(len(d), *(float(mean) for mean in means))


def current_version_mask(versions: torch.Tensor, version: int) -> torch.Tensor:
    """Generated tokens that carry `version`, as do all generated tokens before them in their row: what a trainer at
    that version must rate as the sampler did.

    Args:
        versions: int32 [B, T], -1 where not generated.

    Returns:
        bool [B, T].
    """
    generated = versions >= 0
    return generated & ((generated & (versions != version)).cumsum(-1) == 0)
