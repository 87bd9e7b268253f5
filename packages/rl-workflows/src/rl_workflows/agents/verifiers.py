"""Agent that runs environments of the `verifiers` package."""

from __future__ import annotations

import json
import sys
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

from rl_contracts.errors import ConfigError
from rl_workflows.agents.command import AgentCommand


class VerifiersAgent(AgentCommand):
    """Agent that runs tasks of an environment of `verifiers` 0.4 or later.

    Subclass it and define `python` and `config`.

    The field `task` of an example is the number of a task; `verifiers_program.py CONFIG --tasks` writes such examples.
    The environment computes the reward.

    Raises:
        ConfigError: `config` names no taskset.
    """

    python: str = sys.executable
    """Python interpreter in which `verifiers` and the environment are installed."""
    config: Mapping[str, Any] = {}
    """Configuration of the environment, such as `{"taskset": {"id": "gsm8k"}}`. Its agent must run in a subprocess:
    `{"agent": {"runtime": {"type": "subprocess"}, "harness": {"id": "null"}}}`."""
    long_lived = True
    inherited = (*AgentCommand.inherited, "HOME")
    confined = False  # harnesses install packages into the user's cache
    program = str(Path(__file__).with_name("verifiers_program.py"))
    """Path of the program that runs the tasks."""

    def __init__(self, reward: Callable[..., float | Awaitable[float]]) -> None:
        if not self.config.get("taskset", {}).get("id"):
            raise ConfigError(
                f"{type(self).__name__}.config: expected the id of a taskset, such as "
                f'{{"taskset": {{"id": "gsm8k"}}}}, found {dict(self.config)}.'
            )
        self.command = (self.python, "-P", self.program, json.dumps(self.config))
        super().__init__(reward)
