"""A training loop without a rollout runtime, for tests with fault injection."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from tensordict import TensorDict

from rl_contracts.batch.redistribution import shard_batch
from rl_contracts.batch.trajectory import from_response, stack
from rl_contracts.config import GenerationConfig, OptimizerConfig
from rl_contracts.data import FinetuneSpec, ModelRequest
from rl_contracts.inference import InferenceEngine
from rl_contracts.runtime.aio import LoopThread
from rl_engines_fsdp import FSDPEngine, FSDPEngineConfig
from rl_engines_fsdp.config import LoRAConfig
from rl_trainers import GapConfig, GapGate, PolicyActor, PublishConfig, WeightPublisher
from rl_trainers.algorithms.config import AlgorithmConfig

TEMPERATURE = 1.3
"""Sampling temperature of all completions."""


def prompts(tokens: int = 40) -> list[list[int]]:
    """Return three different prompts without a common prefix."""
    return [[(7 * i + 3 * j) % 200 + 5 for j in range(tokens)] for i in range(3)]


class Run:
    """Trainer with an inference engine; `step` is one training step.

    Args:
        directory: directory of the published weights.
        model: model with which the servers were started.
        client: initialized inference engine; `close` destroys it.
        loop: event loop of the inference engine.
        serve_dtype: dtype in which the servers compute.
        lr: learning rate.
        version: initial version.
        canary: value of `PublishConfig.canary`.
        prompt_tokens: length of each prompt.
        lora: settings of the trained adapters; None to train all weights.
    """

    def __init__(
        self,
        directory: Path,
        model: Path,
        client: InferenceEngine,
        loop: LoopThread,
        serve_dtype: str = "float32",
        lr: float = 1e-2,
        version: int = 0,
        canary: str = "auto",
        prompt_tokens: int = 40,
        lora: LoRAConfig | None = None,
    ) -> None:
        self.loop, self.served, self.client, self.prompts = loop, serve_dtype, client, prompts(prompt_tokens)
        self.engine = FSDPEngine(FSDPEngineConfig(serve_dtype=serve_dtype, lora=lora))
        optimizer = OptimizerConfig(lr=lr, weight_decay=0.0)
        self.engine.initialize(FinetuneSpec(str(model), 1000, optimizer=optimizer, device="cpu"))
        self.engine.version = version
        self.publisher = WeightPublisher(self.engine, client, loop, PublishConfig(canary=canary), str(directory))
        self.reset()

    def reset(self) -> None:
        """Publish the current weights, and replace actor and log-prob gap gate by new ones."""
        config = GapConfig(sequences=3, warn=0.005, stop=2.0)
        self.gate = GapGate(self.engine, self.client, self.loop, config, "float32", self.served)
        self.actor = PolicyActor(self.engine, AlgorithmConfig())
        self.publisher.publish(self.engine.version)

    def sample_batch(self) -> TensorDict:
        """Return a batch with two completions per prompt, whose rewards differ within each group."""
        generation = GenerationConfig(max_new_tokens=12, temperature=TEMPERATURE, ignore_eos=True)
        first = 100 * self.engine.version

        async def generate() -> list[Any]:
            requests = [
                ModelRequest(prompt, generation, seed=first + 10 * group + sample, group=str(group))
                for group, prompt in enumerate(self.prompts)
                for sample in range(2)
            ]
            return await asyncio.gather(*(self.client.agenerate(request) for request in requests))

        trajectories = []
        for index, response in enumerate(self.loop.run(generate(), 60)):
            trajectory = from_response(response, reward=index % 2, temperature=TEMPERATURE)
            trajectory.prompt_id = trajectory.group_id = index // 2
            trajectory.episode_id = index % 2
            trajectories.append(trajectory)
        return shard_batch(stack(trajectories), self.engine.parallel)

    def step(self, batch: TensorDict | None = None) -> dict[str, Any]:
        """Take a training step in the order of `rl_trainers.train`, and return its metrics."""
        batch = self.sample_batch() if batch is None else batch
        stats = self.actor.prepare(batch)
        stats |= self.gate.before_update(batch)
        stats |= self.actor.update(batch)
        stats |= self.publisher.publish(self.engine.version)
        return stats | self.gate.after_commit(self.publisher.receipt)

    def close(self) -> None:
        self.loop.run(self.client.destroy(), 10)
        self.publisher.destroy()
        self.engine.destroy()
