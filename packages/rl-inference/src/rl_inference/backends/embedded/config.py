"""Settings of the embedded server, and the command line that passes them to its process."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields, replace
from pathlib import Path
from typing import Any, ClassVar

from rl_contracts.config import bounded, choice, field_docstrings, require
from rl_contracts.data import ServeSpec
from rl_contracts.inference import ServerConfig, ServerProgram
from rl_contracts.scheduler import JobSpec


@dataclass
class EmbeddedEngineConfig(ServerConfig):
    """Settings of embedded servers.

    Each field except `addresses`, `python` and `ready_timeout` is an option of
    `python -m rl_inference.embedded_server`.
    """

    setting: ClassVar[str] = "server"
    dtype: str = choice("", ("", "float32", "bfloat16", "float16"))
    """Dtype of the served weights: `float32`, `bfloat16` or `float16`. Empty: `model.dtype` of the run, or float32
    outside of a run."""
    max_sequences: int = bounded(64, "at least 1", lambda sequences: sequences >= 1)
    """Maximum number of sequences that one server generates at the same time. Further requests wait."""
    context_length: int = bounded(0, "0 (the model's) or more", lambda tokens: tokens >= 0)
    """Maximum number of tokens of prompt and completion together. 0: the model's maximum, or as many as fit into
    `cache_gib`."""
    cache_gib: float = bounded(0.0, "0 (by the free memory) or more", lambda size: size >= 0)
    """Maximum size of the KV cache in GiB. 0: a quarter of the free memory after the model is loaded, or half of it on
    a GPU. Servers of a run that share the memory divide this size equally. Sequences use as much as they need, and
    requests that do not fit wait. The size also limits the context length."""
    compile: bool = False
    """Compile the forward pass when the server starts. Generation becomes faster (1.2 to 1.5 times on a CPU
    with a small model). The start takes tens of seconds longer; raise `ready_timeout` for a large model. On a CPU it
    needs a C++ compiler. Deterministic runs do not support it."""
    python: str = ""
    """Path of the servers' Python interpreter. Empty: the interpreter of this process."""
    ready_timeout: float = bounded(180.0, "seconds above 0", lambda seconds: seconds > 0)
    """Seconds that a server may take from its start until it is ready."""

    @property
    def served_dtype(self) -> str:
        """Dtype in which the servers compute: `dtype`, or float32 if neither the run nor the caller sets one."""
        return self.dtype or "float32"

    def program(self) -> ServerProgram | None:
        """Return this package as a requirement of the interpreter `python`, or None if `python` is empty."""
        if not self.python:
            return None
        remedy = f"Install it there (`{self.python} -m pip install rl-inference`), or leave server.python empty."
        return ServerProgram(self.python, "rl_inference.embedded_server.__main__", ("rl-inference",), remedy)

    def max_concurrent_completions(self, device: str = "cpu", memory: float = 0.0) -> int | None:
        """Return `max_sequences`, the number of decode slots; see `ServerConfig.max_concurrent_completions`."""
        return self.max_sequences

    def cache_bytes(self, memory: float, weights: float) -> float:
        """Return `cache_gib` in bytes, or half of the memory without weights; see `ServerConfig.cache_bytes`."""
        return self.cache_gib * 2**30 or max(memory - weights, 0.0) / 2

    def sleeping_bytes(self, memory: float, weights: float) -> float:
        """Return the bytes of the weights; see `ServerConfig.sleeping_bytes`."""
        return weights

    def check(self, spec: ServeSpec) -> None:
        """Reject allocations that split the model, and compilation in deterministic runs."""
        split = spec.strategy
        require(
            split.world_size == split.data and split.expert == 1,
            "allocation",
            f"embedded:d{split.data} (the embedded server runs one process per replica and cannot split a model)",
            f"embedded:{split}",
        )
        require(
            not (self.compile and spec.deterministic),
            "server.compile with deterministic=true",
            "false (a compiled forward pass rounds differently from the trainer's)",
            self.compile,
        )


