"""Process with an endpoint whose engine returns a fixed completion. Writes the URL and a session key to a file."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from agent_model import ScriptedEngine

from rl_contracts.config import GenerationConfig
from rl_workflows.agents.endpoint import session as session_module
from rl_workflows.agents.endpoint.config import EndpointConfig
from rl_workflows.agents.endpoint.server import HttpRolloutEndpoint


async def main(connection_file: Path) -> None:
    engine = ScriptedEngine("qwen3", lambda prompt: {"content": "it"})
    session_module.MAX_TOKENS = 2**40
    endpoint = HttpRolloutEndpoint(engine.tokenizer, EndpointConfig(max_calls=2**30))
    session = await endpoint.open(engine, GenerationConfig(max_new_tokens=512))
    connection_file.with_suffix(".part").write_text(f"{session.url}\n{session.api_key}")
    connection_file.with_suffix(".part").rename(connection_file)
    while True:
        await asyncio.sleep(1)
        engine.responses.clear()  # the engine keeps all responses for tests; clear them so that memory stays constant


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1])))
