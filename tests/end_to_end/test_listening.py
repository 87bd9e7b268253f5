"""Addresses on which the processes of a run listen."""

from __future__ import annotations

import ipaddress
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from rl_contracts.testing.models import make_tiny_model

COMMAND = Path(sys.executable).parent / "gsm8k-grpo"


def _listening_addresses(process: psutil.Process) -> set[tuple[str, str]]:
    """Return (process, IP address) of the listening sockets of a process and its child processes."""
    addresses = set()
    for member in [process, *process.children(recursive=True)]:
        with suppress(psutil.NoSuchProcess):
            name = f"{member.pid} {' '.join(member.cmdline()[:4])}"
            addresses |= {(name, c.laddr.ip) for c in member.net_connections("tcp") if c.status == psutil.CONN_LISTEN}
    return addresses


@pytest.mark.nightly  # test_run_security.py checks one moment of a run on every commit
def test_local_run_listens_only_on_loopback(tmp_path: Path) -> None:
    model, run_dir = make_tiny_model(tmp_path / "model", layers=1, hidden=32), tmp_path / "run"
    settings = ["allocation=embedded:d1+fsdp:d2", "publish.route=broadcast", "total_steps=1000", "recipe=embedded"]
    settings += [f"model.path={model}", f"run_dir={run_dir}", "data.batch_size=4", "evaluation.examples=0"]
    run = subprocess.Popen([COMMAND, *settings], stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    seen: set[tuple[str, str]] = set()
    try:
        metrics, deadline = run_dir / "metrics.jsonl", time.monotonic() + 240
        while not metrics.exists() or len(metrics.read_text().splitlines()) < 2:
            assert run.poll() is None, run.communicate()[0].decode()
            assert time.monotonic() < deadline
            seen |= _listening_addresses(psutil.Process(run.pid))
            time.sleep(0.2)
        seen |= _listening_addresses(psutil.Process(run.pid))
    finally:
        run.terminate()
        run.communicate(timeout=60)
    assert len(seen) >= 3  # a server and two ranks
    assert [(name, ip) for name, ip in sorted(seen) if not ipaddress.ip_address(ip).is_loopback] == []
