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
"""Error code of the protocol for a closed connection."""


class McpServer:
    """MCP server in a child process that communicates over its stdin and stdout.

    All episodes share it. It inherits the stderr of this process.

    Args:
        command: program and arguments.
        environment: environment variables of the server, in addition to the few that the `mcp` package copies.
        seconds: time limit for the server to start and list its tools.

    Raises:
        ConfigError: `mcp` is not installed, or the server did not start or did not list its tools in time.
    """

    def __init__(
        self, command: Sequence[str], environment: Mapping[str, str] | None = None, seconds: float = 60.0
    ) -> None:
        self.name = " ".join(command)
        self._loop = LoopThread(f"mcp {self.name}")
        listing: Future[list[Any]] = Future()
        connection = self._loop.submit(self._serve_connection(list(command), dict(environment or {}), listing))
        connection.add_done_callback(partial(_unwrap_error, listing))
        try:
            self.tools = [McpTool(self, tool) for tool in listing.result(seconds)]
        except Exception as error:
            self.close()
            raise ConfigError(
                f"workflow.tools: the MCP server {self.name!r} did not list its tools within {seconds:g} s: "
                f"{type(error).__name__}: {error}. Its stdout must carry only the protocol; write logs to stderr."
            ) from error

    async def call(self, tool: str, arguments: dict[str, Any]) -> str | list[Any]:
        """Return the text that a tool returns, or a list of content parts if it has images.

        Raises:
            RuntimeError: the tool failed. The model gets the message as the result of the call.
            TaskEnvironmentError: the server has closed the connection.
        """
        try:
            response = await asyncio.wrap_future(self._loop.submit(self._session.call_tool(tool, arguments)))
        except Exception as error:
            if getattr(getattr(error, "error", None), "code", None) != _CONNECTION_CLOSED:
                raise
            raise TaskEnvironmentError(
                f"the MCP server {self.name!r} closed the connection; its stderr is in the log of this process."
            ) from error
        result = _as_dict(response)
        blocks = result["content"]
        text = "\n".join(block.get("text", f"[{block['type']}]") for block in blocks)
        if result["isError"]:
            raise RuntimeError(text)
        return [*map(_part, blocks)] if any(block["type"] == "image" for block in blocks) else text

    def close(self) -> None:
        """Stop the server."""
        self._loop.close()

    async def _serve_connection(
        self, command: list[str], environment: dict[str, str], listing: Future[list[Any]]
    ) -> None:
        from mcp import ClientSession, StdioServerParameters, stdio_client
        from mcp.types import PaginatedRequestParams

        server = StdioServerParameters(command=command[0], args=command[1:], env=environment)
        async with stdio_client(server) as streams, ClientSession(*streams) as self._session:
            await self._session.initialize()
            page = _as_dict(await self._session.list_tools())
            tools = list(page["tools"])
            while cursor := page.get("nextCursor"):
                page = _as_dict(await self._session.list_tools(params=PaginatedRequestParams(cursor=cursor)))
                tools += page["tools"]
            listing.set_result(tools)
            await asyncio.Event().wait()


class McpTool(Tool):
    """Tool of an MCP server."""

    def __init__(self, server: McpServer, description: dict[str, Any]) -> None:
        self._server = server
        function = {
            "name": description["name"],
            "description": description["description"] or "",
            "parameters": description["inputSchema"],
        }
        self.schema = {"type": "function", "function": function}

    async def call(self, **arguments: Any) -> str | list[Any]:
        return await self._server.call(self.name, arguments)


def _part(block: Mapping[str, Any]) -> dict[str, Any]:
    """Return a block of a result as a content part."""
    if block["type"] == "image":
        return {"type": "image_url", "image_url": {"url": f"data:{block['mimeType']};base64,{block['data']}"}}
    return {"type": "text", "text": block.get("text", f"[{block['type']}]")}


def _as_dict(message: Any) -> dict[str, Any]:
    """Return a message with the field names of the protocol. Versions 1 and 2 of `mcp` use different Python names."""
    return dict(message.model_dump(by_alias=True))


def _unwrap_error(listing: Future[list[Any]], connection: Future[None]) -> None:
    """Fail `listing` with the error that ended the connection, unless the tools were listed already.

    An exception group is replaced by its first error.
    """
    error = None if connection.cancelled() else connection.exception()
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    if not listing.done():
        listing.set_exception(error or ConnectionError("the server ended"))
