"""Tests of the server's deadlines for silent peers: trainers, owners of a pause, clients during a request."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from rl_contracts.config import ClientConfig
from rl_contracts.data import ParamSpec, ServeSpec, WeightPart, WeightUpdateMeta
from rl_contracts.errors import WeightUpdateError
from rl_contracts.runtime.aio import run_in_thread
from rl_contracts.testing import put_weights
from rl_contracts.testing.waiting import wait_until
from rl_contracts.weights import WeightReceiver
from rl_inference import EmbeddedEngine, EmbeddedEngineConfig
from rl_inference.embedded_server.model.loading import load_model
from rl_inference.embedded_server.weights import ServedWeights
from rl_inference.testing import ServerProcess, reference_model

SHORT_DEADLINES = """
import sys
from rl_inference.embedded_server import app
from rl_contracts.runtime import http_connections as connections
app.BODY_SECONDS = app.UNREAD_SECONDS = connections.SILENT_SECONDS = 1.0
event = app._event
app._event = lambda value: event(value) + (b": " + b"x" * 2**23 + b"\\n\\n" if "much" in str(value) else b"")
from rl_inference.embedded_server.__main__ import main
sys.exit(main(sys.argv[1:]))
"""
"""Program of a server with short deadlines. A stream whose id contains `much` exceeds the buffers of a connection."""
ENDLESS = {"max_new_tokens": 500, "min_new_tokens": 500, "ignore_eos": True}


@pytest.fixture(scope="module")
def server(model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    scratch = tmp_path_factory.mktemp("deadlines")
    with ServerProcess(
        model_path,
        scratch / "server.log",
        options={"weights_dir": scratch / "weights"},
        command=(sys.executable, "-c", SHORT_DEADLINES),
    ) as server:
        yield server


def call(
    server: ServerProcess, path: str, body: dict[str, Any] | None = None, timeout: float = 30.0
) -> tuple[int, Any]:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(server.address + path, data, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=timeout) as response:
            return response.status, json.load(response)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def is_open(process: Path, port: int) -> bool:
    """Return whether a process, given as its directory in `/proc`, has an open connection from this remote port."""
    lines = [line.split() for line in (process / "net" / "tcp").read_text().splitlines()[1:]]
    sockets = {f"socket:[{line[9]}]" for line in lines if line[2].endswith(f":{port:04X}")}
    for file in (process / "fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed after it was listed
            if str(file.readlink()) in sockets:
                return True
    return False


def specs(model_path: Path) -> tuple[ParamSpec, ...]:
    parameters = reference_model(model_path).named_parameters()
    return tuple(ParamSpec(name, tuple(p.shape), "float32") for name, p in parameters)


def silent_update(model_path: Path, port: int, timeout: float) -> dict[str, Any]:
    location = f"tcp://127.0.0.1:{port}/update/0?timeout={timeout}&rank=1&world=2"
    return {"meta": WeightUpdateMeta("broadcast", 1, (WeightPart(location, specs(model_path)),)).to_json()}


@pytest.mark.slow
def test_stage_silent_peer_times_out_at_shorter_deadline(server: ServerProcess, model_path: Path) -> None:
    """The peer and the client each have a deadline. After the first timeout, the next version is staged."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        begin = time.monotonic()
        status, reply = call(server, "/stage_weights", silent_update(model_path, silent.getsockname()[1], 1.0))

    assert status == 409
    assert "no reply within 1 s" in reply["error"]["message"]
    assert time.monotonic() - begin < 15
    tensors = [(name, p.detach()) for name, p in reference_model(model_path).named_parameters()]
    meta, _ = put_weights(server.options["weights_dir"], 1, tensors)
    assert call(server, "/stage_weights", {"meta": meta.to_json()})[0] == 200

    with socket.create_server(("127.0.0.1", 0)) as silent:
        body = silent_update(model_path, silent.getsockname()[1], 600.0)  # deadline of the peer
        status, reply = call(server, "/stage_weights", {**body, "timeout": 0.2})

    assert status == 409
    assert "within 0.2 s" in reply["error"]["message"]


@pytest.mark.nightly
def test_sigterm_during_stage_with_silent_peer_ends_process(model_path: Path, tmp_path: Path) -> None:
    options = {"weights_dir": tmp_path / "weights"}
    with (
        socket.create_server(("127.0.0.1", 0)) as silent,
        ServerProcess(model_path, tmp_path / "server.log", options=options) as server,
    ):
        body = silent_update(model_path, silent.getsockname()[1], 600.0)

        def stage() -> None:
            with contextlib.suppress(OSError):  # the server ends without a response
                call(server, "/stage_weights", body)

        staging = threading.Thread(target=stage)
        staging.start()
        connection, _ = silent.accept()  # the server has connected

        server.signal(signal.SIGTERM)

        assert server.wait(20) == 0
        staging.join()
        connection.close()


