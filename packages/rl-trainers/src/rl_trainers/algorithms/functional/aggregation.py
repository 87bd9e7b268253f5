"""How per-token losses become one number: a weight per token, and the denominator that the engine divides by, once.

The denominator is counted over the whole minibatch (all micro-batches, all data-parallel replicas) from `loss_mask`,
before any correction masks or weights a token.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

__all__ = ["AGGREGATIONS", "denominator", "token_weights"]

AGGREGATIONS: dict[str, Callable[[torch.Tensor, int, torch.Tensor | None], torch.Tensor]] = {
    "token_mean": lambda weights, *_: weights,
    "token_sum": lambda weights, *_: weights,
    "sequence_mean_token_mean": lambda weights, *_: weights / weights.sum(-1, keepdim=True).clamp(min=1),
    "sequence_mean_token_sum": lambda weights, *_: weights,
    "prompt_mean": lambda weights, _, of_group: weights / _column(of_group),
    "constant_length": lambda weights, length, _: weights / length,
}
"""Weights of tokens, float32 [B, T], from 1 where trained, else 0, the constant length and the tokens of groups."""


def _column(tokens: torch.Tensor | None) -> torch.Tensor:
    assert tokens is not None, "prompt_mean needs the trained tokens of each row's group"
    return tokens[:, None].clamp(min=1)


def token_weights(
    loss_mask: torch.Tensor, aggregation: str, constant_length: int = 1, group_tokens: torch.Tensor | None = None
) -> torch.Tensor:
    """Weight of each token in the sum that is divided by `denominator`.

    A "sequence" is a row: an episode of several rows counts as several.

    Args:
        loss_mask: bool [B, T].
        aggregation: `token_mean` (DAPO, arXiv 2503.14476, eq. 8): every token counts alike; `token_sum`: the sum over
            all tokens (verl); `prompt_mean`: the mean over the tokens of a group, averaged over groups (SkyRL);
            `sequence_mean_token_mean` (GRPO, arXiv 2402.03300, eq. 3): rows count alike, and tokens within a row;
            `sequence_mean_token_sum`: the sum over a row, averaged over rows; `constant_length` (Dr. GRPO, arXiv
            2503.20783): that, divided by a fixed length.
        constant_length: the L of `constant_length`, in tokens.
        group_tokens: [B] trained tokens of each row's group in the whole batch, for `prompt_mean`.

    Returns:
        float32 [B, T], 0 where not trained.
    """
    return AGGREGATIONS[aggregation](loss_mask.float(), constant_length, group_tokens)


def denominator(
    loss_mask: torch.Tensor, aggregation: str, group_tokens: torch.Tensor | None = None, replicas: int = 1
) -> torch.Tensor:
    """A rank's part of the denominator: trained tokens for `token_mean`, 1 in all for `token_sum`, groups for
    `prompt_mean` (of one that is in several minibatches, its share of tokens), else rows with a trained token. float32
    scalar."""
    if aggregation == "token_sum":
        return loss_mask.float().new_full((), 1.0 / replicas)
    if aggregation == "prompt_mean":
        return token_weights(loss_mask, aggregation, group_tokens=group_tokens).sum()
    counted = loss_mask if aggregation == "token_mean" else loss_mask.any(-1)
    return counted.sum().float()
