"""Check model families on two ranks. As a script, this file is one rank."""

from __future__ import annotations

import gc
import json
import os
import select
import subprocess
import sys
import time
import warnings
from pathlib import Path

import torch
from families_checks import Result, check_engine

from rl_contracts.testing.processes import free_port

RANK_TIMEOUT = 120.0
"""Seconds that the two ranks may take for a family."""


class RankPair:
    """Two processes that check one family after another. They are restarted after a failed family."""

    def __init__(self) -> None:
        self._processes: list[subprocess.Popen[str]] = []

    def submit(self, path: Path) -> None:
        """Send the path of a model, next to which `expected.pt` lies, to both ranks."""
        if not self._processes:
            self._start()
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.write(f"{path}\n")
            process.stdin.flush()

    def result(self) -> dict[str, Result]:
        """Return the results of rank 0, or a failure if a rank hung, died or has another status."""
        deadline, results = time.monotonic() + RANK_TIMEOUT, []
        for process in self._processes:
            assert process.stdout is not None
            ready, _, _ = select.select([process.stdout], [], [], max(0.0, deadline - time.monotonic()))
            line = process.stdout.readline() if ready else ""
            results.append(json.loads(line) if line else None)
        if None in results:
            self.close()
            return {"engine d2": {"status": "wrong", "why": f"rank {results.index(None)} hung or died; {results}"}}
        first, second = results
        result: dict[str, Result] = first
        if first["engine d2"]["status"] != second["engine d2"]["status"]:
            result["engine d2"] = {
                "status": "wrong",
                "why": f"ranks differ: {first['engine d2']} {second['engine d2']}",
            }
        if result["engine d2"]["status"] == "wrong":
            self.close()
        return result

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.wait()
        self._processes = []

    def _start(self) -> None:
        torchrun = {
            "WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port()),
            "OMP_NUM_THREADS": "1",
        }
        for rank in range(2):
            environment = os.environ | torchrun | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            command = [sys.executable, __file__]
            self._processes.append(
                subprocess.Popen(
                    command,
                    env=environment,
                    text=True,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                )
            )


def rank_main() -> None:
    """Read the path of a model per line of stdin, and write a line of results for each."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # models may print to stdout
    for line in sys.stdin:
        path, results = Path(line.strip()), {}
        expected = torch.load(path.parent / "expected.pt")
        check_engine(path, expected, results, "engine d2")
        print(json.dumps(results), file=replies, flush=True)
        gc.collect()


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    rank_main()
