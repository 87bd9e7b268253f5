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
    """Client of vLLM servers, which run `backends/plugins/vllm_extension.py`; implements `InferenceEngine`."""

    config_class: ClassVar = VLLMEngineConfig
    server_config: VLLMEngineConfig

    def make_protocol(self) -> ServerProtocol:
        return VLLMProtocol(self.spec.version, self.server_config.sleeps(self.spec), not on_cpu(self.spec))

    @property
    def served_dtype(self) -> str:
        """Dtype of the servers' weights and computation; `fp8` if they quantize the weights."""
        return self.server_config.quantization or self.server_config.served_dtype

    @classmethod
    def server_spec(cls, config: VLLMEngineConfig, spec: ServeSpec) -> JobSpec:
        """Return the job of a run's servers: role `rollout`, ready after the first generated tokens."""
        return server_job(config, spec)
