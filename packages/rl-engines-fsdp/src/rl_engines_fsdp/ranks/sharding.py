"""Shard a model over all ranks, copy weights into it, and gather them again one parameter at a time."""

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

    The model may be on the meta device; `fill` then allocates its memory. Parameters stay float32, and gradients are
    reduced in float32; with `bfloat16` the model computes in bfloat16. With `offload` shards and gradients stay in host
    memory.

    Decoder layers are sharded over data and context ranks; `split_matrices` may have split their matrices over tensor
    ranks before. All other parameters (embeddings, final norm, head) are sharded over all ranks. Gradients are averaged
    over the same ranks. Where tensor ranks compute equal gradients, the mean over them has no effect. Where they
    compute parts, the parts are scaled first (see `rl_engines_fsdp.ranks.layout`).
    """
    offload_policy = CPUOffloadPolicy() if offload else OffloadPolicy()
    compute_dtype = getattr(torch, dtype)
    layer_policy = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32)
    # the inputs of the root include temperatures, which must stay float32
    root_policy = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    for layer in decoder_layers(model):
        fully_shard(
            layer,
            mesh=meshes.layers,
            mp_policy=layer_policy,
            reshard_after_forward=reshard_after_forward,
            offload_policy=offload_policy,
        )
    fully_shard(model, mesh=meshes.whole, mp_policy=root_policy, offload_policy=offload_policy)


def sync_gradients(model: nn.Module, now: bool, last: bool) -> None:
    """Set whether the next backward reduces gradients over ranks, and whether it is the last of the step."""
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(now)
        model.set_is_last_backward(last)


def reshard(model: nn.Module) -> None:
    """Free gathered parameters after a forward without backward.

    After such a forward, the root still has gathered parameters instead of the shards that the optimizer updates. So do
    the layers if `reshard_after_forward` is false.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def decoder_layers(model: PackedModel) -> list[nn.Module]:
    """Return the modules that the model class declares as repeated blocks, or else its largest module list."""
    inner: Any = model.model
    class_names = set(inner._no_split_modules or ())
    declared = [module for module in inner.modules() if type(module).__name__ in class_names]
    lists = (module for module in inner.modules() if isinstance(module, nn.ModuleList))
    return declared or list(max(lists, key=lambda modules: sum(1 for _ in modules.parameters()), default=()))


def fill(
    model: nn.Module,
    source: nn.Module | None,
    device: torch.device,
    parallel: ParallelContext,
    offload: bool = False,
) -> None:
    """Allocate a sharded model that is on the meta device, and copy rank 0's weights into it (collective).

    Args:
        source: whole model with the same names on rank 0; None on the other ranks.
        device: device on which the model computes.
        offload: whether to keep the shards in host memory.

    Raises:
        EngineError: see `copy_tensors`.
    """
    shard_device = torch.device("cpu") if offload else device
    fresh: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if isinstance(parameter, nn.Parameter):
                if parameter not in fresh:  # tied parameters stay tied
                    fresh[parameter] = nn.Parameter(
                        torch.empty_like(parameter.data, device=shard_device), parameter.requires_grad
                    )
                module._parameters[name] = fresh[parameter]
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = torch.empty_like(buffer, device=device)
    weights = None if source is None else dict(parameters_and_buffers(source))
    copy_tensors(parameters_and_buffers(model), weights, device, parallel)


def copy_weights(
    model: PackedModel, source: PackedModel | None, device: torch.device, parallel: ParallelContext
) -> None:
    """Copy rank 0's parameters and saved buffers into a model, possibly sharded, one at a time (collective).

    Raises:
        EngineError: see `copy_tensors`.
    """
    weights = None if source is None else dict(source.kept_tensors())
    copy_tensors(model.kept_tensors(), weights, device, parallel)


@torch.no_grad()
def copy_tensors(
    named: Sequence[tuple[str, Tensor]],
    weights: Mapping[str, Tensor] | None,
    device: torch.device,
    parallel: ParallelContext,
) -> None:
    """Copy rank 0's whole tensors into tensors of the same names, possibly sharded, one at a time (collective).

    Args:
        named: parameters, possibly sharded, and buffers, which are whole on every rank.
        weights: whole tensors by name on rank 0; None on the other ranks.

    Raises:
        EngineError: rank 0 failed to copy a tensor; raised on every rank. The weights of the model are then undefined.
    """
    sharded = any(isinstance(tensor, DTensor) for _, tensor in named)
    error: Exception | None = None
    for name, tensor in named:
        value = torch.empty(tensor.shape, dtype=tensor.dtype, device=device) if sharded else tensor
        if weights is not None:
            try:
                value.copy_(weights[name])
            except Exception as failure:  # noqa: BLE001 - other ranks wait in broadcasts; the error is shared after them
                error = error or failure
        if not sharded:
            continue
        dist.broadcast(value, src=0)
        if isinstance(tensor, DTensor):
            value = distribute_tensor(value, tensor.device_mesh, tensor.placements, src_data_rank=None)
        local(tensor).copy_(local(value))
    parallel.agree(error, "copying the weights to all ranks")


def full_parameters(model: PackedModel) -> Iterator[tuple[str, Tensor]]:
    """Yield whole parameters by Hugging Face name, gathered one at a time, with adapters merged (collective)."""
    adapters = model.adapters()
    for name, parameter in model.hugging_face_parameters():
        value = whole(parameter.detach())
        yield name, adapters[name].merged(value) if name in adapters else value


@contextmanager
def rounded(model: nn.Module, dtype: torch.dtype, parallel: ParallelContext) -> Iterator[None]:
    """Round the parameters to `dtype` within the context, without changing their own dtype (collective).

    Raises:
        EngineError: a rank has not enough memory for a copy of its shards; raised on every rank.
    """
    reshard(model)
    with parallel.agree_on_errors("copying the weights before they are rounded"):
        copies = [(shard, shard.clone()) for shard in (local(parameter.detach()) for parameter in model.parameters())]
    try:
        for shard, value in copies:
            shard.copy_(value.to(dtype))
        yield
    finally:
        reshard(model)
        for shard, value in copies:
            shard.copy_(value)


def whole(tensor: Tensor) -> Tensor:
    """Return the whole tensor, gathered if it is sharded (collective)."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def local(tensor: Tensor) -> Tensor:
    """Return this rank's shard of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def mesh_of(tensor: Tensor) -> DeviceMesh | None:
    """Return the mesh over which a tensor is sharded, or None for a plain tensor."""
    return tensor.device_mesh if isinstance(tensor, DTensor) else None


def parameters_and_buffers(model: nn.Module) -> list[tuple[str, Tensor]]:
    """Return all parameters and buffers by name, including buffers that are not saved."""
    return [*model.named_parameters(), *model.named_buffers(remove_duplicate=False)]
