"""State tensors on disk: one safetensors file per rank, with its shards and their offsets in the whole tensors.

Ranks write independently of each other, and any number of ranks can read.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from rl_contracts.batch.parallel import ParallelContext
from rl_contracts.errors import ModelError

OWN = "random."
"""Prefix of the names of per-rank tensors, which each rank writes. Rank 0 writes all other unsharded tensors."""


@dataclass(frozen=True)
class Shard:
    """Shard of a tensor."""

    tensor: Tensor
    """Data of the shard."""
    offset: tuple[int, ...]
    """Start of the shard in the whole tensor, per dimension."""
    shape: tuple[int, ...]
    """Shape of the whole tensor."""


class HostCopies:
    """Host memory for copies of shards. Each copy reuses it, because allocating memory takes longer than copying."""

    def __init__(self) -> None:
        self._memory: dict[str, Tensor] = {}

    def of(self, shards: Mapping[str, Shard]) -> dict[str, Shard]:
        """Copy shards to host memory, and overwrite the previous copies."""
        result = {}
        for name, shard in shards.items():
            value, buffer = shard.tensor, self._memory.get(name)
            if buffer is None or (buffer.shape, buffer.dtype) != (value.shape, value.dtype):
                buffer = torch.empty(value.shape, dtype=value.dtype, pin_memory=value.is_cuda)
            self._memory[name] = buffer.copy_(value, non_blocking=True)
            result[name] = Shard(buffer, shard.offset, shard.shape)
        if any(shard.tensor.is_cuda for shard in shards.values()):
            torch.cuda.current_stream().synchronize()
        return result


def shards_of(state: Mapping[str, Tensor], parallel: ParallelContext) -> dict[str, Shard]:
    """Return the shards of a state that this rank writes.

    These are its shards of sharded tensors, except copies that another rank writes. Tensors that consist of several
    inner tensors, such as 8-bit moments, are split into them, named for example `name#codes`, at the same offset.
    """
    result: dict[str, Shard] = {}
    for name, value in state.items():
        shard = local_shard(value)
        if isinstance(value, DTensor):
            coordinate: Sequence[int] = value.device_mesh.get_coordinate() or ()
            replica_indices = [
                index for index, placement in zip(coordinate, value.placements, strict=True) if placement.is_replicate()
            ]
            is_written = not any(replica_indices)
        else:
            is_written = parallel.is_main or name.startswith(OWN)
        if is_written and shard.tensor.numel():
            inner_tensors = _inner_tensors(shard.tensor) or {"": shard.tensor}
            result |= {
                name + suffix: Shard(tensor, shard.offset, shard.shape) for suffix, tensor in inner_tensors.items()
            }
    return result


def local_shard(value: Tensor) -> Shard:
    """Return this rank's shard of a tensor, without a copy."""
    if not isinstance(value, DTensor):
        return Shard(value, (0,) * value.ndim, tuple(value.shape))
    _, offset = compute_local_shape_and_global_offset(value.shape, value.device_mesh, value.placements)
    return Shard(value.to_local(), tuple(offset), tuple(value.shape))


def _inner_tensors(tensor: Tensor) -> dict[str, Tensor]:
    """Return the inner tensors of a tensor subclass, such as torchao's 8-bit moments, by suffix; none if plain."""
    flatten = getattr(tensor, "__tensor_flatten__", None)
    return {} if flatten is None else {f"#{name}": getattr(tensor, name) for name in flatten()[0]}


def write_shards(shards: Mapping[str, Shard], directory: Path, rank: int) -> list[Path]:
    """Write the shards of a rank to a file in a directory, and return its path."""
    from safetensors.torch import save_file

    directory.mkdir(parents=True, exist_ok=True)
    locations = {name: {"offset": shard.offset, "shape": shard.shape} for name, shard in shards.items()}
    file = directory / f"rank-{rank}.safetensors"
    save_file(
        {name: shard.tensor.contiguous() for name, shard in shards.items()}, file, {"shards": json.dumps(locations)}
    )
    return [file]


