"""The `ipc` route: trainer and server share a GPU. The trainer keeps a copy of the parameters in one allocation, and
the server opens it by its CUDA IPC handle. The handle travels as JSON in `meta.location`."""

from __future__ import annotations

import base64
import json
from typing import TYPE_CHECKING, Any

from rl_contracts.errors import WeightUpdateError

if TYPE_CHECKING:
    import torch


def check_device(device: str) -> None:
    """Refuse what has no CUDA IPC.

    Raises:
        WeightUpdateError: the device is not a GPU.
    """
    import torch

    if torch.device(device).type != "cuda" or not torch.cuda.is_available():
        raise WeightUpdateError(
            f"publish.route=ipc: expected trainer and server on one CUDA device, found a model on {device!r}. "
            "Use publish.route=shm."
        )


class IpcMemory:
    """The trainer's end: device memory that another process may open.

    Args:
        size: bytes.
        device: a CUDA device.
    """

    def __init__(self, size: int, device: str) -> None:
        import torch

        self.tensor = torch.empty(max(size, 1), dtype=torch.uint8, device=device)
        uuid = str(torch.cuda.get_device_properties(torch.device(device)).uuid)
        # once: each call would leave another reference counter behind
        _, *handle = self.tensor.untyped_storage()._share_cuda_()
        start = self.tensor.data_ptr() - self.tensor.untyped_storage().data_ptr()
        packed = [_pack(value) for value in handle]
        self.location = json.dumps({"device": uuid, "offset": start, "size": size, "handle": packed})


class IpcReader:
    """The server's end; keeps the last handle open."""

    def __init__(self) -> None:
        self._location = ""
        self._memory: torch.Tensor | None = None

    def open(self, location: str) -> torch.Tensor:
        """The trainer's memory, uint8.

        Raises:
            WeightUpdateError: this process does not see that GPU, or the handle cannot be opened.
        """
        import torch

        if self._memory is not None and location == self._location:
            return self._memory
        self._memory = None
        try:
            value = json.loads(location)
            device = _device_of(str(value["device"]))
            storage = torch.UntypedStorage._new_shared_cuda(device, *(_unpack(part) for part in value["handle"]))
            memory = torch.empty(0, dtype=torch.uint8, device=storage.device)
            memory.set_(storage, int(value["offset"]), (int(value["size"]),))  # type: ignore[call-overload]
        except (KeyError, TypeError, ValueError, RuntimeError) as error:
            raise WeightUpdateError(f"route ipc: the trainer's memory cannot be opened: {error!r}") from error
        self._location, self._memory = location, memory
        return memory


def _device_of(uuid: str) -> int:
    import torch

    found = [str(torch.cuda.get_device_properties(index).uuid) for index in range(torch.cuda.device_count())]
    if uuid not in found:
        raise WeightUpdateError(
            f"route ipc: expected the trainer's GPU {uuid}, but this server sees {found or 'none'}. Put both on one "
            "GPU (allocation `embedded:d1|fsdp:d1`), or use another route."
        )
    return found.index(uuid)


def _pack(value: Any) -> Any:
    return {"base64": base64.b64encode(value).decode()} if isinstance(value, bytes) else value


def _unpack(value: Any) -> Any:
    return base64.b64decode(value["base64"], validate=True) if isinstance(value, dict) else value
