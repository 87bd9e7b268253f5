"""From a model on one host to one that is sharded over all ranks, and back one parameter at a time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from rl_contracts.batch.parallel import ParallelContext
from rl_engines_fsdp.model.packed import PackedModel
from rl_engines_fsdp.ranks.layout import Meshes


def shard(model: PackedModel, meshes: Meshes, dtype: str, reshard_after_forward: bool, offload: bool = False) -> None:
    """Apply `fully_shard` to each decoder layer and to the root, in place.

    The model may be on the meta device; `fill` then gives it memory. Parameters stay float32 and gradients are reduced
    in float32; with `bfloat16` the model computes in it. With `offload` shards and gradients stay in host memory.

    Layers lie over data and context ranks, and their matrices over tensor ranks as well where `split_matrices` did
    that. What is outside of them (embeddings, last norm, head) lies over all ranks. Gradients are averaged over the
    same ranks: where tensor ranks compute the same, that changes nothing, and where each has a part, the part is scaled
    (`TokenSplit`).
    """
    where = CPUOffloadPolicy() if offload else OffloadPolicy()
    compute = getattr(torch, dtype)
    policy = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=torch.float32)
    # the root's inputs hold temperatures, which stay as they are
    root = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=torch.float32, cast_forward_inputs=False)
    for layer in decoder_layers(model):
        fully_shard(
            layer,
            mesh=meshes.layers,
            mp_policy=policy,
            reshard_after_forward=reshard_after_forward,
            offload_policy=where,
        )
    fully_shard(model, mesh=meshes.whole, mp_policy=root, offload_policy=where)


def sync_gradients(model: nn.Module, now: bool, last: bool) -> None:
    """Say whether the next backward reduces gradients over ranks, and whether it is the last of the step."""
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(now)
        model.set_is_last_backward(last)


def reshard(model: nn.Module) -> None:
    """Free gathered parameters after forward passes that no backward follows.

    Until then they stand in the model in place of its sharded ones, which are those that the optimizer knows: those of
    the root always, those of the layers without `reshard_after_forward`.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def decoder_layers(model: PackedModel) -> list[nn.Module]:
    """The modules that the model's family declares as its repeated blocks; else those of its largest list."""
    inner: Any = model.model
    kinds = set(inner._no_split_modules or ())
    declared = [module for module in inner.modules() if type(module).__name__ in kinds]
    lists = (module for module in inner.modules() if isinstance(module, nn.ModuleList))
    return declared or list(max(lists, key=lambda modules: sum(1 for _ in modules.parameters()), default=()))


def fill(
    model: nn.Module,
    source: nn.Module | None,
    device: torch.device,
    parallel: ParallelContext,
    offload: bool = False,
) -> None:
    """Give a sharded model on the meta device its memory and rank 0's weights (collective).

    Args:
        source: the whole model with the same names, on rank 0; None elsewhere.
        device: on which the model computes.
        offload: keep the shards in host memory.

    Raises:
        EngineError: see `copy_tensors`.
    """
    home = torch.device("cpu") if offload else device
    fresh: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if isinstance(parameter, nn.Parameter):
                if parameter not in fresh:  # tied parameters stay one
                    fresh[parameter] = nn.Parameter(
                        torch.empty_like(parameter.data, device=home), parameter.requires_grad
                    )
                module._parameters[name] = fresh[parameter]
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = torch.empty_like(buffer, device=device)
    given = None if source is None else dict(parameters_and_buffers(source))
    copy_tensors(parameters_and_buffers(model), given, device, parallel)


def copy_weights(
    model: PackedModel, source: PackedModel | None, device: torch.device, parallel: ParallelContext
) -> None:
    """Copy rank 0's whole parameters, and the buffers that are kept with them, into a model that may be sharded
    (collective), one at a time.

    Raises:
        EngineError: see `copy_tensors`.
    """
    given = None if source is None else dict(source.kept_tensors())
    copy_tensors(model.kept_tensors(), given, device, parallel)


@torch.no_grad()
def copy_tensors(
    named: Sequence[tuple[str, Tensor]],
    given: Mapping[str, Tensor] | None,
    device: torch.device,
    parallel: ParallelContext,
) -> None:
    """Copy rank 0's whole tensors of the same names into those of a model that may be sharded (collective), one at a
    time.

    Args:
        named: parameters, and buffers, of which every rank has the whole.
        given: on rank 0; None elsewhere.

    Raises:
        EngineError: rank 0 met an error on the way; on every rank, and the model's weights are undefined.
    """
    sharded = any(isinstance(tensor, DTensor) for _, tensor in named)
    error: Exception | None = None
    for name, tensor in named:
        value = torch.empty(tensor.shape, dtype=tensor.dtype, device=device) if sharded else tensor
        if given is not None:
            try:
                value.copy_(given[name])
            except Exception as failure:  # noqa: BLE001 - the others are in the broadcasts, and are told behind them
                error = error or failure
        if not sharded:
            continue
        dist.broadcast(value, src=0)
        if isinstance(tensor, DTensor):
            value = distribute_tensor(value, tensor.device_mesh, tensor.placements, src_data_rank=None)
        local(tensor).copy_(local(value))
    parallel.agree(error, "copying the weights to all ranks")


def full_parameters(model: PackedModel) -> Iterator[tuple[str, Tensor]]:
    """Whole parameters by their Hugging Face names (collective), one gathered at a time; adapters are merged in."""
    adapters = model.adapters()
    for name, parameter in model.hugging_face_parameters():
        value = whole(parameter.detach())
        yield name, adapters[name].merged(value) if name in adapters else value


@contextmanager
def rounded(model: nn.Module, dtype: torch.dtype, parallel: ParallelContext) -> Iterator[None]:
    """For the time of a block, parameters have the values that a cast to `dtype` leaves of them, in their own dtype
    (collective).

    Raises:
        EngineError: on every rank, if one has no memory for a copy of its part.
    """
    reshard(model)
    with parallel.agree_on_errors("keeping the weights while they are rounded"):
        kept = [(part, part.clone()) for part in (local(parameter.detach()) for parameter in model.parameters())]
    try:
        for part, value in kept:
            part.copy_(value.to(dtype))
        yield
    finally:
        reshard(model)
        for part, value in kept:
            part.copy_(value)


def whole(tensor: Tensor) -> Tensor:
    """The whole of a tensor that may be sharded (collective)."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def mesh_of(tensor: Tensor) -> DeviceMesh | None:
    """The ranks over which a tensor is sharded; None for a plain one."""
    return tensor.device_mesh if isinstance(tensor, DTensor) else None


def parameters_and_buffers(model: nn.Module) -> list[tuple[str, Tensor]]:
    """All that a model computes with, by name; buffers that no directory holds too."""
    return [*model.named_parameters(), *model.named_buffers(remove_duplicate=False)]