class ShardReader:
    """Reader of the shards that all ranks of a saved run wrote.

    Raises:
        ModelError: the directory has no shard files, or one cannot be read.
    """

    def __init__(self, directory: Path) -> None:
        from safetensors import SafetensorError, safe_open

        files = sorted(directory.glob("rank-*.safetensors"))
        if not files:
            entries = sorted(entry.name for entry in directory.iterdir())[:6] if directory.is_dir() else "nothing"
            raise ModelError(
                f"{directory}: expected a saved state (rank-<n>.safetensors files), found {entries}. Use a directory "
                "saved with kind 'state', or load it with kind 'hf'."
            )
        self._pieces: dict[str, dict[tuple[int, ...], _Piece]] = {}
        for path in files:
            try:
                file: Any = safe_open(str(path), framework="pt")
                locations = json.loads((file.metadata() or {}).get("shards", "null"))
            except (OSError, ValueError, SafetensorError) as error:
                raise ModelError(f"{path}: cannot read the saved state: {error}") from error
            for tensor_name, location in (locations or {}).items():
                name, separator, suffix = tensor_name.partition("#")
                offset = tuple(location["offset"])
                piece = _Piece(offset, tuple(location["shape"]))
                piece = self._pieces.setdefault(name, {}).setdefault(offset, piece)
                # each tensor rank wrote a copy of tensors that are not split over tensor ranks
                piece.sources.setdefault(separator + suffix, (file, tensor_name))

    @property
    def names(self) -> set[str]:
        """Names of all tensors."""
        return set(self._pieces)

    @torch.no_grad()
    def fill(self, state: Mapping[str, Tensor]) -> None:
        """Fill this rank's shard of each tensor in place.

        Raises:
            ValueError: a tensor has another shape, or was not saved completely.
        """
        for name, value in state.items():
            shard, pieces = local_shard(value), self._pieces[name]
            shape = next(iter(pieces.values())).shape
            if shape != shard.shape:
                raise ValueError(f"{name}: expected shape {list(shard.shape)}, found {list(shape)}")
            inner_tensors, same_piece = _inner_tensors(shard.tensor), pieces.get(shard.offset)
            if inner_tensors and same_piece is not None and same_piece.fill(inner_tensors):
                continue
            values = torch.empty(shard.tensor.shape, device=value.device) if inner_tensors else shard.tensor
            num_filled = sum(piece.copy_to(replace(shard, tensor=values)) for piece in pieces.values())
            if num_filled != shard.tensor.numel():
                raise ValueError(f"{name}: expected {shard.tensor.numel()} saved elements, found {num_filled}")
            if inner_tensors:
                shard.tensor.copy_(values)


@dataclass(frozen=True)
class _Piece:
    """Saved shard of a tensor."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]
    sources: dict[str, tuple[Any, str]] = field(default_factory=dict)
    """File, and name in the file, of each inner tensor, by suffix (see `shards_of`)."""

    def fill(self, inner_tensors: Mapping[str, Tensor]) -> bool:
        """Copy the inner tensors unchanged if all shapes match; return whether they did."""
        saved_tensors = {suffix: file.get_slice(name) for suffix, (file, name) in self.sources.items()}
        if {k: list(v.shape) for k, v in inner_tensors.items()} != {k: v.get_shape() for k, v in saved_tensors.items()}:
            return False
        for suffix, tensor in inner_tensors.items():
            tensor.copy_(saved_tensors[suffix][:])
        return True

    def copy_to(self, target: Shard) -> int:
        """Copy the saved elements that lie in a local shard, dequantized, and return how many were copied.

        Raises:
            ValueError: the elements cannot be computed from the saved inner tensors.
        """
        saved = self._numbers()
        lengths = saved.shape if isinstance(saved, Tensor) else saved.get_shape()
        sides = zip(self.offset, lengths, target.offset, target.tensor.shape, strict=True)
        common = [(max(a, c), min(a + n, c + m)) for a, n, c, m in sides]
        if any(low >= high for low, high in common):
            return 0
        source_slices = tuple(slice(low - a, high - a) for (low, high), a in zip(common, self.offset, strict=True))
        target_slices = tuple(slice(low - c, high - c) for (low, high), c in zip(common, target.offset, strict=True))
        target.tensor[target_slices].copy_(saved[source_slices])
        return prod(high - low for low, high in common)

    def _numbers(self) -> Any:
        """Return the saved elements as an object that can be sliced.

        8-bit moments (arXiv:2110.02861) are dequantized: the map entry of each code, times the scale of its block.
        """
        if set(self.sources) == {""}:
            file, name = self.sources[""]
            return file.get_slice(name) if self.shape else file.get_tensor(name)
        inner_tensors = {suffix: file.get_tensor(name) for suffix, (file, name) in self.sources.items()}
        if set(inner_tensors) != {"#codes", "#scale", "#qmap"} or inner_tensors["#codes"].dtype != torch.uint8:
            raise ValueError(
                f"cannot reshard the saved inner tensors {sorted(inner_tensors)}; load them with the same number of "
                "ranks"
            )
        codes, scale = inner_tensors["#codes"], inner_tensors["#scale"]
        return (inner_tensors["#qmap"][codes.int()].view(len(scale), -1) * scale[:, None]).view(codes.shape)
