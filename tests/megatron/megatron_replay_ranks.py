"""On each rank: GRPO steps of the Megatron engine on given batches. Arguments: model, batches, layout as JSON, out."""

import json
import sys
from pathlib import Path

from safetensors.torch import save_file
from test_megatron_against_fsdp import first_step, take_steps

from rl_contracts.allocation import ParallelStrategy
from rl_engines_megatron import MegatronEngine, MegatronEngineConfig


def main(model: str, batches: Path, layout: dict, out: Path) -> None:
    strategy = ParallelStrategy(**layout)
    moved = first_step(MegatronEngine(MegatronEngineConfig(), strategy), model, batches)
    figures, parallel = take_steps(MegatronEngine(MegatronEngineConfig(), strategy), model, batches)
    save_file(moved, out / f"moved-{parallel.rank}.safetensors")
    if parallel.is_main:
        (out / "figures.json").write_text(json.dumps(figures))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), json.loads(sys.argv[3]), Path(sys.argv[4]))
