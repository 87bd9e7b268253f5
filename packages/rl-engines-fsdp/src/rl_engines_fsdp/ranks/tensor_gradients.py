"""Gradients of parameters that all tensor ranks hold, and that FSDP does not reduce over them: norms, mostly."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rl_contracts.errors import ModelError
from rl_contracts.parallel import ParallelContext
from rl_engines_fsdp.model.packed_model import PackedModel
from rl_engines_fsdp.ranks.mesh import Meshes
from rl_engines_fsdp.ranks.sharding import local, mesh_of

TOLERANCE = 0.05
"""How far, relative to its norm, a gradient that should be the same on all tensor ranks may be from their mean."""


class TensorGradients:
    """Makes those gradients whole after the backward passes of a step.

    Of parameters that see each rank's heads only, such as norms of queries and keys, the gradients are sums over tensor
    ranks. All others come out the same on every rank. Whether they do is checked in the first step, because a plan that
    forgets one of the first kind would train it wrongly and say nothing.

    Args:
        model: sharded.
        meshes: its layout.
        partial: names of the parameters of the first kind.
    """

    def __init__(self, model: PackedModel, meshes: Meshes, partial: set[str]) -> None:
        self._group: Any = None if meshes.tensor is None else meshes.tensor.get_group()
        self._partial: list[nn.Parameter] = []
        self._alike: dict[str, nn.Parameter] = {}
        for name, parameter in model.own_parameters() if self._group is not None else ():
            if name in partial:
                self._partial.append(parameter)
            elif mesh_of(parameter) == meshes.layers:
                self._alike[name] = parameter
        self._checked = self._group is None

    @torch.no_grad()
    def finish(self, parallel: ParallelContext) -> None:
        """Sum what is partial, in place, and check the rest if that was not done before (collective).

        Raises:
            EngineError: a gradient differs between tensor ranks that should not, on every rank.
        """
        if self._group is None:
            return
        shards = [local(p.grad) for p in self._partial if p.grad is not None]
        for shard, total in zip(shards, _summed(shards, self._group), strict=True):
            shard.copy_(total)
        if not self._checked:
            error = self._difference()
            parallel.agree(error, "the first step with tensor parallelism")
            # all zero, as below a head that starts at zero: nothing is known yet
            nonzero = any(bool(local(p.grad).any()) for p in self._alike.values() if p.grad is not None)
            self._checked = any(parallel.gather_json(nonzero))

    def _difference(self) -> ModelError | None:
        named = {name: local(p.grad) for name, p in self._alike.items() if p.grad is not None}
        ranks = dist.get_world_size(self._group)
        for (name, mine), total in zip(named.items(), _summed(list(named.values()), self._group), strict=True):
            mean = total / ranks
            distance, norm = (mine - mean).norm().item(), mean.norm().item()
            if distance > TOLERANCE * norm:
                return ModelError(
                    f"the gradient of {name} is {distance:.3g} from its mean over tensor ranks, whose norm is "
                    f"{norm:.3g}: the parameter sees part of the heads, and the model's plan in transformers does not "
                    "say so. Use data and context parallelism for this model (d and c)."
                )
        return None


def _summed(shards: list[Tensor], group: Any) -> list[Tensor]:
    """Sums over ranks of tensors that every rank has in the same shapes; new tensors, one exchange."""
    if not shards:
        return []
    flat = torch.cat([shard.flatten() for shard in shards])
    dist.all_reduce(flat, group=group)
    parts = flat.split([shard.numel() for shard in shards])
    return [part.view_as(shard) for part, shard in zip(parts, shards, strict=True)]
