"""A trainer process for the tests that need real ones: no model, but the real runtime.

rollout_process.py heads RANK DIRECTORY     one of two data-parallel heads; writes DIRECTORY/RANK.json
rollout_process.py lost RANK DIRECTORY      two heads, the second of which dies; the first writes DIRECTORY/0.json
rollout_process.py replica RANK DIRECTORY   one of two ranks of a replica; writes DIRECTORY/RANK.json
rollout_process.py lineage DIRECTORY        trains on 60 prompts, saving after every step; meant to be killed
"""

import asyncio
import json
import os
import sys
import threading
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from rl_contracts.batch.parallel import ParallelContext
from rl_contracts.batch.trajectory import from_response, lengths
from rl_contracts.config import GenerationConfig
from rl_contracts.data import ModelRequest
from rl_contracts.errors import InferenceError, RLError
from rl_contracts.runtime.metrics import Metrics, collect, record
from rl_contracts.testing import NullInferenceEngine, NullInferenceEngineConfig
from rl_contracts.workflow import RolloutWorkflow
from rl_workflows import DistRollout, RolloutConfig


class Answer(RolloutWorkflow):
    async def arun_episode(self, engine, data):
        record("prompt/mean", data["prompt_id"])
        record("episodes", 1, kind="sum")
        response = await engine.agenerate(ModelRequest([1 + data["prompt_id"]], GenerationConfig(max_new_tokens=200)))
        row = from_response(response, reward=1.0, temperature=1.0)
        if data["prompt_id"] == 100:  # of the second head's prompts
            row.token_rewards = row.loss_mask.astype("float32")
        return [row]


class InOrder(Answer):
    """Two prompts a batch, in order; the rest does not end."""

    batches = 99
    """That may be taken, or are."""

    async def arun_episode(self, engine, data):
        while data["prompt_id"] % 100 // 2 >= self.batches:  # noqa: ASYNC110 - another thread sets it
            await asyncio.sleep(0.001)
        return await super().arun_episode(engine, data)


def make_rollout(rows, workflow=None, **options):
    config = NullInferenceEngineConfig(mean_tokens=20, sigma=1.0, seconds_per_token=0.001, read_weights=False)
    engine = NullInferenceEngine(config)
    settings = RolloutConfig(group_size=3, max_staleness=1, stall_timeout=60, failure_min_groups=1)
    return engine, DistRollout(engine, workflow or Answer(), rows, config=settings, **options)


def numbers(batch, name):
    return batch[name].tolist()


def heads(rank: int, directory: Path) -> None:
    dist.init_process_group(
        "gloo", init_method=f"file://{directory}/meet", rank=rank, world_size=2, timeout=timedelta(seconds=90)
    )
    parallel = ParallelContext(rank, 2, rank, 2, host_group=dist.group.WORLD, dp_host_group=dist.group.WORLD)
    result: dict = {"batches": []}

    # each head has prompts of its own; the second has fewer
    rows = [{"prompt_id": 100 * rank + i} for i in range(6 - 3 * rank)]
    workflow = InOrder()
    _, rollout = make_rollout(rows, workflow, batch_size=4, parallel=parallel, minibatches=2)
    with collect() as in_evaluation:
        held_out = rollout.evaluate([{"prompt_id": i} for i in range(5)], GenerationConfig(), n=2)
    result["eval"] = [row.prompt_id for row in held_out]
    result["eval_figures"] = in_evaluation.over_replicas(parallel).results()
    figures = Metrics()
    workflow.batches = 1
    while True:
        try:
            batch = rollout.next_batch()
        except StopIteration:
            break
        keys = ("prompt_ids", "group_ids", "episode_ids", "minibatch")
        rewards = batch["token_rewards"].sum(-1).tolist() if "token_rewards" in batch else None
        trained = batch["loss_mask"].sum(-1).tolist()
        result["batches"].append(
            {key: numbers(batch, key) for key in keys}
            | {"lengths": lengths(batch).tolist(), "trained": trained, "token_rewards": rewards}
        )
        workflow.batches = 2
        rollout.end_step(0)
        figures.merge(rollout.stats())
    result["figures"] = figures.over_replicas(parallel).results()
    result["endings"] = rollout.outcomes()
    rollout.destroy()

    # one head fails while the other waits for answers that never come
    engine, rollout = make_rollout(({"prompt_id": i} for i in range(100)), batch_size=2, parallel=parallel)
    if rank == 0:
        engine.faults.hang = lambda request: True
    else:
        engine.faults.generate = lambda request: InferenceError("planted on rank 1")
    try:
        rollout.next_batch()
    except RLError as error:
        result["error"] = str(error)
    rollout.destroy()
    (directory / f"{rank}.json").write_text(json.dumps(result))
    dist.destroy_process_group()


