"""A policy loss."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from rl_trainers.algorithms.functional.policy_terms import PolicyTerms


def halved_loss(terms: PolicyTerms, *, factor: float = 0.5) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return -factor rho A per token [N], and report the fraction of tokens with a positive advantage."""
    return -factor * terms.ratio * terms.advantages, {"acme/positive_advantage": terms.advantages > 0}
