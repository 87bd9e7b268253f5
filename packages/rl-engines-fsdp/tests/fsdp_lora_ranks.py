"""One rank with adapters: train, publish, save all three kinds, take a step, load and repeat the step."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path

from fsdp_ranks import sequences_of_rank
from fsdp_toys import loss_fn, loss_weight_fn, make_batch, make_engine
from safetensors.torch import save_file

from rl_contracts.data import SaveLoadMeta
from rl_engines_fsdp.config import LoRAConfig


def main(model: str, out: Path) -> None:
    engine = make_engine(model, lora=LoRAConfig(rank=4, alpha=8.0))
    rank = engine.parallel.rank
    engine.load(SaveLoadMeta(str(out / "start"), kind="adapter"))

    def step(seed: int, empty_rank: int | None = None) -> dict[str, float]:
        batch = sequences_of_rank(make_batch(seed=seed), engine.parallel, empty_rank)
        return engine.train_batch(batch, loss_fn, loss_weight_fn)

    report: dict = {"steps": [step(0), step(1, empty_rank=1), step(2)]}
    published = {name: tensor.clone() for name, tensor in engine.full_parameters()}
    assert [spec.name for spec in engine.param_specs()] == list(published)
    report["adapter"] = asdict(engine.adapter())
    adapter_only = {name: tensor.clone() for name, tensor in engine.adapter_parameters()}
    assert [spec.name for spec in engine.adapter_specs()] == list(adapter_only)
    if rank == 0:
        save_file(published, out / "published.safetensors")
        save_file(adapter_only, out / "adapter-only.safetensors")
    state = SaveLoadMeta(str(out / "state"), kind="state")
    engine.save(state)
    engine.save(SaveLoadMeta(str(out / "hf")))
    engine.save(SaveLoadMeta(str(out / "adapter"), kind="adapter"))
    report["after saving"] = step(3)
    engine.load(state)
    report["after loading"] = step(3)
    engine.destroy()
    (out / f"report-{rank}.json").write_text(json.dumps(report))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
