"""Where versions lie for a server that is another program, and how their tensors are read, written and summed.

For files beside this one, which run inside servers; needs Python 3.10, torch, numpy and safetensors, and nothing of
ours but `rl_guard`. `rl_contracts.weights.stored` and `.layout` say how the trainer writes them.
"""

from __future__ import annotations

import base64
import json
import mmap
import os
import shutil
import tempfile
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rl_inference.backends.plugins.rl_guard import RefusedError
else:
    from rl_guard import RefusedError

AREAS = Path("/dev/shm")
STORED = ("shm", "disk")
"""Routes on which a version lies where the server's ranks can open it."""


def make_area(kind: str) -> str:
    """A new directory in the host's memory, where the ranks of a server find what came by broadcast. Removes those of
    processes that died before they could."""
    namespace = Path("/proc/self/ns/pid").stat().st_ino  # containers may share the memory, but not the ids of processes
    common = f"rl-{kind}-{os.getuid()}-{namespace}-"
    for path in AREAS.glob(f"{common}*"):
        owner, began = f"{path.name.removeprefix(common)}-".split("-")[:2]
        if _began(owner) != began:
            shutil.rmtree(path, ignore_errors=True)
    return tempfile.mkdtemp(prefix=f"{common}{os.getpid()}-{_began('self')}-", dir=AREAS)


def _began(process: str) -> str:
    """When a process began, in ticks since the machine did; empty: there is none."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return ""


class Base:
    """A checkpoint's parameters by name, mapped: nothing is copied.

    Raises:
        RefusedError: they cannot be read, or there is none of a name.
    """

    def __init__(self, directory: Path) -> None:
        from safetensors import SafetensorError, safe_open

        self._directory = directory
        try:
            files = [safe_open(str(path), framework="pt") for path in sorted(directory.glob("*.safetensors"))]
        except (OSError, SafetensorError) as error:
            raise RefusedError(f"{directory}: the base weights cannot be read: {error}") from error
        self.files = {name: file for file in files for name in file.keys()}  # noqa: SIM118 - not a mapping

    def __getitem__(self, name: str) -> Any:
        if name not in self.files:
            raise RefusedError(
                f"{self._directory}: expected the base weight {name!r} in its safetensors, found none of that name. "
                "Set publish.adapter=never, so that whole weights are sent."
            )
        return self.files[name].get_tensor(name)


def checkpoint_shapes(directory: Path) -> dict[str, list[int]]:
    """Names and shapes of a directory's safetensors; empty where there are none."""
    found: dict[str, list[int]] = {}
    for path in sorted(directory.glob("*.safetensors")) if directory.is_dir() else ():
        with path.open("rb") as file:
            header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        found |= {name: list(entry["shape"]) for name, entry in header.items() if name != "__metadata__"}
    return {name: shape for name, shape in found.items() if not name.endswith("rotary_emb.inv_freq")}


