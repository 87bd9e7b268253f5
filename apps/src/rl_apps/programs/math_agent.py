"""An agent that solves word problems with a calculator: a loop around OpenAI's client, the same by a framework, and as
a program in an environment of its own.

None knows that it is trained. `tool` is what the first two may call; another function of the same name and argument may
take its place.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

from rl_contracts.errors import ConfigError
from rl_contracts.workflow import AgentWorkflow
from rl_workflows import AgentCommand
from rl_workflows.agents.calculator import calculator

TURNS = 4
"""Answers of an episode at most."""


class MathAgent(AgentWorkflow):
    """By OpenAI's client alone.

    Args:
        reward: of the run; scores the last answer.
    """

    tool: ClassVar[staticmethod[[str], str]] = staticmethod(calculator)

    def __init__(self, reward: Callable[..., Any]) -> None:
        try:
            import openai
            from transformers.utils import get_json_schema
        except ImportError as error:
            raise ConfigError(
                f"rollout.workflow: this agent needs OpenAI's client ({error}): install rl-apps[agents], or in the "
                "repository uv run --package rl-apps --extra agents math-agent."
            ) from error
        self._reward, self._openai = reward, openai
        self._tools = [get_json_schema(self.tool)]

    async def run(
        self, data: dict[str, Any], *, base_url: str, api_key: str, http_client: Any
    ) -> float | dict[str, float]:
        client = self._openai.AsyncOpenAI(base_url=base_url, api_key=api_key, http_client=http_client)
        said, calls = await self._solve(client, list(data["messages"]))
        return {"reward": await self._reward("", said, [], [], answer=data["answer"]), "calls": calls}

    async def _solve(self, client: Any, messages: list[Any]) -> tuple[str, int]:
        """The last answer, and how often the tool was called."""
        calls = 0
        for _ in range(TURNS):
            made = await client.chat.completions.create(model="policy", messages=messages, tools=self._tools)
            answer = made.choices[0].message
            if not answer.tool_calls:
                break
            messages.append(answer)
            for call in answer.tool_calls:
                calls += 1
                messages.append({"role": "tool", "tool_call_id": call.id, "content": self._use(call.function)})
        return answer.content or "", calls

    def _use(self, function: Any) -> str:
        """What the model is told of a call."""
        try:
            return self.tool(json.loads(function.arguments)["expression"])
        except (KeyError, TypeError, ValueError, ArithmeticError) as error:
            return f"error: {error}"


class FrameworkAgent(MathAgent):
    """By OpenAI's Agents SDK (`openai-agents`)."""

    def __init__(self, reward: Callable[..., Any]) -> None:
        super().__init__(reward)
        try:
            import agents
        except ImportError as error:
            raise ConfigError(f"rollout.workflow: {error}: install rl-apps[agents] (uv run --extra agents).") from error
        self._agents = agents
        self._function = agents.function_tool(self.tool)

    async def _solve(self, client: Any, messages: list[Any]) -> tuple[str, int]:
        agents = self._agents
        model = agents.OpenAIChatCompletionsModel(model="policy", openai_client=client)
        agent = agents.Agent(name="mathematician", model=model, tools=[self._function])
        try:
            result = await agents.Runner.run(
                agent, messages, max_turns=TURNS, run_config=agents.RunConfig(tracing_disabled=True)
            )
        except agents.MaxTurnsExceeded:
            return "", TURNS
        return str(result.final_output), sum(item.type == "tool_call_item" for item in result.new_items)


class ProgramAgent(AgentCommand):
    """By `math_agent_program.py`, whose processes take one episode after the other. `MATH_AGENT_PYTHON` names the
    Python of its environment, which needs `openai` alone; without it, this one's."""

    command = (
        os.environ.get("MATH_AGENT_PYTHON", sys.executable),
        str(Path(__file__).with_name("math_agent_program.py")),
    )
    long_lived = True


class OneEpisodeAgent(ProgramAgent):
    """The same with a process for each episode."""

    long_lived = False
