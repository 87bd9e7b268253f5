"""How per-token losses become one number: a weight per token, and the denominator that the engine divides by, once.

The denominator is counted over the whole minibatch (all micro-batches, all data-parallel replicas) from `loss_mask`,
before any
correction masks or weights a token.
"""

from __future__ import annotations

import torch

AGGREGATIONS = ("token_mean", "sequence_mean_token_mean", "sequence_mean_token_sum", "constant_length")


def token_weights(loss_mask: torch.Tensor, aggregation: str, constant_length: int = 1) -> torch.Tensor:
    """Weight of each token in the sum that is divided by `denominator`.

    Args:
        loss_mask: bool [B, T].
        aggregation: `token_mean` (DAPO, arXiv 2503.14476, eq. 8): every token counts alike; `sequence_mean_token_mean`
        (GRPO, arXiv
            2402.03300, eq. 3): rows count alike, and tokens within a row; `sequence_mean_token_sum`: the sum over a
            row, averaged over
            rows; `constant_length` (Dr. GRPO, arXiv 2503.20783): that, divided by a fixed length.
        constant_length: the L of `constant_length`, in tokens.

    Returns:
        float32 [B, T], 0 where not trained.
    """
    weights = loss_mask.float()
    if aggregation == "sequence_mean_token_mean":
        return weights / weights.sum(-1, keepdim=True).clamp(min=1)
    if aggregation == "constant_length":
        return weights / constant_length
    if aggregation in ("token_mean", "sequence_mean_token_sum"):
        return weights
    raise ValueError(f"unknown aggregation {aggregation!r}")


def denominator(loss_mask: torch.Tensor, aggregation: str) -> torch.Tensor:
    """This share's part of the denominator: trained tokens for `token_mean`, else rows with a trained token. float32
    scalar."""
    if aggregation == "token_mean":
        return loss_mask.sum().float()
    return loss_mask.any(-1).sum().float()
