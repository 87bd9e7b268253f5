"""Collectives that gradients run through, each with the adjoint that it needs here.

All take the ranks of a replica, which see the same rows and compute the same loss. A loss is therefore counted once per
replica: on each rank only that part of its gradient is followed that belongs to the rank's own tokens.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup


def exchange(x: Tensor, group: ProcessGroup) -> Tensor:
    """All-to-all: row r of [R, ...] goes to rank r, and row r of the result comes from rank r. Its own adjoint."""
    result: Tensor = _Exchange.apply(x, group)
    return result


def gather(part: Tensor, group: ProcessGroup, weight: float = 1.0) -> Tensor:
    """Every rank's [m] end to end, [R * m], the same on all.

    Args:
        weight: of the gradient, which is this rank's part of what arrives, without a sum over ranks.
    """
    result: Tensor = _Gather.apply(part, group, weight)
    return result


def take_part(x: Tensor, group: ProcessGroup) -> Tensor:
    """This rank's R-th part of rows [n, ...] that all ranks hold alike; n is a multiple of R.

    The gradient is made whole from all ranks, and is the mean over them: the parts' gradients are R times too large
    (see `TokenSplit`).
    """
    result: Tensor = _TakePart.apply(x, group)
    return result


def copy_to(x: Tensor, group: ProcessGroup) -> Tensor:
    """The same tensor, which the ranks go on to use for parts of a computation: their gradients are summed."""
    result: Tensor = _CopyTo.apply(x, group)
    return result


def sum_over(x: Tensor, group: ProcessGroup) -> Tensor:
    """The sum of what the ranks hold, which all go on to use alike: the gradient passes. Changes `x` in place."""
    result: Tensor = _SumOver.apply(x, group)
    return result


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return _all_to_all(x, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _all_to_all(grad, ctx.group), None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, group: ProcessGroup, weight: float) -> Tensor:
        ctx.group, ctx.weight = group, weight
        return _all_gather(part, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        mine = _own_part(grad, ctx.group)
        return mine * ctx.weight if ctx.weight != 1.0 else mine, None, None


class _TakePart(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return _own_part(x, group).clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _all_gather(grad, ctx.group).div_(dist.get_world_size(ctx.group)), None


class _CopyTo(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        grad = grad.clone(memory_format=torch.contiguous_format)  # others may hold the same gradient
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class _SumOver(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.mark_dirty(x)
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


def _all_to_all(x: Tensor, group: ProcessGroup) -> Tensor:
    x = x.contiguous()
    out = torch.empty_like(x)
    dist.all_to_all_single(out, x, group=group)
    return out


def _all_gather(part: Tensor, group: ProcessGroup) -> Tensor:
    out = part.new_empty(part.shape[0] * dist.get_world_size(group), *part.shape[1:])
    dist.all_gather_into_tensor(out, part.contiguous(), group=group)
    return out


def _own_part(x: Tensor, group: ProcessGroup) -> Tensor:
    size = x.shape[0] // dist.get_world_size(group)
    return x.narrow(0, dist.get_rank(group) * size, size)
