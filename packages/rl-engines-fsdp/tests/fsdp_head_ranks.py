"""One rank of a critic: trains (once with nothing on rank 1), saves, goes on, loads and goes on again."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from fsdp_ranks import rows_of
from fsdp_toys import loss_weight_fn, make_batch, make_engine, value_loss_fn, weights_of
from safetensors.torch import save_file

from rl_contracts.data import SaveLoadMeta


def main(model: str, out: Path) -> None:
    engine = make_engine(model, head="value")
    rank = engine.parallel.rank
    state = SaveLoadMeta(str(out / "state"), kind="state")

    def step(seed: int, empty_rank: int | None = None) -> dict[str, float]:
        return engine.train_batch(
            rows_of(make_batch(seed=seed), engine.parallel, empty_rank), value_loss_fn, loss_weight_fn
        )

    seen: dict = {"steps": [step(0), step(1, empty_rank=1)]}
    save_file(weights_of(engine), out / f"weights-{rank}.safetensors")
    engine.save(SaveLoadMeta(str(out / "hf")))
    engine.save(state)
    seen["after saving"] = step(2)
    engine.load(state)
    seen["after loading"] = step(2)
    engine.destroy()
    (out / f"seen-{rank}.json").write_text(json.dumps(seen))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
