"""Components that block or fail while the file STUCK_FILE names them, for `test_trainer_restarts.py`."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path
from typing import Any

from rl_workflows import RLVRWorkflow
from rl_workflows.rollout import watchdog

watchdog.TRAINER_TIMEOUT = float(os.environ.get("TRAINER_TIMEOUT", watchdog.TRAINER_TIMEOUT))


def is_stuck(component: str) -> bool:
    """Return whether STUCK_FILE names this component."""
    file = Path(os.environ["STUCK_FILE"])
    return file.exists() and file.read_text() == component


class StuckWorkflow(RLVRWorkflow):
    """Workflow whose episodes never end while it is stuck."""

    async def arun_episode(self, engine: Any, data: dict[str, Any]) -> Any:
        if is_stuck("workflow"):
            await asyncio.Event().wait()
        return await super().arun_episode(engine, data)


def stuck_loss(terms: Any) -> Any:
    """Return the policy-gradient loss, and block while the trainer is stuck."""
    while is_stuck("trainer"):
        time.sleep(0.1)
    return -terms.ratio * terms.advantages, {}


def failing_reward(prompt: str, completions: str, prompt_ids: Any, completion_ids: Any, **data: Any) -> float:
    """Return a constant reward, or divide by zero while the reward is stuck."""
    return 1.0 / (0 if is_stuck("reward") else 2)