@dataclass
class ServerOptions:
    """Parsed command line of `python -m rl_inference.embedded_server`: settings, values of the run, and address."""

    config: EmbeddedEngineConfig
    spec: ServeSpec
    port: int
    """TCP port to listen on; 0 picks a free port."""
    host: str = "127.0.0.1"
    """Address to listen on."""
    name: str = ""
    """Name of the server in receipts. Empty: `host:port`."""
    sharing: int = 1
    """Number of servers that share this server's memory, including this one."""

    def __post_init__(self) -> None:
        require(0 <= self.port < 65536, "server.port", "between 0 and 65535", self.port)
        require(self.sharing >= 1, "server.sharing", "at least 1", self.sharing)
        self.config.check(self.spec)
        if self.spec.deterministic:  # requires one sequence at a time, on one thread
            self.config, self.spec = replace(self.config, max_sequences=1), replace(self.spec, cpus=1)


_OPTIONS: dict[type, dict[str, str]] = {
    ServerOptions: {"port": "port", "host": "host", "name": "name", "sharing": "sharing"},
    ServeSpec: {
        "model": "model_path",
        "device": "device",
        "threads": "cpus",
        "weights_dir": "weights_dir",
        "version": "version",
        "deterministic": "deterministic",
    },
    EmbeddedEngineConfig: {
        field.name: field.name
        for field in fields(EmbeddedEngineConfig)
        if field.name not in ("addresses", "python", "ready_timeout")
    },
}
"""Command-line options by dataclass: option name to field name."""


def server_job(config: EmbeddedEngineConfig, spec: ServeSpec) -> JobSpec:
    """Return the job of a run's servers: role `rollout`, ready when `/health` returns status 200.

    Raises:
        ConfigError: there is no model, or the server does not support a setting.
    """
    config.check(spec)
    require(bool(spec.model_path), "model_path", "a model directory", spec.model_path)
    if spec.weights_dir:
        spec = replace(spec, weights_dir=str(Path(spec.weights_dir).resolve()))
    # assume that servers with separate GPUs run on separate machines
    sharing = 1 if spec.gpus else spec.strategy.data
    values: dict[str, Any] = {"host": "{host}", "port": "{port}", "name": "rollout-{index}", "sharing": sharing}
    for owner in (spec, config):
        values |= {option: getattr(owner, name) for option, name in _OPTIONS[type(owner)].items()}
    return JobSpec(
        role="rollout",
        command=(config.python or sys.executable, "-m", "rl_inference.embedded_server", *to_arguments(values)),
        count=spec.strategy.data,
        cpus=max(spec.cpus, 1),
        gpus=spec.gpus,
        needs_port=True,
        ready_path="/health",
        ready_timeout=config.ready_timeout,
    )


def to_arguments(options: dict[str, Any]) -> list[str]:
    """Convert options to command-line arguments; the inverse of `parse`."""
    texts = {name: str(value).lower() if isinstance(value, bool) else str(value) for name, value in options.items()}
    return [text for name, value in texts.items() for text in ("--" + name.replace("_", "-"), value)]


def parse(arguments: list[str] | None) -> ServerOptions:
    """Parse arguments, or `sys.argv` if None. Each field is an option; its docstring is the help text.

    Raises:
        ConfigError: a value is invalid for the server.
    """
    parser = argparse.ArgumentParser(
        prog="python -m rl_inference.embedded_server",
        description="Load a model and serve it until the process is stopped.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    for owner, options in _OPTIONS.items():
        docs, fields_by_name = field_docstrings(owner), {field.name: field for field in fields(owner)}
        for option, name in options.items():
            parser.add_argument(
                "--" + option.replace("_", "-"),
                required=option in ("model", "port"),
                type=_CONVERTERS.get(str(fields_by_name[name].type), str),
                default=None if fields_by_name[name].default is MISSING else fields_by_name[name].default,
                help=docs[name].rstrip("."),
            )
    values = vars(parser.parse_args(arguments))
    listen, spec, config = ({name: values[option] for option, name in options.items()} for options in _OPTIONS.values())
    return ServerOptions(EmbeddedEngineConfig(**config), ServeSpec(**spec), **listen)


def _parse_bool(text: str) -> bool:
    """Parse `true` or `false` in any case."""
    if text.lower() not in ("true", "false"):
        raise argparse.ArgumentTypeError(f"expected true or false, found {text!r}")
    return text.lower() == "true"


_CONVERTERS: dict[str, Callable[[str], Any]] = {"int": int, "float": float, "bool": _parse_bool}
"""Conversion of option values by the type of the field; other types stay text."""
