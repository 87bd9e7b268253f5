"""Engine with scripted completions and an endpoint in front of it, for tests of agents."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

from rl_contracts.chat.rendering import ChatRenderer, tokenizer_of
from rl_contracts.config import GenerationConfig
from rl_contracts.data import ModelRequest, ModelResponse
from rl_contracts.inference import Capabilities
from rl_contracts.testing import NullInferenceEngine, NullInferenceEngineConfig
from rl_contracts.testing.chat_formats import format_completion, make_chat_tokenizer
from rl_workflows.agents.endpoint.config import EndpointConfig
from rl_workflows.agents.endpoint.server import HttpRolloutEndpoint
from rl_workflows.agents.endpoint.session import Session

Says = Callable[[str], str | dict[str, Any]]
"""Function from the text of a prompt to the completion: its text, or arguments of `format_completion`."""


class ScriptedEngine(NullInferenceEngine):
    """Engine that completes each prompt with a function of its text, and records its responses."""

    schemas = False
    """True if the engine claims to constrain completions to schemas."""
    images = True
    """True if the engine claims to read images."""

    def __init__(self, name: str, says: Says, processor: Any = None, **options: Any) -> None:
        self.name, self.says = name, says
        self.processor = processor or make_chat_tokenizer(name)
        self.tokenizer = tokenizer_of(self.processor)
        self.renderer = ChatRenderer(self.processor)
        self.requests: list[ModelRequest] = []
        self.responses: list[ModelResponse] = []
        super().__init__(
            NullInferenceEngineConfig(**{"seconds_per_token": 0.0, "vocab_size": len(self.tokenizer), **options}),
            answer=self._write,
        )

    def _write(self, request: ModelRequest) -> list[int]:
        completion = self.says(self.tokenizer.decode(request.input_ids))
        return self.renderer.encode(
            completion if isinstance(completion, str) else format_completion(self.name, **completion)
        )

    @property
    def capabilities(self) -> Capabilities:
        return replace(super().capabilities, schemas=self.schemas, images=self.images)

    async def agenerate(self, request: ModelRequest) -> ModelResponse:
        stop = request.generation.stop
        request.generation.stop = []  # the null engine does not support it; scripted completions end there anyway
        response = await super().agenerate(request)
        request.generation.stop = stop
        self.requests.append(request)
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
    """Open a session at an endpoint in front of an engine; close both at exit."""
    endpoint = HttpRolloutEndpoint(engine.processor, config, **options)
    try:
        yield await endpoint.open(engine, generation or GenerationConfig(max_new_tokens=512), max_length)
    finally:
        await endpoint.destroy()
        await engine.destroy()
