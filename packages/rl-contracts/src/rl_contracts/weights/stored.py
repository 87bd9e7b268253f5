"""The `shm` and `disk` routes: the trainer writes named tensors to files, which other processes read at any time.

Both keep the versions n and n-1 in alternating slots. The last committed version stays readable while the next one is
written, and a restarted server can load it. Space is reserved before anything is written: a sparse file in an in-memory
file system that is too small would end the process with SIGBUS.

`shm`: a file in an in-memory file system with the parameters in the order of the specs, each aligned to 64 bytes. Each
side maps it once, because the pages of a new mapping cost as much as a copy.
`disk`: a directory with one safetensors file. It is written under a temporary name and renamed, so that a reader sees
all of it or nothing.
"""

from __future__ import annotations

import json
import mmap
import os
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch

from rl_contracts.data import STORED_ROUTES, ParamSpec, WeightPart, WeightUpdateMeta
from rl_contracts.errors import WeightUpdateError
from rl_contracts.weights.checksums import checksum
from rl_contracts.weights.committed_record import make_private
from rl_contracts.weights.flat_layout import check_specs, dtype_of, fill, offsets, size_of, views

FILE = "model.safetensors"
"""File name of the weights on the `disk` route."""


class StoredSender:
    """Sending end of the routes; see `rl_contracts.weights.WeightSender`.

    Args:
        route: `shm` or `disk`.
        location: directory of the files.
        rank: this rank of the trainer, which is part of its file names.
    """

    def __init__(self, route: str, location: str, rank: int) -> None:
        self.location = location
        self._route, self._rank = route, rank
        self._mappings = Mappings(write=True)

    def begin(self, version: int, specs: tuple[ParamSpec, ...]) -> WeightUpdateMeta:
        self._final, self._specs = self._slot(version), specs
        if self._route == "shm":
            size = offsets(specs)[1]
            make_private(self._final.parent)
            if not (other := self._slot(version + 1)).exists():
                self._mappings.get(other, size)  # the next version needs this slot: report missing space now
            self._places = views(self._mappings.get(self._final, size), specs)
        else:
            # next to the directory that it will replace, with space reserved for its file
            self._scratch = self._final.with_name(f".{self._final.name}.{os.getpid()}")
            shutil.rmtree(self._scratch, ignore_errors=True)
            self._scratch.mkdir(parents=True)
            with (self._scratch / FILE).open("wb") as file:
                header, _, size = _header(specs)
                _reserve(file.fileno(), self._scratch / FILE, len(header) + size)
        return WeightUpdateMeta(self._route, version, (WeightPart(str(self._final), specs),))

    def send(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> dict[str, int]:
        if self._route == "shm":
            return fill(self._places, self._specs, tensors)
        sums = _write_safetensors(self._scratch / FILE, self._specs, tensors)
        shutil.rmtree(self._final, ignore_errors=True)
        self._scratch.rename(self._final)
        return sums

    def cancel(self, reason: str) -> None:
        """Do nothing, because no process waits on these routes."""

    def close(self) -> None:
        self._mappings, self._places = Mappings(write=True), {}
        if self._route == "shm":
            for version in (0, 1):
                self._slot(version).unlink(missing_ok=True)

    def _slot(self, version: int) -> Path:
        suffix = ".weights" if self._route == "shm" else ""
        return Path(self.location) / f"slot-{version % 2}-rank-{self._rank}{suffix}"


def open_weights(meta: WeightUpdateMeta, mappings: Mappings | None = None) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the named tensors of a version, one at a time.

    Tensors of `shm` are views of shared memory: copy them before the next update.

    Args:
        mappings: mappings of a reader that reads more than once.

    Raises:
        WeightUpdateError: the file or directory is missing or too small, or the route stores nothing.
    """
    if meta.route not in STORED_ROUTES:
        raise WeightUpdateError(
            f"route {meta.route} stores no versions; only versions of {', '.join(STORED_ROUTES)} can be read later."
        )
    for part in meta.parts:
        yield from _read_shm(part, mappings or Mappings(write=False)) if meta.route == "shm" else _read_disk(part)


def check_files(meta: WeightUpdateMeta) -> None:
    """Check that the files of `disk` are complete and have the parameters of the specs, without reading the values.

    Raises:
        WeightUpdateError: a file is missing or incomplete, or has other parameters.
    """
    from safetensors import SafetensorError, safe_open

    for part in meta.parts:
        path = Path(part.location) / FILE
        try:
            with safe_open(str(path), framework="pt") as file:
                shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
        except (OSError, SafetensorError) as error:
            raise WeightUpdateError(f"{path}: the weights cannot be read: {error}") from error
        expected = {spec.name: tuple(spec.shape) for spec in part.params}
        if shapes != expected:
            wrong = sorted(name for name in shapes | expected if shapes.get(name) != expected.get(name))
            raise WeightUpdateError(
                f"{path}: parameter {wrong[0]!r}: expected shape {expected.get(wrong[0])}, "
                f"found {shapes.get(wrong[0])}."
            )


class Mappings:
    """Memory mappings of files by path. A mapping is reused while the path refers to the same file of the same size.

    Args:
        write: whether writes to the tensors reach the files; otherwise they stay private to this process.
    """

    def __init__(self, write: bool) -> None:
        self._write = write
        self._open: dict[str, tuple[tuple[int, int, int], torch.Tensor]] = {}

    def get(self, path: str | Path, size: int) -> torch.Tensor:
        """Return the first `size` bytes of a file, uint8 [size]; if writing, create the file and reserve its space.

        Raises:
            OSError: the file cannot be opened, or has fewer bytes.
            WeightUpdateError: there is not enough space for the file.
        """
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT if self._write else os.O_RDONLY, 0o600)
        try:
            if self._write:
                _reserve(descriptor, path, size)
            status = os.fstat(descriptor)
            if status.st_size < size:
                raise OSError(
                    f"expected {size} bytes of weights, found {status.st_size}; start trainer and server with the "
                    "same model"
                )
            if not size:
                return torch.empty(0, dtype=torch.uint8)
            identity = (status.st_dev, status.st_ino, size)
            mapping = self._open.get(str(path))
            if mapping is None or mapping[0] != identity:
                # readers get private writable pages, because torch warns about read-only memory
                access = mmap.ACCESS_WRITE if self._write else mmap.ACCESS_COPY
                memory = mmap.mmap(descriptor, size, access=access)
                mapping = self._open[str(path)] = (identity, torch.frombuffer(memory, dtype=torch.uint8))
            return mapping[1]
        finally:
            os.close(descriptor)


def _reserve(descriptor: int, path: str | Path, size: int) -> None:
    """Set the size of a file in bytes and allocate all of its space.

    Raises:
        WeightUpdateError: the file system does not have enough space.
    """
    status = os.fstat(descriptor)
    os.ftruncate(descriptor, size)
    if status.st_size != size or status.st_blocks * 512 < size:
        try:
            os.posix_fallocate(descriptor, 0, max(size, 1))
        except OSError as error:
            os.unlink(path)
            free = shutil.disk_usage(Path(path).parent).free
            raise WeightUpdateError(
                f"{path}: expected space for {size / 2**20:.1f} MiB of weights, found {free / 2**20:.1f} MiB: {error}. "
                "The route keeps two versions, on disk temporarily three. Free space, raise the container's "
                "shared memory (docker run --shm-size), or set publish.route=disk or broadcast."
            ) from error


def _read_shm(part: WeightPart, mappings: Mappings) -> Iterator[tuple[str, torch.Tensor]]:
    try:
        memory = mappings.get(part.location, offsets(part.params)[1])
    except OSError as error:
        raise WeightUpdateError(f"{part.location}: the weights cannot be opened: {error}") from error
    yield from views(memory, part.params).items()


def _read_disk(part: WeightPart) -> Iterator[tuple[str, torch.Tensor]]:
    from safetensors import SafetensorError, safe_open

    path = Path(part.location) / FILE
    try:
        with safe_open(str(path), framework="pt") as file:
            for spec in part.params:
                tensor = file.get_tensor(spec.name)
                if (tuple(tensor.shape), tensor.dtype) != (spec.shape, dtype_of(spec)):
                    raise WeightUpdateError(
                        f"{path}: parameter {spec.name!r}: expected {spec.dtype} {list(spec.shape)}, "
                        f"found {tensor.dtype} {list(tensor.shape)}."
                    )
                yield spec.name, tensor
    except (OSError, SafetensorError) as error:
        raise WeightUpdateError(f"{path}: the weights cannot be read: {error}") from error


def _write_safetensors(
    path: Path, specs: tuple[ParamSpec, ...], tensors: Iterable[tuple[str, torch.Tensor]]
) -> dict[str, int]:
    """Write one tensor at a time into an existing file, and return the checksums of the written parameters.

    The file is written and closed instead of mapped, so that other hosts see its contents.
    """
    header, places, _ = _header(specs)
    sums: dict[str, int] = {}
    with path.open("r+b") as file:
        file.write(header)
        for spec, tensor in check_specs(specs, tensors):
            value = tensor.detach().to("cpu", dtype_of(spec)).contiguous()
            file.seek(len(header) + places[spec.name])
            file.write(value.view(-1).view(torch.uint8).numpy())
            sums[spec.name] = checksum(value)
    return sums


def _header(specs: Iterable[ParamSpec]) -> tuple[bytes, dict[str, int], int]:
    """Return a safetensors header for the specs, each parameter's offset after the header, and their total size."""
    from safetensors.torch import _TYPES

    names = {dtype: name for name, dtype in _TYPES.items()}
    # widest dtype first, as safetensors does: there are no gaps, and each parameter is still aligned to its item size
    ordered = sorted(specs, key=lambda spec: -dtype_of(spec).itemsize)
    places, size = offsets(ordered, 1)
    entries = {
        spec.name: {
            "dtype": names[dtype_of(spec)],
            "shape": spec.shape,
            "data_offsets": [places[spec.name], places[spec.name] + size_of(spec)],
        }
        for spec in ordered
    }
    text = json.dumps({"__metadata__": {"format": "pt"}, **entries}).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, places, size
