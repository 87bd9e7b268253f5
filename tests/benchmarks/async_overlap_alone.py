"""Training alone or generation alone for `async_overlap.py`. The last line is one JSON object.

python async_overlap_alone.py training|generation RUN_DIR WARMUP
"""

from __future__ import annotations

import json
import os
import re
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from rl_apps.run.app import Run
from rl_apps.run.components import Components, server_jobs
from rl_apps.settings.compose import compose
from rl_apps.settings.config import GRPOConfig
from rl_apps.settings.data import load_rows
from rl_apps.settings.device_layout import Devices, devices_of, layout_of
from rl_contracts.scheduler import RUN_KEY_VARIABLE
from rl_launchers.local.scheduler import LocalScheduler

if TYPE_CHECKING:
    from tensordict import TensorDict

    from rl_contracts.rollout import RolloutRuntime


class SavedBatches:
    """Batch source that yields saved batches in order."""

    def __init__(self, directory: Path, minibatches: int, parallel: Any) -> None:
        paths = directory.glob("step_*.safetensors")
        self._paths = iter(sorted(paths, key=lambda path: int(re.findall(r"step_(\d+)", path.name)[0])))
        self._minibatches, self._parallel = minibatches, parallel

    def next_batch(self) -> TensorDict:
        """Return this rank's shard of the next batch."""
        from rl_contracts.batch.redistribution import shard_batch
        from rl_contracts.batch.trajectory import load_batch

        return shard_batch(load_batch(next(self._paths)), self._parallel, self._minibatches)

    def end_step(self, version: int) -> None:
        """Do nothing: saved batches need no admission."""


@contextmanager
def server(run: Run[GRPOConfig], devices: Devices) -> Iterator[str]:
    """Start one idle server and yield its address."""
    (spec,) = server_jobs(run, devices)
    spec = replace(spec, env={**spec.env, RUN_KEY_VARIABLE: os.environ[RUN_KEY_VARIABLE]})
    with LocalScheduler(run.directory) as scheduler:
        scheduler.create_workers(spec)
        yield scheduler.wait_ready(spec.role)[0].address


def generate(rollout: RolloutRuntime, steps: int, warmup: int) -> float:
    """Return the seconds per generated batch, without training."""
    begin = 0.0
    for step in range(steps):
        if step == warmup:
            begin = time.perf_counter()
        rollout.next_batch()
        rollout.end_step(0)
    return (time.perf_counter() - begin) / (steps - warmup)


def train(
    config: GRPOConfig, engine: Any, run_log: Any, servers: Any, recorded: Path, run_dir: Path, warmup: int
) -> float:
    """Return the seconds per training step on the recorded batches."""
    from rl_trainers import PolicyActor
    from rl_trainers import train as run_loop

    longest = config.rollout.generation.max_new_tokens
    actor = PolicyActor(engine, config.algorithm, config.actor.minibatches, constant_length=longest)
    source = SavedBatches(recorded / "batches", config.actor.minibatches, engine.parallel)
    run_loop(source, actor, run_log, config.total_steps, servers)
    records = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    seconds = [record["time/step"] for record in records if record["step"] > warmup]
    return sum(seconds) / len(seconds)


def main(mode: str, recorded: Path, warmup: int) -> float:
    """Run one side and return its seconds per step."""
    from rl_datasets import PromptLoader

    config = compose(GRPOConfig, [recorded / "config.yaml"])
    layout = layout_of(config.allocation, "required")
    devices = devices_of(layout, config.cluster, config.launcher)
    torch.set_num_threads(devices.cores_each)  # as the launcher sets it
    with tempfile.TemporaryDirectory() as temporary, ExitStack() as stack:
        run = Run(config, layout, Path(temporary), devices.kind)
        os.environ[RUN_KEY_VARIABLE] = "benchmark"
        run = replace(run, servers=(stack.enter_context(server(run, devices)),))
        components = stack.enter_context(Components(run))
        engine = components.engine()
        client = components.client(engine)
        prompts = PromptLoader(load_rows(config.data, "train", "rl", config.seed), seed=config.seed)
        rollout = components.runtime(client, components.workflow(components.reward()), engine, prompts)
        run_log = components.run_log(engine, [])
        servers = components.servers(run_log, engine, client)
        if mode == "training":
            return train(config, engine, run_log, servers, recorded, run.directory, warmup)
        servers.start(0)
        return generate(rollout, config.total_steps, warmup)


if __name__ == "__main__":
    print(json.dumps({"seconds": main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))}))
