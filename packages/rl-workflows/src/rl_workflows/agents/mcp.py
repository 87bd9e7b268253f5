"""Tools of MCP servers (the extra `rl-workflows[mcp]`)."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

from rl_contracts.errors import ConfigError, TaskEnvironmentError
from rl_contracts.runtime.aio import LoopThread
from rl_workflows.agents.tools import Tool

_CONNECTION_CLOSED = -32000
"""Of the protocol's errors, the one of a server that is gone."""


class McpServer:
    """A server that is started here, and speaks over its stdin and stdout. All episodes share it; its stderr is that of
    this process.

    Args:
        command: program and arguments.
        environment: its variables, beside the few that the `mcp` package hands on.
        seconds: in which it must have told its tools.

    Raises:
        ConfigError: `mcp` is not installed, or the server did not start or tell its tools; says why.
    """

    def __init__(
        self, command: Sequence[str], environment: Mapping[str, str] | None = None, seconds: float = 60.0
    ) -> None:
        self.name = " ".join(command)
        self._loop = LoopThread(f"mcp {self.name}")
        listed: Future[list[Any]] = Future()
        life = self._loop.submit(self._live(list(command), dict(environment or {}), listed))
        life.add_done_callback(partial(_unwrap_error, listed))
        try:
            self.tools = [McpTool(self, tool) for tool in listed.result(seconds)]
        except Exception as error:
            self.close()
            raise ConfigError(
                f"workflow.tools: the MCP server {self.name!r} did not tell its tools within {seconds:g} s: "
                f"{type(error).__name__}: {error}. It must speak the protocol on stdout, and log to stderr alone."
            ) from error

    async def call(self, tool: str, arguments: dict[str, Any]) -> str:
        """What a call of a tool gives.

        Raises:
            RuntimeError: the tool failed; the model is told.
            TaskEnvironmentError: the server is gone.
        """
        try:
            found = await asyncio.wrap_future(self._loop.submit(self._session.call_tool(tool, arguments)))
        except Exception as error:
            if getattr(getattr(error, "error", None), "code", None) != _CONNECTION_CLOSED:
                raise
            raise TaskEnvironmentError(
                f"the MCP server {self.name!r} is gone; its last words are in the log."
            ) from error
        result = _plain(found)
        text = "\n".join(part.get("text", f"[{part['type']}]") for part in result["content"])
        if result["isError"]:
            raise RuntimeError(text)
        return text

    def close(self) -> None:
        """End it."""
        self._loop.close()

    async def _live(self, command: list[str], environment: dict[str, str], listed: Future[list[Any]]) -> None:
        from mcp import ClientSession, StdioServerParameters, stdio_client
        from mcp.types import PaginatedRequestParams

        server = StdioServerParameters(command=command[0], args=command[1:], env=environment)
        async with stdio_client(server) as streams, ClientSession(*streams) as self._session:
            await self._session.initialize()
            page = _plain(await self._session.list_tools())
            tools = list(page["tools"])
            while cursor := page.get("nextCursor"):
                page = _plain(await self._session.list_tools(params=PaginatedRequestParams(cursor=cursor)))
                tools += page["tools"]
            listed.set_result(tools)
            await asyncio.Event().wait()


class McpTool(Tool):
    """One tool of a server."""

    def __init__(self, server: McpServer, description: dict[str, Any]) -> None:
        self._server = server
        function = {
            "name": description["name"],
            "description": description["description"] or "",
            "parameters": description["inputSchema"],
        }
        self.schema = {"type": "function", "function": function}

    async def call(self, **arguments: Any) -> str:
        return await self._server.call(self.name, arguments)


def _plain(message: Any) -> dict[str, Any]:
    """A message by the protocol's own names, which versions 1 and 2 of the package give other ones."""
    return dict(message.model_dump(by_alias=True))


def _unwrap_error(listed: Future[list[Any]], life: Future[None]) -> None:
    """Why a connection ended, to who waits for its tools: the first error of a group."""
    error = None if life.cancelled() else life.exception()
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    if not listed.done():
        listed.set_exception(error or ConnectionError("it ended"))
