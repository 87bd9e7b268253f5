"""Corrections between the policy that sampled (`behaviour`) and the one at the start of the update (`old`).

All of them are detached factors of a token's weight, made of pi_old / pi_behaviour. The denominator of the aggregation
is counted before they drop or shrink tokens, so that dropping one does not make the others louder.
"""

from __future__ import annotations

import torch

from rl_contracts.trajectory import PackedBatch
from rl_trainers.functional.terms import row_means


def level_ratio(log_ratio: torch.Tensor, trained: torch.Tensor, packed: PackedBatch, level: str) -> torch.Tensor:
    """pi_old / pi_behaviour [N], detached: of the `token`, of its row (`sequence`: the product over the row's trained
    tokens) or the row's `geometric` mean per token.

    Args:
        log_ratio: [N] log pi_old - log pi_behaviour, 0 where not trained.
        trained: bool [N].

    Raises:
        ValueError: an unknown level.
    """
    log_ratio = log_ratio.detach()
    if level == "token":
        return log_ratio.exp()
    if level == "sequence":
        return packed.row_sums(log_ratio).exp()[packed.row_of_token]
    if level == "geometric":
        return row_means(log_ratio, trained, packed).exp()[packed.row_of_token]
    raise ValueError(f"unknown level {level!r}")


def truncated_weights(ratio: torch.Tensor, cap: float) -> tuple[torch.Tensor, torch.Tensor]:
    """min(ratio, cap): truncated importance sampling (Ionides 2008; between server and trainer: TIS, Yao et al. 2025;
    as the weight of the decoupled objective: AReaL, arXiv 2505.24298, eq. 5).

    Returns:
        (weights, whether each was capped).
    """
    return ratio.clamp(max=cap), ratio > cap


def masked_weights(ratio: torch.Tensor, low: float, high: float) -> tuple[torch.Tensor, torch.Tensor]:
    """ratio where low <= ratio <= high, else 0: IcePop (Ring-1T, arXiv 2510.18855) at token level, masked
    importance sampling at sequence level.

    Returns:
        (weights, whether each was dropped).
    """
    dropped = ~((ratio >= low) & (ratio <= high))  # written so that a NaN is dropped
    return torch.where(dropped, 0.0, ratio), dropped


def effective_sample_sums(weights: torch.Tensor, trained: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Sums of w and of w^2 over trained tokens, from which the effective sample size follows: (sum w)^2 / sum w^2
    (Kish 1965), as a share of the tokens mean(w)^2 / mean(w^2)."""
    kept = torch.where(trained, weights.detach(), 0.0)
    return kept.sum(), kept.square().sum()
