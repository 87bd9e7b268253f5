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
"""Arguments of Python for each server: eager mode and float32, to compare log-probs with those of transformers."""
ENVIRONMENT = {
    "vllm": {"VLLM_SERVER_DEV_MODE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1"},
    "sglang": {"SGLANG_USE_CPU_ENGINE": "1"},  # otherwise SGLang assumes a GPU
}
READY_SECONDS = 900.0
"""Time limit of a start in seconds. A busy machine needs ten times as long as an idle one."""


@contextmanager
def running(
    server: str,
    python: Path,
    model: Path,
    log: Path,
    options: Sequence[str] = (),
    variables: dict[str, str] | None = None,
) -> Iterator[str]:
    """Run a server inside the context; enter it when the health check succeeds.

    Args:
        server: `vllm` or `sglang`.
        python: Interpreter of the server, from `build.py`.
        model: Directory of the model.
        log: File for the output of the server.
        options: Additional arguments, which override those of `COMMANDS`.
        variables: Additional environment variables.

    Yields:
        Address of the server.

    Raises:
        RuntimeError: The server ended or was not healthy in time; the message contains the end of its log.
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
    state = f"ended with {process.poll()}" if process.poll() is not None else f"was not healthy in {READY_SECONDS:g} s"
    raise RuntimeError(f"{' '.join(process.args[:3])} {state}:\n{log.read_text(errors='replace')[-3000:]}")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
