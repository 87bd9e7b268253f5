"""Settings of SGLang servers, and the command that starts them."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from rl_contracts.config import bounded, choice, require
from rl_contracts.data import ServeSpec
from rl_contracts.inference import ServerConfig, ServerProgram
from rl_contracts.models.directory import context_length
from rl_contracts.scheduler import JobSpec
from rl_inference.backends.external_program import CPU_SEQUENCES, STREAM_INTERVAL, check_program, on_cpu, program_job

PROGRAM = Path(__file__).parents[1] / "plugins" / "sglang_server.py"
"""File that the server's Python interpreter runs, in an environment that has SGLang."""
RESERVED_ARGUMENTS = (
    *("--model-path", "--model", "--host", "--port", "--api-key", "--admin-api-key"),
    *("--dtype", "--quantization", "--context-length", "--weight-version", "--custom-weight-loader"),
    *("--tp-size", "--tensor-parallel-size", "--dp-size", "--data-parallel-size", "--pp-size", "--ep-size"),
    *("--max-running-requests", "--mem-fraction-static", "--device"),
    *("--incremental-streaming-output", "--skip-tokenizer-init", "--tokenizer-worker-num"),
    *("--pipeline-parallel-size", "--expert-parallel-size", "--hicache-storage-backend"),
)
"""Options that other settings set, or that the run relies on."""
CPU_CACHE_TOKENS = 65536
"""Size of the KV cache on a CPU, in tokens; `memory_share` sets it on a GPU. Enough for 1,024 tokens of each of
`CPU_SEQUENCES` sequences. `--max-total-tokens` in `arguments` overrides it."""
SPARE_TOKENS = 8
"""Tokens added to the context length at the start, because SGLang leaves a few tokens of its context unused."""
_ON_CPU = (
    *("--device", "cpu", "--attention-backend", "torch_native", "--sampling-backend", "pytorch"),
    *("--disable-cuda-graph", "--disable-overlap-schedule"),
)


@dataclass
class SGLangEngineConfig(ServerConfig):
    """Settings of SGLang 0.5 servers, on GPUs or CPUs."""

    setting: ClassVar[str] = "server"
    dtype: str = choice("", ("", "float32", "bfloat16", "float16"))
    """Dtype of the served weights: `float32` (on CPUs only), `bfloat16` or `float16`. Empty: `model.dtype` of the run,
    or float32 outside of a run."""
    quantization: str = choice("", ("", "fp8"))
    """Quantization of the weights: empty for none, or `fp8`, applied when they are loaded. `fp8` requires GPUs, and
    servers whose weights are never updated."""
    context_length: int = bounded(0, "0 (the model's) or more", lambda tokens: tokens >= 0)
    """Maximum number of tokens of prompt and completion together. 0: the model's maximum."""
    max_sequences: int = bounded(0, "0 (SGLang's default) or more", lambda sequences: sequences >= 0)
    """Maximum number of sequences that one server generates at the same time. Further requests wait. 0: SGLang's
    default (2,048 to 4,096, by the size of the KV cache), and 64 on a CPU."""
    memory_share: float = bounded(0.85, "in (0, 1)", lambda fraction: 0 < fraction < 1)
    """Fraction of a GPU's memory for weights and KV cache."""
    arguments: list[str] = field(default_factory=list)
    """Further arguments of `python -m sglang.launch_server`, passed unchanged: `[--chunked-prefill-size, "8192"]`. They
    can also override `--stream-interval` and, on CPUs, `--max-total-tokens`."""
    python: str = ""
    """Path of a Python interpreter with SGLang. Empty: the interpreter of this process."""
    ready_timeout: float = bounded(900.0, "seconds above 0", lambda seconds: seconds > 0)
    """Seconds that a server may take from its start until its first generated token."""

    @property
    def served_dtype(self) -> str:
        """Dtype in which the servers compute: `dtype`, or float32 if neither the run nor the caller sets one."""
        return self.dtype or "float32"

    def program(self) -> ServerProgram:
        return ServerProgram(
            self.python,
            "sglang.launch_server",
            ("sglang",),
            "Install rl-inference[sglang], or set rollout.server.python to an interpreter that has SGLang. "
            "Without a GPU, `python infra/servers/build.py sglang` builds one.",
            "0.5.23",
            "0.6",
        )

    def max_concurrent_completions(self, device: str = "cpu", memory: float = 0.0) -> int | None:
        """Return `max_sequences`, or the smallest default of SGLang; see `ServerConfig.max_concurrent_completions`."""
        return self.max_sequences or (CPU_SEQUENCES if device == "cpu" else 2048)

    def cache_bytes(self, memory: float, weights: float) -> float:
        """Return the bytes of `memory_share` without the weights; see `ServerConfig.cache_bytes`."""
        return max(self.memory_share * memory - weights, 0.0)

    def check(self, spec: ServeSpec) -> None:
        """Reject settings that SGLang, or weight updates of SGLang, do not support."""
        check_program("sglang", self, spec, RESERVED_ARGUMENTS)
        require(
            not (self.quantization and spec.weights_dir),
            "server.quantization",
            "none if weights are updated, because SGLang cannot load new weights after quantization",
            self.quantization,
        )
        require(
            self.served_dtype != "float32" or on_cpu(spec),
            "server.dtype",
            "bfloat16 or float16 on GPUs, the only dtypes of SGLang's attention there (set model.dtype=bfloat16)",
            self.served_dtype,
        )


