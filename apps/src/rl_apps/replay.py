"""A process of `rl replay`: `python -m rl_apps.replay <run directory> <device> <batch file> <result file>`."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path

from rl_apps.app import Run
from rl_apps.compose import compose
from rl_apps.config import GRPOConfig
from rl_apps.layout import layout_of
from rl_contracts.logging import configure


def main(argv: list[str]) -> int:
    """Take one training step on a saved batch and write its statistics."""
    from rl_apps.parts import Parts
    from rl_trainers import replay_batch

    directory, batch, result = Path(argv[0]), Path(argv[2]), Path(argv[3])
    configure(rank=int(os.environ.get("RANK", "0")), role="replay")
    config = compose(GRPOConfig, [directory / "config.yaml"])
    run = Run(config, layout_of(config.allocation, "refused"), directory, argv[1])
    with Parts(run) as parts:
        engine = parts.engine()
        actor = parts.actor(engine)
        named = re.search(r"version_(\d+)", batch.name)
        stats = replay_batch(actor, batch, int(named.group(1)) if named else None)
        if engine.parallel.is_main:
            result.write_text(json.dumps(stats))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
