"""Reduction of token losses to one number, with a weight per token and a denominator.

The engine divides by the denominator once. The denominator is counted from `loss_mask` over the whole minibatch (all
micro-batches and data-parallel replicas), before any correction masks or weights a token.
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
    "prompt_mean": lambda weights, _, of_group: weights / _group_size_column(of_group),
    "constant_length": lambda weights, length, _: weights / length,
}
"""Functions that return token weights, float32 [B, T].

The arguments are the loss mask as numbers (1 where trained, else 0), the constant length, and the trained tokens of
each sequence's group.
"""


def _group_size_column(tokens: torch.Tensor | None) -> torch.Tensor:
    assert tokens is not None, "prompt_mean needs group_tokens, the trained tokens of each sequence's group"
    return tokens[:, None].clamp(min=1)


def token_weights(
    loss_mask: torch.Tensor, aggregation: str, constant_length: int = 1, group_tokens: torch.Tensor | None = None
) -> torch.Tensor:
    """Return the weight of each token in the sum that is divided by `denominator`.

    An episode of several sequences counts as several sequences. The aggregations are:

    - `token_mean` (DAPO, arXiv 2503.14476, eq. 8): the mean over all tokens.
    - `token_sum` (verl): the sum over all tokens.
    - `prompt_mean` (SkyRL): the mean over the tokens of a group, averaged over groups.
    - `sequence_mean_token_mean` (GRPO, arXiv 2402.03300, eq. 3): the mean over a sequence, averaged over sequences.
    - `sequence_mean_token_sum`: the sum over a sequence, averaged over sequences.
    - `constant_length` (Dr. GRPO, arXiv 2503.20783): `sequence_mean_token_sum` divided by a fixed length.

    Args:
        loss_mask: bool [B, T].
        aggregation: name of the aggregation.
        constant_length: the L of `constant_length`, in tokens.
        group_tokens: [B], trained tokens of each sequence's group in the whole batch; for `prompt_mean`.

    Returns:
        float32 [B, T], 0 where not trained.
    """
    return AGGREGATIONS[aggregation](loss_mask.float(), constant_length, group_tokens)


def denominator(
    loss_mask: torch.Tensor, aggregation: str, group_tokens: torch.Tensor | None = None, replicas: int = 1
) -> torch.Tensor:
    """Return a rank's contribution to the denominator, a float32 scalar.

    The denominator over all ranks is the number of trained tokens for `token_mean`, 1 for `token_sum`, and the number
    of groups for `prompt_mean`. If a group is spread over several minibatches, each counts the fraction of the group's
    trained tokens that it has. All other aggregations count the sequences with a trained token.
    """
    if aggregation == "token_sum":
        return loss_mask.float().new_full((), 1.0 / replicas)
    if aggregation == "prompt_mean":
        return token_weights(loss_mask, aggregation, group_tokens=group_tokens).sum()
    counted = loss_mask if aggregation == "token_mean" else loss_mask.any(-1)
    return counted.sum().float()
