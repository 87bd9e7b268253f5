"""Two processes that try one family after another together; run as a script, one of the two."""

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
"""How long two processes may take for a family."""


class RankPair:
    """A pair of processes that try one family after another; started anew after one that they did not survive."""

    def __init__(self) -> None:
        self._processes: list[subprocess.Popen[str]] = []

    def submit(self, path: Path) -> None:
        """Give them a family's directory, in which `expected.pt` lies."""
        if not self._processes:
            self._start()
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.write(f"{path}\n")
            process.stdin.flush()

    def result(self) -> dict[str, Result]:
        """What rank 0 found; where the ranks differ, that they do."""
        deadline, told = time.monotonic() + RANK_TIMEOUT, []
        for process in self._processes:
            assert process.stdout is not None
            ready, _, _ = select.select([process.stdout], [], [], max(0.0, deadline - time.monotonic()))
            line = process.stdout.readline() if ready else ""
            told.append(json.loads(line) if line else None)
        if None in told:
            self.close()
            return {"engine d2": {"status": "wrong", "why": f"rank {told.index(None)} hung or died; {told}"}}
        first, second = told
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
    """One of the two: a directory per line of stdin, a line of results each."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever models print is not an answer
    for line in sys.stdin:
        path, results = Path(line.strip()), {}
        expected = torch.load(path.parent / "expected.pt")
        check_engine(path, expected, results, "engine d2")
        print(json.dumps(results), file=answers, flush=True)
        gc.collect()


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    rank_main()
