"""One rank of a critic: train (once without sequences on rank 1), save, take a step, load and repeat the step."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from fsdp_ranks import sequences_of_rank
from fsdp_toys import loss_weight_fn, make_batch, make_engine, value_loss_fn, weights_of
from safetensors.torch import save_file

from rl_contracts.data import SaveLoadMeta


def main(model: str, out: Path) -> None:
    engine = make_engine(model, head="value")
    rank = engine.parallel.rank
    state = SaveLoadMeta(str(out / "state"), kind="state")

    def step(seed: int, empty_rank: int | None = None) -> dict[str, float]:
        return engine.train_batch(
            sequences_of_rank(make_batch(seed=seed), engine.parallel, empty_rank), value_loss_fn, loss_weight_fn
        )

    report: dict = {"steps": [step(0), step(1, empty_rank=1)]}
    save_file(weights_of(engine), out / f"weights-{rank}.safetensors")
    engine.save(SaveLoadMeta(str(out / "hf")))
    engine.save(state)
    report["after saving"] = step(2)
    engine.load(state)
    report["after loading"] = step(2)
    engine.destroy()
    (out / f"report-{rank}.json").write_text(json.dumps(report))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
