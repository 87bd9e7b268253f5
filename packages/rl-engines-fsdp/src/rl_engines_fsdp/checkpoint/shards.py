"""The tensors of a state on disk: of each rank a safetensors file with the pieces that it holds, and where in the whole
tensors they lie. Ranks write without each other, and any number of ranks reads."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from rl_contracts.errors import ModelError
from rl_contracts.parallel import ParallelContext

OWN = "random."
"""How names begin that each rank has for itself; of other whole tensors rank 0 writes its own."""


@dataclass(frozen=True)
class Shard:
    """A piece of a tensor."""

    tensor: Tensor
    """The piece."""
    offset: tuple[int, ...]
    """Where it begins in the whole tensor, in each dimension."""
    shape: tuple[int, ...]
    """Of the whole tensor."""


class HostCopies:
    """Copies in host memory, which the next ones use again: a page of new memory costs more than what is copied to
    it."""

    def __init__(self) -> None:
        self._memory: dict[str, Tensor] = {}

    def of(self, shards: Mapping[str, Shard]) -> dict[str, Shard]:
        """Copy; what was copied before is gone."""
        result = {}
        for name, shard in shards.items():
            value, kept = shard.tensor, self._memory.get(name)
            if kept is None or (kept.shape, kept.dtype) != (value.shape, value.dtype):
                kept = torch.empty(value.shape, dtype=value.dtype, pin_memory=value.is_cuda)
            self._memory[name] = kept.copy_(value, non_blocking=True)
            result[name] = Shard(kept, shard.offset, shard.shape)
        if any(shard.tensor.is_cuda for shard in shards.values()):
            torch.cuda.current_stream().synchronize()
        return result


def is_plain(state: Mapping[str, Tensor]) -> bool:
    """Whether pieces of a state are numbers in memory, and no tensors of a class of their own, such as the 8-bit
    moments of torchao: those only torch's distributed checkpoints know to save."""
    return all(type(local_shard(value).tensor) in (Tensor, torch.nn.Parameter) for value in state.values())


def shards_of(state: Mapping[str, Tensor], parallel: ParallelContext) -> dict[str, Shard]:
    """What this rank writes of a state: its part of each sharded tensor, unless another rank has the same one."""
    result = {}
    for name, value in state.items():
        mine = local_shard(value)
        if isinstance(value, DTensor):
            coordinate: Sequence[int] = value.device_mesh.get_coordinate() or ()
            copies = [
                at for at, placement in zip(coordinate, value.placements, strict=True) if placement.is_replicate()
            ]
            written = not any(copies)
        else:
            written = parallel.is_main or name.startswith(OWN)
        if written and mine.tensor.numel():
            result[name] = mine
    return result


def local_shard(value: Tensor) -> Shard:
    """This rank's piece of a tensor, in its own memory."""
    if not isinstance(value, DTensor):
        return Shard(value, (0,) * value.ndim, tuple(value.shape))
    _, offset = compute_local_shape_and_global_offset(value.shape, value.device_mesh, value.placements)
    return Shard(value.to_local(), tuple(offset), tuple(value.shape))


def write_shards(shards: Mapping[str, Shard], directory: Path, rank: int) -> list[Path]:
    """Write a rank's pieces into a directory; the file that this is."""
    from safetensors.torch import save_file

    directory.mkdir(parents=True, exist_ok=True)
    places = {name: {"offset": shard.offset, "shape": shard.shape} for name, shard in shards.items()}
    file = directory / f"rank-{rank}.safetensors"
    save_file({name: shard.tensor.contiguous() for name, shard in shards.items()}, file, {"shards": json.dumps(places)})
    return [file]


class ShardReader:
    """What the ranks of a saved run have written.

    Raises:
        ModelError: the directory holds no such files, or one cannot be read.
    """

    def __init__(self, directory: Path) -> None:
        from safetensors import SafetensorError, safe_open

        files = sorted(directory.glob("rank-*.safetensors"))
        if not files:
            found = sorted(entry.name for entry in directory.iterdir())[:6] if directory.is_dir() else "nothing"
            raise ModelError(
                f"{directory}: expected a saved state (a directory with rank-<n>.safetensors, or .metadata and "
                f"*.distcp), found {found}. Give a directory that was saved with kind 'state', or load it with kind "
                "'hf'."
            )
        self._pieces: dict[str, dict[tuple[int, ...], tuple[Any, dict[str, list[int]]]]] = {}
        for path in files:
            try:
                file: Any = safe_open(str(path), framework="pt")
                places = json.loads((file.metadata() or {}).get("shards", "null"))
            except (OSError, ValueError, SafetensorError) as error:
                raise ModelError(f"{path}: the saved state cannot be read: {error}") from error
            for name, place in (places or {}).items():
                # what tensor ranks do not split, each of them has written
                self._pieces.setdefault(name, {}).setdefault(tuple(place["offset"]), (file, place))

    @property
    def names(self) -> set[str]:
        """Of all tensors."""
        return set(self._pieces)

    @torch.no_grad()
    def fill(self, state: Mapping[str, Tensor]) -> None:
        """Fill this rank's part of each tensor, in place.

        Raises:
            ValueError: a tensor has another shape, or not all of it was saved.
        """
        for name, value in state.items():
            mine, filled = local_shard(value), 0
            for file, place in self._pieces[name].values():
                if tuple(place["shape"]) != mine.shape:
                    raise ValueError(f"{name}: expected shape {list(mine.shape)}, found {place['shape']}")
                filled += _copy_common(file, name, place["offset"], mine)
            if filled != mine.tensor.numel():
                raise ValueError(f"{name}: expected {mine.tensor.numel()} of its numbers, found {filled}")


def _copy_common(file: Any, name: str, offset: list[int], mine: Shard) -> int:
    """Copy what a saved piece and mine have in common; how many numbers that is."""
    saved = file.get_slice(name)
    sides = zip(offset, saved.get_shape(), mine.offset, mine.tensor.shape, strict=True)
    common = [(max(a, c), min(a + n, c + m)) for a, n, c, m in sides]
    if any(low >= high for low, high in common):
        return 0
    there = tuple(slice(low - a, high - a) for (low, high), a in zip(common, offset, strict=True))
    here = tuple(slice(low - c, high - c) for (low, high), c in zip(common, mine.offset, strict=True))
    mine.tensor[here].copy_(saved[there] if there else file.get_tensor(name))
    return prod(high - low for low, high in common)
