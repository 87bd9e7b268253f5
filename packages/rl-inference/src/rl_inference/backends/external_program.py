"""Checks and start of servers that are third-party programs (vLLM, SGLang)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rl_contracts.config import require
from rl_contracts.data import ServeSpec
from rl_contracts.scheduler import JobSpec

CPU_SEQUENCES = 64
"""Default number of sequences that a server on a CPU generates at the same time. Its KV cache is small."""
STREAM_INTERVAL = 8
"""Number of tokens per message of a stream. Larger messages take less of the client's time. A completion loses
at most this many tokens if its server dies. Arguments of the server can override it."""


def on_cpu(spec: ServeSpec) -> bool:
    """Return whether the servers of a run have no GPU."""
    return spec.device == "cpu" or not spec.gpus


def check_program(kind: str, config: Any, spec: ServeSpec, reserved: Sequence[str]) -> None:
    """Reject settings that neither vLLM nor SGLang supports, and arguments that name reserved options.

    Args:
        kind: the backend in `allocation`, `vllm` or `sglang`.
        config: settings of the servers.
        spec: settings of the run for its servers.
        reserved: options that other settings set, or that the run relies on.

    Raises:
        ConfigError: a setting is not supported, or an option is reserved; the message names it.
    """
    split = spec.strategy
    require(
        split.pipeline == split.context == split.expert == 1,
        "allocation",
        f"{kind}:d{split.data}t{split.tensor} (a server supports tensor parallelism only)",
        f"{kind}:{split}",
    )
    embedded = "false, or allocation=embedded:... (only embedded servers are deterministic)"
    require(not spec.deterministic, f"deterministic with allocation={kind}", embedded, True)
    require(not (config.quantization and on_cpu(spec)), "server.quantization", "none on CPUs", config.quantization)
    overridden = overridden_arguments(config.arguments, reserved)
    require(
        not overridden,
        "server.arguments",
        f"none of {', '.join(reserved)}, which other settings determine or the run relies on",
        ", ".join(overridden),
    )


def program_job(config: Any, spec: ServeSpec, command: Sequence[str], environment: Mapping[str, str]) -> JobSpec:
    """Return the job of a run's servers: role `rollout`, ready after the first generated tokens.

    Args:
        config: settings of the servers; `config.check` is called.
        command: program and arguments, to which `config.arguments` are appended.
        environment: environment variables in addition to the common ones.

    Raises:
        ConfigError: there is no model, or the servers do not support a setting.
    """
    config.check(spec)
    require(bool(spec.model_path), "model_path", "a model directory", spec.model_path)
    variables = {
        "RL_WEIGHTS_DIR": str(Path(spec.weights_dir).resolve()) if spec.weights_dir else "",
        "RL_WEIGHT_VERSION": str(spec.version),
        "RL_SERVER_NAME": "rollout-{index}",
    }
    if Path(spec.model_path).is_dir():
        variables["HF_HUB_OFFLINE"] = "1"
    return JobSpec(
        role="rollout",
        command=(*command, *config.arguments),
        count=spec.strategy.data,
        cpus=max(spec.cpus, 1),
        gpus=spec.gpus,
        env={**variables, **environment},
        needs_port=True,
        ready_path="/health",
        ready_timeout=config.ready_timeout,
        remedy=(
            f"Read its log for the reason why it cannot serve {spec.model_path} in {config.served_dtype} on this "
            "machine. Choose another model, other settings of rollout.server, or other servers "
            "(allocation=embedded:...)."
        ),
    )


def overridden_arguments(arguments: Iterable[str], reserved: Iterable[str]) -> list[str]:
    """Return the arguments that name a reserved option.

    Names match as command-line parsers match them: with `_` for `-`, with a value after `=`, or abbreviated.
    """
    reserved = tuple(reserved)

    def is_reserved(text: str) -> bool:
        name = text.partition("=")[0].replace("_", "-")
        return name in reserved or (name.startswith("--") and any(option.startswith(name) for option in reserved))

    return [text for text in arguments if is_reserved(text)]
