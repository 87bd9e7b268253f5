"""The `shm` and `disk` routes: one side writes named tensors, the other reads them, whenever it likes.

Both keep the versions n and n-1 in alternating places (`slot-0`, `slot-1`), so the last committed version stays
readable while the next one is written and a restarted server can load it.

`shm`: a file in a memory file system with the parameters one after the other, each aligned to 64 bytes, in the order
of `meta.params`.
`disk`: a directory with one safetensors file, written beside and renamed, so that a reader sees all of it or none.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from rl_contracts.data import WeightReceipt, WeightUpdateMeta
from rl_contracts.errors import WeightUpdateError
from rl_contracts.weights.checksum import checksum
from rl_contracts.weights.layout import checked, dtype_of, fill, total_size, views
from rl_contracts.weights.mapping import Mappings

if TYPE_CHECKING:
    import torch

STORED_ROUTES = ("shm", "disk")
"""Routes on which a version lies somewhere for whoever comes to read it."""


def staged_location(directory: str | Path, route: str, version: int) -> str:
    """Where a version lies: a file for `shm`, a directory for `disk`."""
    if route not in STORED_ROUTES:
        raise WeightUpdateError(f"weight route: expected one of {', '.join(STORED_ROUTES)}, found {route!r}.")
    return str(Path(directory) / f"slot-{version % 2}{'.weights' if route == 'shm' else ''}")


def write_weights(
    meta: WeightUpdateMeta, tensors: Iterable[tuple[str, torch.Tensor]], mappings: Mappings | None = None
) -> tuple[WeightUpdateMeta, WeightReceipt]:
    """Put named tensors onto the route, cast to the served dtypes, and take the trainer's receipt from what was
    written.

    Args:
        meta: route, version, location and the parameters' specs.
        tensors: full tensors by name, in the order of `meta.params`; a generator, so that one at a time exists.
        mappings: the writer's own, where it writes more than once.

    Returns:
        `meta` and the receipt.

    Raises:
        WeightUpdateError: names, order or shapes differ from the specs.
    """
    if meta.route == "shm":
        sums = _write_shm(meta, tensors, mappings or Mappings(write=True))
    else:
        sums = _write_disk(meta, tensors)
    return meta, WeightReceipt("trainer", meta.version, sums)


def open_weights(meta: WeightUpdateMeta, mappings: Mappings | None = None) -> Iterator[tuple[str, torch.Tensor]]:
    """Read named tensors from the route, one after the other. Those of `shm` are views of shared memory: copy before
    the next update.

    Args:
        mappings: the reader's own, where it reads more than once.

    Raises:
        WeightUpdateError: the file or directory is missing or too small, or the route keeps nothing.
    """
    if meta.route not in STORED_ROUTES:
        raise WeightUpdateError(
            f"route {meta.route} keeps no version; only those of {', '.join(STORED_ROUTES)} can be read later."
        )
    yield from (_read_shm(meta, mappings or Mappings(write=False)) if meta.route == "shm" else _read_disk(meta))


def _write_shm(
    meta: WeightUpdateMeta, tensors: Iterable[tuple[str, torch.Tensor]], mappings: Mappings
) -> dict[str, int]:
    Path(meta.location).parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    return fill(mappings.get(meta.location, total_size(meta.params)), meta.params, tensors)


def _read_shm(meta: WeightUpdateMeta, mappings: Mappings) -> Iterator[tuple[str, torch.Tensor]]:
    try:
        memory = mappings.get(meta.location, total_size(meta.params))
    except OSError as error:
        raise WeightUpdateError(
            f"{meta.location}: the weights of version {meta.version} cannot be opened: {error}"
        ) from error
    for spec, tensor in views(memory, meta.params):
        yield spec.name, tensor


def _write_disk(meta: WeightUpdateMeta, tensors: Iterable[tuple[str, torch.Tensor]]) -> dict[str, int]:
    import shutil

    from safetensors.torch import save_file

    named = checked(meta.params, tensors)
    cast = {spec.name: tensor.detach().to("cpu", dtype_of(spec)).contiguous() for spec, tensor in named}
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
