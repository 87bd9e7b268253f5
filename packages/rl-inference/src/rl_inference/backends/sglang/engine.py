"""The client of SGLang servers."""

from __future__ import annotations

from typing import ClassVar

from rl_contracts.data import ServeSpec
from rl_contracts.scheduler import JobSpec
from rl_inference.backends.sglang.config import SGLangEngineConfig, context_of, server_job
from rl_inference.backends.sglang.protocol import SGLangProtocol
from rl_inference.client.engine import HttpEngine
from rl_inference.client.protocol import ServerProtocol


class SGLangEngine(HttpEngine):
    """Client of SGLang servers, which run `backends/plugins/sglang_server.py`; implements `InferenceEngine`."""

    config_class: ClassVar = SGLangEngineConfig
    server_config: SGLangEngineConfig

    def make_protocol(self) -> ServerProtocol:
        return SGLangProtocol(self.spec, context_of(self.server_config, self.spec))

    @property
    def served_dtype(self) -> str:
        """Dtype of the servers' weights and computation."""
        return self.server_config.served_dtype

    @classmethod
    def server_spec(cls, config: SGLangEngineConfig, spec: ServeSpec) -> JobSpec:
        """Return the job of a run's servers: role `rollout`, ready after the first generated token."""
        return server_job(config, spec)
