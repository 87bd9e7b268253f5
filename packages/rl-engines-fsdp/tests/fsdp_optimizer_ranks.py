"""One rank per optimizer: take two steps, save the state, take a step, load the state and repeat the step."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from fsdp_toys import loss_fn, loss_weight_fn, make_batch, make_engine, weights_of
from safetensors.torch import save_file

from rl_contracts.allocation import ParallelStrategy
from rl_contracts.batch.trajectory import select
from rl_contracts.config import OptimizerConfig
from rl_contracts.data import SaveLoadMeta


def main(model: str, out: Path, layout: dict[str, int], settings: dict[str, dict[str, object]]) -> None:
    strategy = ParallelStrategy(**layout)
    torch.compiler.set_stance("force_eager")  # adamw8bit would compile for minutes
    for name, values in settings.items():
        engine = make_engine(model, strategy=strategy, optimizer=OptimizerConfig(name=name, **values))

        def step(seed: int, engine=engine) -> dict[str, float]:
            batch, parallel = make_batch(seed=seed), engine.parallel
            batch = select(batch, list(range(len(batch)))[parallel.dp_rank :: parallel.dp_size])
            return engine.train_batch(batch, loss_fn, loss_weight_fn)

        state = SaveLoadMeta(str(out / f"{name}-state"), kind="state")
        results = [step(0), step(1)]
        engine.save(state)
        weights = weights_of(engine)
        after = step(2)
        engine.load(state)
        results += [after, step(2)]
        engine.destroy()
        if engine.parallel.rank == 0:
            save_file(weights, out / f"{name}.safetensors")
            (out / f"{name}.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), json.loads(sys.argv[3]), json.loads(sys.argv[4]))
