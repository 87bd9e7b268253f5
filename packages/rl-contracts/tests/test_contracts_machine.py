"""GPUs, cores and addresses of this machine, and hosts to reach without a proxy."""

from __future__ import annotations

import os
import socket
import urllib.request
from pathlib import Path

import pytest

from rl_contracts.runtime.machine import bypass_proxies, reachable_host, url_of, usable_cores, visible_gpus
from rl_contracts.scheduler import Worker


@pytest.mark.parametrize(
    ("value", "names"),
    [
        (" 1 , 0", ["1", "0"]),
        ("", []),
        ("0,-1,1", ["0"]),
        ("0,2,1", ["0"]),
        ("0,1,0", []),
        ("1gpu,0", ["1", "0"]),
        ("GPU-ab,1", ["GPU-ab"]),
        ("GPU-ab,GPU-ab", []),
        ("0,GPU-ab", ["0"]),
        ("MIG-ab,MIG-cd", ["MIG-ab", "MIG-cd"]),
    ],
)
def test_visible_gpus_follow_rules_of_cuda(value: str, names: list[str], tmp_path: Path) -> None:
    for name in ("nvidia2", "nvidia7", "nvidiactl", "nvidia-uvm", "null"):
        (tmp_path / name).touch()
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": value}, tmp_path) == names


def test_visible_gpus_without_variable_are_numbered_from_0(tmp_path: Path) -> None:
    for name in ("nvidia2", "nvidia7", "nvidiactl"):
        (tmp_path / name).touch()
    assert visible_gpus({}, tmp_path) == ["0", "1"]


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({"pod/a/cpu.max": "350000 100000", "pod/cpu.max": "max 100000"}, 3),
        ({"pod/a/cpu.max": "max 100000", "cpu.max": "200000 100000"}, 2),
        ({"pod/a/cpu.max": "50000 100000"}, 1),
        ({"cpu/job/cpu.cfs_quota_us": "400000", "cpu/job/cpu.cfs_period_us": "100000"}, 4),
        ({"cpu/job/cpu.cfs_quota_us": "-1", "cpu/job/cpu.cfs_period_us": "100000"}, 8),
    ],
)
def test_usable_cores_are_limited_by_quota_of_each_group(
    files: dict[str, str], cores: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    (tmp_path / "listing").write_text("4:cpu,cpuacct:/job\n3:memory:/job\n0::/pod/a\n")
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"{text}\n")
    assert usable_cores(tmp_path / "listing", tmp_path) == cores


def test_usable_cores_without_groups_follow_affinity(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {3})
    assert usable_cores(tmp_path / "none") == 1


def test_worker_address_of_ipv6_host_has_brackets(tmp_path: Path) -> None:
    assert Worker("rollout", 0, "::1", 41043, tmp_path).address == url_of("::1", 41043) == "http://[::1]:41043"
    assert url_of("127.0.0.1", 80) == "http://127.0.0.1:80"


def test_reachable_host_of_wildcard_keeps_address_family() -> None:
    assert reachable_host("10.1.2.3") == "10.1.2.3"
    assert ":" in reachable_host("::")
    assert ":" not in reachable_host("0.0.0.0")


def test_reachable_host_without_network_is_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(*_: object) -> None:
        raise OSError

    monkeypatch.setattr(socket, "socket", unreachable)
    assert reachable_host("::") == "::1"
    assert reachable_host("") == socket.gethostname()


def test_bypass_proxies_keeps_existing_entries(monkeypatch: pytest.MonkeyPatch) -> None:
    environment = {"no_proxy": "a.example, b.example", "NO_PROXY": "c.example"}
    value = "a.example,b.example,c.example,localhost,127.0.0.1,::1,10.1.2.3"
    assert bypass_proxies(environment, "10.1.2.3") == {"no_proxy": value, "NO_PROXY": value}
    assert bypass_proxies({"NO_PROXY": "*"}, "10.1.2.3") == {"no_proxy": "*", "NO_PROXY": "*"}
    for name, hosts in bypass_proxies({}).items():
        monkeypatch.setenv(name, hosts)
    assert urllib.request.proxy_bypass("127.0.0.1:8000")
    assert not urllib.request.proxy_bypass("example.com")
