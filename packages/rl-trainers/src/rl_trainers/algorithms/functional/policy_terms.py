"""What a policy loss is given, and how rows of a packed micro-batch are added up.

A policy loss is a pure function `loss(terms, *, constant=..., ...) -> (losses [N], marks)`: what each trained token
contributes, and named marks to report (bool [N]). Weights, aggregation, corrections and sums are not its business.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from rl_contracts.batch.trajectory import PackedBatch

    TokenLoss = tuple[torch.Tensor, dict[str, torch.Tensor]]
    """Losses, float [N] with gradient; and marks, bool [N], whose fractions of the trained tokens are reported."""

__all__ = ["MAX_LOG_RATIO", "PolicyTerms", "policy_terms", "ratio_of", "sequence_means"]


MAX_LOG_RATIO = 20.0


@dataclass(slots=True)
class PolicyTerms:
    """One packed micro-batch in the eyes of a policy loss. Where a token is not trained, log-prob and advantage are 0
    and the ratio is 1, so that whatever a loss makes of them is finite and without gradient."""

    logprobs: torch.Tensor
    """[N] log pi_theta; carries gradient."""
    ratio: torch.Tensor
    """[N] pi_theta / pi_old, of the token or of its row (`algorithm.ratio`); carries gradient."""
    advantages: torch.Tensor
    """[N]."""
    trained: torch.Tensor
    """bool [N]."""
    entropy: torch.Tensor
    """[N] of the policy's next-token distribution, in nats, 0 where not trained; carries gradient where the engine was
    made with `entropy_grad`."""


def policy_terms(
    logprobs: torch.Tensor,
    old_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    trained: torch.Tensor,
    packed: PackedBatch | None = None,
    entropy: torch.Tensor | None = None,
) -> PolicyTerms:
    """The terms of a micro-batch.

    With `packed`, the ratio is the row's: GSPO (arXiv 2507.18071, eq. 7), s = exp(mean over the row's trained tokens of
    log pi_theta - log pi_old), in the form GSPO-token (eq. 14): each token carries the value of s and the gradient of
    its own log-prob, s_t = sg[s] pi_theta(t) / sg[pi_theta(t)]. With equal advantages and weights within a row this is
    the gradient of GSPO, and it stays defined where they differ.

    Args:
        logprobs: [N] of the policy that learns; carries gradient. May hold anything where not trained.
        old_logprobs: [N] of the policy at the start of this update; may hold anything where not trained.
        advantages: [N].
        trained: bool [N].
        packed: whose rows share a ratio; None: each token has its own.
        entropy: [N] of the policy that learns; may hold anything where not trained. None: 0.
    """
    untrained = ~trained
    logprobs = logprobs.masked_fill(untrained, 0.0)
    difference = logprobs - old_logprobs.detach().masked_fill(untrained, 0.0)
    if packed is not None:
        mean = sequence_means(difference.detach(), trained, packed)[packed.sequence_of_token]
        difference = mean.masked_fill(untrained, 0.0) + logprobs - logprobs.detach()
    entropy = logprobs.new_zeros(logprobs.shape) if entropy is None else entropy.masked_fill(untrained, 0.0)
    return PolicyTerms(logprobs, ratio_of(difference), advantages.masked_fill(untrained, 0.0), trained, entropy)


def ratio_of(log_ratio: torch.Tensor) -> torch.Tensor:
    """exp(log_ratio), at most e^20 and at least e^-20 and without gradient beyond, as in verl and SkyRL: one token must
    not overflow, and with it the gradient of its minibatch."""
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def sequence_means(values: torch.Tensor, trained: torch.Tensor, packed: PackedBatch) -> torch.Tensor:
    """Mean of per-token values [N] over each row's trained tokens, [S]; 0 for a row without any. `values` must be 0
    where not trained."""
    count = packed.sequence_sums(trained.to(values.dtype))
    return packed.sequence_sums(values) / count.clamp(min=1)
