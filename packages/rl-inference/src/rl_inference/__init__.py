"""Inference servers and their clients.

`EmbeddedEngine` speaks to servers started with `python -m rl_inference.server`; `EmbeddedEngine.server_spec` says how
to start them. Another kind of server is a `ServerProtocol` and a subclass of `HttpEngine` with its settings."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rl_contracts.lazy import on_demand

if TYPE_CHECKING:
    from rl_inference.config import EmbeddedEngineConfig
    from rl_inference.embedded import EmbeddedEngine
    from rl_inference.engine import HttpEngine
    from rl_inference.protocols.base import ServerProtocol
    from rl_inference.sglang import SGLangEngine
    from rl_inference.sglang_config import SGLangEngineConfig
    from rl_inference.vllm import VLLMEngine
    from rl_inference.vllm_config import VLLMEngineConfig

__all__ = [
    "EmbeddedEngine",
    "EmbeddedEngineConfig",
    "HttpEngine",
    "SGLangEngine",
    "SGLangEngineConfig",
    "ServerProtocol",
    "VLLMEngine",
    "VLLMEngineConfig",
]


__getattr__ = on_demand(
    __name__,
    {
        "EmbeddedEngine": "embedded",
        "EmbeddedEngineConfig": "config",
        "HttpEngine": "engine",
        "SGLangEngine": "sglang",
        "SGLangEngineConfig": "sglang_config",
        "ServerProtocol": "protocols.base",
        "VLLMEngine": "vllm",
        "VLLMEngineConfig": "vllm_config",
    },
)
