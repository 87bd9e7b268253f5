"""The trainer processes of `rl replay`: an app that takes one training step on the batch in its run directory."""

from __future__ import annotations

import re

from rl_apps.run.app import App, Run
from rl_apps.run.components import Components
from rl_apps.settings.config import GRPOConfig
from rl_contracts.runtime.json_lines import to_json


def train(run: Run[GRPOConfig]) -> None:
    """Take the step, and write its statistics beside the batch."""
    from rl_trainers import replay_batch

    (batch,) = run.directory.glob("*.safetensors")
    named = re.search(r"version_(\d+)", batch.name)
    with Components(run) as parts:
        engine = parts.engine()
        stats = replay_batch(parts.actor(engine), batch, int(named[1]) if named else None)
        if engine.parallel.is_main:
            (run.directory / "result.json").write_text(to_json(stats))


APP = App("rl replay", __doc__, GRPOConfig, train, check=lambda run: [], servers="refused")
