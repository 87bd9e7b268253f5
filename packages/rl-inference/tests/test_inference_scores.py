"""Scores during generation: both get time of the decode thread."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from server_program import server_command, server_with_constants

from rl_contracts.config import ClientConfig, GenerationConfig
from rl_contracts.data import ModelRequest
from rl_inference import EmbeddedEngine
from rl_inference.testing import ServerProcess, reference_logprobs, reference_model

SEQUENCE = [3 + (11 * i) % 90 for i in range(250)]

LONG_SEQUENCE = [3 + (7 * i) % 90 for i in range(400)]


@pytest.fixture(scope="module")
def server(model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    log = tmp_path_factory.mktemp("logs") / "server.log"
    with ServerProcess(
        model_path, log, options={"max_sequences": 4}, command=server_with_constants(MAX_WAITING=4)
    ) as server:
        yield server


@pytest.fixture
async def engine(server: ServerProcess) -> AsyncIterator[EmbeddedEngine]:
    engine = EmbeddedEngine(client=ClientConfig(progress_timeout=20))
    engine.initialize([server.address])
    yield engine
    await engine.destroy()


async def test_generate_during_continuous_scoring_completes(engine: EmbeddedEngine) -> None:
    scored: list[list[float]] = []

    async def score() -> None:
        while True:
            scored.append(await engine.score(SEQUENCE))

    async def wait_for_more_than(count: int) -> None:
        while len(scored) <= count:
            assert not any(task.done() for task in scorers)
            await asyncio.sleep(0.01)

    scorers = [asyncio.create_task(score()) for _ in range(6)]
    await asyncio.wait_for(wait_for_more_than(0), 60)
    generation = GenerationConfig(max_new_tokens=100, ignore_eos=True)
    response = await asyncio.wait_for(engine.agenerate(ModelRequest(SEQUENCE[:6], generation, seed=1)), 60)
    await asyncio.wait_for(wait_for_more_than(len(scored)), 60)
    for task in scorers:
        task.cancel()
    await asyncio.gather(*scorers, return_exceptions=True)

    assert len(response.output_ids) == 100


@pytest.mark.slow
async def test_score_beyond_queue_limit_returns_503_others_are_correct(server: ServerProcess, model_path: Path) -> None:
    expected = reference_logprobs(reference_model(model_path), SEQUENCE[:1], SEQUENCE[1:])

    async def post_score(http: aiohttp.ClientSession) -> tuple[int, Any]:
        async with http.post(server.address + "/score", json={"input_ids": SEQUENCE}) as response:
            return response.status, await response.json()

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:
        replies = await asyncio.gather(*(post_score(http) for _ in range(200)))
        async with http.get(server.address + "/stats") as response:
            stats = await response.json()

    assert {status for status, _ in replies} == {200, 503}
    assert any("are waiting already" in body["error"]["message"] for status, body in replies if status == 503)
    for body in (body for status, body in replies if status == 200):
        assert body["logprobs"][1:] == pytest.approx(expected, abs=1e-5)
    assert stats["scoring"] == 0
    assert stats["scored_tokens"] >= len(SEQUENCE) * sum(status == 200 for status, _ in replies)


async def test_score_while_paused_returns_logprobs(engine: EmbeddedEngine) -> None:
    await engine.pause()
    try:
        assert len(await asyncio.wait_for(engine.score(SEQUENCE), 60)) == len(SEQUENCE)
    finally:
        await engine.resume()


@pytest.mark.slow
async def test_score_longer_than_a_pass_runs_in_chunks_during_generation(model_path: Path, tmp_path: Path) -> None:
    expected = reference_logprobs(reference_model(model_path), LONG_SEQUENCE[:1], LONG_SEQUENCE[1:], 0.7)
    engine = EmbeddedEngine()
    command = server_command("from rl_inference.embedded_server import loop\nloop.PREFILL_TOKENS = 64")
    options = {"max_sequences": 2}
    with ServerProcess(model_path, tmp_path / "server.log", options=options, command=command) as server:
        engine.initialize([server.address])
        generation = GenerationConfig(max_new_tokens=60, ignore_eos=True)
        calls = [engine.agenerate(ModelRequest(LONG_SEQUENCE[: 90 * n], generation, seed=n)) for n in (1, 2, 3)]
        scores = asyncio.gather(engine.score(LONG_SEQUENCE, 0.7), engine.score(LONG_SEQUENCE, 0.7))
        responses = await asyncio.gather(*calls)
        first, second = await scores
        await engine.destroy()

    assert first == second
    assert first[1:] == pytest.approx(expected, abs=2e-5)
    assert [len(response.output_ids) for response in responses] == [60, 60, 60]
