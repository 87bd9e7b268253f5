"""Parameters of a transformers model under the names and shapes of its checkpoint on the Hugging Face hub.

transformers stores some parameters differently from checkpoints: all experts share one tensor, and modules have other
names. It converts them when it loads and saves. This module uses the same conversion to find which slice of a parameter
is which checkpoint tensor. Each slice can then be sent, received and summed separately, in place. Third-party servers
load weights under these names.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode


class HubSlice(NamedTuple):
    """Checkpoint tensor as a slice of a model parameter."""

    name: str
    """Name in the checkpoint."""
    shape: tuple[int, ...]
    """Shape in the checkpoint."""
    strides: tuple[int, ...]
    """Strides in elements of the contiguous parameter."""
    offset: int
    """Index of the first element in the contiguous parameter."""

    def slice_of(self, parameter: Tensor) -> Tensor:
        """Return this slice of a whole, contiguous parameter as a view."""
        return parameter.as_strided(self.shape, self.strides, parameter.storage_offset() + self.offset)


def hub_slices(model: Any, parameters: Iterable[tuple[str, Tensor]]) -> dict[str, list[HubSlice]]:
    """Return the checkpoint tensors that each parameter consists of. Most parameters are one tensor, maybe renamed.

    Names come from the checkpoint that the model was loaded from. If it was not loaded, they follow the hub's format. A
    parameter keeps its own name and shape if checkpoint tensors are computed from it instead of being slices of it.

    Args:
        model: a transformers model; any other model keeps its names.
        parameters: parameters with their names in the model.
    """
    from transformers.core_model_loading import revert_weight_conversion

    shapes = {name: tensor.shape for name, tensor in parameters}
    meta_tensors = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
    owners = {tensor.untyped_storage()._cdata: name for name, tensor in meta_tensors.items()}
    slices: dict[str, list[HubSlice]] = {name: [] for name in shapes}
    with _WithoutCopies():
        checkpoint = revert_weight_conversion(model, dict(meta_tensors))
    for name, part in checkpoint.items():
        owner = owners.get(part.untyped_storage()._cdata)
        if owner is not None:
            slices[owner].append(HubSlice(name, tuple(part.shape), part.stride(), int(part.storage_offset())))
    for name, tensor in meta_tensors.items():
        if sum(torch.Size(part.shape).numel() for part in slices[name]) != tensor.numel():
            slices[name] = [HubSlice(name, tuple(tensor.shape), tensor.stride(), 0)]
    return slices


class _WithoutCopies(TorchFunctionMode):
    """Torch function mode in which `contiguous` makes no copy, so that slices stay views of their parameters."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return args[0] if func is Tensor.contiguous else func(*args, **(kwargs or {}))
