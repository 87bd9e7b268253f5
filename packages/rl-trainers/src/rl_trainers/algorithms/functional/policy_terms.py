"""Input of a policy loss, and means over the sequences of a packed micro-batch.

A policy loss is a pure function `loss(terms, *, constant=..., ...) -> (losses [N], marks)`. It returns the loss of each
token and named marks, bool [N], to report. The caller applies weights and corrections and aggregates the losses.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from rl_contracts.batch.trajectory import PackedBatch

    TokenLoss = tuple[torch.Tensor, dict[str, torch.Tensor]]
    """Losses, float [N] with gradient, and marks, bool [N] by name; see `rl_trainers.algorithms.components`."""

__all__ = ["MAX_LOG_RATIO", "PolicyTerms", "policy_terms", "ratio_of", "sequence_means"]


MAX_LOG_RATIO = 20.0


@dataclass(slots=True)
class PolicyTerms:
    """Input of a policy loss: one packed micro-batch of N tokens.

    Untrained tokens have log-prob 0, advantage 0 and ratio 1, so that their losses are finite and have no gradient.
    """

    logprobs: torch.Tensor
    """[N]: log pi_theta; has a gradient."""
    ratio: torch.Tensor
    """[N]: pi_theta / pi_old of the token or of its sequence (`algorithm.ratio`); has a gradient."""
    advantages: torch.Tensor
    """[N]: advantage of each token."""
    trained: torch.Tensor
    """bool [N]: tokens that are trained."""
    entropy: torch.Tensor
    """[N]: entropy of the policy's next-token distribution, in nats, 0 where not trained.

    It has a gradient if the engine was built with `entropy_grad`.
    """


def policy_terms(
    logprobs: torch.Tensor,
    old_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    trained: torch.Tensor,
    packed: PackedBatch | None = None,
    entropy: torch.Tensor | None = None,
) -> PolicyTerms:
    """Return the terms of a micro-batch.

    With `packed`, all tokens of a sequence share one ratio (GSPO, arXiv 2507.18071, eq. 7):

    s = exp(mean over the sequence's trained tokens of log pi_theta - log pi_old)

    The form is GSPO-token (eq. 14), s_t = sg[s] pi_theta(t) / sg[pi_theta(t)]. Each token has the value of s and the
    gradient of its log-prob. With equal advantages and weights within a sequence, this is the gradient of GSPO. It
    is also defined if they differ.

    All inputs may have any value, including NaN, where not trained.

    Args:
        logprobs: [N], log-probs of the current policy; has a gradient.
        old_logprobs: [N], log-probs of the policy at the start of this update.
        advantages: [N].
        trained: bool [N].
        packed: batch whose sequences share a ratio, or None for a ratio per token.
        entropy: [N], entropy of the current policy, or None for 0.
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
    """Return exp(log_ratio), clipped to [e^-20, e^20] and without gradient beyond, as in verl and SkyRL.

    Otherwise one token could overflow and make the gradient of its minibatch non-finite.
    """
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def sequence_means(values: torch.Tensor, trained: torch.Tensor, packed: PackedBatch) -> torch.Tensor:
    """Return the mean of per-token values, [N], over the trained tokens of each sequence, [S].

    The mean of a sequence without trained tokens is 0. `values` must be 0 where not trained.
    """
    count = packed.sequence_sums(trained.to(values.dtype))
    return packed.sequence_sums(values) / count.clamp(min=1)
