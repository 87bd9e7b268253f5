"""Behavior of client and server at the limit of open files of a process."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import resource
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from rl_contracts.config import ClientConfig, GenerationConfig
from rl_contracts.data import ModelRequest, WeightUpdateMeta
from rl_contracts.errors import InferenceError, WeightUpdateError
from rl_inference import EmbeddedEngine
from rl_inference.client.file_limit import TooManyFilesError
from rl_inference.client.health import ServerMonitor
from rl_inference.testing import ServerProcess

REQUEST = ModelRequest([5, 6, 7], GenerationConfig(max_new_tokens=4, ignore_eos=True))


@contextlib.contextmanager
def soft_limit(files: int) -> Iterator[None]:
    old_limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (files, old_limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, old_limits)


def highest_file() -> int:
    """Return the highest open file descriptor; earlier tests may have left some open."""
    return max(int(number) for number in os.listdir("/proc/self/fd"))


@contextlib.contextmanager
def no_free_descriptor() -> Iterator[Callable[[], None]]:
    """Use up all file descriptors of this process. Yields a function that uses up those closed meanwhile."""
    opened = []

    def fill() -> None:
        with contextlib.suppress(OSError):
            while True:
                opened.append(os.dup(0))

    gc.collect()
    with soft_limit(1 + highest_file()):
        try:
            fill()
            yield fill
        finally:
            for descriptor in opened:
                os.close(descriptor)


@pytest.fixture(scope="module")
def server(model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with ServerProcess(model_path, tmp_path_factory.mktemp("server") / "log") as started:
        yield started


@contextlib.asynccontextmanager
async def client(address: str):
    engine = EmbeddedEngine(client=ClientConfig(progress_timeout=5.0))
    engine.initialize([address])
    try:
        yield engine
    finally:
        await engine.destroy()


async def test_client_without_free_descriptor_reports_ulimit_and_evicts_none(
    server: ServerProcess, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    probes, check = asyncio.Semaphore(0), ServerMonitor._check

    async def counted_check(self: ServerMonitor, *arguments: Any) -> None:
        await check(self, *arguments)
        probes.release()

    monkeypatch.setattr(ServerMonitor, "_check", counted_check)
    monkeypatch.setattr("rl_inference.client.health.PROBE_INTERVAL", 0.02)
    async with client(server.address) as engine:
        with caplog.at_level(logging.WARNING, logger="rl"), no_free_descriptor() as fill:
            for _ in range(3):
                fill()
                with pytest.raises(TooManyFilesError, match=r"ulimit -n.*rollout\.max_concurrent"):
                    await engine.agenerate(REQUEST)
            with pytest.raises(InferenceError, match="ulimit -n"):
                await engine.score([1, 2, 3])
            with pytest.raises(WeightUpdateError, match=r"version 1.*ulimit -n"):
                await engine.stage_weights(WeightUpdateMeta("shm", 1))
            async with asyncio.timeout(20):
                for _ in range(3):
                    await probes.acquire()
            assert (await engine.stats())["running"] == 0, "unavailable metrics must not cause an error"
            assert engine.servers == [server.address]
        levels = {record.levelno for record in caplog.records if server.address in record.getMessage()}
        assert levels == {logging.WARNING}, "failed probes must be warnings, not evictions"
        assert len((await engine.agenerate(REQUEST)).output_ids) == 4


async def test_client_initialize_raises_soft_file_limit() -> None:
    with soft_limit(limit := highest_file() + 200):
        EmbeddedEngine().initialize(["http://127.0.0.1:9"])
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        assert soft == hard > limit


@pytest.mark.nightly
def test_server_start_raises_soft_file_limit(model_path: Path, tmp_path: Path) -> None:
    command = (sys.executable, "-m", "rl_inference.embedded_server")
    limit = highest_file() + 200
    with soft_limit(limit), ServerProcess(model_path, tmp_path / "log", command=command) as server:
        line = next(
            line
            for line in Path(f"/proc/{server.process.pid}/limits").read_text().splitlines()
            if line.startswith("Max open")
        )
    soft, hard = line.split()[3:5]
    assert soft == hard != str(limit)


@pytest.mark.slow
async def test_client_sends_1100_concurrent_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rl_inference.client.transport._CONNECT_SECONDS", 30.0)
    arrived, all_arrived = [], asyncio.Event()

    async def generate(request: web.Request) -> web.Response:
        arrived.append(None)
        if len(arrived) == 1100:
            all_arrived.set()
        await all_arrived.wait()
        return web.json_response({"error": {"message": "seen"}}, status=400)

    app = web.Application()
    app.router.add_post("/generate", generate)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0, backlog=2048).start()
    try:
        async with client(f"http://127.0.0.1:{runner.addresses[0][1]}") as engine:
            async with asyncio.timeout(60):
                errors = await asyncio.gather(*(engine.agenerate(REQUEST) for _ in range(1100)), return_exceptions=True)
    finally:
        await runner.cleanup()
    assert all("seen" in str(error) for error in errors)
