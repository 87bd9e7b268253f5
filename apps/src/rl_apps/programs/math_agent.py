"""Agents that solve word problems with a calculator.

`MathAgent` is a loop around OpenAI's client, `FrameworkAgent` uses the OpenAI Agents SDK, and `ProgramAgent` runs a
program in its own Python environment. No agent contains training code. A subclass of the first two may replace `tool`
by another function with the same name and argument.
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
"""Maximum number of completions per episode."""


class MathAgent(AgentWorkflow):
    """Agent that uses OpenAI's client only.

    Args:
        reward: the run's reward, which scores the last completion.

    Raises:
        ConfigError: `openai` or `transformers` is not installed.
    """

    tool: ClassVar[staticmethod[[str], str]] = staticmethod(calculator)

    def __init__(self, reward: Callable[..., Any]) -> None:
        try:
            import openai
            from transformers.utils import get_json_schema
        except ImportError as error:
            raise ConfigError(
                f"rollout.workflow: this agent needs OpenAI's client ({error}). Install rl-apps[agents], or run "
                "`uv run --package rl-apps --extra agents math-agent` in the repository."
            ) from error
        self._reward, self._openai = reward, openai
        self._tools = [get_json_schema(self.tool)]

    async def run(
        self, data: dict[str, Any], *, base_url: str, api_key: str, http_client: Any
    ) -> float | dict[str, float]:
        client = self._openai.AsyncOpenAI(base_url=base_url, api_key=api_key, http_client=http_client)
        completion, calls = await self._solve(client, list(data["messages"]))
        return {"reward": await self._reward("", completion, [], [], answer=data["answer"]), "calls": calls}

    async def _solve(self, client: Any, messages: list[Any]) -> tuple[str, int]:
        """Return the text of the last completion and the number of tool calls."""
        calls = 0
        for _ in range(TURNS):
            response = await client.chat.completions.create(model="policy", messages=messages, tools=self._tools)
            message = response.choices[0].message
            if not message.tool_calls:
                break
            messages.append(message)
            for call in message.tool_calls:
                calls += 1
                messages.append({"role": "tool", "tool_call_id": call.id, "content": self._call_tool(call.function)})
        return message.content or "", calls

    def _call_tool(self, function: Any) -> str:
        """Return the result of a tool call, or its error, as the text of a tool message."""
        try:
            return self.tool(json.loads(function.arguments)["expression"])
        except (KeyError, TypeError, ValueError, ArithmeticError) as error:
            return f"error: {error}"


class FrameworkAgent(MathAgent):
    """Agent that uses OpenAI's Agents SDK (`openai-agents`)."""

    def __init__(self, reward: Callable[..., Any]) -> None:
        super().__init__(reward)
        try:
            import agents
        except ImportError as error:
            raise ConfigError(
                f"rollout.workflow: {error}. Install rl-apps[agents], or use `uv run --extra agents`."
            ) from error
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
    """Agent that runs `math_agent_program.py` in long-lived processes, one episode after the other.

    `MATH_AGENT_PYTHON` is the path of the Python interpreter; the default is the current one. Its environment needs
    only `openai`.
    """

    command = (
        os.environ.get("MATH_AGENT_PYTHON", sys.executable),
        str(Path(__file__).with_name("math_agent_program.py")),
    )
    long_lived = True


class OneEpisodeAgent(ProgramAgent):
    """`ProgramAgent` that starts a new process for each episode."""

    long_lived = False