def lost(rank: int, directory: Path) -> None:
    dist.init_process_group(
        "gloo", init_method=f"file://{directory}/meet", rank=rank, world_size=2, timeout=timedelta(seconds=90)
    )
    parallel = ParallelContext(rank, 2, rank, 2, host_group=dist.group.WORLD, dp_host_group=dist.group.WORLD)
    engine, rollout = make_rollout(({"prompt_id": i} for i in range(100)), batch_size=2, parallel=parallel)
    engine.faults.hang = lambda request: True
    if rank == 1:
        threading.Timer(1.0, os._exit, [9]).start()
    try:
        rollout.next_batch()
    except RLError as error:
        (directory / "0.json").write_text(json.dumps({"error": str(error)}))
    os._exit(0)


class NoClient:
    """In the place of the client of a rank that must not use one."""

    def __getattr__(self, name):
        raise AssertionError(f"a rank that is no head used its client: {name}")


def replica(rank: int, directory: Path) -> None:
    dist.init_process_group(
        "gloo", init_method=f"file://{directory}/meet", rank=rank, world_size=2, timeout=timedelta(seconds=90)
    )
    parallel = ParallelContext(rank, 2, 0, 1, is_dp_leader=rank == 0, host_group=dist.group.WORLD)
    _, rollout = make_rollout([{"prompt_id": i} for i in range(6)], batch_size=4, parallel=parallel)
    if rank:
        rollout.scheduler.engine = rollout.scheduler.episodes.engine = NoClient()
    rows = [len(rollout.evaluate([{"prompt_id": 0}], GenerationConfig()))]
    with suppress(StopIteration):
        while True:
            rows.append(len(rollout.next_batch()))
            rollout.end_step(0)
            rollout.stats()
            rollout.state_dict()
    rollout.destroy()
    (directory / f"{rank}.json").write_text(json.dumps(rows))
    dist.destroy_process_group()


def lineage(directory: Path) -> None:
    trained: list[int] = []
    _, rollout = make_rollout([{"prompt_id": i} for i in range(60)], batch_size=4)
    latest = directory / "latest"
    if latest.is_symlink():
        saved = json.loads((latest / "state.json").read_text())
        trained = saved.pop("trained")
        rollout.load_state_dict(saved | {"tensors": load_file(latest / "state.safetensors")})
    while True:
        try:
            batch = rollout.next_batch()
        except StopIteration:
            break
        trained += sorted(set(numbers(batch, "prompt_ids")))
        rollout.end_step(0)
        save(directory, rollout.state_dict(), trained)
    rollout.destroy()
    (directory / "done.json").write_text(json.dumps(trained))


def save(directory: Path, state: dict, trained: list[int]) -> None:
    """A recover point: written aside, then made the latest by one rename."""
    point = directory / f"point-{os.getpid()}-{len(trained)}"
    point.mkdir()
    tensors = state.pop("tensors")
    save_file(tensors, point / "state.safetensors")
    (point / "state.json").write_text(json.dumps(state | {"trained": trained}))
    link = directory / f"link-{os.getpid()}-{len(trained)}"
    link.symlink_to(point)
    link.rename(directory / "latest")
    print(len(trained), flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    if sys.argv[1] in ("heads", "lost", "replica"):
        {"heads": heads, "lost": lost, "replica": replica}[sys.argv[1]](int(sys.argv[2]), Path(sys.argv[3]))
    else:
        lineage(Path(sys.argv[2]))
