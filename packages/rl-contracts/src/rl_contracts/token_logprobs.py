"""The one expression by which trainers and servers turn logits into the log-prob of a given token.

Both sides call it, so that the same logits give the same bits: `x * (1 / t)` and `x / t`, or `log_softmax` and
`z - logsumexp(z)`, are equal on paper only.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def chosen_logprobs(
    logits: torch.Tensor, targets: torch.Tensor, sharpness: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-prob of each row's target under softmax(sharpness * logits).

    Args:
        logits: float32 [M, V]; holds `sharpness * logits` afterwards.
        targets: int64 [M].
        sharpness: float32 [M], reciprocals of the temperatures.

    Returns:
        the log-probs, and the logsumexp that they were normalised by; float32 [M] each.
    """
    norm = logits.mul_(sharpness[:, None]).logsumexp(-1)
    return logits.gather(1, targets[:, None])[:, 0] - norm, norm