@pytest.mark.parametrize("client", ["waits", "disconnected"])
def test_stage_that_hangs_is_abandoned_and_late_weights_are_ignored(
    model_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, client: str
) -> None:
    tensors = [(name, p.detach() + 1) for name, p in reference_model(model_path).named_parameters()]
    meta, receipt = put_weights(tmp_path, 1, tensors)
    model = load_model(EmbeddedEngineConfig(max_sequences=1), ServeSpec(str(model_path), device="cpu")).model
    weights = ServedWeights(model, str(tmp_path), "a test", 0)
    started, proceed, received = threading.Event(), threading.Event(), threading.Event()
    receive = WeightReceiver.receive

    def frozen(self: WeightReceiver, meta: WeightUpdateMeta, targets: dict[str, Any]) -> dict[str, int]:
        started.set()
        proceed.wait(60)
        try:
            return receive(self, meta, targets)
        finally:
            received.set()

    monkeypatch.setattr(WeightReceiver, "receive", frozen)
    if client == "waits":
        with pytest.raises(WeightUpdateError, match=r"version 1: .* within 0\.2 s"):
            weights.stage(meta, 0.2)
    else:
        run_in_thread(lambda: weights.stage(meta))
        assert started.wait(60)
    monkeypatch.undo()
    monkeypatch.setattr("rl_inference.embedded_server.weights.ABANDONED_SECONDS", 0.1)

    staged = weights.stage(meta, 60.0)
    proceed.set()
    received.wait(60)
    weights.commit(1)

    assert staged.checksums == receipt.checksums
    assert weights.receipt().checksums.items() >= receipt.checksums.items()


@pytest.mark.slow
async def test_incomplete_requests_are_disconnected_but_waiting_streams_not(server: ServerProcess) -> None:
    head = b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    half_sent = head + b"Content-Length: 100\r\n\r\n{"
    body = json.dumps({"input_ids": [5], "sampling_params": ENDLESS, "stream": True}).encode()
    call(server, "/pause_generation", {})

    async def until_closed(data: bytes) -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(data)
        try:
            return await reader.read()
        except ConnectionError:
            return b"reset"
        finally:
            writer.close()

    async with asyncio.timeout(60):
        streaming = asyncio.create_task(
            until_closed(head + b"Connection: close\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
        )
        closed = await asyncio.gather(*(until_closed(data) for data in (b"", b"GET /hea", head, half_sent)))
        assert not streaming.done(), "a waiting stream must stay open"
        call(server, "/continue_generation", {})
        response = await streaming

    assert b" 408 " in closed[3]
    assert response.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["stream", "complete response"])
def test_client_that_does_not_read_is_disconnected_and_request_ends(server: ServerProcess, kind: str) -> None:
    assert isinstance(server.process, subprocess.Popen)
    stream, process = kind == "stream", Path(f"/proc/{server.process.pid}")
    params = ENDLESS if stream else {"max_new_tokens": 1, "n": 4000}  # each repeats the 4,000 characters of the id
    message = {"input_ids": [5], "rid": "much" * 1000, "sampling_params": params, "stream": stream}
    body = json.dumps(message).encode()
    head = "POST /generate HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\r\n"
    if stream:
        call(server, "/pause_generation", {})  # keeps the stream open
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(("127.0.0.1", server.port))
        port = connection.getsockname()[1]
        wait_until(lambda: is_open(process, port))
        connection.sendall(head.format(len(body)).encode() + body)
        if stream:
            wait_until(lambda: call(server, "/stats")[1]["waiting"] == 1)

        wait_until(lambda: not is_open(process, port))

        wait_until(lambda: call(server, "/stats")[1]["waiting"] == call(server, "/health")[1]["open"] == 0)
        assert call(server, "/stats")[1]["running"] == 0
        if stream:
            assert call(server, "/continue_generation", {})[1]["paused_seconds"] > 0
        else:
            connection.settimeout(30)
            assert len(b"".join(iter(lambda: connection.recv(2**20), b""))) < 4000 * 4000


@pytest.mark.slow
def test_pause_without_renewal_ends_with_its_lease(server: ServerProcess) -> None:
    assert call(server, "/pause_generation", {"lease": 0.5})[1]["paused"]
    _, reply = call(
        server, "/generate", {"input_ids": [5], "sampling_params": {"max_new_tokens": 3, "ignore_eos": True}}
    )

    assert len(reply["output_ids"]) == 3


@asynccontextmanager
async def client(server: ServerProcess, **settings: float) -> AsyncIterator[EmbeddedEngine]:
    engine = EmbeddedEngine(client=ClientConfig(**settings))
    engine.initialize([server.address])
    try:
        yield engine
    finally:
        await engine.destroy()


@pytest.mark.slow
async def test_pause_of_running_client_is_renewed_beyond_its_lease(server: ServerProcess) -> None:
    async with client(server, progress_timeout=1.0) as engine:  # the lease is 3 s
        await engine.pause()
        start = time.monotonic()
        while time.monotonic() - start < 5:
            assert call(server, "/stats")[1]["paused"]
            await asyncio.sleep(0.1)
        await engine.resume()

        assert not call(server, "/stats")[1]["paused"]
