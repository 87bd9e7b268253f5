"""Starting several ranks of a script, as torchrun would."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

DEADLINE = 240
"""Seconds that the ranks of one script may take."""


def start_ranks(script: Path, arguments: list[str], world_size: int) -> list[str]:
    """Run a script on several ranks of this host; returns the output of each.

    Raises:
        AssertionError: a rank failed; shows the end of its output.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = os.environ | {
        "WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
    }
    ranks = [
        subprocess.Popen(
            [sys.executable, str(script), *arguments],
            env=common | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(world_size)
    ]
    try:
        outputs = [rank.communicate(timeout=DEADLINE)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    for number, (rank, output) in enumerate(zip(ranks, outputs, strict=True)):
        assert rank.returncode == 0, f"rank {number}:\n{output[-4000:]}"
    return outputs
