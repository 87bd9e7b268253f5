"""SAPO's policy loss."""

from __future__ import annotations

import torch

from rl_trainers.functional.terms import PolicyTerms, TokenLoss


def sapo_loss(terms: PolicyTerms, *, tau_positive: float, tau_negative: float) -> TokenLoss:
    """A soft gate in place of the clip (SAPO, arXiv 2511.20347).

    loss = -(4 / tau) sigmoid(tau (rho - 1)) A, tau = tau_positive where A > 0, else tau_negative. On policy its
    gradient is that of -rho A; away from rho = 1 it fades by 4 p (1 - p), p = sigmoid(tau (rho - 1)).

    Returns:
        losses, and the mark `gate/closed`: tokens whose gradient the gate has at least halved.
    """
    tau = torch.where(terms.advantages > 0, tau_positive, tau_negative)
    gate = torch.sigmoid(tau * (terms.ratio - 1))
    with torch.no_grad():
        closed = (4 * gate * (1 - gate) <= 0.5) & terms.trained
    return -4 / tau * gate * terms.advantages, {"gate/closed": closed}
