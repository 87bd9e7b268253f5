"""A user program for type checkers: the exports of the packages have types, and a misspelled import is an error.

`lint.sh` checks it with strict mypy and basedpyright, which reject an unused `type: ignore`. It is never run.
"""

from pathlib import Path
from typing import Any

import rl_contracts.testing
import rl_contracts.weights
import rl_datasets
import rl_engines_fsdp
import rl_engines_megatron
import rl_inference
import rl_launchers
import rl_rewards
import rl_trainers
import rl_workflows
from rl_contracts.config import GenerationConfig
from rl_contracts.data import ModelRequest
from rl_contracts.inference import InferenceEngine
from rl_contracts.workflow import RolloutWorkflow
from rl_datasets import GSM8K, PromptLoader
from rl_engines_fsdp import FSDPEngine
from rl_inference import EmbeddedEngine
from rl_rewards import gsm8k_reward_fn
from rl_trainers import AlgorithmConfig, PolicyActor
from rl_workflows import DistRollout, RolloutConfig

MISSPELLED = (
    rl_contracts.testing.Misspelled,  # type: ignore[attr-defined]
    rl_contracts.weights.Misspelled,  # type: ignore[attr-defined]
    rl_datasets.Misspelled,  # type: ignore[attr-defined]
    rl_engines_fsdp.Misspelled,  # type: ignore[attr-defined]
    rl_engines_megatron.Misspelled,  # type: ignore[attr-defined]
    rl_inference.Misspelled,  # type: ignore[attr-defined]
    rl_launchers.Misspelled,  # type: ignore[attr-defined]
    rl_rewards.Misspelled,  # type: ignore[attr-defined]
    rl_trainers.Misspelled,  # type: ignore[attr-defined]
    rl_workflows.Misspelled,  # type: ignore[attr-defined]
)


def examples(directory: Path) -> list[dict[str, Any]]:
    return list(GSM8K(directory, split="train"))


async def generate(engine: EmbeddedEngine) -> list[int]:
    completion = await engine.agenerate(ModelRequest([1, 2], GenerationConfig(max_new_tokens=4)))
    return completion.output_ids


def step(engine: FSDPEngine, rollout: DistRollout) -> float | None:
    actor = PolicyActor(engine, AlgorithmConfig(entropy_coef=0.1))
    batch = rollout.next_batch()
    actor.prepare(batch)
    return actor.update(batch)["grad_norm"]


def rollout(engine: InferenceEngine, workflow: RolloutWorkflow, loader: PromptLoader) -> DistRollout:
    return DistRollout(engine, workflow, loader, batch_size=4, config=RolloutConfig(group_size=8))


def score(text: str) -> float:
    return gsm8k_reward_fn("", text, [], [], answer="#### 72")
