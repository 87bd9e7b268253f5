"""Test helpers: tiny models created on demand, their results in transformers, and real server processes."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from rl_contracts.errors import InferenceError
from rl_contracts.scheduler import JobSpec
from rl_contracts.testing.processes import fork, free_port, preload
from rl_inference.backends.embedded.config import to_arguments

__all__ = ["JobProcess", "ServerProcess", "reference_logprobs", "reference_model", "tiny_model"]

VOCAB_SIZE = 160
"""Vocabulary size of the tiny models."""
END_ID = 2
"""End token of the tiny models."""

preload(
    "rl_inference.embedded_server.loop",
    "rl_inference.embedded_server.__main__",
    "transformers.models.qwen3.modeling_qwen3",
)


def tiny_model(path: Path, family: str = "qwen3", seed: int = 0, **settings: Any) -> Path:
    """Save a random model whose distributions are neither flat nor sharp, and a tokenizer of single characters.

    Args:
        path: directory to create.
        family: model type of transformers.
        seed: seed of the weights.
        settings: fields of the model config.

    Returns:
        `path`.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    base: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 512,
        "eos_token_id": END_ID,
        "pad_token_id": 0,
        "bos_token_id": None,
        "tie_word_embeddings": True,
    }
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **{**base, **settings}))
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.normal_(std=0.25)
    model.save_pretrained(path)
    _tiny_tokenizer(path, settings.get("vocab_size", VOCAB_SIZE))
    return path


def _tiny_tokenizer(path: Path, size: int) -> None:
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocab = {"<pad>": 0, "<unk>": 1, "<end>": END_ID}
    for character in [chr(code) for code in range(32, 127)] + ["\n"]:
        vocab[character] = len(vocab)
    while len(vocab) < size:
        vocab[f"<extra{len(vocab)}>"] = len(vocab)
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<end>", pad_token="<pad>", unk_token="<unk>"
    ).save_pretrained(path)


def reference_model(path: Path) -> Any:
    """Load the model with transformers' eager attention, in float32."""
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()


def reference_logprobs(model: Any, prompt: list[int], output: list[int], temperature: float = 1.0) -> list[float]:
    """Return log-probs of `output` after `prompt`, from one forward pass of a `reference_model`."""
    import torch

    with torch.no_grad():
        ids = torch.tensor([prompt + output])
        logprobs = torch.log_softmax(model(input_ids=ids).logits[0].float() / temperature, -1)
        chosen: list[float] = logprobs[:-1].gather(1, ids[0, 1:, None])[:, 0].tolist()
    return chosen[len(prompt) - 1 :]


@dataclass
class ServerProcess:
    """Server process that runs from `start` to `stop`; a context manager calls both.

    The process is forked from one that has already imported everything. This saves the seconds that `python -m
    rl_inference.embedded_server` spends on imports; otherwise both are the same. With `device=cuda`, which does not
    work after a fork, the program is started instead.
    """

    model: Path
    """Model directory."""
    log: Path
    """File for the output of the server."""
    key: str = ""
    """Run key; empty: no key."""
    port: int = 0
    """Port; 0: a free port."""
    options: dict[str, Any] = field(default_factory=dict)
    """Further options of `python -m rl_inference.embedded_server`, by name."""
    command: tuple[str, ...] | None = None
    """Program to start with the server's options instead of forking."""
    process: BaseProcess | subprocess.Popen[bytes] | None = None
    """Running process; None before `start`."""

    @property
    def address(self) -> str:
        """URL `http://127.0.0.1:port`."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def exit_code(self) -> int | None:
        """Exit code of the process; None while it runs."""
        if isinstance(self.process, subprocess.Popen):
            return self.process.poll()
        return None if self.process is None else self.process.exitcode

    def start(self) -> Self:
        """Start the server and return at once."""
        self.port = self.port or free_port()
        options = {"model": self.model, "port": self.port, "threads": 1, **self.options}
        arguments = to_arguments(options)
        environment = {"OMP_NUM_THREADS": "1", "RL_RUN_KEY": self.key}
        if self.options.get("device") == "cuda":
            self.command = self.command or (sys.executable, "-m", "rl_inference.embedded_server")
        if self.command is None:
            self.process = fork(_serve, (arguments,), self.log, environment)
        else:
            with self.log.open("wb") as file:
                self.process = subprocess.Popen(
                    [*self.command, *arguments], stdout=file, stderr=file, env={**os.environ, **environment}
                )
        return self

    def wait_ready(self, timeout: float = 120.0) -> Self:
        """Return when `/health` replies 200.

        Raises:
            InferenceError: the server ended, or was not ready in time. The message includes its log.
        """
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            if self.process is None or self.exit_code is not None:
                raise InferenceError(f"the server ended before it was ready:\n{self.log.read_text()}")
            try:
                with urllib.request.urlopen(self.address + "/health", timeout=5):
                    return self
            except (urllib.error.URLError, OSError):
                time.sleep(0.05)
        raise InferenceError(f"the server was not ready within {timeout:g} s:\n{self.log.read_text()}")

    def wait(self, timeout: float = 60.0) -> int:
        """Wait for the end of the process.

        Returns:
            Exit code; the negative signal number if a signal killed the process.

        Raises:
            InferenceError: the process still runs after `timeout` seconds.
        """
        deadline = time.monotonic() + timeout
        while (code := self.exit_code) is None:
            if time.monotonic() > deadline:
                raise InferenceError(f"the server still runs after {timeout:g} s:\n{self.log.read_text()}")
            time.sleep(0.02)
        return code

    def signal(self, signum: int) -> None:
        """Send a signal to the process."""
        assert self.process is not None
        assert self.process.pid is not None
        os.kill(self.process.pid, signum)

    def stop(self) -> int:
        """Kill the process if it still runs.

        Returns:
            Exit code.
        """
        if self.exit_code is None:
            self.signal(signal.SIGKILL)
        return self.wait()

    def __enter__(self) -> Self:
        self.start()
        try:
            return self.wait_ready()
        except BaseException:
            self.stop()
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


@dataclass
class JobProcess(ServerProcess):
    """Server of another program, started from its engine's `server_spec` in a separate process group."""

    job: JobSpec | None = None
    """Job to start."""

    def start(self) -> Self:
        """Start the server and return at once."""
        assert self.job is not None
        self.port = self.port or free_port()
        values = {"{host}": "127.0.0.1", "{port}": str(self.port), "{index}": "0"}

        def fill(text: str) -> str:
            for name, value in values.items():
                text = text.replace(name, value)
            return text

        variables = {name: fill(value) for name, value in self.job.env.items()}
        with self.log.open("wb") as file:
            self.process = subprocess.Popen(
                [fill(text) for text in self.job.command],
                stdout=file,
                stderr=file,
                env={**os.environ, **variables, "RL_RUN_KEY": self.key},
                start_new_session=True,
            )
        return self

    def wait_ready(self, timeout: float = 900.0) -> Self:
        """Wait like `ServerProcess.wait_ready`, but for longer: a large server takes minutes on a busy machine."""
        return super().wait_ready(timeout)

    def stop(self) -> int:
        """Kill the process group of the server, if it still runs.

        Returns:
            Exit code.
        """
        assert isinstance(self.process, subprocess.Popen)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        return self.wait()


def _serve(arguments: list[str]) -> None:
    """Run the server in the forked process."""
    from rl_inference.embedded_server.__main__ import main

    sys.exit(main(arguments))
