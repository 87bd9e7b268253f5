"""Real processes for tests, forked from one that has imported what they need.

A process that imports torch and transformers anew takes seconds before it does anything. Here one process does that
once for all of a test session, and every script starts as a copy of it; otherwise it runs as `python SCRIPT` would.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import random
import runpy
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from multiprocessing.process import BaseProcess
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

_PRELOADED: list[str] = []
_GIVEN_PORTS = Path("/proc/sys/net/ipv4/ip_local_port_range")
_HANDED_OUT: set[int] = set()


def free_port(count: int = 1) -> int:
    """A TCP port of loopback that nobody has, below those that the kernel gives to whoever asks for any free one.

    So it stays free until somebody names it, also while it is given up and taken again. None is handed out twice, nor
    by two of pytest-xdist's processes.

    Args:
        count: how many in a row; the first one is returned.
    """
    first_given = int(_GIVEN_PORTS.read_text().split()[0]) if _GIVEN_PORTS.exists() else 49_152
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    mine = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    share = max(first_given - 20_000, 100 * workers) // workers
    while True:
        first = 20_000 + mine * share + random.SystemRandom().randrange(share - count)
        ports = set(range(first, first + count))
        if ports.isdisjoint(_HANDED_OUT) and all(map(_is_free, ports)):
            _HANDED_OUT.update(ports)
            return first


def _is_free(port: int) -> bool:
    with socket.socket() as probe, suppress(OSError):
        probe.bind(("127.0.0.1", port))
        return True
    return False


def preload(*modules: str) -> None:
    """Have these modules imported before the first fork; for a `conftest.py`, which is read before any test runs."""
    _PRELOADED.extend(name for name in modules if name not in _PRELOADED)
    multiprocessing.get_context("forkserver").set_forkserver_preload(_PRELOADED)


def fork(
    target: Callable[..., None], args: tuple[Any, ...], log: Path, environment: Mapping[str, str] | None = None
) -> BaseProcess:
    """Call a function in a process of its own, and return at once.

    Args:
        target: a function that can be imported.
        args: what it is called with.
        log: file for what it writes to stdout and stderr.
        environment: variables to set beside those of this process.
    """
    variables = {**os.environ, **(environment or {})}
    context = multiprocessing.get_context("forkserver")
    process = context.Process(target=_begin, args=(target, args, str(log), variables), daemon=True)
    process.start()
    return process


def fork_script(
    script: Path, arguments: Sequence[str], log: Path, environment: Mapping[str, str] | None = None
) -> BaseProcess:
    """Run a script in a process of its own, as `fork` does; what lies beside it can be imported."""
    return fork(_run_script, (str(script), list(arguments)), log, environment)


def run_ranks(script: Path, arguments: Sequence[str], world_size: int, seconds: float = 240) -> list[str]:
    """Run a script on several ranks of this host, with torchrun's variables; returns what each wrote.

    Raises:
        AssertionError: a rank failed, or did not end in time; shows the end of what it wrote.
    """
    common = {
        "WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "OMP_NUM_THREADS": "1",
    }
    with TemporaryDirectory() as directory:
        logs = [Path(directory) / str(rank) for rank in range(world_size)]
        ranks = [
            fork_script(script, arguments, log, {**common, "RANK": str(rank), "LOCAL_RANK": str(rank)})
            for rank, log in enumerate(logs)
        ]
        deadline = time.monotonic() + seconds
        try:
            for process in ranks:
                process.join(max(0.0, deadline - time.monotonic()))
            codes = [process.exitcode for process in ranks]
        finally:
            for process in ranks:
                process.kill()
                process.join()
        outputs = [log.read_text() for log in logs]
    for rank, (code, output) in enumerate(zip(codes, outputs, strict=True)):
        assert code == 0, f"rank {rank} ended with {code} (None: not within {seconds:g} s):\n{output[-4000:]}"
    return outputs


def _begin(target: Callable[..., None], args: tuple[Any, ...], log: str, environment: dict[str, str]) -> None:
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.environ.clear()
    os.environ.update(environment)
    faulthandler.enable()
    target(*args)


def _run_script(script: str, arguments: list[str]) -> None:
    sys.argv = [script, *arguments]
    sys.path.insert(0, str(Path(script).parent))
    runpy.run_path(script, run_name="__main__")
