"""Run a toy engine with a recovery checkpoint after every step, in one process or several, until a test kills it.

The engine's whole state is one number, so a test can detect a recovery checkpoint that mixes two steps.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from rl_contracts.batch.parallel import ParallelContext
from rl_contracts.data import SaveLoadMeta
from rl_trainers import RecoverConfig, RecoveryCheckpoints

FILES = 20
"""Files per rank in a recovery checkpoint: enough that a kill may fall between two of them."""


class CountingEngine:
    """Engine whose state is the number of steps. It is also the only other component of the run."""

    def __init__(self, parallel: ParallelContext) -> None:
        self.parallel, self.steps = parallel, 0

    def snapshot(self, meta: SaveLoadMeta) -> Any:
        return partial(self._write, Path(meta.path), self.steps)

    def _write(self, directory: Path, steps: int) -> Sequence[Path]:
        directory.mkdir(exist_ok=True)
        files = [directory / f"{self.parallel.rank}-{number}" for number in range(FILES)]
        for file in files:
            file.write_text(f"{steps}\n" * 2000)
        return files

    def load(self, meta: SaveLoadMeta) -> None:
        numbers = {int(n) for f in Path(meta.path).glob(f"{self.parallel.rank}-*") for n in f.read_text().split()}
        (self.steps,) = numbers

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state == {"steps": self.steps}


def main(run_dir: Path, steps: int, **settings: Any) -> None:
    parallel = ParallelContext()
    if "WORLD_SIZE" in os.environ:
        import torch.distributed as dist

        dist.init_process_group("gloo")
        group = dist.group.WORLD
        parallel = ParallelContext(dist.get_rank(), dist.get_world_size(), host_group=group)
    engine = CountingEngine(parallel)
    checkpoints = RecoveryCheckpoints(run_dir, RecoverConfig(1, **settings), {"actor": engine}, {"component": engine})
    assert (checkpoints.resume() or 0) == engine.steps
    print(json.dumps({"resumed": engine.steps}), flush=True)
    while engine.steps < steps:
        engine.steps += 1
        time.sleep(0.002)  # a step, during which the previous recovery checkpoint is written
        checkpoints.after_step(engine.steps)
    checkpoints.finish()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
