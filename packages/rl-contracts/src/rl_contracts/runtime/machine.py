"""Devices, cores and addresses of this machine, and hosts to reach without a proxy."""

from __future__ import annotations

import ipaddress
import os
import re
import socket
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

LOCAL_HOSTS = ("localhost", "127.0.0.1", "::1")
"""Names and addresses under which this machine reaches itself."""


def visible_gpus(environment: Mapping[str, str], devices: Path = Path("/dev")) -> list[str]:
    """Return the names of the CUDA devices that this process may use, as CUDA_VISIBLE_DEVICES spells them.

    This follows CUDA's rules: the entries are numbers, UUIDs of GPUs (`GPU-...`) or UUIDs of MIG instances
    (`MIG-...`), all of the same kind as the first. The first entry that is not a device (`-1`, `NoDevFiles`) ends the
    list. A device that is listed twice makes all devices invisible. If there are device files, a number must be below
    their count. Needs no torch.
    """
    # CUDA numbers the devices from 0, independent of the numbers of their files.
    count = sum(bool(re.fullmatch(r"nvidia\d+", device.name)) for device in devices.glob("nvidia*"))
    value = environment.get("CUDA_VISIBLE_DEVICES")
    if value is None:
        return [str(index) for index in range(count)]
    uuid = re.match(r"GPU-|MIG-", value.strip())
    pattern = re.compile(rf"({uuid[0]}.*)" if uuid else r"\+?(\d+)")
    names: list[str] = []
    for entry in value.split(","):
        match = pattern.match(entry.strip())
        if match is None or (uuid is None and count and int(match[1]) >= count):
            break
        if match[1] in names:
            return []
        names.append(match[1])
    return names


def usable_cores(listing: Path = Path("/proc/self/cgroup"), mount: Path = Path("/sys/fs/cgroup")) -> int:
    """Return the number of cores that this process may use, by its CPU affinity and the quotas of its control groups.

    A fractional quota is rounded down; the result is at least 1.

    Args:
        listing: file in the format of `/proc/self/cgroup`.
        mount: directory laid out like `/sys/fs/cgroup`.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    for group, first_version in control_groups("cpu", listing, mount):
        names = ("cpu.cfs_quota_us", "cpu.cfs_period_us") if first_version else ("cpu.max",)
        with suppress(OSError, ValueError):  # the file does not exist, or the quota is `max`
            quota, period = (int(number) for name in names for number in (group / name).read_text().split())
            cores = min(cores, quota // period) if quota > 0 else cores
    return max(cores, 1)


def control_groups(controller: str, listing: Path, mount: Path) -> Iterator[tuple[Path, bool]]:
    """Yield the directory of each control group of this process, and whether the group is of cgroup version 1.

    Args:
        controller: `cpu` or `memory`.
        listing: file in the format of `/proc/self/cgroup`.
        mount: directory laid out like `/sys/fs/cgroup`.
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


def is_loopback(host: str) -> bool:
    """Return whether a server that listens on `host` can be reached from this machine only."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:  # a host name
        return False


def reachable_host(host: str) -> str:
    """Return the host under which clients reach a server that listens on `host`.

    For a wildcard address (`""`, `0.0.0.0`, `::`) this is the address that other machines see. Without a network it
    is this machine's host name (IPv4) or `::1` (IPv6).
    """
    if host not in ("", "0.0.0.0", "::"):
        return host
    family, remote, fallback = (
        (socket.AF_INET6, "2001:db8::1", "::1") if host == "::" else (socket.AF_INET, "192.0.2.1", socket.gethostname())
    )
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((remote, 9))  # an address reserved for documentation; nothing is sent
            return str(probe.getsockname()[0])
    except OSError:
        return fallback


def bypass_proxies(environment: Mapping[str, str], *hosts: str) -> dict[str, str]:
    """Return values of `no_proxy` and `NO_PROXY` with which HTTP clients reach this machine and `hosts` directly.

    They include the entries of `environment`.
    """
    current = [environment.get(name, "").strip() for name in ("no_proxy", "NO_PROXY")]
    entries = [entry.strip() for text in current for entry in text.split(",")]
    value = "*" if "*" in current else ",".join(filter(None, dict.fromkeys([*entries, *LOCAL_HOSTS, *hosts])))
    return {"no_proxy": value, "NO_PROXY": value}
