"""The trainer processes of `rl replay`: an app that takes one training step on the batch in its run directory."""

from __future__ import annotations

import re

from rl_apps.run.app import App, Run
from rl_apps.run.components import Components
from rl_apps.settings.config import GRPOConfig
from rl_contracts.runtime.json_lines import to_json


def train(run: Run[GRPOConfig]) -> None:
    """Take one training step and write its metrics to `result.json` next to the batch."""
    from rl_trainers import replay_batch

    (batch,) = run.directory.glob("*.safetensors")
    match = re.search(r"version_(\d+)", batch.name)
    with Components(run) as components:
        engine = components.engine()
        metrics = replay_batch(components.actor(engine), batch, int(match[1]) if match else None)
        if engine.parallel.is_main:
            (run.directory / "result.json").write_text(to_json(metrics))


APP = App("rl replay", __doc__, GRPOConfig, train, check=lambda run: [], servers="rejected")
