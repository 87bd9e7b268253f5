"""Parameters one after the other in one piece of memory: the form in which they lie in shared memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from rl_contracts.data import ParamSpec
from rl_contracts.errors import WeightUpdateError
from rl_contracts.weights.checksum import copy_with_checksum

if TYPE_CHECKING:
    import torch

ALIGNMENT = 64
"""Bytes at whose multiples a parameter begins."""


def dtype_of(spec: ParamSpec) -> torch.dtype:
    """The served dtype.

    Raises:
        WeightUpdateError: torch has none of that name.
    """
    import torch

    dtype = getattr(torch, spec.dtype, None)
    if not isinstance(dtype, torch.dtype):
        raise WeightUpdateError(f"parameter {spec.name!r}: {spec.dtype!r} is not a torch dtype.")
    return dtype


def size_of(spec: ParamSpec) -> int:
    """Bytes of a parameter."""
    size = dtype_of(spec).itemsize
    for dim in spec.shape:
        size *= dim
    return size


def total_size(specs: tuple[ParamSpec, ...]) -> int:
    """Bytes of the whole."""
    return sum(-(-size_of(spec) // ALIGNMENT) * ALIGNMENT for spec in specs)


def views(memory: torch.Tensor, specs: tuple[ParamSpec, ...]) -> Iterator[tuple[ParamSpec, torch.Tensor]]:
    """Each parameter's place in a piece of memory, uint8 [total_size]."""
    offset = 0
    for spec in specs:
        size = size_of(spec)
        yield spec, memory[offset : offset + size].view(dtype_of(spec)).view(spec.shape)
        offset += -(-size // ALIGNMENT) * ALIGNMENT


def fill(
    memory: torch.Tensor, specs: tuple[ParamSpec, ...], tensors: Iterable[tuple[str, torch.Tensor]]
) -> dict[str, int]:
    """Copy named tensors to their places, cast to the served dtypes.

    Returns:
        the checksum of what lies there, by name.

    Raises:
        WeightUpdateError: names, order or shapes differ from the specs.
    """
    sums: dict[str, int] = {}
    places = views(memory, specs)
    for spec, tensor in checked(specs, tensors):
        sums[spec.name] = copy_with_checksum(next(places)[1], tensor)
    return sums


def checked(
    specs: tuple[ParamSpec, ...], tensors: Iterable[tuple[str, torch.Tensor]]
) -> Iterator[tuple[ParamSpec, torch.Tensor]]:
    """Pair named tensors with their specs.

    Raises:
        WeightUpdateError: names, order or shapes differ from the specs.
    """
    expected = iter(specs)
    for name, tensor in tensors:
        spec = next(expected, None)
        if spec is None or spec.name != name or spec.shape != tuple(tensor.shape):
            wanted = "no more parameters" if spec is None else f"{spec.name} {list(spec.shape)}"
            raise WeightUpdateError(f"writing weights: expected {wanted}, found {name} {list(tensor.shape)}.")
        yield spec, tensor
    missing = next(expected, None)
    if missing is not None:
        raise WeightUpdateError(f"writing weights: parameter {missing.name!r} is in the specs but was not given.")
