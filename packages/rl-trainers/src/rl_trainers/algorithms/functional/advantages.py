"""Advantages: of whole episodes from their rewards, and of tokens by generalized advantage estimation. Groups are found
by id, never by position."""

from __future__ import annotations

from dataclasses import dataclass

import torch

__all__ = ["EPS", "Groups", "gae", "group_by_id", "moments", "normalize", "reverse_discounted_sum", "whiten"]

EPS = 1e-6
"""Added to every standard deviation that something is divided by."""


@dataclass(slots=True)
class Groups:
    """Numbers, and the statistics of the groups that they are in."""

    index: torch.Tensor
    """int64 [E] group of each number, 0 to G - 1."""
    size: torch.Tensor
    """float [G]."""
    mean: torch.Tensor
    """float [G]."""
    std: torch.Tensor
    """float [G] sample std (ddof 1); 0 of a group of one."""
    flat: torch.Tensor
    """bool [G] groups whose numbers do not differ, or that have one."""


def group_by_id(values: torch.Tensor, group_ids: torch.Tensor | None = None) -> Groups:
    """Statistics of `values`, float32 [E], in the groups of `group_ids`, int64 [E]; without ids all are one group."""
    ids = torch.zeros(len(values), dtype=torch.int64) if group_ids is None else group_ids
    names, index = torch.unique(ids, return_inverse=True)

    def added(entries: torch.Tensor) -> torch.Tensor:
        return torch.zeros(len(names)).index_add(0, index, entries)

    size = added(torch.ones_like(values))
    mean = added(values) / size
    std = (added((values - mean[index]).square()) / (size - 1).clamp(min=1)).sqrt()
    # equal numbers whose mean is not exact in float32 leave a deviation of a few ulp, which the std would blow up
    return Groups(index, size, mean, std, std <= EPS * mean.abs().clamp(min=1))


def normalize(
    values: torch.Tensor, mean: Groups | None, std: Groups | None, leave_one_out: bool = False
) -> torch.Tensor:
    """(value - mean) / (std + 1e-6), where mean and std are each those of the value's group, or are left out.

    With groups of answers to a prompt, and with one group of the whole batch, this is GRPO (arXiv 2402.03300, section
    4.1.2: mean and std of the group), Dr. GRPO (arXiv 2503.20783: the mean alone), LitePPO (arXiv 2508.08221: mean of
    the group, std of the batch) and RLOO (arXiv 2402.14740: the mean of the others).

    Args:
        values: float32 [E].
        mean: groups whose mean is subtracted.
        std: groups by whose std is divided.
        leave_one_out: subtract the mean of the group's *other* numbers.

    Returns:
        [E]; 0 where the numbers of a group whose mean or std is taken do not differ, or there is one.
    """
    result = values
    if mean is not None:
        deviation = values - mean.mean[mean.index]
        if leave_one_out:
            deviation = deviation * (mean.size / (mean.size - 1).clamp(min=1))[mean.index]
        result = torch.where(mean.flat[mean.index], 0.0, deviation)
    if std is not None:
        result = torch.where(std.flat[std.index], 0.0, result / (std.std + EPS)[std.index])
    return result


def moments(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Number, sum and sum of squares of masked values, to be added over replicas; float64 [3]."""
    kept = torch.where(mask, values, 0.0).double()
    return torch.stack([mask.sum().double(), kept.sum(), kept.square().sum()])


def whiten(values: torch.Tensor, mask: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
    """(A - mean) / (std + 1e-6) with the sample std over all masked values: the batch normalisation of REINFORCE++
    (arXiv 2501.03262). Where they are all equal, 0.

    Args:
        values: float32, any shape.
        mask: bool, same shape.
        total: `moments` over all replicas.

    Returns:
        same shape, 0 where not masked.
    """
    count, first, second = total.tolist()
    mean = first / max(count, 1)
    variance = max(second - count * mean**2, 0.0) / max(count - 1, 1)
    if variance**0.5 <= EPS * max(abs(mean), 1):
        return torch.zeros_like(values)
    return torch.where(mask, (values - mean) / (variance**0.5 + EPS), 0.0)


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
    what lies between two of them (tool output, say) takes no time. With `turn`, a run of neighbouring trained tokens is
    one step: its value is that at its first token, its reward the sum over it, and all of its tokens have its advantage
    and its return.

    The value after the last is 0, also where the length limit ended the answer: the reward was given for the answer as
    it stands, and what it would have earned had it gone on is not estimated. There is no bootstrapping.

    Args:
        rewards: float [B, T]; read at trained tokens only.
        values: float [B, T], entry t from the hidden state at t - 1: the value before token t.
        loss_mask: bool [B, T].
        gamma, lam: discount and lambda, 0 to 1.
        unit: `token` or `turn`.

    Returns:
        advantages and returns (advantage + value of the step), float32 [B, T], 0 where not trained.
    """
    begins = loss_mask
    if unit == "turn":
        begins = loss_mask & ~torch.nn.functional.pad(loss_mask, (1, 0))[:, :-1]
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
