"""Collectives that gradients run through, each with the adjoint that it needs here.

All take the ranks of a replica, which see the same rows and compute the same loss. A loss is therefore counted once per
replica: on each rank only that part of its gradient is followed that belongs to the rank's own tokens.
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
    """All-to-all: row r of [R, ...] goes to rank r, and row r of the result comes from rank r. Its own adjoint."""
    return _Linear.apply(x, lambda rows: _all_to_all(rows, group), lambda grad: _all_to_all(grad, group))


def gather(part: Tensor, group: ProcessGroup, weight: float = 1.0) -> Tensor:
    """Every rank's [m] end to end, [R * m], the same on all.

    Args:
        weight: of the gradient, which is this rank's part of what arrives, without a sum over ranks.
    """
    return _Linear.apply(part, lambda mine: _all_gather(mine, group), lambda grad: own_part(grad, group) * weight)


def take_part(x: Tensor, group: ProcessGroup) -> Tensor:
    """This rank's R-th part of rows [n, ...] that all ranks hold alike; n is a multiple of R.

    The gradient is made whole from all ranks, and is the mean over them: the parts' gradients are R times too large
    (see `TokenSplit`).
    """
    ranks = dist.get_world_size(group)
    return _Linear.apply(
        x, lambda rows: own_part(rows, group).clone(), lambda grad: _all_gather(grad, group).div_(ranks)
    )


def copy_to(x: Tensor, group: ProcessGroup) -> Tensor:
    """The same tensor, which the ranks go on to use for parts of a computation: their gradients are summed."""

    def summed(grad: Tensor) -> Tensor:
        # a copy, for others may hold the same gradient
        return _all_reduce(grad.clone(memory_format=torch.contiguous_format), group)

    return _Linear.apply(x, lambda same: same.view_as(same), summed)


def sum_over(x: Tensor, group: ProcessGroup) -> Tensor:
    """The sum of what the ranks hold, which all go on to use alike: the gradient passes. Changes `x` in place."""
    return _Linear.apply(x, lambda mine: _all_reduce(mine, group), lambda grad: grad)


def own_part(x: Tensor, group: ProcessGroup) -> Tensor:
    """This rank's R-th part of rows [n, ...], a view; n is a multiple of R."""
    size = x.shape[0] // dist.get_world_size(group)
    return x.narrow(0, dist.get_rank(group) * size, size)


class _Linear(torch.autograd.Function):
    """A linear map, with the map that its gradients take back."""

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