def server_job(config: SGLangEngineConfig, spec: ServeSpec) -> JobSpec:
    """Return the job of a run's servers: role `rollout`, ready after the first generated token.

    Raises:
        ConfigError: there is no model, or SGLang does not support a setting.
    """
    program = (config.python or sys.executable, str(PROGRAM))
    return program_job(config, spec, (*program, *_arguments(config, spec)), _environment(config, spec))


def context_of(config: SGLangEngineConfig, spec: ServeSpec) -> int | None:
    """Return the maximum number of tokens of prompt and completion together, or None if it is unknown."""
    return config.context_length or context_length(spec.model_path)


def _arguments(config: SGLangEngineConfig, spec: ServeSpec) -> list[str]:
    values: dict[str, Any] = {
        "model-path": spec.model_path,
        "host": "{host}",
        "port": "{port}",
        "dtype": config.served_dtype,
        "weight-version": spec.version,
        "tp-size": spec.strategy.tensor,
        "stream-interval": STREAM_INTERVAL,
        "log-level-http": "warning",
    }
    if sequences := config.max_sequences or (CPU_SEQUENCES if on_cpu(spec) else 0):
        values["max-running-requests"] = sequences
    values |= {"max-total-tokens": CPU_CACHE_TOKENS} if on_cpu(spec) else {"mem-fraction-static": config.memory_share}
    if context := context_of(config, spec):
        values["context-length"] = context + SPARE_TOKENS
    if config.quantization:
        values["quantization"] = config.quantization
    options = [text for name, value in values.items() for text in (f"--{name}", str(value))]
    # SGLang's warm-up request would not have the key; the first health check generates a token instead
    switches = ["--incremental-streaming-output", "--skip-server-warmup"]
    return [*options, *switches, *(_ON_CPU if on_cpu(spec) else ())]


def _environment(config: SGLangEngineConfig, spec: ServeSpec) -> dict[str, str]:
    environment = {
        "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1",  # required by the spare tokens
    }
    if config.python:
        environment["PYTHONPATH"] = ""  # the command's packages belong to another environment
    if on_cpu(spec):
        environment["SGLANG_USE_CPU_ENGINE"] = "1"
        # not a file, so that tensor-parallel ranks do not use NCCL, which torch's CUDA build contains
        environment["SGLANG_NCCL_SO_PATH"] = "none"
    return environment
