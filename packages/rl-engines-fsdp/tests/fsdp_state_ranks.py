"""One rank that goes on from another layout's state, saves in the background, and goes on from that."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from threading import Thread

import torch
from fsdp_ranks import rows_of
from fsdp_toys import loss_fn, loss_weight_fn, make_batch, make_engine

from rl_contracts.data import SaveLoadMeta


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
    engine.destroy()
    (out / f"seen-{rank}.json").write_text(json.dumps(seen))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
