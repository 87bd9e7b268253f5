"""Tools that models call: Python functions, sandboxed Python programs, and a base class for others."""

from __future__ import annotations

import asyncio
import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from rl_contracts import registry
from rl_contracts.errors import ConfigError
from rl_contracts.runtime.aio import run_in_thread
from rl_contracts.sandbox.sandbox import Sandbox, SandboxLimits


class Tool(ABC):
    """Tool that a model may call. An `RLError` in a call fails the episode; other errors are reported to the model."""

    schema: dict[str, Any]
    """Schema for the prompt: `{"type": "function", "function": {"name", "description", "parameters"}}`."""

    @property
    def name(self) -> str:
        """Name that the model uses in calls."""
        return str(self.schema["function"]["name"])

    @abstractmethod
    async def call(self, **arguments: Any) -> Any:
        """Run the tool; return a text or a JSON value."""


class FunctionTool(Tool):
    """Python function as a tool. `transformers` builds its schema from its name, docstring and annotations.

    Each call of a plain function runs in a separate thread, so a function that hangs does not delay others.

    Raises:
        ConfigError: the function has no docstring, or an argument without description or annotation.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        from transformers.utils import chat_template_utils, get_json_schema

        self._function = function
        try:
            self.schema = get_json_schema(function)
        except (chat_template_utils.DocstringParsingException, chat_template_utils.TypeHintParsingException) as error:
            raise ConfigError(f"workflow.tools: {error}") from error

    async def call(self, **arguments: Any) -> Any:
        if inspect.iscoroutinefunction(self._function):
            return await self._function(**arguments)
        return await asyncio.wrap_future(run_in_thread(partial(self._function, **arguments)))


class PythonTool(FunctionTool):
    """Tool that runs Python programs, each in a separate sandboxed process (`rl_contracts.sandbox.sandbox`).

    Args:
        sandbox: the sandbox. None creates one with a limit of 5 s per program.

    Raises:
        ConfigError: the kernel cannot confine a process.
    """

    def __init__(self, sandbox: Sandbox | None = None) -> None:
        self._sandbox = sandbox or Sandbox(SandboxLimits(seconds=5.0, cpu_seconds=5))
        super().__init__(self.python)

    async def call(self, **arguments: Any) -> Any:
        # the thread pool limits programs to little more than one per core
        return await asyncio.to_thread(self.python, **arguments)

    def python(self, code: str) -> str:
        """Runs a Python program and returns what it prints.

        Args:
            code: the program. It has the standard library, no network, and no files but its own.
        """
        run = self._sandbox.run(code)
        outputs = (run.output, run.errors, run.stopped and f"error: {run.stopped}.")
        return "\n".join(filter(None, outputs)) or "(it printed nothing)"


def load_tools(sources: Iterable[Tool | Callable[..., Any] | str]) -> dict[str, Tool]:
    """Return tools by name.

    Args:
        sources: tools, functions, or strings. A string is an entry point in the group `rl.tools`, or the dotted path of
            a function or of a subclass of `Tool`.

    Raises:
        ConfigError: a string names no tool, two tools have the same name, or a tool cannot be created.
    """
    tools: dict[str, Tool] = {}
    for item in sources:
        component = registry.load("rl.tools", item) if isinstance(item, str) else item
        component = component() if isinstance(component, type) else component
        tool = component if isinstance(component, Tool) else FunctionTool(component)
        if tool.name in tools:
            raise ConfigError(
                f"workflow.tools: expected unique names, found two tools named {tool.name!r}; rename one."
            )
        tools[tool.name] = tool
    return tools
