"""Free memory of the device, and the capacity of the KV cache."""

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
_CACHE_FRACTIONS = {"cpu": 0.25, "cuda": 0.5}
"""Fractions of the free memory for keys and values. The rest is for passes and for other processes."""


def free_bytes(device: torch.device) -> int:
    """Return the free bytes of a GPU, or of the machine within the limits of this process's control groups."""
    if device.type == "cuda":
        import torch

        return int(torch.cuda.mem_get_info(device)[0])
    return min([_machine_free_bytes(), *group_bytes(Path("/proc/self/cgroup"), Path("/sys/fs/cgroup"))])


def used_bytes(device: torch.device) -> int:
    """Return the bytes that this process uses: tensors on a GPU, else resident memory.

    Unused GPU cache or heap memory is released first.
    """
    if device.type == "cuda":
        import torch

        torch.cuda.empty_cache()
        return int(torch.cuda.memory_allocated(device))
    with suppress(OSError, AttributeError):  # not glibc
        ctypes.CDLL(None).malloc_trim(0)
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


def _machine_free_bytes() -> int:
    try:
        lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
        return int(lines["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def group_bytes(listing: Path, mount: Path) -> list[int]:
    """Return the bytes that each control group with a limit still allows.

    File pages that can be dropped count as free.

    Args:
        listing: a file such as `/proc/self/cgroup`.
        mount: a directory such as `/sys/fs/cgroup`.
    """
    remaining: list[int] = []
    for group, first_version in control_groups("memory", listing, mount):
        names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        limit, usage, reclaimable = names if first_version else ("memory.max", "memory.current", "inactive_file")
        if (group / limit).exists():
            allowed = (group / limit).read_text().strip()
            stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
            used = int((group / usage).read_text()) - int(stat.get(reclaimable, 0))
            remaining += [] if allowed == "max" else [max(int(allowed) - used, 0)]
    return remaining


def fit_cache(model: SlotModel, cache_gib: float, context_length: int, staged: bool, sharing: int = 1) -> None:
    """Allocate the cache, and limit the model's context length to its capacity.

    Args:
        cache_gib: maximum size of keys and values; 0: a quarter of the free memory, or half of a GPU's.
        context_length: requested context length; 0: the longest that fits.
        staged: whether to leave room for a second set of weights.
        sharing: number of servers that share the memory; each takes an equal part. Memory that the other servers have
            not allocated yet still looks free.

    Raises:
        ModelError: the memory is too small for the request.
    """
    cache, free = model.cache, free_bytes(model.device) // sharing
    weights = (
        sum(parameter.numel() * parameter.element_size() for parameter in model.model.parameters()) if staged else 0
    )
    fraction = _CACHE_FRACTIONS.get(model.device.type, 0.25)
    budget = cache_gib * _GIB or fraction * max(free - weights, 0)
    page = PAGE * cache.token_bytes
    needed = pages_of(context_length or 1) * page
    arithmetic = (
        f"{cache.token_bytes:,} bytes per token; {free / _GIB:.2f} GiB free for each of {sharing} servers, "
        f"of which {weights / _GIB:.2f} GiB for staged weights and at most {budget / _GIB:.2f} GiB for the cache"
    )
    if budget > free - weights or needed > budget:
        raise ModelError(
            f"the cache does not fit: {context_length or PAGE} tokens of context need {needed / _GIB:.2f} GiB; "
            f"{arithmetic}. Lower server.context_length, change server.cache_gib, or free memory."
        )
    cache.allocate(min(int(budget // page), (cache.slots + 1) * pages_of(model.context_length)) * PAGE)
    if cache.tokens < model.context_length:
        logger.warning("the context length is limited to %d tokens: %s", cache.tokens, arithmetic)
        model.context_length = cache.tokens
    logger.info("the cache holds %d tokens in %d slots: %s", cache.tokens, cache.slots, arithmetic)
