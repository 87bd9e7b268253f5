"""Components of a run with faults that `rl demo` injects. The file FAULT_FILE names the active fault; an empty file
means no fault."""

from __future__ import annotations

import os
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rl_inference import EmbeddedEngine, EmbeddedEngineConfig
from rl_workflows import RLVRWorkflow

if TYPE_CHECKING:
    from rl_contracts.batch.trajectory import Trajectory
    from rl_contracts.data import ServeSpec
    from rl_contracts.scheduler import JobSpec


FaultyEngineConfig = EmbeddedEngineConfig
"""Settings of `FaultyEngine`."""


def fault() -> str:
    """Return the name of the active fault, or an empty string outside of a demonstration."""
    path = os.environ.get("FAULT_FILE", "")
    return Path(path).read_text().strip() if path else ""


class FaultyEngine(EmbeddedEngine):
    """Embedded engine whose servers can have the faults of `rl_inference.embedded_server.fault_injection`."""

    @classmethod
    def server_spec(cls, config: Any, spec: ServeSpec) -> JobSpec:
        """Return the job of the embedded server, with the module that injects faults."""
        job = super().server_spec(config, spec)
        command = tuple(
            word if word != "rl_inference.embedded_server" else "rl_inference.embedded_server.fault_injection"
            for word in job.command
        )
        return replace(job, command=command)


def reward(prompt: str, completions: str, prompt_ids: Any, completion_ids: Any, *, answer: str, **data: Any) -> float:
    """Return the `gsm8k` reward, after waiting for as long as the fault is active."""
    from rl_rewards.gsm8k import gsm8k_reward_fn

    while fault() == "stuck reward":
        time.sleep(1.0)
    return gsm8k_reward_fn(prompt, completions, prompt_ids, completion_ids, answer=answer, **data)


class DyingWorkflow(RLVRWorkflow):
    """Workflow that ends the thread that generates the completions."""

    async def arun_episode(self, engine: Any, data: dict[str, Any]) -> list[Trajectory]:
        """Run an `rlvr` episode, or exit the thread if the fault is active."""
        if fault() == "dead producer":
            sys.exit("injected fault: the rollout thread died")
        return await super().arun_episode(engine, data)


def nan_loss(terms: Any) -> Any:
    """Return a policy gradient loss, which is NaN while the fault is active."""
    return -terms.ratio * terms.advantages * (float("nan") if fault() == "nan loss" else 1.0), {}
