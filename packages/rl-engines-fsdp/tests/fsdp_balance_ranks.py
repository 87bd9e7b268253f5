"""One rank of a training step with the router auxiliary loss."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from safetensors.torch import save_file
from test_fsdp_balance import step_of

from rl_contracts.allocation import ParallelStrategy


def main(model: str, out: Path, layout: dict[str, int]) -> None:
    strategy = ParallelStrategy(**layout)
    result, gradients, engine = step_of(model, strategy=strategy)
    if engine.parallel.rank == 0:
        (out / "result.json").write_text(json.dumps(result))
        save_file(gradients, out / "gradients.safetensors")
    engine.destroy()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), json.loads(sys.argv[3]))
