"""Parts of a run that stand still or fail once a file says so, for `test_trainer_restarts.py`."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path
from typing import Any

from rl_workflows import RLVRWorkflow


def stuck(what: str) -> bool:
    """Whether this part is the one."""
    file = Path(os.environ["STUCK_FILE"])
    return file.exists() and file.read_text() == what


class StuckWorkflow(RLVRWorkflow):
    """Waits for what never comes."""

    async def arun_episode(self, engine: Any, data: dict[str, Any]) -> Any:
        if stuck("workflow"):
            await asyncio.Event().wait()
        return await super().arun_episode(engine, data)


def stuck_loss(terms: Any) -> Any:
    """A policy gradient that is never computed."""
    while stuck("trainer"):
        time.sleep(0.1)
    return -terms.ratio * terms.advantages, {}


def failing_reward(prompt: str, completions: str, prompt_ids: Any, completion_ids: Any, **data: Any) -> float:
    """A reward that has a mistake."""
    return 1.0 / (0 if stuck("reward") else 2)
