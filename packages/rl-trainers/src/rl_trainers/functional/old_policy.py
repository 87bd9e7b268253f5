"""An estimate of the old policy's log-probs that needs no forward pass."""

from __future__ import annotations

import torch


def interpolated_logprobs(
    logprobs: torch.Tensor, behaviour: torch.Tensor, versions: torch.Tensor, version: int
) -> torch.Tensor:
    """log pi_old between the sampler and the policy that learns, by version and linear in the log (A-3PO, arXiv
    2512.06547).

    The update that begins at `version` makes version + 1; a token of version v is (version - v) / (version + 1 - v) of
    the way from the sampler to the policy that learns: a fresh one is the sampler's, an old one nearly the learner's.

    Args:
        logprobs: [N] of the policy that learns.
        behaviour: [N] as sampled.
        versions: int [N] of each token; read where generated.
        version: the trainer's, at the start of the update.

    Returns:
        [N], detached.
    """
    age = (version - versions).clamp(min=0).to(logprobs.dtype)
    return torch.lerp(behaviour, logprobs.detach(), age / (age + 1))
