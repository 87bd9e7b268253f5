"""The server process: its errors at start, and its end."""

from __future__ import annotations

import asyncio
import signal
import socket
import subprocess
import sys
from pathlib import Path

import aiohttp
import pytest
from server_program import MAIN, server_command

from rl_contracts.config import ClientConfig, GenerationConfig
from rl_contracts.data import ModelRequest, ServeSpec
from rl_contracts.errors import ModelError
from rl_inference import EmbeddedEngine, EmbeddedEngineConfig
from rl_inference.embedded_server.model.loading import load_model
from rl_inference.testing import ServerProcess, tiny_model

COMMAND = (sys.executable, "-m", "rl_inference.embedded_server")
LOAD_PROGRAM = """
import asyncio, gc, sys
from rl_inference.backends.embedded.config import parse
from rl_inference.embedded_server.__main__ import _load

async def main():
    await _load(parse(sys.argv[1:]), "a test", print)
    print(gc.get_freeze_count(), len(gc.get_objects()))

asyncio.run(main())
"""


def start_failing(model: Path, tmp_path: Path, port: int = 0) -> tuple[int, str]:
    """Return the exit code and last log line of a server that fails to start."""
    server = ServerProcess(model, tmp_path / "server.log", port=port, command=COMMAND).start()
    return server.wait(), server.log.read_text().strip().splitlines()[-1]


def test_start_model_without_weights_names_the_files_found(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")

    code, last_line = start_failing(model, tmp_path)

    assert code == 1
    assert "expected weights (*.safetensors) beside config.json, found config.json" in last_line
    assert "save_pretrained" in last_line


def test_load_weights_without_a_parameter_names_it(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    model = tiny_model(tmp_path / "model")
    tensors = load_file(model / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})

    with pytest.raises(ModelError, match=r"lack 1 parameters of Qwen3ForCausalLM.*layers\.1\.mlp\.up_proj"):
        load_model(EmbeddedEngineConfig(), ServeSpec(str(model), device="cpu"))


def test_load_context_longer_than_the_model_is_rejected(model_path: Path) -> None:
    with pytest.raises(ModelError, match="context_length=1000"):
        load_model(EmbeddedEngineConfig(context_length=1000), ServeSpec(str(model_path), device="cpu"))


@pytest.mark.nightly
def test_load_freezes_imports_and_model_for_garbage_collection(model_path: Path) -> None:
    command = [sys.executable, "-c", LOAD_PROGRAM, "--model", str(model_path), "--port", "0", "--device", "cpu"]
    output = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
    frozen, tracked = map(int, output.split())

    assert frozen > 100_000, "torch and transformers alone have more objects"
    assert tracked < frozen / 10


@pytest.mark.slow
def test_load_unsupported_layers_are_rejected(tmp_path: Path) -> None:
    model = tiny_model(tmp_path / "model", "qwen3_next", linear_num_value_heads=4, linear_num_key_heads=2)

    with pytest.raises(ModelError, match=r"layers of type .'linear_attention'"):
        load_model(EmbeddedEngineConfig(), ServeSpec(str(model), device="cpu"))


def test_start_with_port_in_use_names_the_port(model_path: Path, tmp_path: Path) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]

        code, last_line = start_failing(model_path, tmp_path, port)

    assert code == 1
    assert f"port {port} of 127.0.0.1 is in use" in last_line


def test_start_invalid_setting_is_rejected_before_loading(tmp_path: Path) -> None:
    arguments = ["--model", str(tmp_path), "--port", "0", "--dtype", "int3"]
    done = subprocess.run([sys.executable, "-c", MAIN, *arguments], capture_output=True, text=True, timeout=60)

    assert done.returncode == 2
    assert "server.dtype: expected one of float32, bfloat16, float16, found 'int3'" in done.stderr


async def test_sigterm_returns_partial_completion_and_frees_port(model_path: Path, tmp_path: Path) -> None:
    with ServerProcess(model_path, tmp_path / "server.log") as server:
        params = {"max_new_tokens": 500, "min_new_tokens": 500, "ignore_eos": True}
        async with aiohttp.ClientSession() as http:
            body = {"input_ids": [5], "sampling_params": params, "stream": True}
            async with http.post(server.address + "/generate", json=body) as response:
                server.signal(signal.SIGTERM)
                text = await response.text()

        assert '"type": "abort"' in text or '"type": "length"' in text
        assert await asyncio.to_thread(server.wait) == 0
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("127.0.0.1", server.port))


