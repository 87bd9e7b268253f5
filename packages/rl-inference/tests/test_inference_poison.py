"""Requests that make a pass fail or end the process: they fail alone, and the client does not carry them through the
fleet."""

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
"""No answer of the tiny model has these in a row."""
FAULT = """
import os, signal, sys
from rl_inference.embedded_server.__main__ import main
from rl_inference.embedded_server.model.slot_model import SlotModel
run = SlotModel.run
def fails(self, tokens, span):
    if str({poison})[1:-1] in str(tokens.tolist()):
        {action}
    return run(self, tokens, span)
SlotModel.run = fails
sys.exit(main(sys.argv[1:]))
"""
RAISES = FAULT.format(poison=POISON, action="raise RuntimeError('planted')")
KILLS = FAULT.format(poison=POISON, action="os.kill(os.getpid(), signal.SIGKILL)")


SPOILS = FAULT.format(poison=POISON, action="return run(self, tokens, span) * float('nan')")


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
async def test_pass_fails_by_one_request_and_that_one_alone_fails(model_path: Path, tmp_path: Path) -> None:
    with serving(model_path, tmp_path, 1, RAISES) as servers:
        async with client(servers) as engine, asyncio.timeout(120):
            prompts = [[5 + i, 17, 40] for i in range(6)]
            alone = [await engine.agenerate(request(prompt, 0, 200)) for prompt in prompts]
            others = [asyncio.create_task(engine.agenerate(request(prompt, 0, 200))) for prompt in prompts]
            while (await engine.stats())["running"] < 6:  # noqa: ASYNC110 - another process
                await asyncio.sleep(0.001)

            with pytest.raises(InferenceError, match=r"abandoned.*RuntimeError: planted"):
                await engine.agenerate(request([5, *POISON, 6], 0, 8))
            among = await asyncio.gather(*others)

        assert [answer.output_ids for answer in among] == [answer.output_ids for answer in alone]
        assert all(answer.resubmissions == 0 for answer in among)
        assert servers[0].exit_code is None


@pytest.mark.nightly
@pytest.mark.parametrize("kind", ["answer", "score"])
async def test_request_that_ends_servers_is_given_up_after_two_and_the_third_lives(
    model_path: Path, tmp_path: Path, kind: str
) -> None:
    with serving(model_path, tmp_path, 3, KILLS) as servers:
        async with client(servers) as engine, asyncio.timeout(60):
            poison = [5, *POISON, 6]
            asked = engine.agenerate(request(poison, 0, 8)) if kind == "answer" else engine.score(poison)
            with pytest.raises(InferenceError, match="2 servers ended or failed"):
                await asked
            answer = await engine.agenerate(request([5, 6], 0, 8))

        ended = [server.exit_code for server in servers]
        assert sorted(code is None for code in ended) == [False, False, True]
        assert ended.count(-signal.SIGKILL) == 2
        assert len(answer.output_ids) == 8


@pytest.mark.nightly
async def test_score_that_is_not_finite_answers_500_and_no_nan(model_path: Path, tmp_path: Path) -> None:
    with serving(model_path, tmp_path, 1, SPOILS) as servers:
        async with (
            aiohttp.ClientSession(servers[0].address) as http,
            http.post("/score", json={"input_ids": [5, *POISON, 6]}) as response,
        ):
            text = await response.text()

    assert response.status == 500
    assert "computes numbers that are not finite" in json.loads(text, parse_constant=pytest.fail)["error"]["message"]
