"""Process with an endpoint whose engine returns a fixed completion. Writes the URL and a session key to a file.

The optional second argument is the directory of a vision-language model, whose processor reads the prompts.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from agent_model import ScriptedEngine

from rl_contracts.config import GenerationConfig
from rl_workflows.agents.endpoint import session as session_module
from rl_workflows.agents.endpoint.config import EndpointConfig
from rl_workflows.agents.endpoint.server import HttpRolloutEndpoint


async def main(connection_file: Path, vision_model: Path | None = None) -> None:
    if vision_model is None:
        engine = ScriptedEngine("qwen3", lambda prompt: {"content": "it"})
    else:
        from transformers import AutoProcessor

        engine = ScriptedEngine("", lambda prompt: "it<|im_end|>", AutoProcessor.from_pretrained(vision_model))
    session_module.MAX_TOKENS = 2**40
    endpoint = HttpRolloutEndpoint(engine.processor, EndpointConfig(max_calls=2**30))
    session = await endpoint.open(engine, GenerationConfig(max_new_tokens=512))
    connection_file.with_suffix(".part").write_text(f"{session.url}\n{session.api_key}")
    connection_file.with_suffix(".part").rename(connection_file)
    while True:
        await asyncio.sleep(1)
        # the engine keeps all requests and responses for tests; clear them so that memory stays constant
        engine.requests.clear()
        engine.responses.clear()


if __name__ == "__main__":
    asyncio.run(main(*map(Path, sys.argv[1:])))
