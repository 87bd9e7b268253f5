"""How far two sets of log-probs of the same tokens are apart."""

from __future__ import annotations

import torch


def gap_sums(ours: torch.Tensor, theirs: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Comparison of two computations that ought to agree.

    With d = ours - theirs at the masked tokens, and k3 = exp(-d) - 1 + d, the non-negative estimate of KL(ours ||
    theirs) of Schulman,
    "Approximating KL divergence" (2020).

    Args:
        ours, theirs: float32, same shape.
        mask: bool, same shape; the tokens that count.

    Returns:
        float64 [3]: (number of tokens, sum of |d|, sum of k3), and float64 [1]: the largest |d| (0 without tokens).
    """
    d = torch.where(mask, ours - theirs, 0.0).double()
    sums = torch.stack([mask.sum().double(), d.abs().sum(), ((-d).exp() - 1 + d).sum()])
    return sums, d.abs().amax().reshape(1) if d.numel() else torch.zeros(1, dtype=torch.float64)
