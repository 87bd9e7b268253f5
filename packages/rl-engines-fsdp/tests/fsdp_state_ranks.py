"""One rank that resumes from the state of another layout, and saves its own state while training continues."""

from __future__ import annotations

import json
import sys
import time
from functools import partial
from pathlib import Path
from threading import Thread
from typing import Any

import torch
from fsdp_ranks import sequences_of_rank
from fsdp_toys import loss_fn, loss_weight_fn, make_batch, make_engine

from rl_contracts.data import SaveLoadMeta
from rl_contracts.errors import StopRequestedError
from rl_contracts.models.step_gate import STEP, largest_of_ranks
from rl_engines_fsdp import FSDPEngine


def abandon(engine: FSDPEngine) -> None:
    """Abandon a step during a forward pass, so that gathered parameters stay in the model.

    Rank 1 gets the request 0.2 s later, when it is one micro-batch ahead, and waits for rank 0.
    """
    num_begun = 0

    def request_abandon() -> None:
        time.sleep(0.2 * engine.parallel.rank)
        STEP.abandon(partial(largest_of_ranks, parallel=engine.parallel, seconds=30))

    thread = Thread(target=request_abandon)

    def logprobs(outputs: Any, packed: Any) -> Any:
        nonlocal num_begun
        if not num_begun:
            thread.start()
        num_begun += 1
        return outputs.logprobs

    try:
        with STEP.step():
            engine.forward(sequences_of_rank(make_batch(80, seed=9), engine.parallel), logprobs)
        raise AssertionError("the step was not abandoned")
    except StopRequestedError:
        thread.join()
    assert engine.parallel.gather_json(num_begun) == [num_begun, num_begun]


def state_files(engine: FSDPEngine, directory: Path) -> list[bytes]:
    """Return the contents of the state files of this rank."""
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
        return engine.train_batch(sequences_of_rank(make_batch(seed=seed), engine.parallel), loss_fn, loss_weight_fn)

    results = [step(2), step(3)]
    engine.version = 4
    write = engine.snapshot(SaveLoadMeta(str(out / "two"), kind="state"))
    assert write is not None
    thread = Thread(target=write)
    thread.start()
    results += [step(4), step(5)]
    thread.join()
    before = state_files(engine, out / "before")
    abandon(engine)
    assert state_files(engine, out / "after") == before
    engine.destroy()
    (out / f"report-{rank}.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
