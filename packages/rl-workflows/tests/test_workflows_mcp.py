"""Tools of a real MCP server in a separate process."""

import asyncio
import os
import signal
import sys

import pytest

from rl_contracts.chat.image_messages import images_in
from rl_contracts.config import GenerationConfig
from rl_contracts.errors import ConfigError, TaskEnvironmentError
from rl_contracts.images import read_image
from rl_contracts.testing import NullInferenceEngine, NullInferenceEngineConfig
from rl_contracts.testing.chat_formats import format_completion, make_chat_tokenizer
from rl_contracts.testing.image_files import unusual_image_files
from rl_workflows import ToolWorkflow
from rl_workflows.agents.mcp import McpServer

PNG = unusual_image_files()["plain"]
SERVER = """
import os, time
from mcp.server.mcpserver import Image, MCPServer
from mcp.server.mcpserver.exceptions import ToolError

server = MCPServer("weather")

@server.tool()
def weather(city: str) -> str:
    '''The weather of a city.'''
    if city == "Atlantis":
        raise ToolError("it sank")
    return f"sunny in {city}, {os.environ['UNIT']}"

@server.tool()
def pid() -> int:
    '''The id of the server's process.'''
    return os.getpid()

@server.tool()
def radar() -> list[str | Image]:
    '''A picture of the clouds.'''
    return ["clouds: ", Image(data=bytes.fromhex(os.environ["PNG"]), format="png")]

server.run(transport="stdio")
"""


@pytest.fixture
def server(tmp_path):
    (tmp_path / "server.py").write_text(SERVER)
    server = McpServer([sys.executable, str(tmp_path / "server.py")], {"UNIT": "celsius", "PNG": PNG.hex()})
    yield server
    server.close()


@pytest.mark.slow
async def test_mcp_tools_are_listed_called_and_report_errors(server):
    tokenizer, prompts = make_chat_tokenizer("gemma3"), []
    calls = [{"name": "weather", "arguments": {"city": city}} for city in ("Oslo", "Atlantis")]
    completions = [
        format_completion("gemma3", calls=[*calls, {"name": "weather", "arguments": {}}]),
        format_completion("gemma3", "sunny"),
    ]

    def complete(request):
        prompts.append(tokenizer.decode(request.input_ids))
        return tokenizer.encode(completions.pop(0), add_special_tokens=False)

    config = NullInferenceEngineConfig(seconds_per_token=0.0, vocab_size=len(tokenizer))
    workflow = ToolWorkflow(
        tokenizer, GenerationConfig(max_new_tokens=512), lambda *args, **data: 1.0, tools=[*server.tools, "calculator"]
    )

    [trajectory] = await workflow.arun_episode(
        NullInferenceEngine(config, answer=complete), {"messages": [{"role": "user", "content": "?"}], "prompt_id": 0}
    )

    assert trajectory.info["turns"] == 2
    assert '"description": "The weather of a city."' in prompts[0]
    assert '"city"' in prompts[0]
    assert "<tool_response>sunny in Oslo, celsius</tool_response>" in prompts[1]
    assert "it sank" in prompts[1]
    assert prompts[1].count("<tool_response>error: RuntimeError") == 2


@pytest.mark.slow
async def test_mcp_calls_run_concurrently_and_dead_server_raises(server):
    tools = {tool.name: tool for tool in server.tools}
    results = await asyncio.gather(*(tools["weather"].call(city=str(n)) for n in range(20)))
    assert results == [f"sunny in {n}, celsius" for n in range(20)]

    os.kill(int(await tools["pid"].call()), signal.SIGKILL)

    with pytest.raises(TaskEnvironmentError, match=r"server.py' closed the connection"):
        await asyncio.wait_for(tools["weather"].call(city="Oslo"), 30)


@pytest.mark.slow
async def test_mcp_image_is_a_content_part(server):
    (tool,) = (tool for tool in server.tools if tool.name == "radar")

    text, image = await tool.call()

    assert text == {"type": "text", "text": "clouds: "}
    assert images_in([{"role": "tool", "content": [text, image]}]) == (read_image(PNG),)


@pytest.mark.parametrize("command", [["no-such-program"], [sys.executable, "-c", "raise SystemExit(3)"]])
def test_mcp_server_that_does_not_start_raises(command):
    with pytest.raises(ConfigError, match=r"workflow.tools: .* 30 s"):
        McpServer(command, seconds=30)
