"""The client of vLLM servers."""

from __future__ import annotations

from typing import ClassVar

from rl_contracts.data import ServeSpec
from rl_contracts.scheduler import JobSpec
from rl_inference.backends.external_program import on_cpu
from rl_inference.backends.vllm.config import VLLMEngineConfig, server_job
from rl_inference.backends.vllm.protocol import VLLMProtocol
from rl_inference.client.engine import HttpEngine
from rl_inference.client.protocol import ServerProtocol


class VLLMEngine(HttpEngine):
    """An `InferenceEngine` over vLLM servers, which run our extension."""

    config_class: ClassVar = VLLMEngineConfig
    server_config: VLLMEngineConfig

    def make_protocol(self) -> ServerProtocol:
        return VLLMProtocol(self.spec.version, self.server_config.sleeps(self.spec), not on_cpu(self.spec))

    @property
    def served_dtype(self) -> str:
        """Dtype in which the servers hold weights and compute; `fp8` where they quantise them."""
        return self.server_config.quantization or self.server_config.dtype

    @classmethod
    def server_spec(cls, config: VLLMEngineConfig, spec: ServeSpec) -> JobSpec:
        """The servers of a run as a job: role `rollout`, ready when the first tokens were made."""
        return server_job(config, spec)
