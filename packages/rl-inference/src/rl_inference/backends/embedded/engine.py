"""The client of embedded servers."""

from __future__ import annotations

from typing import ClassVar

from rl_contracts.data import ServeSpec
from rl_contracts.scheduler import JobSpec
from rl_inference.backends.embedded.config import EmbeddedEngineConfig, server_job
from rl_inference.backends.embedded.protocol import EmbeddedProtocol
from rl_inference.client.engine import HttpEngine
from rl_inference.client.protocol import ServerProtocol


class EmbeddedEngine(HttpEngine):
    """Client of embedded servers; implements `InferenceEngine`."""

    config_class: ClassVar = EmbeddedEngineConfig
    server_config: EmbeddedEngineConfig

    def make_protocol(self) -> ServerProtocol:
        return EmbeddedProtocol()

    @property
    def served_dtype(self) -> str:
        """Dtype of the servers' weights and computation."""
        return self.server_config.served_dtype

    @classmethod
    def server_spec(cls, config: EmbeddedEngineConfig, spec: ServeSpec) -> JobSpec:
        """Return the job of a run's servers: role `rollout`, ready when `/health` returns status 200."""
        return server_job(config, spec)
