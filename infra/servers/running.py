"""Start a real server on a CPU for a model directory, and stop it with all its processes."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

COMMANDS = {
    "vllm": """-m vllm.entrypoints.openai.api_server --model {model} --served-model-name tiny --host 127.0.0.1
        --port {port} --dtype float32 --enforce-eager --max-model-len 1024 --max-num-seqs 64
        --logprobs-mode processed_logprobs --enable-scale-out""",
    "sglang": """-m sglang.launch_server --model-path {model} --served-model-name tiny --host 127.0.0.1 --port {port}
        --device cpu --dtype float32 --attention-backend torch_native --sampling-backend pytorch --disable-cuda-graph
        --disable-overlap-schedule --skip-server-warmup --grammar-backend none --context-length 1024
        --max-running-requests 64 --max-total-tokens 16384
        --enable-metrics""",
}
"""Arguments of each server's Python. Eager and in float32, so that log-probs compare with those of transformers."""
ENVIRONMENT = {
    "vllm": {"VLLM_SERVER_DEV_MODE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1"},
    "sglang": {"SGLANG_USE_CPU_ENGINE": "1"},  # without it SGLang takes the machine for one with a GPU
}
READY_SECONDS = 900.0
"""A busy machine takes ten times as long as an idle one; a server that ended is seen at once."""


@contextmanager
def running(
    server: str,
    python: Path,
    model: Path,
    log: Path,
    options: Sequence[str] = (),
    variables: dict[str, str] | None = None,
) -> Iterator[str]:
    """A server that answers its health check.

    Args:
        server: `vllm` or `sglang`.
        python: its interpreter, from `build.py`.
        model: directory of the model.
        log: file for what it writes.
        options: further arguments; the last one of a name counts.
        variables: of its environment, besides those that it needs.

    Yields:
        its address.

    Raises:
        RuntimeError: it ended, or did not answer in time; with the end of its log.
    """
    port = _free_port()
    command = [str(python), *COMMANDS[server].format(model=model, port=port).split(), *options]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment |= {"HF_HUB_OFFLINE": "1", **ENVIRONMENT[server], **(variables or {})}
    with log.open("wb") as file:
        process = subprocess.Popen(command, stdout=file, stderr=file, env=environment, start_new_session=True)
    try:
        _await_health(f"http://127.0.0.1:{port}", process, log)
        yield f"http://127.0.0.1:{port}"
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(30)


def _await_health(address: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + READY_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        try:
            with urllib.request.urlopen(f"{address}/health", timeout=5):
                return
        except OSError:
            time.sleep(0.2)
    state = f"ended with {process.poll()}" if process.poll() is not None else f"gave no answer in {READY_SECONDS:g} s"
    raise RuntimeError(f"{' '.join(process.args[:3])} {state}:\n{log.read_text(errors='replace')[-3000:]}")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
