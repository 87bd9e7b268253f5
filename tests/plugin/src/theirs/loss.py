"""A policy loss."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from rl_trainers.algorithms.functional.policy_terms import PolicyTerms


def halved_loss(terms: PolicyTerms, *, factor: float = 0.5) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """-factor rho A, per token [N]; the share of tokens that are to become likelier is reported."""
    return -factor * terms.ratio * terms.advantages, {"theirs/praised": terms.advantages > 0}
