"""Differentiable collectives, each with the adjoint that this engine needs.

All run over ranks of one replica, which get the same sequences and compute the same loss. The loss counts once per
replica. Therefore each rank backpropagates only the part of the gradient that belongs to its own tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup


def exchange(x: Tensor, group: ProcessGroup) -> Tensor:
    """Run an all-to-all: row r of [R, ...] goes to rank r, and row r of the result is from rank r. Self-adjoint."""
    return _Linear.apply(x, lambda tensor: _all_to_all(tensor, group), lambda grad: _all_to_all(grad, group))


def gather(part: Tensor, group: ProcessGroup, weight: float = 1.0) -> Tensor:
    """Concatenate the tensors [m] of all ranks to [R * m], equal on all ranks.

    The gradient is this rank's part of the incoming gradient, without a sum over ranks.

    Args:
        weight: factor of the gradient.
    """
    return _Linear.apply(part, lambda local: _all_gather(local, group), lambda grad: own_part(grad, group) * weight)


def take_part(x: Tensor, group: ProcessGroup) -> Tensor:
    """Return this rank's chunk [n / R, ...] of a tensor [n, ...] that is equal on all R ranks; n is a multiple of R.

    The gradient is gathered from all ranks and divided by R, because the gradients of the chunks are R times too large
    (see `rl_engines_fsdp.ranks.layout`).
    """
    ranks = dist.get_world_size(group)
    return _Linear.apply(
        x, lambda tensor: own_part(tensor, group).clone(), lambda grad: _all_gather(grad, group).div_(ranks)
    )


def copy_to(x: Tensor, group: ProcessGroup) -> Tensor:
    """Return the same tensor for use in a different part of the computation on each rank; gradients are summed."""

    def summed(grad: Tensor) -> Tensor:
        # clone, because other nodes of the graph may use the same gradient
        return _all_reduce(grad.clone(memory_format=torch.contiguous_format), group)

    return _Linear.apply(x, lambda tensor: tensor.view_as(tensor), summed)


def sum_over(x: Tensor, group: ProcessGroup) -> Tensor:
    """Sum `x` over ranks in place. All ranks use the sum in the same way, so the gradient passes unchanged."""
    return _Linear.apply(x, lambda local: _all_reduce(local, group), lambda grad: grad)


def own_part(x: Tensor, group: ProcessGroup) -> Tensor:
    """Return this rank's chunk [n / R, ...] of a tensor [n, ...], as a view; n is a multiple of R."""
    size = x.shape[0] // dist.get_world_size(group)
    return x.narrow(0, dist.get_rank(group) * size, size)


class _Linear(torch.autograd.Function):
    """Linear map with an explicit adjoint for its gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, run: Callable[[Tensor], Tensor], adjoint: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.adjoint = adjoint
        result = run(x)
        if result is x:
            ctx.mark_dirty(x)
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return ctx.adjoint(grad), None, None


def _all_reduce(x: Tensor, group: ProcessGroup) -> Tensor:
    dist.all_reduce(x, group=group)
    return x


def _all_to_all(x: Tensor, group: ProcessGroup) -> Tensor:
    x = x.contiguous()
    out = torch.empty_like(x)
    dist.all_to_all_single(out, x, group=group)
    return out


def _all_gather(part: Tensor, group: ProcessGroup) -> Tensor:
    out = part.new_empty(part.shape[0] * dist.get_world_size(group), *part.shape[1:])
    dist.all_gather_into_tensor(out, part.contiguous(), group=group)
    return out
