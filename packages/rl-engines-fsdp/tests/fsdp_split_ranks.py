"""One rank of `test_fsdp_invariance.py`: train on the same batch, distributed over the ranks by each split."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from fsdp_toys import loss_fn, loss_weight_fn, make_batch, make_engine, record_gradients, weights_of
from safetensors.torch import save_file

from rl_contracts.batch.trajectory import select
from rl_contracts.config import OptimizerConfig


def main(model: str, out: Path, splits: dict[str, list[list[int]]]) -> None:
    def step(stem: str, indices_by_rank: list[list[int]], micro_batch: int, masked: int = 0) -> None:
        engine = make_engine(model, micro_batch=micro_batch, optimizer=OptimizerConfig(lr=0.1, max_grad_norm=0.0))
        gradients = record_gradients(engine)
        batch = make_batch(10)
        batch["loss_mask"][:masked] = False
        batch = select(batch, indices_by_rank[engine.parallel.rank])
        result = engine.train_batch(batch, loss_fn, loss_weight_fn)
        stem = f"{stem}-{engine.parallel.rank}"
        (out / f"{stem}.json").write_text(json.dumps(result))
        save_file(gradients, out / f"{stem}-gradients.safetensors")
        save_file(weights_of(engine), out / f"{stem}-weights.safetensors")

    for name, indices_by_rank in splits.items():
        for micro_batch in (19, 45):
            step(f"{name}-{micro_batch}", indices_by_rank, micro_batch)
    step("masked", splits["halves"], 45, masked=5)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), json.loads(sys.argv[3]))
