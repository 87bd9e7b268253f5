"""Supervised losses."""

from __future__ import annotations

import torch

from rl_contracts.engine import Stats, TokenOutputs
from rl_contracts.trajectory import PackedBatch


def cross_entropy_loss(outputs: TokenOutputs, packed: PackedBatch) -> tuple[torch.Tensor, Stats]:
    """Sum over trained tokens of -log pi(token), for token-weighted cross entropy: the engine divides by their number.

    Statistics: `logprob/mean` of a trained token.
    """
    mask = packed["loss_mask"]
    logprobs = torch.where(mask, outputs.logprobs, 0.0)
    return -logprobs.sum(), {"logprob/mean": (logprobs.detach().sum(), mask.sum().float())}
