"""An engine whose answers are scripted, behind an endpoint: what agents of tests talk to."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

from rl_contracts.chat.rendering import ChatRenderer
from rl_contracts.config import GenerationConfig
from rl_contracts.data import ModelRequest, ModelResponse
from rl_contracts.inference import Capabilities
from rl_contracts.testing import NullInferenceEngine, NullInferenceEngineConfig
from rl_contracts.testing.chat_formats import format_completion, make_chat_tokenizer
from rl_workflows.agents.endpoint.config import EndpointConfig
from rl_workflows.agents.endpoint.server import HttpRolloutEndpoint
from rl_workflows.agents.endpoint.session import Session

Says = Callable[[str], str | dict[str, Any]]
"""`(text of the prompt) -> what the model writes`: the text itself, or arguments of `written`."""


class ScriptedEngine(NullInferenceEngine):
    """Says what a function of the prompt's text says, and remembers its answers."""

    schemas = False
    """Whether it is taken to keep answers to schemas."""

    def __init__(self, name: str, says: Says, **options: Any) -> None:
        self.name, self.says = name, says
        self.tokenizer = make_chat_tokenizer(name)
        self.renderer = ChatRenderer(self.tokenizer)
        self.responses: list[ModelResponse] = []
        super().__init__(
            NullInferenceEngineConfig(**{"seconds_per_token": 0.0, "vocab_size": len(self.tokenizer), **options}),
            answer=self._write,
        )

    def _write(self, request: ModelRequest) -> list[int]:
        said = self.says(self.tokenizer.decode(request.input_ids))
        return self.renderer.encode(said if isinstance(said, str) else format_completion(self.name, **said))

    @property
    def capabilities(self) -> Capabilities:
        return replace(super().capabilities, schemas=self.schemas)

    async def agenerate(self, request: ModelRequest) -> ModelResponse:
        stop = request.generation.stop
        request.generation.stop = []  # which the null engine does not know; the script ends there itself
        response = await super().agenerate(request)
        request.generation.stop = stop
        self.responses.append(response)
        return response


@asynccontextmanager
async def served(
    engine: ScriptedEngine,
    config: EndpointConfig | None = None,
    generation: GenerationConfig | None = None,
    max_length: int | None = None,
    **options: Any,
) -> AsyncIterator[Session]:
    """A session of an endpoint over an engine."""
    endpoint = HttpRolloutEndpoint(engine.tokenizer, config, **options)
    try:
        yield await endpoint.open(engine, generation or GenerationConfig(max_new_tokens=512), max_length)
    finally:
        await endpoint.destroy()
        await engine.destroy()
