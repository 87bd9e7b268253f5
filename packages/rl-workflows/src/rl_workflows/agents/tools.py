"""Tools: what a model is shown of them, and what a call of one gives."""

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
    """What a model may call. It is told of errors that a call raises; an `RLError` fails the episode."""

    schema: dict[str, Any]
    """What the model is shown: `{"type": "function", "function": {"name", "description", "parameters"}}`."""

    @property
    def name(self) -> str:
        """By which it is called."""
        return str(self.schema["function"]["name"])

    @abstractmethod
    async def call(self, **arguments: Any) -> Any:
        """What a call gives: a text, or a JSON value."""


class FunctionTool(Tool):
    """A Python function: its name, docstring and annotations are what the model is shown (`transformers` makes the
    schema). A plain one runs in a thread of its own, which one that hangs keeps, and nothing else waits for.

    Raises:
        ConfigError: it has no docstring, or an argument without description or annotation.
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
    """Python programs, each in a process of its own that can do nothing but compute (`rl_contracts.sandbox.sandbox`).

    Args:
        sandbox: None: one with 5 s for a program.

    Raises:
        ConfigError: the kernel cannot confine a process.
    """

    def __init__(self, sandbox: Sandbox | None = None) -> None:
        self._sandbox = sandbox or Sandbox(SandboxLimits(seconds=5.0, cpu_seconds=5))
        super().__init__(self.python)

    async def call(self, **arguments: Any) -> Any:
        return await asyncio.to_thread(self.python, **arguments)  # not many more at once than there are cores

    def python(self, code: str) -> str:
        """Runs a Python program and gives what it prints.

        Args:
            code: the program. It has the standard library, no network, and no files but its own.
        """
        run = self._sandbox.run(code)
        outputs = (run.output, run.errors, run.stopped and f"error: {run.stopped}.")
        return "\n".join(filter(None, outputs)) or "(it printed nothing)"


def tools_of(given: Iterable[Tool | Callable[..., Any] | str]) -> dict[str, Tool]:
    """Tools by name.

    Args:
        given: tools; functions; or names under `rl.tools` or dotted paths of functions, or of classes that are tools.

    Raises:
        ConfigError: nothing of a name is installed, two have one name, or as the tools say.
    """
    found: dict[str, Tool] = {}
    for item in given:
        part = registry.load("rl.tools", item) if isinstance(item, str) else item
        part = part() if isinstance(part, type) else part
        tool = part if isinstance(part, Tool) else FunctionTool(part)
        if tool.name in found:
            raise ConfigError(f"workflow.tools: two tools are called {tool.name!r}; a model calls them by name.")
        found[tool.name] = tool
    return found
