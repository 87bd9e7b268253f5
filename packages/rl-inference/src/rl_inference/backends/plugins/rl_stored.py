"""Weights for vLLM and SGLang servers: files and GPU memory of the trainer, files of a staging area, and checksums.

Other plugins import this module inside the servers. It requires Python 3.10, torch, numpy and safetensors, and
imports only `rl_guard` of this project. The trainer writes its files with `rl_contracts.weights.stored`: safetensors
on the `disk` route, otherwise the layout of `rl_contracts.weights.flat_layout`. Staging areas use that layout, too.
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
    from rl_inference.backends.plugins.rl_guard import RejectedError
else:
    from rl_guard import RejectedError

AREA_ROOT = Path("/dev/shm")
"""Parent directory of all staging areas."""
STORED_ROUTES = ("shm", "disk")
"""Routes whose files the ranks of a server open directly."""


def make_area(kind: str) -> str:
    """Create a staging area: a directory in shared memory from which the ranks of a server load a received version.

    Also removes the staging areas of processes that died.
    """
    namespace = Path("/proc/self/ns/pid").stat().st_ino  # containers may share the memory but not the process ids
    common = f"rl-{kind}-{os.getuid()}-{namespace}-"
    for path in AREA_ROOT.glob(f"{common}*"):
        owner, start_time = f"{path.name.removeprefix(common)}-".split("-")[:2]
        if _start_time(owner) != start_time:
            shutil.rmtree(path, ignore_errors=True)
    return tempfile.mkdtemp(prefix=f"{common}{os.getpid()}-{_start_time('self')}-", dir=AREA_ROOT)


def _start_time(process: str) -> str:
    """Return the start time of a process in clock ticks since boot, or an empty text if there is no such process."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return ""


class BaseWeights:
    """Parameters by name from the safetensors files of a checkpoint. They are memory-mapped: nothing is copied.

    Raises:
        RejectedError: the files cannot be read; or, on access, there is no parameter of that name.
    """

    def __init__(self, directory: Path) -> None:
        from safetensors import SafetensorError, safe_open

        self._directory = directory
        try:
            files = [safe_open(str(path), framework="pt") for path in sorted(directory.glob("*.safetensors"))]
        except (OSError, SafetensorError) as error:
            raise RejectedError(f"{directory}: the base weights cannot be read: {error}") from error
        self.files = {name: file for file in files for name in file.keys()}  # noqa: SIM118 - not a mapping

    def __getitem__(self, name: str) -> Any:
        if name not in self.files:
            raise RejectedError(
                f"{self._directory}: expected the base weight {name!r} in its safetensors, found none of that name. "
                "Set publish.adapter=never to send full weights."
            )
        return self.files[name].get_tensor(name)


def checkpoint_shapes(directory: Path) -> dict[str, list[int]]:
    """Return names and shapes of the parameters in a directory's safetensors files; empty if there are no files."""
    shapes: dict[str, list[int]] = {}
    for path in sorted(directory.glob("*.safetensors")) if directory.is_dir() else ():
        with path.open("rb") as file:
            header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        shapes |= {name: list(entry["shape"]) for name, entry in header.items() if name != "__metadata__"}
    return {name: shape for name, shape in shapes.items() if not name.endswith("rotary_emb.inv_freq")}


def checksum(tensor: Any) -> int:
    """Return the checksum of a contiguous tensor in host memory, as `rl_contracts.weights.checksum` does.

    It is `sum_i (u_i + C) (2 i + 1)` modulo 2^64 over the 64-bit words; `rl_contracts.weights.checksums` defines it.
    """
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


