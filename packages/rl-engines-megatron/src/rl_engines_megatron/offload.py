"""Tensors that leave their device for the host's memory, and return."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor, UntypedStorage


class OffloadedTensors:
    """What tensors hold lies in host memory, and their storages are empty, until `restore`. Views of the same storage,
    as megatron-core's are of its buffers, stay views of it.

    Args:
        tensors: nobody may look into them meanwhile; one may be given twice, and views of one another.
    """

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self._kept: list[tuple[UntypedStorage, UntypedStorage]] = []
        for storage in (tensor.untyped_storage() for tensor in tensors):
            if storage.nbytes():
                self._kept.append((storage, UntypedStorage(storage.nbytes()).copy_(storage, False)))
                storage.resize_(0)

    def restore(self) -> None:
        """Give the tensors their numbers back, in memory of the device that they had."""
        for storage, host in self._kept:
            storage.resize_(host.nbytes())
            storage.copy_(host, False)
        self._kept = []
