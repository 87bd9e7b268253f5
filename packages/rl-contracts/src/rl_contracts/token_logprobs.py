"""The one expression by which trainers and servers turn logits into the log-prob of a given token.

Both sides call it, so that the same logits give the same bits: `x * (1 / t)` and `x / t`, or `log_softmax` and
`z - logsumexp(z)`, are equal on paper only.
"""

from __future__ import annotations

import torch


def chosen_logprobs(logits: torch.Tensor, targets: torch.Tensor, sharpness: torch.Tensor) -> torch.Tensor:
    """Log-prob of each row's target under softmax(sharpness * logits).

    Args:
        logits: float32 [M, V]; holds `sharpness * logits` afterwards.
        targets: int64 [M].
        sharpness: float32 [M], reciprocals of the temperatures.

    Returns:
        float32 [M].
    """
    norm, _, _ = log_normalizer(logits.mul_(sharpness[:, None]))
    return logits.gather(1, targets[:, None])[:, 0] - norm


def log_normalizer(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Logsumexp of each row, and what it was made from.

    Args:
        logits: float32 [M, V].

    Returns:
        the logsumexps [M], sums [M, 1] and weights [M, V], a new tensor: weights / sums is the softmax.
    """
    top = logits.amax(-1, keepdim=True)
    weights = (logits - top).exp_()
    total = weights.sum(-1, keepdim=True)
    return total.log().add_(top)[:, 0], total, weights
