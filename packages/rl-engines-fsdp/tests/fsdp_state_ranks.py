"""One rank that goes on from another layout's state, saves in the background, and goes on from that."""

from __future__ import annotations

import json
import sys
import time
from functools import partial
from pathlib import Path
from threading import Thread
from typing import Any

import torch
from fsdp_ranks import rows_of
from fsdp_toys import loss_fn, loss_weight_fn, make_batch, make_engine

from rl_contracts.data import SaveLoadMeta
from rl_contracts.errors import StopRequestedError
from rl_contracts.models.step_gate import STEP, largest_of_ranks
from rl_engines_fsdp import FSDPEngine


def abandon(engine: FSDPEngine) -> None:
    """Leave a step in a forward pass, so that gathered parameters stay in the model; rank 1 is asked when it is one
    micro-batch ahead, and waits for rank 0."""
    begun = 0

    def ask() -> None:
        time.sleep(0.2 * engine.parallel.rank)
        STEP.abandon(partial(largest_of_ranks, parallel=engine.parallel, seconds=30))

    asking = Thread(target=ask)

    def logprobs(outputs: Any, packed: Any) -> Any:
        nonlocal begun
        if not begun:
            asking.start()
        begun += 1
        return outputs.logprobs

    try:
        with STEP.step():
            engine.forward(rows_of(make_batch(80, seed=9), engine.parallel), logprobs)
        raise AssertionError("the step was not abandoned")
    except StopRequestedError:
        asking.join()
    assert engine.parallel.gather_json(begun) == [begun, begun]


def written(engine: FSDPEngine, directory: Path) -> list[bytes]:
    """This rank's part of its engine's state."""
    write = engine.snapshot(SaveLoadMeta(str(directory), kind="state"))
    assert write is not None
    return [file.read_bytes() for file in write()]


def main(model: str, out: Path) -> None:
    engine = make_engine(model)
    engine.load(SaveLoadMeta(str(out / "one"), kind="state"))
    assert engine.version == 2
    rank, random = engine.parallel.rank, torch.get_rng_state()
    engine.load(SaveLoadMeta(str(out / "one"), kind="state"))
    assert torch.equal(torch.get_rng_state(), random)
    torch.save(random, out / f"random-{rank}")

    def step(seed: int) -> dict[str, float]:
        return engine.train_batch(rows_of(make_batch(seed=seed), engine.parallel), loss_fn, loss_weight_fn)

    seen = [step(2), step(3)]
    engine.version = 4
    write = engine.snapshot(SaveLoadMeta(str(out / "two"), kind="state"))
    assert write is not None
    thread = Thread(target=write)
    thread.start()
    seen += [step(4), step(5)]
    thread.join()
    before = written(engine, out / "before")
    abandon(engine)
    assert written(engine, out / "after") == before
    engine.destroy()
    (out / f"seen-{rank}.json").write_text(json.dumps(seen))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
