"""Requests for several completions, aborts of a batch, stop strings after a minimum length, and the run key."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from server_program import MAIN

from rl_contracts.config import GenerationConfig
from rl_inference.embedded_server.job import GenerationJob
from rl_inference.testing import ServerProcess

PROMPT = [5, 17, 40, 33, 21, 90]


@pytest.fixture(scope="module")
def server(model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    log = tmp_path_factory.mktemp("requests") / "server.log"
    with ServerProcess(model_path, log, options={"max_sequences": 8}) as server:
        yield server


@pytest.fixture
async def http(server: ServerProcess) -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(server.address, timeout=aiohttp.ClientTimeout(60)) as session:
        yield session


async def post(http: aiohttp.ClientSession, path: str, body: dict[str, Any]) -> Any:
    async with http.post(path, json=body) as response:
        assert response.status == 200, await response.text()
        return await response.json()


async def test_generate_n_completions_use_consecutive_seeds(http: aiohttp.ClientSession) -> None:
    params = {"max_new_tokens": 12, "ignore_eos": True}
    completions = await post(
        http, "/generate", {"input_ids": PROMPT, "rid": "a", "sampling_params": {**params, "sampling_seed": 5, "n": 3}}
    )
    alone = [
        await post(http, "/generate", {"input_ids": PROMPT, "sampling_params": {**params, "sampling_seed": seed}})
        for seed in (5, 6, 7)
    ]

    assert [completion["output_ids"] for completion in completions] == [
        completion["output_ids"] for completion in alone
    ]
    assert len({tuple(completion["output_ids"]) for completion in completions}) == 3
    assert [completion["meta_info"]["id"] for completion in completions] == ["a-0", "a-1", "a-2"]


async def test_abort_request_with_batch_id_ends_all_its_completions(http: aiohttp.ClientSession) -> None:
    params = {"max_new_tokens": 500, "min_new_tokens": 500, "ignore_eos": True}
    body = {"input_ids": [PROMPT, PROMPT[:3], [9]], "rid": "batch", "sampling_params": params}
    await post(http, "/pause_generation", {})
    batch = asyncio.create_task(post(http, "/generate", body))
    other_request = asyncio.create_task(
        post(http, "/generate", {"input_ids": PROMPT, "rid": "other", "sampling_params": {"max_new_tokens": 3}})
    )
    async with asyncio.timeout(30):
        while True:
            async with http.get("/stats") as response:
                if (await response.json())["waiting"] == 4:
                    break

    aborted = await post(http, "/abort_request", {"rid": "batch"})
    await post(http, "/continue_generation", {})

    assert aborted == {"aborted": 3}
    assert {completion["meta_info"]["finish_reason"]["type"] for completion in await batch} == {"abort"}
    assert (await other_request)["meta_info"]["finish_reason"]["type"] != "abort"


async def test_generate_tiny_top_p_equals_greedy(http: aiohttp.ClientSession) -> None:
    greedy, tiny = [
        await post(http, "/generate", {"input_ids": PROMPT, "sampling_params": {**params, "max_new_tokens": 20}})
        for params in ({"temperature": 0.0}, {"top_p": 1e-46})
    ]

    assert tiny["output_ids"] == greedy["output_ids"]


@pytest.mark.parametrize("resumed", [0, 4])
def test_stop_string_completed_before_minimum_length_is_ignored(model_path: Path, resumed: int) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_path)
    completion = tokenizer.encode("abXYcdefghXYz")
    settings = GenerationConfig(stop=["XY"], min_new_tokens=7 - resumed)
    job = GenerationJob("a", [9, *completion[:resumed]], settings, 0, frozenset(), resumed=resumed)

    for token in completion[resumed:]:
        job.append(token, -1.0, 0)
        if (matched := job.matched_stop(tokenizer)) is not None:
            break
    job.finish({"type": "stop", "matched": matched})

    assert resumed + len(job.output_ids) == len("abXYcdefghXY")
    assert job.to_reply(0, tokenizer, 0, False)["text"] == "abXYcdefgh"[resumed:]


@pytest.mark.slow
@pytest.mark.parametrize("host", ["::", "example.org"])
def test_start_beyond_loopback_without_run_key_is_rejected(
    tmp_path: Path, host: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RL_RUN_KEY", raising=False)
    arguments = ["--model", str(tmp_path), "--port", "0", "--host", host]
    done = subprocess.run([sys.executable, "-c", MAIN, *arguments], capture_output=True, text=True, timeout=120)

    assert done.returncode == 2
    assert "server.host: expected a loopback address" in done.stderr
    assert "RL_RUN_KEY" in done.stderr
