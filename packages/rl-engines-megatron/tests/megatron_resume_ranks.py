"""Train, copy a state and an export, continue to train, and write the copies. Runs on each rank.

With a state to load: load it, save it again and continue to train.

Arguments: a model, layout and settings as JSON, the state to load (or empty), the state to save, and the results file.
"""

import json
import sys
from pathlib import Path

from rl_contracts.allocation import ParallelStrategy
from rl_contracts.batch.redistribution import shard_batch
from rl_contracts.conformance.train_engine import OPTIMIZER, STEPS, policy_loss, trained_tokens
from rl_contracts.data import FinetuneSpec, SaveLoadMeta
from rl_contracts.testing import make_batch
from rl_engines_megatron import MegatronEngine, MegatronEngineConfig


def main(model: str, layout: dict, settings: dict, load: str, save: str, out: Path) -> None:
    engine = MegatronEngine(MegatronEngineConfig(**settings), ParallelStrategy(**layout))
    engine.initialize(FinetuneSpec(model, STEPS, optimizer=OPTIMIZER, device="cpu"))

    def step(seed: int) -> dict[str, float]:
        return engine.train_batch(shard_batch(make_batch(8, seed=seed), engine.parallel), policy_loss, trained_tokens)

    writers = []
    if load:
        engine.load(SaveLoadMeta(load, "state"))
        engine.save(SaveLoadMeta(save, "state"))
    else:
        step(0), step(1)
        engine.save(SaveLoadMeta(f"{save}-saved", "hf"))
        writers = [engine.snapshot(SaveLoadMeta(f"{save}-copied", "hf")), engine.snapshot(SaveLoadMeta(save, "state"))]
    metrics = [step(2), step(3)]
    for write in writers:
        files = write()
        assert files == [*dict.fromkeys(files)]
        assert all(file.is_file() for file in files)
    if engine.parallel.is_main:
        out.write_text(json.dumps(metrics))
    engine.destroy()


if __name__ == "__main__":
    main(sys.argv[1], *map(json.loads, sys.argv[2:4]), *sys.argv[4:6], Path(sys.argv[6]))
