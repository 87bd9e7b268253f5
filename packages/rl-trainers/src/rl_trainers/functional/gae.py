"""Generalized advantage estimation over the trained tokens of each row."""

from __future__ import annotations

import torch


def gae(
    rewards: torch.Tensor,
    values: torch.Tensor,
    loss_mask: torch.Tensor,
    gamma: float,
    lam: float,
    unit: str = "token",
) -> tuple[torch.Tensor, torch.Tensor]:
    """GAE (arXiv 1506.02438, eqs. 11 to 16) with tokens or turns as time steps.

    delta_k = r_k + gamma V_{k+1} - V_k and A_k = sum_l (gamma lam)^l delta_{k+l}, where k counts *trained* tokens:
    what lies between two of them (tool output, say) takes no time. The value after the last is 0. With `turn`, a run of
    neighbouring trained tokens is one step: its value is that at its first token, its reward the sum over it, and all
    of its tokens have its advantage and its return.

    Args:
        rewards: float [B, T]; read at trained tokens only.
        values: float [B, T], entry t from the hidden state at t - 1: the value before token t.
        loss_mask: bool [B, T].
        gamma, lam: discount and lambda, 0 to 1.
        unit: `token` or `turn`.

    Returns:
        advantages and returns (advantage + value of the step), float32 [B, T], 0 where not trained.
    """
    if unit == "turn":
        begins = loss_mask & ~torch.nn.functional.pad(loss_mask, (1, 0))[:, :-1]
    elif unit == "token":
        begins = loss_mask
    else:
        raise ValueError(f"unknown unit {unit!r}")
    # step k of a row in column k; everything that is not trained goes to a last column that is dropped
    steps = loss_mask.shape[1]
    step = torch.where(loss_mask, begins.cumsum(-1) - 1, steps)
    start = torch.where(begins, step, steps)

    def gathered(entries: torch.Tensor, where: torch.Tensor) -> torch.Tensor:
        out = torch.zeros(len(entries), steps + 1, dtype=torch.float64)
        return out.scatter_add(1, where, entries.double())[:, :steps]

    value = gathered(values, start)
    delta = gathered(rewards, step) - value
    delta[:, :-1] += gamma * value[:, 1:]
    advantage = reverse_discounted_sum(delta, gamma * lam)
    index = step.clamp(max=max(steps - 1, 0))

    def spread(entries: torch.Tensor) -> torch.Tensor:
        return torch.where(loss_mask, entries.gather(1, index).float(), 0.0)

    return spread(advantage), spread(advantage + value)


def reverse_discounted_sum(values: torch.Tensor, factor: float) -> torch.Tensor:
    """sum over l of factor^l values[k + l], [B, K], by doubling: log2(K) vectorised passes instead of K."""
    result, reach, power = values, 1, factor
    while reach < values.shape[1] and power:
        ahead = torch.nn.functional.pad(result[:, reach:], (0, reach))
        result, reach, power = result + power * ahead, 2 * reach, power * power
    return result
