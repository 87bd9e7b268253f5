"""Offload of tensors to host memory."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor, UntypedStorage


class OffloadedTensors:
    """Tensors whose storages are copied to host memory and emptied until `restore`.

    Views of one storage, such as megatron-core's views of its buffers, stay views of it.

    Args:
        tensors: tensors that no code may access before `restore`; duplicates and views of each other are allowed.
    """

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self._storages: list[tuple[UntypedStorage, UntypedStorage]] = []
        for storage in (tensor.untyped_storage() for tensor in tensors):
            if storage.nbytes():
                self._storages.append((storage, UntypedStorage(storage.nbytes()).copy_(storage, False)))
                storage.resize_(0)

    def restore(self) -> None:
        """Copy the values back into memory of the original device."""
        for storage, host in self._storages:
            storage.resize_(host.nbytes())
            storage.copy_(host, False)
        self._storages = []
