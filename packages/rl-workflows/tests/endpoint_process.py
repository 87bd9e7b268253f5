"""A process with an endpoint over an engine that says the same to all; writes its URL and a session's key to a file."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from agent_model import ScriptedEngine

from rl_contracts.config import GenerationConfig
from rl_workflows.agents.endpoint.config import EndpointConfig
from rl_workflows.agents.endpoint.server import HttpRolloutEndpoint


async def main(told: Path) -> None:
    engine = ScriptedEngine("qwen3", lambda prompt: {"content": "it"})
    endpoint = HttpRolloutEndpoint(engine.tokenizer, EndpointConfig(max_calls=2**30, max_tokens=2**40))
    session = await endpoint.open(engine, GenerationConfig(max_new_tokens=512))
    told.with_suffix(".part").write_text(f"{session.url}\n{session.api_key}")
    told.with_suffix(".part").rename(told)
    while True:
        await asyncio.sleep(1)
        engine.responses.clear()  # which tests look at, and which grow


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1])))
