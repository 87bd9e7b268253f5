"""What makes a trainer process repeat itself to the last bit."""

from __future__ import annotations

import os
from collections.abc import Callable

import torch

from rl_contracts.logging import get_logger

log = get_logger("engines.fsdp")


def make_deterministic() -> Callable[[], None]:
    """Let torch use one thread and algorithms of a fixed order only, in this whole process.

    A sum that several threads make depends on how many there are; with one, machines of another size agree too.

    Returns:
        a function that undoes it.
    """
    threads, before = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # torch asks for it where there is a GPU
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)

    def undo() -> None:
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(before)

    return undo
