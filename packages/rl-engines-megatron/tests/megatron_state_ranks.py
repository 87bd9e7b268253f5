"""Save and load states of two layouts in one process, with errors on one rank. Runs on each of two ranks.

Arguments: a model, and a directory for the states.
"""

import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from unittest.mock import patch

import torch

from rl_contracts.allocation import ParallelStrategy
from rl_contracts.conformance.train_engine import OPTIMIZER
from rl_contracts.data import FinetuneSpec, SaveLoadMeta
from rl_contracts.errors import EngineError
from rl_engines_megatron import MegatronEngine
from rl_engines_megatron.weights import checkpoint

RANK = int(os.environ["RANK"])


def started(model: str, layout: dict) -> MegatronEngine:
    engine = MegatronEngine(strategy=ParallelStrategy(**layout))
    engine.initialize(FinetuneSpec(model, 1, optimizer=OPTIMIZER, device="cpu"))
    return engine


def weights(engine: MegatronEngine) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in engine.full_parameters()}


def error_of(call: Callable[[], None]) -> str:
    try:
        call()
    except EngineError as error:
        return str(error)
    raise AssertionError("expected an EngineError")


def state_without_shard(parts: list, *arguments: object, **settings: object) -> dict:
    """Return a state that lacks rank 1's shard of the embedding."""
    complete = STATE(parts, *arguments, **settings)
    if RANK == 1:
        del complete["model0"]["embedding.word_embeddings.weight"]
    return complete


def failing_memfd_create(name: str) -> int:
    if RANK == 1:
        raise OSError("no memory")
    return MEMORY(name)


STATE, MEMORY = checkpoint._state, os.memfd_create


def main(model: str, directory: Path) -> None:
    first, second, absent = (SaveLoadMeta(str(directory / name), "state") for name in ("first", "second", "absent"))
    engine = started(model, {"context": 2})
    engine.version = 7
    engine.save(first)
    engine.destroy()

    engine = started(model, {"tensor": 2})
    engine.load(first)
    engine.save(second)
    before, engine.version = weights(engine), 0
    engine.load(second)
    after = weights(engine)
    assert engine.version == 7
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    print("second layout: saved and loaded")

    with patch.object(checkpoint, "_state", state_without_shard):
        print("missing shard:", error_of(lambda: engine.save(absent)))
    with patch.object(os, "memfd_create", failing_memfd_create):
        print("no memory:", error_of(lambda: engine.save(absent)))
    with patch.object(shutil, "copyfileobj", side_effect=OSError("disk is full") if RANK else None):
        print("full disk:", error_of(lambda: engine.save(absent)))
    print("file on one rank:", error_of(lambda: engine.load(absent if RANK else second)))
    assert not Path(absent.path).exists()
    engine.destroy()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
