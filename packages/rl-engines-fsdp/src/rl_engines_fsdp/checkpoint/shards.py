"""The tensors of a state on disk: of each rank a safetensors file with the pieces that it holds, and where in the whole
tensors they lie. Ranks write without each other, and any number of ranks reads."""

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


def shards_of(state: Mapping[str, Tensor], parallel: ParallelContext) -> dict[str, Shard]:
    """What this rank writes of a state: its part of each sharded tensor, unless another rank has the same one. Of a
    tensor that is several, as 8-bit moments are, each by itself, as `name#codes`, at the place of the whole."""
    result: dict[str, Shard] = {}
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
            parts = _parts(mine.tensor) or {"": mine.tensor}
            result |= {name + part: Shard(tensor, mine.offset, mine.shape) for part, tensor in parts.items()}
    return result


def local_shard(value: Tensor) -> Shard:
    """This rank's piece of a tensor, in its own memory."""
    if not isinstance(value, DTensor):
        return Shard(value, (0,) * value.ndim, tuple(value.shape))
    _, offset = compute_local_shape_and_global_offset(value.shape, value.device_mesh, value.placements)
    return Shard(value.to_local(), tuple(offset), tuple(value.shape))


def _parts(tensor: Tensor) -> dict[str, Tensor]:
    """What a tensor of a class of its own keeps, such as torchao's moments in 8 bits; nothing of a plain one."""
    flatten = getattr(tensor, "__tensor_flatten__", None)
    return {} if flatten is None else {f"#{name}": getattr(tensor, name) for name in flatten()[0]}


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
                f"{directory}: expected a saved state (a directory with rank-<n>.safetensors), found {found}. Give a "
                "directory that was saved with kind 'state', or load it with kind 'hf'."
            )
        self._pieces: dict[str, dict[tuple[int, ...], _Piece]] = {}
        for path in files:
            try:
                file: Any = safe_open(str(path), framework="pt")
                places = json.loads((file.metadata() or {}).get("shards", "null"))
            except (OSError, ValueError, SafetensorError) as error:
                raise ModelError(f"{path}: the saved state cannot be read: {error}") from error
            for written, place in (places or {}).items():
                name, mark, part = written.partition("#")
                offset = tuple(place["offset"])
                piece = _Piece(offset, tuple(place["shape"]))
                piece = self._pieces.setdefault(name, {}).setdefault(offset, piece)
                # what tensor ranks do not split, each of them has written
                piece.parts.setdefault(mark + part, (file, written))

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
            mine, pieces = local_shard(value), self._pieces[name]
            shape = next(iter(pieces.values())).shape
            if shape != mine.shape:
                raise ValueError(f"{name}: expected shape {list(mine.shape)}, found {list(shape)}")
            parts, twin = _parts(mine.tensor), pieces.get(mine.offset)
            if parts and twin is not None and twin.fill(parts):
                continue
            plain = torch.empty(mine.tensor.shape, device=value.device) if parts else mine.tensor
            filled = sum(piece.copy_to(replace(mine, tensor=plain)) for piece in pieces.values())
            if filled != mine.tensor.numel():
                raise ValueError(f"{name}: expected {mine.tensor.numel()} of its numbers, found {filled}")
            if parts:
                mine.tensor.copy_(plain)


@dataclass(frozen=True)
class _Piece:
    """What one rank wrote of a tensor."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]
    parts: dict[str, tuple[Any, str]] = field(default_factory=dict)
    """By what follows the tensor's name, see `shards_of`: the file, and the name in there."""

    def fill(self, parts: Mapping[str, Tensor]) -> bool:
        """Fill the parts of the same piece, each as it was; whether they are those of the same piece."""
        found = {part: file.get_slice(name) for part, (file, name) in self.parts.items()}
        if {k: list(v.shape) for k, v in parts.items()} != {k: v.get_shape() for k, v in found.items()}:
            return False
        for part, tensor in parts.items():
            tensor.copy_(found[part][:])
        return True

    def copy_to(self, mine: Shard) -> int:
        """Copy what this piece and mine have in common, as plain numbers; how many that is.

        Raises:
            ValueError: it is kept in parts of which these numbers cannot be told.
        """
        saved = self._numbers()
        lengths = saved.shape if isinstance(saved, Tensor) else saved.get_shape()
        sides = zip(self.offset, lengths, mine.offset, mine.tensor.shape, strict=True)
        common = [(max(a, c), min(a + n, c + m)) for a, n, c, m in sides]
        if any(low >= high for low, high in common):
            return 0
        there = tuple(slice(low - a, high - a) for (low, high), a in zip(common, self.offset, strict=True))
        here = tuple(slice(low - c, high - c) for (low, high), c in zip(common, mine.offset, strict=True))
        mine.tensor[here].copy_(saved[there])
        return prod(high - low for low, high in common)

    def _numbers(self) -> Any:
        """What can be sliced: of 8-bit moments (arXiv 2110.02861) the entry of the map that each code names, times the
        scale of its block."""
        if set(self.parts) == {""}:
            file, name = self.parts[""]
            return file.get_slice(name) if self.shape else file.get_tensor(name)
        found = {part: file.get_tensor(name) for part, (file, name) in self.parts.items()}
        if set(found) != {"#codes", "#scale", "#qmap"} or found["#codes"].dtype != torch.uint8:
            raise ValueError(f"saved in parts {sorted(found)}, which only the same split into ranks can read")
        codes, scale = found["#codes"], found["#scale"]
        return (found["#qmap"][codes.int()].view(len(scale), -1) * scale[:, None]).view(codes.shape)
