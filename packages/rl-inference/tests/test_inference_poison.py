"""Requests that crash a pass or the server: only they fail, and the client does not send them to every server."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import aiohttp
import pytest

from rl_contracts.config import ClientConfig, GenerationConfig
from rl_contracts.data import ModelRequest
from rl_contracts.errors import InferenceError
from rl_inference import EmbeddedEngine
from rl_inference.testing import ServerProcess

POISON = [77, 78, 77, 78, 79]
"""Token ids that the completions of the tiny model never contain in a row."""
FAULTY_SERVER = """
import os, signal, sys
from rl_inference.embedded_server.__main__ import main
from rl_inference.embedded_server.model.slot_model import SlotModel
run = SlotModel.run
def faulty_run(self, tokens, span):
    if str({poison})[1:-1] in str(tokens.tolist()):
        {action}
    return run(self, tokens, span)
SlotModel.run = faulty_run
sys.exit(main(sys.argv[1:]))
"""
RAISING_SERVER = FAULTY_SERVER.format(poison=POISON, action="raise RuntimeError('injected')")
CRASHING_SERVER = FAULTY_SERVER.format(poison=POISON, action="os.kill(os.getpid(), signal.SIGKILL)")


NAN_SERVER = FAULTY_SERVER.format(poison=POISON, action="return run(self, tokens, span) * float('nan')")


@contextmanager
def serving(model: Path, folder: Path, count: int, program: str) -> Iterator[list[ServerProcess]]:
    command = (sys.executable, "-c", program)
    servers = [ServerProcess(model, folder / f"server-{i}.log", command=command).start() for i in range(count)]
    try:
        yield [server.wait_ready() for server in servers]
    finally:
        for server in servers:
            server.stop()


@asynccontextmanager
async def client(servers: list[ServerProcess]) -> AsyncIterator[EmbeddedEngine]:
    engine = EmbeddedEngine(client=ClientConfig(progress_timeout=20))
    engine.initialize([server.address for server in servers])
    try:
        yield engine
    finally:
        await engine.destroy()


def request(prompt: list[int], seed: int, tokens: int) -> ModelRequest:
    generation = GenerationConfig(max_new_tokens=tokens, ignore_eos=True, temperature=0.0)
    return ModelRequest(prompt, generation, seed=seed)


@pytest.mark.nightly
async def test_request_that_crashes_a_pass_fails_alone(model_path: Path, tmp_path: Path) -> None:
    with serving(model_path, tmp_path, 1, RAISING_SERVER) as servers:
        async with client(servers) as engine, asyncio.timeout(120):
            prompts = [[5 + i, 17, 40] for i in range(6)]
            alone = [await engine.agenerate(request(prompt, 0, 200)) for prompt in prompts]
            tasks = [asyncio.create_task(engine.agenerate(request(prompt, 0, 200))) for prompt in prompts]
            while (await engine.stats())["running"] < 6:  # noqa: ASYNC110 - another process
                await asyncio.sleep(0.001)

            with pytest.raises(InferenceError, match=r"abandoned.*RuntimeError: injected"):
                await engine.agenerate(request([5, *POISON, 6], 0, 8))
            concurrent = await asyncio.gather(*tasks)

        assert [response.output_ids for response in concurrent] == [response.output_ids for response in alone]
        assert all(response.resubmissions == 0 for response in concurrent)
        assert servers[0].exit_code is None


@pytest.mark.nightly
@pytest.mark.parametrize("kind", ["completion", "score"])
async def test_request_that_crashes_servers_fails_after_two_servers(
    model_path: Path, tmp_path: Path, kind: str
) -> None:
    with serving(model_path, tmp_path, 3, CRASHING_SERVER) as servers:
        async with client(servers) as engine, asyncio.timeout(60):
            poison = [5, *POISON, 6]
            call = engine.agenerate(request(poison, 0, 8)) if kind == "completion" else engine.score(poison)
            with pytest.raises(InferenceError, match="2 servers ended or failed"):
                await call
            response = await engine.agenerate(request([5, 6], 0, 8))

        exit_codes = [server.exit_code for server in servers]
        assert sorted(code is None for code in exit_codes) == [False, False, True]
        assert exit_codes.count(-signal.SIGKILL) == 2
        assert len(response.output_ids) == 8


@pytest.mark.nightly
async def test_score_with_nan_returns_500_without_nan(model_path: Path, tmp_path: Path) -> None:
    with serving(model_path, tmp_path, 1, NAN_SERVER) as servers:
        async with (
            aiohttp.ClientSession(servers[0].address) as http,
            http.post("/score", json={"input_ids": [5, *POISON, 6]}) as response,
        ):
            text = await response.text()

    assert response.status == 500
    assert "not finite" in json.loads(text, parse_constant=pytest.fail)["error"]["message"]
