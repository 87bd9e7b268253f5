"""The parameters of a transformers model by the names and shapes of its checkpoints on the hub.

transformers holds some parameters otherwise than checkpoints do: experts lie in one tensor, modules have other names.
What it knows of that, it uses to load and save; here the same knowledge says which parts of a parameter are which
tensors of a checkpoint, so that they can be sent, received and summed one by one, in place. Servers other than ours
load such names.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode


class HubSlice(NamedTuple):
    """A tensor of a checkpoint, as a part of a parameter."""

    name: str
    """In the checkpoint."""
    shape: tuple[int, ...]
    """In the checkpoint."""
    strides: tuple[int, ...]
    """In elements of the contiguous parameter."""
    offset: int
    """The same, of its first element."""

    def slice_of(self, parameter: Tensor) -> Tensor:
        """The part of a whole, contiguous parameter; a view."""
        return parameter.as_strided(self.shape, self.strides, parameter.storage_offset() + self.offset)


def hub_slices(model: Any, parameters: Iterable[tuple[str, Tensor]]) -> dict[str, list[HubSlice]]:
    """Of which tensors of its checkpoint each parameter consists; one, of another name or none, for most.

    The checkpoint is the one that the model was loaded from, or, of a model that was not loaded, one as the hub has it.
    A parameter of which a checkpoint has no part, because it is computed from several, keeps its own name and shape.

    Args:
        model: of transformers; any other keeps its names.
        parameters: by their names in the model.
    """
    from transformers.core_model_loading import revert_weight_conversion

    shapes = {name: tensor.shape for name, tensor in parameters}
    bare = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
    owners = {tensor.untyped_storage()._cdata: name for name, tensor in bare.items()}
    found: dict[str, list[HubSlice]] = {name: [] for name in shapes}
    with _WithoutCopies():
        stored = revert_weight_conversion(model, dict(bare))
    for name, part in stored.items():
        owner = owners.get(part.untyped_storage()._cdata)
        if owner is not None:
            found[owner].append(HubSlice(name, tuple(part.shape), part.stride(), int(part.storage_offset())))
    for name, tensor in bare.items():
        if sum(torch.Size(part.shape).numel() for part in found[name]) != tensor.numel():
            found[name] = [HubSlice(name, tuple(tensor.shape), tensor.stride(), 0)]
    return found


class _WithoutCopies(TorchFunctionMode):
    """Parts stay views of what they are parts of."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return args[0] if func is Tensor.contiguous else func(*args, **(kwargs or {}))
