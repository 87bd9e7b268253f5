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
    """An `InferenceEngine` over embedded servers."""

    config_class: ClassVar = EmbeddedEngineConfig
    server_config: EmbeddedEngineConfig

    def make_protocol(self) -> ServerProtocol:
        return EmbeddedProtocol()

    @property
    def served_dtype(self) -> str:
        """Dtype in which the servers hold weights and compute."""
        return self.server_config.dtype

    @classmethod
    def server_spec(cls, config: EmbeddedEngineConfig, spec: ServeSpec) -> JobSpec:
        """The servers of a run as a job: role `rollout`, ready when `/health` answers 200."""
        return server_job(config, spec)
