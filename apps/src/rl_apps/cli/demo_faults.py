"""Parts of a run that break when they are told to: what `rl demo` plants. The file FAULT_FILE names the fault that is
on; while it is empty, all is well."""

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
    """Name of the fault that is on; empty: none, or this is no demonstration."""
    path = os.environ.get("FAULT_FILE", "")
    return Path(path).read_text().strip() if path else ""


class FaultyEngine(EmbeddedEngine):
    """Whose servers have the faults of `rl_inference.embedded_server.fault_injection`."""

    @classmethod
    def server_spec(cls, config: Any, spec: ServeSpec) -> JobSpec:
        """The embedded server's, by another module."""
        job = super().server_spec(config, spec)
        command = tuple(
            word if word != "rl_inference.embedded_server" else "rl_inference.embedded_server.fault_injection"
            for word in job.command
        )
        return replace(job, command=command)


def reward(prompt: str, completions: str, prompt_ids: Any, completion_ids: Any, *, answer: str, **data: Any) -> float:
    """That of `gsm8k`, unless it is stuck."""
    from rl_rewards.gsm8k import gsm8k_reward_fn

    while fault() == "stuck reward":
        time.sleep(1.0)
    return gsm8k_reward_fn(prompt, completions, prompt_ids, completion_ids, answer=answer, **data)


class DyingWorkflow(RLVRWorkflow):
    """Ends the thread that makes the answers."""

    async def arun_episode(self, engine: Any, data: dict[str, Any]) -> list[Trajectory]:
        """That of `rlvr`, until it dies."""
        if fault() == "dead producer":
            sys.exit("planted: the producer of answers died")
        return await super().arun_episode(engine, data)


def nan_loss(terms: Any) -> Any:
    """A policy gradient that is no number."""
    return -terms.ratio * terms.advantages * (float("nan") if fault() == "nan loss" else 1.0), {}
