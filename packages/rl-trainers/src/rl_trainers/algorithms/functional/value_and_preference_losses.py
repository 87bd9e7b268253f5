"""Losses other than policy gradients: cross entropy, preference pairs and values."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from rl_contracts.batch.trajectory import PackedBatch
from rl_contracts.engine import Stats, TokenOutputs
from rl_trainers.algorithms.functional.advantages import moments


def cross_entropy_loss(outputs: TokenOutputs, packed: PackedBatch) -> tuple[torch.Tensor, Stats]:
    """Return the cross entropy, the sum over trained tokens of -log pi(token); the engine divides by their number.

    The statistics have `logprob/mean`, the mean log-prob of the trained tokens.
    """
    mask = packed["loss_mask"]
    logprobs = torch.where(mask, outputs.logprobs, 0.0)
    return -logprobs.sum(), {"logprob/mean": (logprobs.detach().sum(), mask.sum().float())}


def margins(values: torch.Tensor, packed: PackedBatch) -> torch.Tensor:
    """Return the value of the chosen minus the value of the rejected sequence, for each pair.

    Args:
        values: [S], value of each sequence.
        packed: batch with `unit_ids`, shared by the two sequences of a pair, and `rewards`, positive for the chosen
            one.

    Returns:
        [pairs].
    """
    return packed.unit_sums(torch.where(packed["rewards"] > 0, values, -values))


def bradley_terry_loss(scores: torch.Tensor, packed: PackedBatch) -> tuple[torch.Tensor, Stats]:
    """Return the loss of a reward model (arXiv 2203.02155, eq. 1).

    The loss is the sum over pairs of -log sigmoid(s_chosen - s_rejected).

    Args:
        scores: [S], score of each sequence; has a gradient.
        packed: batch of pairs; see `margins`.

    Returns:
        The sum, which must be divided by the number of pairs, and the statistics `pair/accuracy` (ties count half),
        `pair/margin` and `score/mean`.
    """
    margin = margins(scores, packed)
    stats = _pair_statistics(margin) | {"score/mean": (scores.detach().sum(), _count(scores))}
    return -F.logsigmoid(margin).sum(), stats


def dpo_loss(
    log_ratios: torch.Tensor, packed: PackedBatch, beta: float, label_smoothing: float = 0.0
) -> tuple[torch.Tensor, Stats]:
    """Return the loss of direct preference optimization (Rafailov et al., arXiv 2305.18290, eq. 7).

    The loss is the sum over pairs of -log sigmoid(beta h). Here h is log pi / pi_ref of the chosen sequence minus that
    of the rejected one, each summed over the sequence's trained tokens.

    With label smoothing e (conservative DPO, Mitchell 2023), the loss of a pair is
    -(1 - e) log sigmoid(beta h) - e log sigmoid(-beta h).

    Args:
        log_ratios: [S], log pi - log pi_ref of each sequence; has a gradient.
        packed: batch of pairs; see `margins`.
        beta: strength of the regularization towards the reference, more than 0.
        label_smoothing: e, the assumed fraction of pairs with swapped labels, in [0, 0.5).

    Returns:
        The sum, which must be divided by the number of pairs, and statistics of the implied rewards beta log pi /
        pi_ref: `pair/accuracy`, `pair/margin`, `reward/chosen` and `reward/rejected`.
    """
    implied = beta * margins(log_ratios, packed)
    loss = -(1 - label_smoothing) * F.logsigmoid(implied).sum() - label_smoothing * F.logsigmoid(-implied).sum()
    return loss, _pair_statistics(implied) | _implied_rewards(log_ratios, packed, beta)


def ipo_loss(log_ratios: torch.Tensor, packed: PackedBatch, beta: float) -> tuple[torch.Tensor, Stats]:
    """Return the loss of identity preference optimization (Azar et al., arXiv 2310.12036, eq. 17).

    The loss is the sum over pairs of (h - 1 / (2 beta))^2, with h as in `dpo_loss`. The paper's experiments divide the
    log-ratio of each sequence by its number of tokens, as TRL documents.

    Args:
        log_ratios: [S], log pi - log pi_ref of each sequence, summed or averaged over its tokens; has a gradient.
        packed: batch of pairs; see `margins`.
        beta: tau of the paper, more than 0.

    Returns:
        The same as `dpo_loss`.
    """
    margin = margins(log_ratios, packed)
    loss = (margin - 1 / (2 * beta)).square().sum()
    return loss, _pair_statistics(beta * margin) | _implied_rewards(log_ratios, packed, beta)


def _pair_statistics(margin: torch.Tensor) -> Stats:
    margin = margin.detach()
    correct = (margin > 0).float() + 0.5 * (margin == 0).float()
    return {"pair/accuracy": (correct.sum(), _count(margin)), "pair/margin": (margin.sum(), _count(margin))}


def _implied_rewards(log_ratios: torch.Tensor, packed: PackedBatch, beta: float) -> Stats:
    rewards, preferred = beta * log_ratios.detach(), packed["rewards"] > 0
    return {
        f"reward/{name}": (torch.where(selected, rewards, 0.0).sum(), selected.sum().float())
        for name, selected in (("chosen", preferred), ("rejected", ~preferred))
    }


def _count(values: torch.Tensor) -> torch.Tensor:
    return values.new_full((), float(len(values)))


def clipped_value_loss(
    values: torch.Tensor, old_values: torch.Tensor, returns: torch.Tensor, clip: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return half the squared error of the value, or of the value clipped to old +- clip, whichever is larger.

    This follows PPO's implementation (Huang et al., "The 37 implementation details of PPO", detail 9).

    Args:
        values: [N], values of the current critic; has a gradient.
        old_values: [N], values at the start of the update.
        returns: [N], targets.
        clip: largest distance from the old value; 0 disables clipping.

    Returns:
        Losses, [N], and whether the clipped error was larger, bool [N].
    """
    squared_error = (values - returns).square()
    if not clip:
        return squared_error / 2, torch.zeros_like(squared_error, dtype=torch.bool)
    clipped_values = old_values + (values - old_values).clamp(-clip, clip)
    clipped = (clipped_values - returns).square()
    return torch.maximum(squared_error, clipped) / 2, (clipped > squared_error).detach()


def explained_variance(sums: torch.Tensor) -> float | None:
    """Return 1 - Var(returns - values) / Var(returns) from `variance_sums`, or None if the returns do not vary."""
    count, error, squared_error, _, target, squared_target = sums.tolist()
    if not count:
        return None
    variance = squared_target / count - (target / count) ** 2
    if not variance > 1e-12:
        return None
    return 1 - (squared_error / count - (error / count) ** 2) / variance


def variance_sums(values: torch.Tensor, returns: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return the input of `explained_variance`, float64 [6], ready to be summed over replicas.

    These are the `moments` of `returns - values`, then those of `returns`, over the masked tokens.
    """
    return torch.cat([moments(returns - values, mask), moments(returns, mask)])
