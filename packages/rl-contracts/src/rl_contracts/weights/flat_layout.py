"""Parameters one after the other in one piece of memory, and the pairing of a stream with its specs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from math import prod

import torch

from rl_contracts.data import ParamSpec
from rl_contracts.errors import WeightUpdateError
from rl_contracts.weights.checksums import copy_with_checksum

ALIGNMENT = 64
"""Bytes at whose multiples a parameter begins in shared memory."""


def dtype_of(spec: ParamSpec) -> torch.dtype:
    """The served dtype.

    Raises:
        WeightUpdateError: torch has none of that name.
    """
    dtype = getattr(torch, spec.dtype, None)
    if not isinstance(dtype, torch.dtype):
        raise WeightUpdateError(f"parameter {spec.name!r}: {spec.dtype!r} is not a torch dtype.")
    return dtype


def size_of(spec: ParamSpec) -> int:
    """Bytes of a parameter."""
    return dtype_of(spec).itemsize * prod(spec.shape)


def offsets(specs: Iterable[ParamSpec], alignment: int = ALIGNMENT) -> tuple[dict[str, int], int]:
    """The byte at which each parameter begins, and the bytes of the whole."""
    places, end = dict[str, int](), 0
    for spec in specs:
        places[spec.name] = end
        end += -(-size_of(spec) // alignment) * alignment
    return places, end


def views(memory: torch.Tensor, specs: tuple[ParamSpec, ...]) -> dict[str, torch.Tensor]:
    """Each parameter's place in a piece of memory, uint8 [bytes of the whole]."""
    places, _ = offsets(specs)
    return {
        spec.name: memory[places[spec.name] :][: size_of(spec)].view(dtype_of(spec)).view(spec.shape) for spec in specs
    }


def fill(
    places: dict[str, torch.Tensor], specs: tuple[ParamSpec, ...], tensors: Iterable[tuple[str, torch.Tensor]]
) -> dict[str, int]:
    """Copy named tensors to their places, cast to the dtypes that these have.

    Returns:
        the checksum of what lies there, by name.

    Raises:
        WeightUpdateError: names, order or shapes differ from the specs.
    """
    return {spec.name: copy_with_checksum(places[spec.name], tensor) for spec, tensor in check_specs(specs, tensors)}


def check_specs(
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
            raise WeightUpdateError(f"sending weights: expected {wanted}, found {name} {list(tensor.shape)}.")
        yield spec, tensor
    missing = next(expected, None)
    if missing is not None:
        raise WeightUpdateError(f"sending weights: parameter {missing.name!r} is in the specs but was not given.")
