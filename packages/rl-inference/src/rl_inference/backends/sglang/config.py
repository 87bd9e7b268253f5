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
from rl_inference.backends.external_program import check_program, on_cpu, program_job

PROGRAM = Path(__file__).parents[1] / "plugins" / "sglang_server.py"
"""What is started with the Python that has SGLang."""
OWN_ARGUMENTS = (
    *("--model-path", "--model", "--host", "--port", "--api-key", "--admin-api-key"),
    *("--dtype", "--quantization", "--context-length", "--weight-version", "--custom-weight-loader"),
    *("--tp-size", "--tensor-parallel-size", "--dp-size", "--data-parallel-size", "--pp-size", "--ep-size"),
    *("--max-running-requests", "--max-total-tokens", "--mem-fraction-static", "--device", "--disable-radix-cache"),
    *("--stream-interval", "--incremental-streaming-output", "--skip-tokenizer-init", "--tokenizer-worker-num"),
    *("--pipeline-parallel-size", "--expert-parallel-size", "--hicache-storage-backend"),
)
"""What is set by other settings, or must be as it is."""
SPARE_TOKENS = 8
"""Of its context, SGLang leaves a few tokens empty: it is started with so many more than it is asked for."""
_ON_CPU = (
    *("--device", "cpu", "--attention-backend", "torch_native", "--sampling-backend", "pytorch"),
    *("--disable-cuda-graph", "--disable-overlap-schedule"),
)


@dataclass
class SGLangEngineConfig(ServerConfig):
    """SGLang 0.5, on GPUs or CPUs."""

    setting: ClassVar[str] = "server"
    dtype: str = choice("float32", ("float32", "bfloat16", "float16"))
    """Dtype in which the weights are served: `float32` (on CPUs), `bfloat16` (what GPUs are made for) or `float16`."""
    quantization: str = choice("", ("", "fp8"))
    """Empty: none. `fp8`: quantised when they are loaded, on GPUs, by servers whose weights are never updated."""
    context_length: int = bounded(0, "0 (the model's) or more", lambda tokens: tokens >= 0)
    """Tokens of prompt and answer together at most; 0: what the model says."""
    max_sequences: int = bounded(64, "at least 1", lambda sequences: sequences >= 1)
    """Sequences that one server generates at the same time; others wait."""
    memory_share: float = bounded(0.85, "in (0, 1)", lambda fraction: 0 < fraction < 1)
    """Fraction of a GPU's memory for weights and keys and values."""
    cache_tokens: int = bounded(65536, "at least 1", lambda tokens: tokens >= 1)
    """Tokens of which keys and values are kept on a CPU."""
    stream_interval: int = bounded(8, "at least 1", lambda tokens: tokens >= 1)
    """Tokens that come in one message: fewer messages take less of the client's time; so many tokens at most are lost
    with a server that dies."""
    prefix_cache: bool = True
    """Use keys and values of prompts that begin alike again."""
    arguments: list[str] = field(default_factory=list)
    """Further arguments of `python -m sglang.launch_server`, as they are: `[--chunked-prefill-size, "8192"]`."""
    python: str = ""
    """Interpreter with SGLang; empty: this one."""
    ready_timeout: float = bounded(900.0, "seconds above 0", lambda seconds: seconds > 0)
    """Seconds within which a started server must have made its first token."""

    def program(self) -> ServerProgram:
        return ServerProgram(
            self.python,
            "sglang.launch_server",
            ("sglang",),
            "install rl-inference[sglang], or set rollout.server.python to an interpreter that has SGLang: "
            "`python infra/servers/build.py sglang` makes one without a GPU",
            "0.5.23",
            "0.6",
        )

    def max_concurrent_completions(self) -> int | None:
        """See `ServerConfig.max_concurrent_completions`."""
        return self.max_sequences

    def cache_bytes(self, memory: float, weights: float) -> float:
        """See `ServerConfig.cache_bytes`."""
        return max(self.memory_share * memory - weights, 0.0)

    def check(self, spec: ServeSpec) -> None:
        """Refuse what SGLang, or our way of updating it, cannot do."""
        check_program("sglang", self, spec, OWN_ARGUMENTS)
        require(
            not (self.quantization and spec.weights_dir),
            "server.quantization",
            "none where weights are updated: SGLang quantises them when it starts, and cannot load others after that",
            self.quantization,
        )
        require(
            self.dtype != "float32" or on_cpu(spec),
            "server.dtype",
            "bfloat16 or float16 on GPUs, whose attention takes no other (actor.dtype should be the same)",
            self.dtype,
        )


def server_job(config: SGLangEngineConfig, spec: ServeSpec) -> JobSpec:
    """The servers of a run: role `rollout`, ready when the first token was made.

    Raises:
        ConfigError: no model, or what SGLang cannot do.
    """
    program = (config.python or sys.executable, str(PROGRAM))
    return program_job(config, spec, (*program, *_arguments(config, spec)), _environment(config, spec))


def context_of(config: SGLangEngineConfig, spec: ServeSpec) -> int | None:
    """Tokens of prompt and answer together at most; None: nobody says."""
    return config.context_length or context_length(spec.model_path)


def _arguments(config: SGLangEngineConfig, spec: ServeSpec) -> list[str]:
    values: dict[str, Any] = {
        "model-path": spec.model_path,
        "host": "{host}",
        "port": "{port}",
        "dtype": config.dtype,
        "weight-version": spec.version,
        "tp-size": spec.strategy.tensor,
        "max-running-requests": config.max_sequences,
        "stream-interval": config.stream_interval,
        "log-level-http": "warning",
    }
    values |= (
        {"max-total-tokens": config.cache_tokens} if on_cpu(spec) else {"mem-fraction-static": config.memory_share}
    )
    if context := context_of(config, spec):
        values["context-length"] = context + SPARE_TOKENS
    if config.quantization:
        values["quantization"] = config.quantization
    named = [text for name, value in values.items() for text in (f"--{name}", str(value))]
    # SGLang's own warm-up would not know the key; the first health check generates a token
    switches = ["--incremental-streaming-output", "--skip-server-warmup"]
    switches += [] if config.prefix_cache else ["--disable-radix-cache"]
    return [*named, *switches, *(_ON_CPU if on_cpu(spec) else ())]


def _environment(config: SGLangEngineConfig, spec: ServeSpec) -> dict[str, str]:
    found = {
        "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1",  # by the spare tokens
    }
    if config.python:
        found["PYTHONPATH"] = ""  # what the command imports is of another environment
    if on_cpu(spec):
        found["SGLANG_USE_CPU_ENGINE"] = "1"
        # no such file: parts of a model would else meet over NCCL, which torch's CUDA build brings along
        found["SGLANG_NCCL_SO_PATH"] = "none"
    return found
