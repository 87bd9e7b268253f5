"""Environments of the `verifiers` package as agents."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rl_contracts.errors import ConfigError
from rl_workflows.agents.command import AgentCommand


class VerifiersAgent(AgentCommand):
    """Plays tasks of an environment of `verifiers` 0.4 or later, in the Python that has both.

    A row has the number of its `task`; `program.py CONFIG --tasks` writes such rows. The reward is the environment's.

    Subclass it with `python` and `config`.

    Raises:
        ConfigError: `config` names no taskset.
    """

    python: str = sys.executable
    config: Mapping[str, Any] = {}
    """What `verifiers` calls an environment's config, such as `{"taskset": {"id": "gsm8k"}}`, with an agent for whom
    there is a place here: `{"agent": {"runtime": {"type": "subprocess"}, "harness": {"id": "null"}}}`."""
    long_lived = True
    inherited = (*AgentCommand.inherited, "HOME")
    confined = False  # what harnesses install lies in the user's cache
    program = str(Path(__file__).with_name("verifiers_program.py"))

    def __init__(self, reward: Callable[..., Any]) -> None:
        if not self.config.get("taskset", {}).get("id"):
            raise ConfigError(
                f"{type(self).__name__}.config: expected a taskset's id, such as "
                f'{{"taskset": {{"id": "gsm8k"}}}}, found {dict(self.config)}.'
            )
        self.command = (self.python, "-P", self.program, json.dumps(self.config))
        super().__init__(reward)
