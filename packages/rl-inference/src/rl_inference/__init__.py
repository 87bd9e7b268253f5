"""Inference servers and their clients.

`EmbeddedEngine` is the client of servers started with `python -m rl_inference.embedded_server`;
`EmbeddedEngine.server_spec` returns the job that starts them. `InProcessEngine` is the embedded server without HTTP,
for notebooks and tests. To add another kind of server, implement a `ServerProtocol`, a subclass of `HttpEngine`, and
its settings.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rl_contracts.runtime.lazy_imports import lazy_getattr

if TYPE_CHECKING:
    from rl_inference.backends.embedded.config import EmbeddedEngineConfig
    from rl_inference.backends.embedded.engine import EmbeddedEngine
    from rl_inference.backends.embedded.in_process import InProcessEngine
    from rl_inference.backends.sglang.config import SGLangEngineConfig
    from rl_inference.backends.sglang.engine import SGLangEngine
    from rl_inference.backends.vllm.config import VLLMEngineConfig
    from rl_inference.backends.vllm.engine import VLLMEngine
    from rl_inference.client.engine import HttpEngine
    from rl_inference.client.protocol import ServerProtocol

    __version__: str
else:
    __getattr__ = lazy_getattr(
        __name__,
        {
            "EmbeddedEngine": "backends.embedded.engine",
            "EmbeddedEngineConfig": "backends.embedded.config",
            "HttpEngine": "client.engine",
            "InProcessEngine": "backends.embedded.in_process",
            "SGLangEngine": "backends.sglang.engine",
            "SGLangEngineConfig": "backends.sglang.config",
            "ServerProtocol": "client.protocol",
            "VLLMEngine": "backends.vllm.engine",
            "VLLMEngineConfig": "backends.vllm.config",
        },
    )

__all__ = [
    "EmbeddedEngine",
    "EmbeddedEngineConfig",
    "HttpEngine",
    "InProcessEngine",
    "SGLangEngine",
    "SGLangEngineConfig",
    "ServerProtocol",
    "VLLMEngine",
    "VLLMEngineConfig",
]
