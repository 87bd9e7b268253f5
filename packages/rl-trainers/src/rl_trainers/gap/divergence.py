"""How far two sets of log-probs of the same tokens are apart."""

from __future__ import annotations

import torch

from rl_trainers.functional.kl import k3

FAR = 1.0
"""Nats beyond which a token counts as far off."""
NOISE = 1e-3
"""Nats within which two log-probs count as equal where only the sign of their difference matters."""


def gap_sums(ours: torch.Tensor, theirs: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Comparison of two computations that ought to agree.

    With d = ours - theirs at the masked tokens, and `k3` of it, the non-negative estimate of KL(ours || theirs).

    Args:
        ours, theirs: float32, same shape.
        mask: bool, same shape; the tokens that count.

    Returns:
        float64 [7]: number of tokens, sum of |d|, sum of k3, sum of d, tokens that ours rates higher (d > NOISE),
        tokens that are far off (|d| > FAR), sum of |d| over the others; and float64 [1]: the largest |d| (0 without
        tokens).
    """
    d = torch.where(mask, ours - theirs, 0.0).double()
    size = d.abs()
    far = size > FAR
    sums = torch.stack(
        [
            mask.sum().double(),
            size.sum(),
            k3(d).sum(),
            d.sum(),
            (d > NOISE).sum().double(),
            far.sum().double(),
            torch.where(far, 0.0, size).sum(),
        ]
    )
    return sums, size.amax().reshape(1) if d.numel() else torch.zeros(1, dtype=torch.float64)


def fresh_mask(versions: torch.Tensor, version: int) -> torch.Tensor:
    """Generated tokens that carry `version`, as do all generated tokens before them in their row: what a trainer at
    that version must rate as the sampler did.

    Args:
        versions: int32 [B, T], -1 where not generated.

    Returns:
        bool [B, T].
    """
    generated = versions >= 0
    other = generated & (versions != version)
    return generated & (other.cumsum(-1) == 0)
