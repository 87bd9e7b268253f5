"""Real processes for tests, forked from a process that has already imported torch and transformers.

These imports take seconds. One process runs them once per test session, and every script starts as a copy of it.
Apart from that a script runs like `python SCRIPT`.
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

DEVICE_VARIABLE = "RL_TEST_DEVICE"
"""Environment variable with the device of the engines in tests with several ranks."""
_PRELOADED: list[str] = []
_EPHEMERAL_PORTS = Path("/proc/sys/net/ipv4/ip_local_port_range")
_RETURNED_PORTS: set[int] = set()


def free_port(count: int = 1) -> int:
    """Return a free TCP port of the loopback interface, below the kernel's ephemeral port range.

    The kernel therefore assigns it to no other socket, even while it is temporarily closed. No port is returned twice,
    neither in this process nor in another worker of pytest-xdist.

    Args:
        count: number of consecutive free ports; the first one is returned.
    """
    first_ephemeral = int(_EPHEMERAL_PORTS.read_text().split()[0]) if _EPHEMERAL_PORTS.exists() else 49_152
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    ports_per_worker = max(first_ephemeral - 20_000, 100 * workers) // workers
    while True:
        first = 20_000 + worker * ports_per_worker + random.SystemRandom().randrange(ports_per_worker - count)
        ports = set(range(first, first + count))
        if ports.isdisjoint(_RETURNED_PORTS) and all(map(_is_free, ports)):
            _RETURNED_PORTS.update(ports)
            return first


def _is_free(port: int) -> bool:
    with socket.socket() as probe, suppress(OSError):
        probe.bind(("127.0.0.1", port))
        return True
    return False


def preload(*modules: str) -> None:
    """Import these modules before the first fork. Call it in a `conftest.py`, which is read before any test runs."""
    _PRELOADED.extend(name for name in modules if name not in _PRELOADED)
    multiprocessing.get_context("forkserver").set_forkserver_preload(_PRELOADED)


def fork(
    target: Callable[..., None], args: tuple[Any, ...], log: Path, environment: Mapping[str, str] | None = None
) -> BaseProcess:
    """Start a process that calls a function, and return without waiting for it.

    Args:
        target: importable function.
        args: arguments of the function.
        log: file for the stdout and stderr of the process.
        environment: variables to set in addition to this process's environment.
    """
    variables = {**os.environ, **(environment or {})}
    context = multiprocessing.get_context("forkserver")
    process = context.Process(target=_begin, args=(target, args, str(log), variables), daemon=True)
    process.start()
    return process


def fork_script(
    script: Path, arguments: Sequence[str], log: Path, environment: Mapping[str, str] | None = None
) -> BaseProcess:
    """Start a process that runs a script, as `fork` does. The script can import modules from its directory."""
    return fork(_run_script, (str(script), list(arguments)), log, environment)


def rank_device() -> str:
    """Return the device of the engines in a test with several ranks: `cpu`, or `cuda` with one GPU per rank."""
    return os.environ.get(DEVICE_VARIABLE, "cpu")


def run_ranks(script: Path, arguments: Sequence[str], world_size: int, seconds: float = 240) -> list[str]:
    """Run a script on several ranks of this host, with torchrun's variables, and return the output of each rank.

    Skips the test if `rank_device` is `cuda` and this host has fewer GPUs than ranks.

    Args:
        script: script to run.
        arguments: command-line arguments of the script.
        world_size: number of ranks.
        seconds: time limit for all ranks together.

    Raises:
        AssertionError: a rank failed, or did not end in time; the message has the end of its output.
    """
    if rank_device() == "cuda":
        _require_gpus(world_size)
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
        assert code == 0, f"rank {rank}: exit code {code} (None: still running after {seconds:g} s):\n{output[-4000:]}"
    return outputs


def _require_gpus(count: int) -> None:
    import pytest
    import torch

    if torch.cuda.device_count() < count:
        pytest.skip(f"needs {count} CUDA devices, one for each rank; found {torch.cuda.device_count()}")


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
