"""Advantages of episodes from their rewards, and of tokens by generalized advantage estimation.

Groups are identified by their ids, never by position.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

__all__ = ["EPS", "Groups", "gae", "group_by_id", "moments", "normalize", "reverse_discounted_sum", "whiten"]

EPS = 1e-6
"""Offset added to every standard deviation used as a divisor."""


@dataclass(slots=True)
class Groups:
    """Assignment of E values to G groups, and the statistics of each group."""

    index: torch.Tensor
    """int64 [E]: group of each value, 0 to G - 1."""
    size: torch.Tensor
    """float [G]: number of values."""
    mean: torch.Tensor
    """float [G]: mean of the values."""
    std: torch.Tensor
    """float [G]: sample standard deviation (ddof 1), 0 for a group of one."""
    is_constant: torch.Tensor
    """bool [G]: whether the values of the group are all equal; also True for a group of one."""


def group_by_id(values: torch.Tensor, group_ids: torch.Tensor | None = None) -> Groups:
    """Return the statistics of `values`, float32 [E], by group.

    Args:
        values: float32 [E].
        group_ids: int64 [E], or None to put all values in one group.
    """
    ids = torch.zeros(len(values), dtype=torch.int64) if group_ids is None else group_ids
    unique_ids, index = torch.unique(ids, return_inverse=True)

    def group_sums(entries: torch.Tensor) -> torch.Tensor:
        return torch.zeros(len(unique_ids)).index_add(0, index, entries)

    size = group_sums(torch.ones_like(values))
    mean = group_sums(values) / size
    std = (group_sums((values - mean[index]).square()) / (size - 1).clamp(min=1)).sqrt()
    # equal values with an inexact float32 mean deviate by a few ulp, which division by their std would amplify
    return Groups(index, size, mean, std, std <= EPS * mean.abs().clamp(min=1))


def normalize(
    values: torch.Tensor, mean: Groups | None, std: Groups | None, leave_one_out: bool = False
) -> torch.Tensor:
    """Return (value - mean) / (std + 1e-6), with mean and std of the value's group, either of which may be omitted.

    The groups of `mean` and `std` can be the completions of one prompt ("group" below) or the whole batch:

    - GRPO (arXiv 2402.03300, section 4.1.2): mean and std of the group.
    - Dr. GRPO (arXiv 2503.20783): mean of the group, no std.
    - LitePPO (arXiv 2508.08221): mean of the group, std of the batch.
    - RLOO (arXiv 2402.14740): mean of the other completions of the group, no std.

    Args:
        values: float32 [E].
        mean: groups whose mean is subtracted, or None.
        std: groups whose std is the divisor, or None.
        leave_one_out: whether to subtract the mean of the *other* values of the group.

    Returns:
        [E]; 0 where all values of a group used for mean or std are equal, or where it has only one value.
    """
    result = values
    if mean is not None:
        deviation = values - mean.mean[mean.index]
        if leave_one_out:
            deviation = deviation * (mean.size / (mean.size - 1).clamp(min=1))[mean.index]
        result = torch.where(mean.is_constant[mean.index], 0.0, deviation)
    if std is not None:
        result = torch.where(std.is_constant[std.index], 0.0, result / (std.std + EPS)[std.index])
    return result


def moments(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return number, sum and sum of squares of the masked values, float64 [3], ready to be summed over replicas."""
    masked = torch.where(mask, values, 0.0).double()
    return torch.stack([mask.sum().double(), masked.sum(), masked.square().sum()])


def whiten(values: torch.Tensor, mask: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
    """Return (A - mean) / (std + 1e-6) with mean and sample std over all masked values.

    This is the batch normalization of REINFORCE++ (arXiv 2501.03262). If all masked values are equal, the result is 0.

    Args:
        values: float32, any shape.
        mask: bool, same shape; True for the values that count.
        total: `moments` summed over all replicas.

    Returns:
        Tensor of the same shape, 0 where `mask` is False.
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
    """Return the advantages and returns of GAE (arXiv 1506.02438, eqs. 11 to 16), with tokens or turns as time steps.

    delta_k = r_k + gamma V_{k+1} - V_k
    A_k = sum_l (gamma lam)^l delta_{k+l}

    Here k counts *trained* tokens, so untrained tokens such as tool output take no time. With `turn`, a run of adjacent
    trained tokens is one step. The step's value is the value at its first token, and its reward is the sum over its
    tokens. All its tokens get its advantage and return.

    The value after the last step is 0, even if the length limit ended the completion. The reward was given for the
    truncated completion, so there is no bootstrapping from the value of a continuation.

    Args:
        rewards: float [B, T]; read at trained tokens only.
        values: float [B, T]; entry t is the value before token t, from the hidden state at t - 1.
        loss_mask: bool [B, T].
        gamma, lam: discount and lambda, 0 to 1.
        unit: `token` or `turn`.

    Returns:
        Advantages and returns (advantage + value of the step), float32 [B, T] each, 0 where not trained.
    """
    starts_step = loss_mask
    if unit == "turn":
        starts_step = loss_mask & ~torch.nn.functional.pad(loss_mask, (1, 0))[:, :-1]
    # column k holds step k of a sequence; untrained tokens go to an extra last column, which is dropped
    steps = loss_mask.shape[1]
    step_of_token = torch.where(loss_mask, starts_step.cumsum(-1) - 1, steps)
    step_if_first = torch.where(starts_step, step_of_token, steps)

    def to_steps(entries: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        out = torch.zeros(len(entries), steps + 1, dtype=torch.float64)
        return out.scatter_add(1, index, entries.double())[:, :steps]

    value = to_steps(values, step_if_first)
    delta = to_steps(rewards, step_of_token) - value
    delta[:, :-1] += gamma * value[:, 1:]
    advantage = reverse_discounted_sum(delta, gamma * lam)
    column = step_of_token.clamp(max=max(steps - 1, 0))

    def to_tokens(entries: torch.Tensor) -> torch.Tensor:
        return torch.where(loss_mask, entries.gather(1, column).float(), 0.0)

    return to_tokens(advantage), to_tokens(advantage + value)


def reverse_discounted_sum(values: torch.Tensor, factor: float) -> torch.Tensor:
    """Return the sum over l of factor^l values[k + l], [B, K], by doubling: log2(K) vectorized passes instead of K."""
    result, reach, power = values, 1, factor
    while reach < values.shape[1] and power:
        ahead = torch.nn.functional.pad(result[:, reach:], (0, reach))
        result, reach, power = result + power * ahead, 2 * reach, power * power
    return result