@pytest.mark.slow
async def test_decode_thread_crash_fails_requests_and_ends_process(model_path: Path, tmp_path: Path) -> None:
    fault = (
        "from rl_inference.embedded_server.slots import SlotTable\n"
        "from rl_inference.embedded_server.model.slot_model import SlotModel\n"
        "def broken(self, *_): raise ZeroDivisionError('injected')\n"
        "def step(self): SlotModel.run = broken; broken(self)\n"
        "SlotTable.step = step\n"
    )
    server = ServerProcess(model_path, tmp_path / "server.log", command=server_command(fault))
    with server:
        async with (
            aiohttp.ClientSession() as http,
            http.post(server.address + "/generate", json={"input_ids": [5]}) as response,
        ):
            message = (await response.json())["error"]["message"]

        assert response.status == 500
        assert "ZeroDivisionError: injected" in message
        assert await asyncio.to_thread(server.wait) == 1
        assert "Traceback" in server.log.read_text()


@pytest.mark.nightly
async def test_decode_thread_stuck_client_uses_other_server(model_path: Path, tmp_path: Path) -> None:
    fault = (
        "import time\nfrom rl_inference.embedded_server import app\n"
        "from rl_inference.embedded_server.slots import SlotTable\n"
        "app.STUCK_SECONDS, SlotTable.step = 1.0, lambda self: time.sleep(600)\n"
    )
    with (
        ServerProcess(model_path, tmp_path / "stuck.log", command=server_command(fault)) as stuck,
        ServerProcess(model_path, tmp_path / "well.log") as healthy,
    ):
        engine = EmbeddedEngine(client=ClientConfig(progress_timeout=1.5))
        engine.initialize([stuck.address, healthy.address])
        try:
            requests = [ModelRequest([5, 6], GenerationConfig(max_new_tokens=8, ignore_eos=True)) for _ in range(4)]
            responses = await asyncio.wait_for(asyncio.gather(*map(engine.agenerate, requests)), 60)
            async with asyncio.timeout(60):
                while len(engine._router.live) == 2:  # noqa: ASYNC110 - another process
                    await asyncio.sleep(0.02)

            assert {response.server for response in responses} == {healthy.address}
            assert "the decode thread has made no progress for" in str(engine._router.servers[0].reason)
        finally:
            await engine.destroy()


async def test_request_before_model_is_loaded_returns_503(model_path: Path, tmp_path: Path) -> None:
    server = ServerProcess(model_path, tmp_path / "server.log").start()
    try:
        async with aiohttp.ClientSession() as http, asyncio.timeout(60):
            while True:
                try:
                    async with http.post(server.address + "/generate", json={}) as response:
                        assert response.status == 503
                        assert response.headers["Retry-After"]
                        return
                except aiohttp.ClientConnectorError:
                    await asyncio.sleep(0.01)
    finally:
        server.stop()


def resident_kib(server: ServerProcess) -> int:
    """Return the resident memory of the server in KiB."""
    assert server.process is not None
    lines = Path(f"/proc/{server.process.pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS:"))


@pytest.mark.nightly
async def test_passes_of_many_sizes_do_not_grow_memory(model_path: Path, tmp_path: Path) -> None:
    sizes = [*range(2, 512, 2), *range(3, 512, 2)]  # no size of the first half is in the second
    kib_after_half: list[int] = []

    with ServerProcess(model_path, tmp_path / "server.log") as server:
        async with aiohttp.ClientSession(server.address, raise_for_status=True) as http:
            for number, size in enumerate(sizes, 1):
                async with http.post("/score", json={"input_ids": [3 + i % 90 for i in range(size)]}) as response:
                    await response.read()
                if number in (len(sizes) // 2, len(sizes)):
                    kib_after_half.append(resident_kib(server))

    assert kib_after_half[1] <= 1.05 * kib_after_half[0], kib_after_half
