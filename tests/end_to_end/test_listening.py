"""Where the processes of a whole run listen."""

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


def _listening(process: psutil.Process) -> set[tuple[str, str]]:
    """Who of a process and all that it started listens where."""
    found = set()
    for one in [process, *process.children(recursive=True)]:
        with suppress(psutil.NoSuchProcess):
            name = f"{one.pid} {' '.join(one.cmdline()[:4])}"
            found |= {(name, c.laddr.ip) for c in one.net_connections("tcp") if c.status == psutil.CONN_LISTEN}
    return found


@pytest.mark.nightly  # for every commit test_run_security.py looks at one moment
def test_run_of_one_machine_listens_on_loopback_alone(tmp_path: Path) -> None:
    model, run_dir = make_tiny_model(tmp_path / "model", layers=1, hidden=32), tmp_path / "run"
    settings = ["allocation=embedded:d1+fsdp:d2", "publish.route=broadcast", "total_steps=1000", "recipe=embedded"]
    settings += [f"model.path={model}", f"run_dir={run_dir}", "data.batch_size=4", "evaluation.rows=0"]
    run = subprocess.Popen([COMMAND, *settings], stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    seen: set[tuple[str, str]] = set()
    try:
        metrics, deadline = run_dir / "metrics.jsonl", time.monotonic() + 240
        while not metrics.exists() or len(metrics.read_text().splitlines()) < 2:
            assert run.poll() is None, run.communicate()[0].decode()
            assert time.monotonic() < deadline
            seen |= _listening(psutil.Process(run.pid))
            time.sleep(0.2)
        seen |= _listening(psutil.Process(run.pid))
    finally:
        run.terminate()
        run.communicate(timeout=60)
    assert len(seen) >= 3  # a server and two ranks
    assert [(who, where) for who, where in sorted(seen) if not ipaddress.ip_address(where).is_loopback] == []
