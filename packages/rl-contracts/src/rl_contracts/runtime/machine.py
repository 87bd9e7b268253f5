"""Devices, cores and addresses of this machine, and hosts without a proxy, for all packages and `rl doctor`."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

LOCAL_HOSTS = ("localhost", "127.0.0.1", "::1")
"""Names and addresses of this machine for itself."""


def visible_gpus(environment: Mapping[str, str], devices: Path = Path("/dev")) -> list[str]:
    """Return the names of the CUDA devices that this process may use, as CUDA_VISIBLE_DEVICES spells them.

    The variable is read as CUDA reads it: up to the first entry that is no device (`-1`, `NoDevFiles`), either numbers,
    or UUIDs of GPUs (`GPU-...`) or MIG instances (`MIG-...`). A device that is listed twice makes all invisible.
    Numbers are compared with the device files where there are any. Needs no torch.
    """
    # CUDA numbers the devices that it finds from 0, whatever the numbers of their files are.
    count = sum(bool(re.fullmatch(r"nvidia\d+", device.name)) for device in devices.glob("nvidia*"))
    chosen = environment.get("CUDA_VISIBLE_DEVICES")
    if chosen is None:
        return [str(index) for index in range(count)]
    uuid = re.match(r"GPU-|MIG-", chosen.strip())
    form = re.compile(rf"({uuid[0]}.*)" if uuid else r"\+?(\d+)")
    names: list[str] = []
    for entry in chosen.split(","):
        match = form.match(entry.strip())
        if match is None or (uuid is None and count and int(match[1]) >= count):
            break
        if match[1] in names:
            return []
        names.append(match[1])
    return names


def usable_cores(listing: Path = Path("/proc/self/cgroup"), mount: Path = Path("/sys/fs/cgroup")) -> int:
    """Return the number of cores that this process may use: of its affinity and of its control groups' quotas.

    A quota that is no whole number of cores is rounded down, and at least 1.

    Args:
        listing: as `/proc/self/cgroup`.
        mount: as `/sys/fs/cgroup`.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    for group, first_version in control_groups("cpu", listing, mount):
        names = ("cpu.cfs_quota_us", "cpu.cfs_period_us") if first_version else ("cpu.max",)
        with suppress(OSError, ValueError):  # no such file, or `max`
            quota, period = (int(each) for name in names for each in (group / name).read_text().split())
            cores = min(cores, quota // period) if quota > 0 else cores
    return max(cores, 1)


def control_groups(controller: str, listing: Path, mount: Path) -> Iterator[tuple[Path, bool]]:
    """Yield the control groups that this process is in, each with whether it is one of version 1.

    Args:
        controller: `cpu` or `memory`.
        listing: as `/proc/self/cgroup`.
        mount: as `/sys/fs/cgroup`.
    """
    for line in listing.read_text().splitlines() if listing.exists() else ():
        _, kinds, path = line.split(":", 2)
        if not kinds or controller in kinds.split(","):
            root = mount / controller if kinds else mount
            inner = root / path.strip("/")
            yield from ((group, bool(kinds)) for group in (inner, *inner.parents) if group.is_relative_to(root))


def url_of(host: str, port: int | None) -> str:
    """Return `http://host:port`, with brackets around an IPv6 address."""
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


def reachable_host(host: str) -> str:
    """Return the host by which a server that listens on `host` is reached.

    Where that is all addresses, it is the one that other machines see; without a network, this machine's own name or
    loopback.
    """
    if host not in ("", "0.0.0.0", "::"):
        return host
    family, other, own = (
        (socket.AF_INET6, "2001:db8::1", "::1") if host == "::" else (socket.AF_INET, "192.0.2.1", socket.gethostname())
    )
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((other, 9))  # an address reserved for documentation; nothing is sent
            return str(probe.getsockname()[0])
    except OSError:
        return own


def bypass_proxies(environment: Mapping[str, str], *hosts: str) -> dict[str, str]:
    """Return `no_proxy` and `NO_PROXY` such that HTTP clients reach this machine and `hosts` without a proxy."""
    given = [environment.get(name, "").strip() for name in ("no_proxy", "NO_PROXY")]
    listed = [entry.strip() for text in given for entry in text.split(",")]
    value = "*" if "*" in given else ",".join(filter(None, dict.fromkeys([*listed, *LOCAL_HOSTS, *hosts])))
    return {"no_proxy": value, "NO_PROXY": value}
