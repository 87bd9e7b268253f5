"""Trainer process for tests that need real processes: the real runtime without a model.

rollout_process.py leaders RANK DIRECTORY   one of two data-parallel leaders; writes DIRECTORY/RANK.json
rollout_process.py lost RANK DIRECTORY      two leaders, of which the second dies; the first writes DIRECTORY/0.json
rollout_process.py replica RANK DIRECTORY   one of two ranks of a replica; writes DIRECTORY/RANK.json
rollout_process.py lineage DIRECTORY        trains on 60 prompts, saving after every step; the test kills it
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
        trajectory = from_response(response, reward=1.0, temperature=1.0)
        if data["prompt_id"] == 100:  # a prompt of the second leader
            trajectory.token_rewards = trajectory.loss_mask.astype("float32")
        return [trajectory]


class InOrder(Answer):
    """Workflow that finishes two prompts per batch, in order; all others wait."""

    batches = 99
    """Number of batches whose prompts may finish."""

    async def arun_episode(self, engine, data):
        while data["prompt_id"] % 100 // 2 >= self.batches:  # noqa: ASYNC110 - another thread sets it
            await asyncio.sleep(0.001)
        return await super().arun_episode(engine, data)


def make_rollout(examples, workflow=None, **options):
    config = NullInferenceEngineConfig(mean_tokens=20, sigma=1.0, seconds_per_token=0.001, read_weights=False)
    engine = NullInferenceEngine(config)
    settings = RolloutConfig(group_size=3, max_staleness=1, stall_timeout=60)
    return engine, DistRollout(engine, workflow or Answer(), examples, config=settings, **options)


def numbers(batch, name):
    return batch[name].tolist()


def leaders(rank: int, directory: Path) -> None:
    dist.init_process_group(
        "gloo", init_method=f"file://{directory}/meet", rank=rank, world_size=2, timeout=timedelta(seconds=90)
    )
    parallel = ParallelContext(rank, 2, rank, 2, host_group=dist.group.WORLD, dp_host_group=dist.group.WORLD)
    result: dict = {"batches": []}

    # each leader has different prompts; the second has fewer
    examples = [{"prompt_id": 100 * rank + i} for i in range(6 - 3 * rank)]
    workflow = InOrder()
    _, rollout = make_rollout(examples, workflow, batch_size=4, parallel=parallel, minibatches=2)
    with collect() as in_evaluation:
        held_out = rollout.evaluate([{"prompt_id": i} for i in range(5)], GenerationConfig(), n=2)
    result["eval"] = [trajectory.prompt_id for trajectory in held_out]
    result["eval_metrics"] = in_evaluation.over_replicas(parallel).results()
    metrics = Metrics()
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
        metrics.merge(rollout.stats())
    result["metrics"] = metrics.over_replicas(parallel).results()
    result["outcomes"] = rollout.outcomes()
    rollout.destroy()

    # one leader fails while the other waits for completions that never arrive
    engine, rollout = make_rollout(({"prompt_id": i} for i in range(100)), batch_size=2, parallel=parallel)
    if rank == 0:
        engine.faults.hang = lambda request: True
    else:
        engine.faults.generate = lambda request: InferenceError("injected on rank 1")
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
    """Replacement for the client on a rank that must not use it."""

    def __getattr__(self, name):
        raise AssertionError(f"a rank that is no leader used its client: {name}")


def replica(rank: int, directory: Path) -> None:
    dist.init_process_group(
        "gloo", init_method=f"file://{directory}/meet", rank=rank, world_size=2, timeout=timedelta(seconds=90)
    )
    parallel = ParallelContext(rank, 2, 0, 1, is_dp_leader=rank == 0, host_group=dist.group.WORLD)
    _, rollout = make_rollout([{"prompt_id": i} for i in range(6)], batch_size=4, parallel=parallel)
    if rank:
        rollout.scheduler.engine = rollout.scheduler.episodes.engine = NoClient()
    sizes = [len(rollout.evaluate([{"prompt_id": 0}], GenerationConfig()))]
    with suppress(StopIteration):
        while True:
            sizes.append(len(rollout.next_batch()))
            rollout.end_step(0)
            rollout.stats()
            rollout.state_dict()
    rollout.destroy()
    (directory / f"{rank}.json").write_text(json.dumps(sizes))
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
    """Save a recovery checkpoint: write a new directory, then make it the latest with one rename."""
    checkpoint = directory / f"checkpoint-{os.getpid()}-{len(trained)}"
    checkpoint.mkdir()
    tensors = state.pop("tensors")
    save_file(tensors, checkpoint / "state.safetensors")
    (checkpoint / "state.json").write_text(json.dumps(state | {"trained": trained}))
    link = directory / f"link-{os.getpid()}-{len(trained)}"
    link.symlink_to(checkpoint)
    link.rename(directory / "latest")
    print(len(trained), flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    if sys.argv[1] in ("leaders", "lost", "replica"):
        {"leaders": leaders, "lost": lost, "replica": replica}[sys.argv[1]](int(sys.argv[2]), Path(sys.argv[3]))
    else:
        lineage(Path(sys.argv[2]))
