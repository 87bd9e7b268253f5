"""Settings of the embedded server, and the command line that hands them to its process."""

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
    """The embedded server. Each field but `addresses`, `python` and `ready_timeout` is an option of
    `python -m rl_inference.embedded_server`."""

    setting: ClassVar[str] = "server"
    dtype: str = choice("float32", ("float32", "bfloat16", "float16"))
    """Dtype in which the weights are served: `float32`, `bfloat16` or `float16`."""
    slots: int = bounded(64, "at least 1", lambda slots: slots >= 1)
    """Sequences that one server generates at the same time."""
    context_length: int = bounded(0, "0 (the model's) or more", lambda tokens: tokens >= 0)
    """Tokens of prompt and answer together at most; 0: what the model says, or what fits into `cache_gib`."""
    cache_gib: float = bounded(0.0, "0 (by the free memory) or more", lambda size: size >= 0)
    """GiB for keys and values at most; 0: a quarter of the memory that is free when the model is loaded, half of a
    GPU's; servers of a run that share it take a part each. Sequences take of it what they need; what does not fit
    waits, and the context is no longer than what fits."""
    prefill_tokens: int = bounded(2048, "at least 1", lambda tokens: tokens >= 1)
    """Tokens of prompts, beside a token of each answer, or of a score that one pass reads at most; what is longer takes
    several."""
    max_waiting: int = bounded(4096, "0 or more", lambda requests: requests >= 0)
    """Requests that may wait for a slot at one server; beyond, it answers 503 and the client backs off."""
    max_request_bytes: int = bounded(0, "0 (from the context) or more", lambda size: size >= 0)
    """Larger request bodies are refused with 413; 0: what eight prompts of the whole context take."""
    stuck_seconds: int = bounded(300, "at least 1", lambda seconds: seconds >= 1)
    """Seconds without a turn of the decode thread after which `/health` answers 503."""
    compile: bool = False
    """Compile the forward pass when the server starts: tokens come faster (1.2 to 1.5 times on a CPU with a small
    model), the start takes tens of seconds longer (raise `ready_timeout` for a large model). Needs a C++ compiler on a
    CPU. Not for deterministic runs."""
    python: str = ""
    """Interpreter of the servers; empty: this one."""
    ready_timeout: float = bounded(180.0, "seconds above 0", lambda seconds: seconds > 0)
    """Seconds within which a started server must be ready."""

    def program(self) -> ServerProgram | None:
        """This package, where the servers have another interpreter than the command, which has it."""
        if not self.python:
            return None
        remedy = f"Install it there (`{self.python} -m pip install rl-inference`), or leave server.python empty."
        return ServerProgram(self.python, "rl_inference.embedded_server.__main__", ("rl-inference",), remedy)

    def max_concurrent_completions(self) -> int | None:
        """See `ServerConfig.max_concurrent_completions`."""
        return self.slots

    def cache_bytes(self, memory: float, weights: float) -> float:
        """See `ServerConfig.cache_bytes`; half of what is free, unless `cache_gib` says it."""
        return self.cache_gib * 2**30 or max(memory - weights, 0.0) / 2

    def check(self, spec: ServeSpec) -> None:
        """Refuse a model that is split, and compilation in a deterministic run."""
        split = spec.strategy
        require(
            split.world_size == split.data and split.expert == 1,
            "allocation",
            f"embedded:d{split.data} (the embedded server is one process per replica, and splits no model)",
            f"embedded:{split}",
        )
        require(
            not (self.compile and spec.deterministic),
            "server.compile with deterministic=true",
            "false (a compiled pass rounds differently than a trainer's)",
            self.compile,
        )


@dataclass
class ServerOptions:
    """What `python -m rl_inference.embedded_server` is told: settings, what follows from the run, and where to
    listen."""

    config: EmbeddedEngineConfig
    spec: ServeSpec
    port: int
    """TCP port to listen on; 0 picks a free one."""
    host: str = "127.0.0.1"
    """Address to listen on."""
    name: str = ""
    """Name in receipts; empty: `host:port`."""
    sharing: int = 1
    """Servers that share the memory this one has, itself included."""

    def __post_init__(self) -> None:
        require(0 <= self.port < 65536, "server.port", "between 0 and 65535", self.port)
        require(self.sharing >= 1, "server.sharing", "at least 1", self.sharing)
        self.config.check(self.spec)
        if self.spec.deterministic:  # one sequence at a time, on one thread
            self.config, self.spec = replace(self.config, slots=1), replace(self.spec, cpus=1)


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
"""The options of the command line by the dataclass that describes them: option and field."""


def server_job(config: EmbeddedEngineConfig, spec: ServeSpec) -> JobSpec:
    """The servers of a run: role `rollout`, ready when `/health` answers 200.

    Raises:
        ConfigError: no model, or what the server cannot do.
    """
    config.check(spec)
    require(bool(spec.model_path), "model_path", "a model directory", spec.model_path)
    if spec.weights_dir:
        spec = replace(spec, weights_dir=str(Path(spec.weights_dir).resolve()))
    # those with GPUs of their own are taken to have a machine's memory each, too
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
    """Options as arguments of the command line; `parse` reads them."""
    texts = {name: str(value).lower() if isinstance(value, bool) else str(value) for name, value in options.items()}
    return [text for name, value in texts.items() for text in ("--" + name.replace("_", "-"), value)]


def parse(arguments: list[str] | None) -> ServerOptions:
    """Read the command line (None: of this process): an option per field, described by the field's docstring.

    Raises:
        ConfigError: a value that the server cannot take.
    """
    parser = argparse.ArgumentParser(
        prog="python -m rl_inference.embedded_server",
        description="Load a model and serve it until told to stop.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    for owner, options in _OPTIONS.items():
        docs, known = field_docstrings(owner), {field.name: field for field in fields(owner)}
        for option, name in options.items():
            parser.add_argument(
                "--" + option.replace("_", "-"),
                required=option in ("model", "port"),
                type=_KINDS.get(str(known[name].type), str),
                default=None if known[name].default is MISSING else known[name].default,
                help=docs[name].rstrip("."),
            )
    given = vars(parser.parse_args(arguments))
    listen, spec, config = ({name: given[option] for option, name in options.items()} for options in _OPTIONS.values())
    return ServerOptions(EmbeddedEngineConfig(**config), ServeSpec(**spec), **listen)


def _switch(text: str) -> bool:
    """The value of an option that is on or off."""
    if text.lower() not in ("true", "false"):
        raise argparse.ArgumentTypeError(f"expected true or false, found {text!r}")
    return text.lower() == "true"


_KINDS: dict[str, Callable[[str], Any]] = {"int": int, "float": float, "bool": _switch}
"""How the options of a type are read; others are text."""
