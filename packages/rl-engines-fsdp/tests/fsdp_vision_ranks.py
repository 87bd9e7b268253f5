"""One rank of `test_fsdp_vision.py`: train a step on sequences with and without images in each layout.

Also check that an error about the images of one rank is raised on all ranks.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from fsdp_toys import record_gradients
from safetensors.torch import save_file
from vision_toys import LAYOUTS, make_vision_batch, make_vision_engine, output_path, step

from rl_contracts.allocation import ParallelStrategy
from rl_contracts.batch.image_entries import set_images
from rl_contracts.batch.redistribution import shard_batch
from rl_contracts.errors import EngineError


def main(models: dict[str, str], out: Path) -> None:
    for family, directory in models.items():
        for layout, (strategy, freeze) in LAYOUTS.items():
            engine = make_vision_engine(directory, 130, strategy, freeze)
            gradients = record_gradients(engine)
            step(engine, shard_batch(make_vision_batch(directory), engine.parallel))
            save_file(gradients, output_path(out, f"{family}-{layout}", engine.parallel.rank))
            engine.destroy()
    check_error_on_all_ranks(next(iter(models.values())))


def check_error_on_all_ranks(directory: str) -> None:
    engine = make_vision_engine(directory, 130, ParallelStrategy(2))
    batch = shard_batch(make_vision_batch(directory), engine.parallel)
    if engine.parallel.rank == 1:
        set_images(batch, [()] * len(batch))
    with pytest.raises(EngineError):
        step(engine, batch)
    engine.destroy()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]), Path(sys.argv[2]))
