"""Take GRPO steps with the Megatron engine on saved batches, on each rank.

Arguments: model directory, directory of the batches, parallel layout as JSON, output directory.
"""

import json
import sys
from pathlib import Path

from safetensors.torch import save_file
from test_megatron_against_fsdp import first_step, take_steps

from rl_contracts.allocation import ParallelStrategy
from rl_engines_megatron import MegatronEngine, MegatronEngineConfig


def main(model: str, batches: Path, layout: dict, out: Path) -> None:
    strategy = ParallelStrategy(**layout)
    gradients = first_step(MegatronEngine(MegatronEngineConfig(), strategy), model, batches)
    metrics, parallel = take_steps(MegatronEngine(MegatronEngineConfig(), strategy), model, batches)
    save_file(gradients, out / f"gradients-{parallel.rank}.safetensors")
    if parallel.is_main:
        (out / "metrics.json").write_text(json.dumps(metrics))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), json.loads(sys.argv[3]), Path(sys.argv[4]))
