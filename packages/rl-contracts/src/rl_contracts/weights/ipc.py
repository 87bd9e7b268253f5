"""The `ipc` route, for a trainer and a server that share a GPU.

The trainer keeps a copy of the parameters in one allocation, and the server opens it by its CUDA IPC handle. The
location of a part contains the handle as JSON.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from rl_contracts.data import ParamSpec, WeightPart, WeightUpdateMeta
from rl_contracts.errors import WeightUpdateError
from rl_contracts.weights.flat_layout import fill, offsets, views


class IpcSender:
    """Sending end of the route; see `rl_contracts.weights.WeightSender`.

    Args:
        device: a CUDA device.

    Raises:
        WeightUpdateError: the device is not a GPU.
    """

    location = ""

    def __init__(self, device: str) -> None:
        if torch.device(device).type != "cuda" or not torch.cuda.is_available():
            raise WeightUpdateError(
                f"publish.route=ipc: expected trainer and server on one CUDA device, found a model on {device!r}. "
                "Use publish.route=shm."
            )
        self._device = device
        self._memory: torch.Tensor | None = None

    def begin(self, version: int, specs: tuple[ParamSpec, ...]) -> WeightUpdateMeta:
        size = offsets(specs)[1]
        if self._memory is None or self._memory.numel() < size:
            self._memory = torch.empty(max(size, 1), dtype=torch.uint8, device=self._device)
            self._handle = _handle_of(self._memory)  # only once: each call would leak a reference counter
        self._specs, self._places = specs, views(self._memory, specs)
        return WeightUpdateMeta("ipc", version, (WeightPart(self._handle, specs),))

    def send(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> dict[str, int]:
        sums = fill(self._places, self._specs, tensors)
        torch.cuda.synchronize(self._device)
        return sums

    def cancel(self, reason: str) -> None:
        """Do nothing, because no process waits on this route."""

    def close(self) -> None:
        self._memory, self._places = None, {}


class IpcReader:
    """Receiving end of the route; keeps the last handles open."""

    def __init__(self) -> None:
        self._open: dict[str, torch.Tensor] = {}

    def read(self, meta: WeightUpdateMeta) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the named tensors in the trainer's memory; copy them before the next update.

        Raises:
            WeightUpdateError: this process does not see that GPU, or a handle cannot be opened.
        """
        old, self._open = self._open, {}
        for part in meta.parts:
            self._open[part.location] = old[part.location] if part.location in old else _open(part.location)
            yield from views(self._open[part.location], part.params).items()


def _handle_of(memory: torch.Tensor) -> str:
    uuid = str(torch.cuda.get_device_properties(memory.device).uuid)
    _, *handle = memory.untyped_storage()._share_cuda_()
    start = memory.data_ptr() - memory.untyped_storage().data_ptr()
    packed = [_pack(value) for value in handle]
    return json.dumps({"device": uuid, "offset": start, "size": memory.numel(), "handle": packed})


def _open(location: str) -> torch.Tensor:
    """Return the trainer's memory, uint8."""
    try:
        value = json.loads(location)
        device = _device_of(str(value["device"]))
        storage = torch.UntypedStorage._new_shared_cuda(device, *(_unpack(part) for part in value["handle"]))
        memory = torch.empty(0, dtype=torch.uint8, device=storage.device)
        return memory.set_(storage, int(value["offset"]), (int(value["size"]),))  # type: ignore[call-overload]
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise WeightUpdateError(f"route ipc: the trainer's memory cannot be opened: {error!r}") from error


def _device_of(uuid: str) -> int:
    uuids = [str(torch.cuda.get_device_properties(index).uuid) for index in range(torch.cuda.device_count())]
    if uuid not in uuids:
        raise WeightUpdateError(
            f"route ipc: expected the trainer's GPU {uuid}, but this server sees {uuids or 'none'}. Put both on one "
            "GPU, or use another route."
        )
    return uuids.index(uuid)


def _pack(value: Any) -> Any:
    return {"base64": base64.b64encode(value).decode()} if isinstance(value, bytes) else value


def _unpack(value: Any) -> Any:
    return base64.b64decode(value["base64"], validate=True) if isinstance(value, dict) else value
