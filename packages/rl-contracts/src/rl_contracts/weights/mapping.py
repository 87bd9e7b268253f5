"""Files of a memory file system as tensors, mapped once: the pages of a new mapping cost as much as a copy."""

from __future__ import annotations

import mmap
import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


class Mappings:
    """Files by path, each mapped for as long as the path means the same file of the same size.

    Args:
        write: the tensors write to the files; else what is written to them stays private.
    """

    def __init__(self, write: bool) -> None:
        self._write = write
        self._open: dict[str, tuple[tuple[int, int, int], torch.Tensor]] = {}

    def get(self, path: str, size: int) -> torch.Tensor:
        """The first `size` bytes of a file, uint8 [size]; when writing, the file is made, and cut to that size.

        Raises:
            OSError: it cannot be opened, or has fewer bytes.
        """
        import torch

        flags = os.O_RDWR | os.O_CREAT if self._write else os.O_RDONLY
        descriptor = os.open(path, flags, 0o600)
        try:
            if self._write and os.fstat(descriptor).st_size != size:
                self._open.pop(path, None)
                os.ftruncate(descriptor, size)
            found = os.fstat(descriptor)
            if found.st_size < size:
                raise OSError(f"expected {size} bytes of weights, found {found.st_size}; was another model connected?")
            if not size:
                return torch.empty(0, dtype=torch.uint8)
            identity = (found.st_dev, found.st_ino, size)
            known = self._open.get(path)
            if known is None or known[0] != identity:
                # readers' pages are private and writable, because torch warns about memory that it must not write
                access = mmap.ACCESS_WRITE if self._write else mmap.ACCESS_COPY
                memory = mmap.mmap(descriptor, size, access=access)
                known = self._open[path] = (identity, torch.frombuffer(memory, dtype=torch.uint8))
            return known[1]
        finally:
            os.close(descriptor)
