"""`rl serve`: serve a model with the HTTP APIs of OpenAI and Anthropic."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import signal
from pathlib import Path
from typing import TYPE_CHECKING

from rl_apps.cli.generate import model_of
from rl_apps.run.chat_template import read_tokenizer
from rl_apps.settings.dtypes import gpus_have_bfloat16
from rl_apps.settings.model import check_generates
from rl_contracts.config import GenerationConfig, require
from rl_contracts.data import ServeSpec
from rl_contracts.models.directory import context_length
from rl_contracts.runtime.machine import is_loopback
from rl_inference import EmbeddedEngine, EmbeddedEngineConfig
from rl_inference.backends.embedded.config import ServerOptions
from rl_launchers.local.resources import PortReservation

if TYPE_CHECKING:
    from rl_workflows.agents.endpoint.config import EndpointConfig

KEY_VARIABLE = "RL_API_KEY"
"""Environment variable with the key that clients must send."""


def serve(path: Path, host: str = "127.0.0.1", port: int = 8000, device: str = "", dtype: str = "auto") -> int:
    """Load a model into this process, serve it until a signal, and return the exit code.

    Args:
        path: directory of a model, or of a run, whose last checkpoint is served.
        host: address to listen on.
        port: port to listen on; 0 selects a free one.
        device: `cpu` or `cuda`; an empty string selects a GPU if available.
        dtype: dtype of the weights; `auto`: bfloat16 on a GPU that has it, otherwise float32.

    Raises:
        ModelError: the model cannot be served.
        ConfigError: the host needs a key, or the tokenizer has no chat template.
        LaunchError: the address is in use.
    """
    from rl_inference.embedded_server.__main__ import run
    from rl_workflows.agents.endpoint.config import EndpointConfig

    key = os.environ.get(KEY_VARIABLE, "")
    expected = f"a loopback address (127.0.0.1), or a key for the clients in the environment variable {KEY_VARIABLE}"
    require(bool(key) or is_loopback(host), "--host", expected, host)
    endpoint = EndpointConfig(host=host, port=port)
    PortReservation(host, port).release()  # reports an address in use before the model is loaded
    directory = model_of(path, "rl serve")
    check_generates(str(directory), directory)
    dtype = _dtype_on(device) if dtype == "auto" else dtype
    spec = ServeSpec(str(directory), device=device or "auto")
    return run(_serve(ServerOptions(EmbeddedEngineConfig(dtype=dtype), spec, port=0), endpoint, key))


def _dtype_on(device: str) -> str:
    """Return the default dtype on a device; an empty string is a GPU if available."""
    import torch

    on_gpu = device != "cpu" and torch.cuda.is_available()
    return "bfloat16" if on_gpu and gpus_have_bfloat16() else "float32"


async def _serve(options: ServerOptions, config: EndpointConfig, key: str) -> int:
    """Run the embedded server on a free port, and the endpoint in front of it."""
    from rl_inference.embedded_server.__main__ import serve as serve_model
    from rl_workflows.agents.endpoint.server import HttpRolloutEndpoint

    logging.getLogger("torch.utils._pytree").setLevel(logging.ERROR)  # warnings on the import of torchao
    logging.getLogger("transformers.tokenization_utils_base").setLevel(logging.ERROR)  # prompts that are rejected
    directory, run_key = Path(options.spec.model_path), secrets.token_urlsafe()
    tokenizer = await asyncio.to_thread(read_tokenizer, directory)
    address = asyncio.get_running_loop().create_future()
    server = asyncio.create_task(serve_model(options, run_key, address.set_result))
    await asyncio.wait({server, address}, return_when=asyncio.FIRST_COMPLETED)
    if server.done():
        return server.result()
    stopped = asyncio.Event()
    async with EmbeddedEngine(options.config, options.spec) as engine:
        engine.initialize([f"http://{address.result()}"], run_key)
        endpoint = HttpRolloutEndpoint(tokenizer, config)
        try:
            limit = context_length(str(directory))
            name = directory.resolve().name
            endpoint.serve(engine, GenerationConfig(max_new_tokens=limit or 1 << 20), limit, name, key)
            for signum in (signal.SIGTERM, signal.SIGINT):  # instead of the server's handlers, to end the server last
                asyncio.get_running_loop().add_signal_handler(signum, stopped.set)
            print(f"serving {directory} at {endpoint.url}/v1; Ctrl-C ends it", flush=True)
            stop = asyncio.create_task(stopped.wait())
            await asyncio.wait({server, stop}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            await endpoint.destroy()
    server.cancel()
    await asyncio.wait({server})
    return 0 if server.cancelled() else server.result()
