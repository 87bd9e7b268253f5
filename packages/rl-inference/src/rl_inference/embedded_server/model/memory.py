"""How much memory there is, and how many tokens the cache may hold."""

from __future__ import annotations

import ctypes
import os
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from rl_contracts.errors import ModelError
from rl_contracts.runtime.logging import get_logger
from rl_contracts.runtime.machine import control_groups
from rl_inference.embedded_server.model.pages import PAGE, pages_of

if TYPE_CHECKING:
    import torch

    from rl_inference.embedded_server.model.slot_model import SlotModel

logger = get_logger("inference.server.memory")

_GIB = 2**30
_SHARES = {"cpu": 0.25, "cuda": 0.5}
"""Of the free memory, for keys and values; the rest is for passes and for others on the machine."""


def free_bytes(device: torch.device) -> int:
    """What can be had: of a GPU, or of the machine and of the control groups that this process is in."""
    if device.type == "cuda":
        import torch

        return int(torch.cuda.mem_get_info(device)[0])
    return min([_machine(), *group_bytes(Path("/proc/self/cgroup"), Path("/sys/fs/cgroup"))])


def used_bytes(device: torch.device) -> int:
    """What this process has of it: tensors on a GPU, else pages of memory, as far as it can give them back."""
    if device.type == "cuda":
        import torch

        torch.cuda.empty_cache()
        return int(torch.cuda.memory_allocated(device))
    with suppress(OSError, AttributeError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


def _machine() -> int:
    try:
        lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
        return int(lines["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def group_bytes(listing: Path, mount: Path) -> list[int]:
    """What each control group with a limit still allows; file pages that it can drop count as free.

    Args:
        listing: as `/proc/self/cgroup`.
        mount: as `/sys/fs/cgroup`.
    """
    found: list[int] = []
    for group, first_version in control_groups("memory", listing, mount):
        names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        limit, usage, droppable = names if first_version else ("memory.max", "memory.current", "inactive_file")
        if (group / limit).exists():
            allowed = (group / limit).read_text().strip()
            stat = dict(each.split() for each in (group / "memory.stat").read_text().splitlines())
            used = int((group / usage).read_text()) - int(stat.get(droppable, 0))
            found += [] if allowed == "max" else [max(int(allowed) - used, 0)]
    return found


def fit_cache(model: SlotModel, cache_gib: float, context_length: int, staged: bool, sharing: int = 1) -> None:
    """Give the cache its memory, and the model the context that it can serve.

    Args:
        cache_gib: for keys and values at most; 0: a quarter of what is free, half of a GPU's.
        context_length: that was asked for; 0: the longest that fits.
        staged: whether room for a second set of weights is to be left.
        sharing: servers that have the same memory, of which each takes a part: what they promise, they have not touched
            yet, so it still looks free.

    Raises:
        ModelError: too little memory for what was asked for.
    """
    cache, free = model.cache, free_bytes(model.device) // sharing
    weights = sum(each.numel() * each.element_size() for each in model.model.parameters()) if staged else 0
    share = _SHARES.get(model.device.type, 0.25)
    budget = cache_gib * _GIB or share * max(free - weights, 0)
    page = PAGE * cache.token_bytes
    needed = pages_of(context_length or 1) * page
    arithmetic = (
        f"a token takes {cache.token_bytes:,} bytes in the cache; {free / _GIB:.2f} GiB of memory are free for this "
        f"one of {sharing} servers, of which {weights / _GIB:.2f} GiB are left for weights that are staged, and the "
        f"cache may take {budget / _GIB:.2f} GiB"
    )
    if budget > free - weights or needed > budget:
        raise ModelError(
            f"the cache does not fit: {context_length or PAGE} tokens of context need {needed / _GIB:.2f} GiB; "
            f"{arithmetic}. Lower server.context_length, change server.cache_gib, or free memory."
        )
    cache.allocate(min(int(budget // page), (cache.slots + 1) * pages_of(model.context_length)) * PAGE)
    if cache.tokens < model.context_length:
        logger.warning("sequences are at most %d tokens long: %s", cache.tokens, arithmetic)
        model.context_length = cache.tokens
    logger.info("the cache holds %d tokens in %d slots: %s", cache.tokens, cache.slots, arithmetic)
