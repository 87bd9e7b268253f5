"""Join the process group described by torchrun's environment variables, or run as a single process."""

from __future__ import annotations

import errno
import ipaddress
import os
import socket
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from rl_contracts.batch.parallel import ParallelContext
from rl_contracts.errors import ConfigError, EngineError

_users = 0
"""Number of engines in this process that share the default process group."""
_joined_group = False
"""True if this module created the default process group, and so destroys it."""
_store: Any = None
"""Store where the ranks meet, kept while the process lives. A new group can use it after another was destroyed."""
_generation = 0
"""Number of default groups created so far; it separates their keys in the store."""


@dataclass(frozen=True, slots=True)
class RankInfo:
    """Position of this process among all ranks."""

    rank: int = 0
    """Global rank."""
    world_size: int = 1
    """Total number of processes."""
    local_rank: int = 0
    """Rank on this host."""


def read_environment(environment: Mapping[str, str] | None = None) -> RankInfo:
    """Return this process's ranks from torchrun's variables; without WORLD_SIZE there is one process.

    Raises:
        ConfigError: a variable is missing or not a number.
    """
    env = os.environ if environment is None else environment
    if "WORLD_SIZE" not in env:
        return RankInfo()
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    needed = names if env["WORLD_SIZE"] == "1" else (*names, "MASTER_ADDR", "MASTER_PORT")
    missing = [name for name in needed if name not in env]
    if missing:
        raise ConfigError(
            f"environment: WORLD_SIZE is {env['WORLD_SIZE']}, but {', '.join(missing)} is missing. "
            "Start the trainers with torchrun or a launcher, or unset WORLD_SIZE to run one process."
        )
    try:
        return RankInfo(*(int(env[name]) for name in names))
    except ValueError as error:
        raise ConfigError(f"environment: RANK, WORLD_SIZE and LOCAL_RANK must be integers: {error}.") from error


def pick_device(setting: str, local_rank: int) -> torch.device:
    """Return the device of this rank; a CUDA device also becomes the current one.

    Raises:
        ConfigError: CUDA was requested and is not available, or this host has more ranks than CUDA devices.
    """
    available = torch.cuda.is_available()
    if setting == "cpu" or (setting == "auto" and not available):
        return torch.device("cpu")
    device_count = torch.cuda.device_count() if available else 0
    if local_rank >= device_count:
        raise ConfigError(
            f"device: local rank {local_rank} needs a separate CUDA device; this host has {device_count}. "
            "Set device=cpu, or start fewer ranks on this host."
        )
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)


def join(
    info: RankInfo, device: torch.device, timeout_seconds: float, need_group: bool, replica_size: int, undo: ExitStack
) -> ParallelContext:
    """Join the default process group, or create it, and create gloo groups for collectives on host memory.

    Args:
        need_group: create a group even for a single process.
        replica_size: number of consecutive ranks that hold one replica together; divides the world size.
        undo: leaves the groups when it is closed.

    Raises:
        EngineError: the other ranks did not join in time, or a group of another size exists already.
    """
    global _users, _joined_group
    context = ParallelContext(
        rank=info.rank,
        world_size=info.world_size,
        dp_rank=info.rank // replica_size,
        dp_size=info.world_size // replica_size,
        is_dp_leader=info.rank % replica_size == 0,
        device=str(device),
    )
    if info.world_size == 1 and not need_group:
        return context
    timeout = timedelta(seconds=timeout_seconds)
    if not dist.is_initialized():
        _make_default_group(info, device, timeout)
        _joined_group = True
    elif dist.get_world_size() != info.world_size:
        raise EngineError(
            f"process group: expected {info.world_size} ranks, found a group of {dist.get_world_size()} in this "
            "process. Destroy it first, or give the engine the same number of ranks."
        )
    _users += 1
    undo.callback(_leave)
    if info.world_size > 1:
        undo.callback(context.release_groups)
        host_group: Any = dist.new_group(backend="gloo", timeout=timeout)
        undo.callback(dist.destroy_process_group, host_group)
        context.host_group, context.store = host_group, _store
        context.dp_host_group = (
            host_group if replica_size == 1 else _replica_group(context, replica_size, timeout, undo)
        )
    return context


def _leave() -> None:
    """Decrement the number of engines. At 0, destroy the default group if this module created it."""
    global _users, _joined_group
    _users -= 1
    if _users == 0 and _joined_group:
        dist.destroy_process_group()
        _joined_group = False


def _replica_group(context: ParallelContext, replica_size: int, timeout: timedelta, undo: ExitStack) -> Any:
    """Return the gloo group of the ranks with this rank's position in their replica, or None with one replica.

    Collective: all ranks must call it.
    """
    if context.dp_size == 1:
        return None
    groups = [list(range(position, context.world_size, replica_size)) for position in range(replica_size)]
    subgroup, _ = dist.new_subgroups_by_enumeration(groups, timeout=timeout, backend="gloo")
    undo.callback(dist.destroy_process_group, subgroup)
    return subgroup


def _make_default_group(info: RankInfo, device: torch.device, timeout: timedelta) -> None:
    global _generation
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    try:
        store = dist.PrefixStore(f"rl_contracts.models/{_generation}", _open_store(info, timeout))
        dist.init_process_group(backend, store=store, rank=info.rank, world_size=info.world_size, timeout=timeout)
    except (RuntimeError, ValueError) as error:
        address = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        raise EngineError(
            f"rank {info.rank} of {info.world_size} could not join the process group at {address} within "
            f"{timeout.total_seconds():.0f} s: {error}"
        ) from error
    _generation += 1


def _open_store(info: RankInfo, timeout: timedelta) -> Any:
    global _store
    if _store is None and info.world_size == 1:
        _store = dist.HashStore()
    elif _store is None:
        _bind_gloo_to_loopback(os.environ["MASTER_ADDR"])
        _store = _host_store(info, timeout) or _find_store(info, timeout)
    return _store


def _host_store(info: RankInfo, timeout: timedelta) -> Any:
    """Host the store on rank 0, listening only on MASTER_ADDR; torch's own store listens on all addresses.

    Return None on other ranks, under torchrun (which hosts the store itself), and if MASTER_ADDR is not an address of
    this machine.
    """
    if info.rank or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True):
        return None
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    try:
        listener = socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as error:
        if error.errno == errno.EADDRNOTAVAIL:
            return None
        raise RuntimeError(f"cannot listen on this address: {error}") from error
    return dist.TCPStore(
        host, port, info.world_size, True, timeout, wait_for_workers=False, master_listen_fd=listener.detach()
    )


def _find_store(info: RankInfo, timeout: timedelta) -> Any:
    """Return the store that torch finds through the environment variables."""
    from torch.distributed.rendezvous import rendezvous

    store, _, _ = next(iter(rendezvous("env://", info.rank, info.world_size, timeout=timeout)))
    return store


def _bind_gloo_to_loopback(host: str) -> None:
    """Make gloo listen on loopback if MASTER_ADDR is a loopback address, instead of the host name's address."""
    with suppress(OSError, IndexError):
        if ipaddress.ip_address(socket.gethostbyname(host)).is_loopback:
            loopback = [name for _, name in socket.if_nameindex() if name.startswith("lo")]
            os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback[0])
