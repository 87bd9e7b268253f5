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
    """An `InferenceEngine` over SGLang servers, which run `backends/plugins/sglang_server.py`."""

    config_class: ClassVar = SGLangEngineConfig
    server_config: SGLangEngineConfig

    def make_protocol(self) -> ServerProtocol:
        return SGLangProtocol(self.spec, context_of(self.server_config, self.spec))

    @property
    def served_dtype(self) -> str:
        """Dtype in which the servers hold weights and compute."""
        return self.server_config.dtype

    @classmethod
    def server_spec(cls, config: SGLangEngineConfig, spec: ServeSpec) -> JobSpec:
        """The servers of a run as a job: role `rollout`, ready when the first token was made."""
        return server_job(config, spec)