def checksum(tensor: Any) -> int:
    """`rl_contracts.weights.checksum` of a contiguous tensor in the host's memory; `sum_i (u_i + C) (2 i + 1)` over its
    64-bit words, see there."""
    import numpy
    import torch

    raw = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
    total = 0
    for start in range(0, len(raw), 8 * 2**20):
        piece = raw[start : start + 8 * 2**20]
        words = numpy.frombuffer(piece.tobytes() + bytes(-len(piece) % 8), dtype=numpy.uint64)
        factors = numpy.arange(start // 8, start // 8 + len(words), dtype=numpy.uint64) * numpy.uint64(2)
        mixed = (words ^ (words >> numpy.uint64(31))) + numpy.uint64(0x1E3779B97F4A7C15)
        total += int((mixed * (factors + numpy.uint64(1))).sum(dtype=numpy.uint64))
    return total % 2**64


def places(part: dict[str, Any]) -> tuple[list[tuple[str, int, int]], int]:
    """Name, first byte and bytes of each parameter of a part, each aligned to 64 bytes; and the bytes of the whole."""
    import torch

    placed, end = [], 0
    for spec in part["params"]:
        size = getattr(torch, spec["dtype"]).itemsize * prod(spec["shape"])
        placed.append((spec["name"], end, size))
        end += -(-size // 64) * 64
    return placed, end


def _views(part: dict[str, Any], memory: Any) -> dict[str, Any]:
    """Each parameter's place in a piece of memory, by name."""
    import torch

    placed, _ = places(part)
    raw = torch.frombuffer(memory, dtype=torch.uint8) if len(memory) else torch.empty(0, dtype=torch.uint8)
    return {
        name: raw[start : start + size].view(getattr(torch, spec["dtype"])).view(spec["shape"])
        for spec, (name, start, size) in zip(part["params"], placed, strict=True)
    }


def open_parts(meta: dict[str, Any], area: str | None) -> dict[str, Any]:
    """All parameters of a version by name, as they lie in files; `area` is the directory of what was put there.

    Raises:
        RefusedError: a file is missing or too small.
    """
    found: dict[str, Any] = {}
    if "checkpoint" in meta:
        base = Base(Path(meta["checkpoint"]))
        found = {name: base[name] for name in checkpoint_shapes(Path(meta["checkpoint"]))}
    for index, part in enumerate(meta["parts"]):
        if meta["route"] == "disk":
            found |= _safetensors(part)
            continue
        path = Path(area) / str(index) if area else Path(part["location"])
        _, size = places(part)
        try:
            with path.open("rb") as file:
                if (there := os.fstat(file.fileno()).st_size) < size:
                    raise RefusedError(f"{path}: expected {size} bytes of weights, found {there}.")
                memory = mmap.mmap(file.fileno(), size, access=mmap.ACCESS_COPY) if size else b""
        except OSError as error:
            raise RefusedError(f"{path}: the weights cannot be opened: {error}") from error
        found |= _views(part, memory)
    return found


def _safetensors(part: dict[str, Any]) -> dict[str, Any]:
    import torch
    from safetensors import SafetensorError, safe_open

    path = Path(part["location"]) / "model.safetensors"
    found = {}
    try:
        with safe_open(str(path), framework="pt") as file:
            for spec in part["params"]:
                tensor = file.get_tensor(spec["name"])
                if list(tensor.shape) != list(spec["shape"]) or tensor.dtype != getattr(torch, spec["dtype"]):
                    raise RefusedError(
                        f"{path}: parameter {spec['name']!r}: expected {spec['dtype']} {spec['shape']}, found "
                        f"{tensor.dtype} {list(tensor.shape)}."
                    )
                found[spec["name"]] = tensor
    except (OSError, SafetensorError) as error:
        raise RefusedError(f"{path}: the weights cannot be read: {error}") from error
    return found


def make_files(meta: dict[str, Any], place: str) -> list[dict[str, Any]]:
    """Memory for a version, which other ranks of this server can open; by part, each parameter by name."""
    area, found = Path(place), []
    area.mkdir(mode=0o700, parents=True, exist_ok=True)
    for index, part in enumerate(meta["parts"]):
        _, size = places(part)
        path = area / str(index)
        path.unlink(missing_ok=True)  # whoever still reads the last version keeps it
        with path.open("w+b") as file:
            if size:
                os.posix_fallocate(file.fileno(), 0, size)
            memory = mmap.mmap(file.fileno(), size) if size else b""
        found.append(_views(part, memory))
    return found


# ---- memory of a GPU: `rl_contracts.weights.ipc` is the trainer's end


def open_gpu_memory(location: str) -> Any:
    """The trainer's memory, uint8, by the handle that it told.

    Raises:
        RefusedError: this process does not see that GPU, or the handle cannot be opened.
    """
    import torch

    try:
        value = json.loads(location)
        count = torch.cuda.device_count()
        found = [str(torch.cuda.get_device_properties(index).uuid) for index in range(count)]
        if value["device"] not in found:
            raise RefusedError(
                f"route ipc: expected the trainer's GPU {value['device']}, but this server sees {found or 'none'}. Put "
                "both on one GPU, or use another route."
            )
        handle = [_unpacked(part) for part in value["handle"]]
        storage = torch.UntypedStorage._new_shared_cuda(found.index(value["device"]), *handle)
        memory = torch.empty(0, dtype=torch.uint8, device=storage.device)
        return memory.set_(storage, int(value["offset"]), (int(value["size"]),))  # type: ignore[call-overload]
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise RefusedError(f"route ipc: the trainer's memory cannot be opened: {error!r}") from error


def _unpacked(value: Any) -> Any:
    return base64.b64decode(value["base64"], validate=True) if isinstance(value, dict) else value
