"""The `shm` and `disk` routes: one side writes named tensors, the other reads them.

Both keep the versions n and n-1 in alternating places (`slot-0`, `slot-1`), so the last committed version stays
readable while the next
one is written and a restarted server can load it.

`shm`: a file in a memory file system with the parameters one after the other, each aligned to 64 bytes, in the order
of `meta.params`.
`disk`: a directory with one safetensors file, written beside and renamed, so that a reader sees all of it or none.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from rl_contracts.data import ParamSpec, WeightReceipt, WeightUpdateMeta
from rl_contracts.errors import WeightUpdateError
from rl_contracts.weights.checksum import checksum

if TYPE_CHECKING:
    import torch

ALIGNMENT = 64
ROUTES = ("shm", "disk")


def staged_location(directory: str | Path, route: str, version: int) -> str:
    """Where a version lies: a file for `shm`, a directory for `disk`."""
    if route not in ROUTES:
        raise WeightUpdateError(f"weight route: expected one of {', '.join(ROUTES)}, found {route!r}.")
    return str(Path(directory) / f"slot-{version % 2}{'.weights' if route == 'shm' else ''}")


def write_weights(
    meta: WeightUpdateMeta, tensors: Iterable[tuple[str, torch.Tensor]]
) -> tuple[WeightUpdateMeta, WeightReceipt]:
    """Put named tensors onto the route, cast to the served dtypes, and take the trainer's receipt from what was
    written.

    Args:
        meta: route, version, location and the parameters' specs.
        tensors: full tensors by name, in the order of `meta.params`; a generator, so that one at a time exists.

    Returns:
        `meta` and the receipt.

    Raises:
        WeightUpdateError: names, order or shapes differ from the specs.
    """
    writer = _write_shm if meta.route == "shm" else _write_disk
    return meta, WeightReceipt("trainer", meta.version, writer(meta, _checked(meta.params, tensors)))


def open_weights(meta: WeightUpdateMeta) -> Iterator[tuple[str, torch.Tensor]]:
    """Read named tensors from the route, one after the other. Those of `shm` are views of shared memory: copy before
    the next update.

    Raises:
        WeightUpdateError: the file or directory is missing or too small.
    """
    yield from (_read_shm(meta) if meta.route == "shm" else _read_disk(meta))


def _checked(
    specs: tuple[ParamSpec, ...], tensors: Iterable[tuple[str, torch.Tensor]]
) -> Iterator[tuple[ParamSpec, torch.Tensor]]:
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


def _dtype(spec: ParamSpec) -> torch.dtype:
    import torch

    dtype = getattr(torch, spec.dtype, None)
    if not isinstance(dtype, torch.dtype):
        raise WeightUpdateError(f"parameter {spec.name!r}: {spec.dtype!r} is not a torch dtype.")
    return dtype


def _layout(specs: tuple[ParamSpec, ...]) -> tuple[list[tuple[int, int]], int]:
    """(offset, bytes) of each parameter, and the size of the whole."""
    places, end = [], 0
    for spec in specs:
        size = _dtype(spec).itemsize
        for dim in spec.shape:
            size *= dim
        places.append((end, size))
        end += -(-size // ALIGNMENT) * ALIGNMENT
    return places, end


def _write_shm(meta: WeightUpdateMeta, tensors: Iterator[tuple[ParamSpec, torch.Tensor]]) -> dict[str, int]:
    import torch

    places, total = _layout(meta.params)
    path = Path(meta.location)
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        if os.fstat(descriptor).st_size != total:
            os.ftruncate(descriptor, total)
        memory = mmap.mmap(descriptor, max(total, 1)) if total else None
    finally:
        os.close(descriptor)
    sums: dict[str, int] = {}
    for (spec, tensor), (offset, size) in zip(tensors, places, strict=False):
        if not size or memory is None:
            sums[spec.name] = 0
            continue
        view = torch.frombuffer(memory, dtype=_dtype(spec), count=size // _dtype(spec).itemsize, offset=offset)
        view = view.view(spec.shape).copy_(tensor.detach())
        sums[spec.name] = checksum(view)
    return sums


def _read_shm(meta: WeightUpdateMeta) -> Iterator[tuple[str, torch.Tensor]]:
    import torch

    places, total = _layout(meta.params)
    try:
        with open(meta.location, "rb") as file:
            found = os.fstat(file.fileno()).st_size
            if found < total:
                raise WeightUpdateError(
                    f"{meta.location}: expected {total} bytes of weights, found {found}; was another model connected?"
                )
            # private and writable, because torch warns about buffers it must not write; nobody writes, so nothing is
            # copied
            memory = mmap.mmap(file.fileno(), total, access=mmap.ACCESS_COPY)
    except OSError as error:
        raise WeightUpdateError(
            f"{meta.location}: the weights of version {meta.version} cannot be opened: {error}"
        ) from error
    for spec, (offset, size) in zip(meta.params, places, strict=True):
        dtype = _dtype(spec)
        flat = (
            torch.frombuffer(memory, dtype=dtype, count=size // dtype.itemsize, offset=offset)
            if size
            else torch.empty(0, dtype=dtype)
        )
        yield spec.name, flat.view(spec.shape)


def _write_disk(meta: WeightUpdateMeta, tensors: Iterator[tuple[ParamSpec, torch.Tensor]]) -> dict[str, int]:
    import shutil

    from safetensors.torch import save_file

    cast = {spec.name: tensor.detach().to("cpu", _dtype(spec)).contiguous() for spec, tensor in tensors}
    final = Path(meta.location)
    scratch = final.with_name(f".{final.name}.{os.getpid()}")
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    save_file(cast, str(scratch / "model.safetensors"), metadata={"format": "pt", "version": str(meta.version)})
    if final.exists():
        shutil.rmtree(final)
    scratch.rename(final)
    return {name: checksum(tensor) for name, tensor in cast.items()}


def _read_disk(meta: WeightUpdateMeta) -> Iterator[tuple[str, torch.Tensor]]:
    from safetensors import SafetensorError, safe_open

    path = Path(meta.location) / "model.safetensors"
    try:
        with safe_open(str(path), framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - safe_open is no mapping
                yield name, file.get_tensor(name)
    except (OSError, SafetensorError) as error:
        raise WeightUpdateError(f"{path}: the weights of version {meta.version} cannot be read: {error}") from error
