"""Layout of parameters in one block of memory, and pairing of a stream of tensors with its specs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from math import prod

import torch

from rl_contracts.data import ParamSpec
from rl_contracts.errors import WeightUpdateError
from rl_contracts.weights.checksums import copy_with_checksum

ALIGNMENT = 64
"""Alignment of each parameter in shared memory, in bytes."""


def dtype_of(spec: ParamSpec) -> torch.dtype:
    """Return the served dtype of a parameter.

    Raises:
        WeightUpdateError: torch has no dtype of that name.
    """
    dtype = getattr(torch, spec.dtype, None)
    if not isinstance(dtype, torch.dtype):
        raise WeightUpdateError(f"parameter {spec.name!r}: {spec.dtype!r} is not a torch dtype.")
    return dtype


def size_of(spec: ParamSpec) -> int:
    """Return the size of a parameter in bytes."""
    return dtype_of(spec).itemsize * prod(spec.shape)


def offsets(specs: Iterable[ParamSpec], alignment: int = ALIGNMENT) -> tuple[dict[str, int], int]:
    """Return the offset of each parameter and the total size, both in bytes."""
    places, end = dict[str, int](), 0
    for spec in specs:
        places[spec.name] = end
        end += -(-size_of(spec) // alignment) * alignment
    return places, end


def views(memory: torch.Tensor, specs: tuple[ParamSpec, ...]) -> dict[str, torch.Tensor]:
    """Return each parameter as a view of one block of memory, uint8 [total size]."""
    places, _ = offsets(specs)
    return {
        spec.name: memory[places[spec.name] :][: size_of(spec)].view(dtype_of(spec)).view(spec.shape) for spec in specs
    }


def fill(
    places: dict[str, torch.Tensor], specs: tuple[ParamSpec, ...], tensors: Iterable[tuple[str, torch.Tensor]]
) -> dict[str, int]:
    """Copy named tensors to their places, casting to the dtypes there.

    Returns:
        the checksum of each parameter at its place, by name.

    Raises:
        WeightUpdateError: names, order or shapes differ from the specs.
    """
    return {spec.name: copy_with_checksum(places[spec.name], tensor) for spec, tensor in check_specs(specs, tensors)}


def check_specs(
    specs: tuple[ParamSpec, ...], tensors: Iterable[tuple[str, torch.Tensor]]
) -> Iterator[tuple[ParamSpec, torch.Tensor]]:
    """Yield the spec and the tensor of each parameter.

    Raises:
        WeightUpdateError: names, order or shapes differ from the specs.
    """
    expected = iter(specs)
    for name, tensor in tensors:
        spec = next(expected, None)
        if spec is None or spec.name != name or spec.shape != tuple(tensor.shape):
            expectation = "no more parameters" if spec is None else f"{spec.name} {list(spec.shape)}"
            raise WeightUpdateError(f"sending weights: expected {expectation}, found {name} {list(tensor.shape)}.")
        yield spec, tensor
    missing = next(expected, None)
    if missing is not None:
        raise WeightUpdateError(f"sending weights: parameter {missing.name!r} is in the specs but was not given.")