def offsets(part: dict[str, Any]) -> tuple[list[tuple[str, int, int]], int]:
    """Return name, offset and size of each parameter of a part, and the total size, in bytes.

    Each parameter is aligned to 64 bytes.
    """
    import torch

    entries, end = [], 0
    for spec in part["params"]:
        size = getattr(torch, spec["dtype"]).itemsize * prod(spec["shape"])
        entries.append((spec["name"], end, size))
        end += -(-size // 64) * 64
    return entries, end


def _views(part: dict[str, Any], memory: Any) -> dict[str, Any]:
    """Return each parameter as a view of one block of memory, by name."""
    import torch

    entries, _ = offsets(part)
    raw = torch.frombuffer(memory, dtype=torch.uint8) if len(memory) else torch.empty(0, dtype=torch.uint8)
    return {
        name: raw[start : start + size].view(getattr(torch, spec["dtype"])).view(spec["shape"])
        for spec, (name, start, size) in zip(part["params"], entries, strict=True)
    }


def open_parts(meta: dict[str, Any], area: str | None) -> dict[str, Any]:
    """Return all parameters of a version by name, memory-mapped from files.

    Args:
        meta: the update as JSON.
        area: directory of the received files; None to open the trainer's files.

    Raises:
        RejectedError: a file is missing or too small.
    """
    tensors: dict[str, Any] = {}
    if "checkpoint" in meta:
        base = BaseWeights(Path(meta["checkpoint"]))
        tensors = {name: base[name] for name in checkpoint_shapes(Path(meta["checkpoint"]))}
    for index, part in enumerate(meta["parts"]):
        if meta["route"] == "disk":
            tensors |= _read_safetensors(part)
            continue
        path = Path(area) / str(index) if area else Path(part["location"])
        _, size = offsets(part)
        try:
            with path.open("rb") as file:
                if (actual := os.fstat(file.fileno()).st_size) < size:
                    raise RejectedError(f"{path}: expected {size} bytes of weights, found {actual}.")
                memory = mmap.mmap(file.fileno(), size, access=mmap.ACCESS_COPY) if size else b""
        except OSError as error:
            raise RejectedError(f"{path}: the weights cannot be opened: {error}") from error
        tensors |= _views(part, memory)
    return tensors


def _read_safetensors(part: dict[str, Any]) -> dict[str, Any]:
    import torch
    from safetensors import SafetensorError, safe_open

    path = Path(part["location"]) / "model.safetensors"
    tensors = {}
    try:
        with safe_open(str(path), framework="pt") as file:
            for spec in part["params"]:
                tensor = file.get_tensor(spec["name"])
                if list(tensor.shape) != list(spec["shape"]) or tensor.dtype != getattr(torch, spec["dtype"]):
                    raise RejectedError(
                        f"{path}: parameter {spec['name']!r}: expected {spec['dtype']} {spec['shape']}, found "
                        f"{tensor.dtype} {list(tensor.shape)}."
                    )
                tensors[spec["name"]] = tensor
    except (OSError, SafetensorError) as error:
        raise RejectedError(f"{path}: the weights cannot be read: {error}") from error
    return tensors


def make_files(meta: dict[str, Any], area: str) -> list[dict[str, Any]]:
    """Create the files of a version in a staging area, where other ranks of this server can open them.

    Returns:
        for each part, its parameters by name, as views of the file.
    """
    directory, parts = Path(area), []
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    for index, part in enumerate(meta["parts"]):
        _, size = offsets(part)
        path = directory / str(index)
        path.unlink(missing_ok=True)  # a rank that still reads the last version keeps its mapping
        with path.open("w+b") as file:
            if size:
                os.posix_fallocate(file.fileno(), 0, size)
            memory = mmap.mmap(file.fileno(), size) if size else b""
        parts.append(_views(part, memory))
    return parts


# ---- memory of a GPU: `rl_contracts.weights.ipc` is the sending end


def open_gpu_memory(location: str) -> Any:
    """Return the trainer's GPU memory, uint8, opened by the CUDA IPC handle in the location.

    Raises:
        RejectedError: this process does not see that GPU, or the handle cannot be opened.
    """
    import torch

    try:
        value = json.loads(location)
        count = torch.cuda.device_count()
        uuids = [str(torch.cuda.get_device_properties(index).uuid) for index in range(count)]
        if value["device"] not in uuids:
            raise RejectedError(
                f"route ipc: expected the trainer's GPU {value['device']}, but this server sees {uuids or 'none'}. Put "
                "both on one GPU, or use another route."
            )
        handle = [_unpack(part) for part in value["handle"]]
        storage = torch.UntypedStorage._new_shared_cuda(uuids.index(value["device"]), *handle)
        memory = torch.empty(0, dtype=torch.uint8, device=storage.device)
        return memory.set_(storage, int(value["offset"]), (int(value["size"]),))  # type: ignore[call-overload]
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise RejectedError(f"route ipc: the trainer's memory cannot be opened: {error!r}") from error


def _unpack(value: Any) -> Any:
    return base64.b64decode(value["base64"], validate=True) if isinstance(value, dict) else value
