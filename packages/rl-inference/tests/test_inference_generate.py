"""Generation through the client and a real server, compared with transformers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import torch
from server_program import server_with_constants

from rl_contracts.config import ClientConfig, GenerationConfig
from rl_contracts.data import ModelRequest, StopReason
from rl_contracts.errors import InferenceError
from rl_contracts.testing.waiting import until
from rl_inference import EmbeddedEngine
from rl_inference.testing import END_ID, ServerProcess, reference_logprobs, reference_model

KEY = "a key for tests"
PROMPT = [5, 17, 40, 33, 21, 90]


@pytest.fixture(scope="module")
def server(model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    log = tmp_path_factory.mktemp("logs") / "server.log"
    options = {"max_sequences": 16}
    command = server_with_constants(MAX_WAITING=32)
    with ServerProcess(model_path, log, key=KEY, options=options, command=command) as server:
        yield server


@pytest.fixture
async def engine(server: ServerProcess) -> AsyncIterator[EmbeddedEngine]:
    engine = EmbeddedEngine(client=ClientConfig(progress_timeout=20))
    engine.initialize([server.address], KEY)
    yield engine
    await engine.destroy()


def session(key: str = KEY) -> aiohttp.ClientSession:
    return aiohttp.ClientSession(
        headers={"Authorization": f"Bearer {key}"} if key else {}, timeout=aiohttp.ClientTimeout(60)
    )


async def post(http: aiohttp.ClientSession, server: ServerProcess, path: str, body: dict[str, Any]) -> Any:
    async with http.post(server.address + path, json=body) as response:
        assert response.status == 200, await response.text()
        return await response.json()


async def get(http: aiohttp.ClientSession, server: ServerProcess, path: str) -> Any:
    async with http.get(server.address + path) as response:
        assert response.status == 200, await response.text()
        return await response.json()


async def until_counter(
    http: aiohttp.ClientSession, server: ServerProcess, name: str, condition: Callable[[float], bool]
) -> None:
    """Wait until a counter of the server fulfills the condition."""

    async def holds() -> bool:
        return condition((await get(http, server, "/stats"))[name])

    await until(holds, what=f"the counter {name}", interval=0.001)


def request(prompt: list[int], seed: int = 1, **settings: Any) -> ModelRequest:
    return ModelRequest(list(prompt), GenerationConfig(**settings), seed=seed)


async def test_generate_greedy_equals_transformers(engine: EmbeddedEngine, model_path: Path) -> None:
    model = reference_model(model_path)

    response = await engine.agenerate(request(PROMPT, temperature=0.0, max_new_tokens=40))

    ids = torch.tensor([PROMPT])
    expected = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=40)
    assert response.output_ids == expected[0, len(PROMPT) :].tolist()


async def test_generate_logprobs_equal_transformers_forward(engine: EmbeddedEngine, model_path: Path) -> None:
    model = reference_model(model_path)
    settings = {"temperature": 0.7, "max_new_tokens": 50, "ignore_eos": True, "min_new_tokens": 50}
    prompts = [[*PROMPT[: 1 + i % 6], 30 + i] for i in range(24)]

    responses = await asyncio.gather(*(engine.agenerate(request(p, i, **settings)) for i, p in enumerate(prompts)))

    for prompt, response in zip(prompts, responses, strict=True):
        expected = reference_logprobs(model, prompt, response.output_ids, 0.7)
        assert response.logprobs == pytest.approx(expected, abs=1e-5)
        assert response.versions == [0] * 50
        assert response.stop_reason is StopReason.LENGTH


@pytest.mark.slow
async def test_generate_minimum_length_blocks_ignored_end_tokens(
    engine: EmbeddedEngine,
) -> None:
    settings = {"max_new_tokens": 200, "min_new_tokens": 200, "ignore_eos": True, "temperature": 2.0}

    responses = await asyncio.gather(*(engine.agenerate(request(PROMPT, i, **settings)) for i in range(16)))

    assert all(len(r.output_ids) == 200 and END_ID not in r.output_ids for r in responses)


async def test_generate_stop_string_across_resumed_tokens_ends_generation(server: ServerProcess) -> None:
    params = {"max_new_tokens": 60, "ignore_eos": True, "min_new_tokens": 0, "sampling_seed": 4}
    async with session() as http:
        body: dict[str, Any] = {"input_ids": PROMPT, "sampling_params": params}
        free = await post(http, server, "/generate", body)
        texts = [chr(32 + token - 3) if 3 <= token < 98 else None for token in free["output_ids"]]
        seam = next(i for i in range(1, 50) if texts[i - 1] and texts[i])
        stop = f"{texts[seam - 1]}{texts[seam]}"
        body = {
            "input_ids": PROMPT + free["output_ids"][:seam],
            "resumed_tokens": seam,
            "sampling_params": {**params, "max_new_tokens": 20, "stop": stop},
        }

        resumed = await post(http, server, "/generate", body)

    assert resumed["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}
    assert resumed["output_ids"] == free["output_ids"][seam : seam + 1]


async def test_generate_batch_replies_in_order_of_prompts(server: ServerProcess) -> None:
    params = {"max_new_tokens": 5, "sampling_seed": 1, "ignore_eos": True}
    async with session() as http:
        prompts = [PROMPT, PROMPT[:3], [9]]
        batched = await post(http, server, "/generate", {"input_ids": prompts, "sampling_params": params})
        single = [
            await post(http, server, "/generate", {"input_ids": prompt, "sampling_params": params})
            for prompt in prompts
        ]

    assert [reply["output_ids"] for reply in batched] == [reply["output_ids"] for reply in single]


async def test_abort_request_returns_tokens_so_far(server: ServerProcess) -> None:
    params = {"max_new_tokens": 400, "min_new_tokens": 400, "ignore_eos": True}
    body = {
        "input_ids": PROMPT,
        "rid": "to-abort",
        "stream": True,
        "return_logprob": True,
        "sampling_params": params,
    }
    async with session() as http:
        await post(http, server, "/pause_generation", {})
        async with http.post(server.address + "/generate", json=body) as response:
            first = await response.content.readline()  # the heartbeat of a waiting job
            stream = asyncio.create_task(response.content.read())
            await post(http, server, "/continue_generation", {})
            await until_counter(http, server, "running", lambda count: count > 0)

            aborted = await post(http, server, "/abort_request", {"rid": "to-abort"})
            chunks = [
                json.loads(line[6:]) for line in (first + await stream).splitlines() if line.startswith(b"data: {")
            ]

    assert aborted == {"aborted": 1}
    assert chunks[-1]["meta_info"]["finish_reason"]["type"] == "abort"
    total = sum(len(chunk["output_ids"]) for chunk in chunks)
    assert 0 < total == chunks[-1]["meta_info"]["completion_tokens"] < 400


@pytest.mark.slow
async def test_generate_with_penalties_interrupted_keeps_tokens_and_logprobs(
    server: ServerProcess, engine: EmbeddedEngine, model_path: Path
) -> None:
    penalties = {"presence_penalty": 1.0, "frequency_penalty": 0.5, "repetition_penalty": 1.2}
    settings = {"max_new_tokens": 300, "min_new_tokens": 300, "ignore_eos": True, **penalties}
    complete = await engine.agenerate(request(PROMPT, 8, **settings))
    async with session() as http:
        task = asyncio.create_task(engine.agenerate(request(PROMPT, 8, **settings)))
        await until_counter(http, server, "running", lambda count: count > 0)
        await post(http, server, "/abort_request", {"abort_all": True})

    resumed = await task
    plain = await engine.agenerate(request(PROMPT, 8, max_new_tokens=300, min_new_tokens=300, ignore_eos=True))

    expected = reference_logprobs(reference_model(model_path), PROMPT, complete.output_ids)
    assert complete.logprobs == pytest.approx(expected, abs=1e-5)
    assert resumed.resubmissions == 1
    assert resumed.output_ids == complete.output_ids
    assert resumed.logprobs == pytest.approx(complete.logprobs, abs=1e-5)
    assert len(set(complete.output_ids[:60])) > len(set(plain.output_ids[:60]))


async def test_client_disconnect_frees_slot(server: ServerProcess, engine: EmbeddedEngine) -> None:
    async with session() as http:
        task = asyncio.create_task(engine.agenerate(request(PROMPT, max_new_tokens=500, ignore_eos=True)))
        await until_counter(http, server, "running", lambda count: count > 0)

        task.cancel()

        await until_counter(http, server, "running", lambda count: count == 0)


INVALID_REQUESTS: list[tuple[dict[str, Any], str]] = [
    (
        {"input_ids": [5], "sampling_params": {"max_tokens": 5}},
        "unknown parameter 'max_tokens'; did you mean",
    ),
    (
        {"input_ids": [5], "sampling_params": {"temperature": -1}},
        "temperature: expected 0 (greedy) or 1e-4 to 1e4",
    ),
    (
        {"input_ids": [5], "sampling_params": {"presence_penalty": 3}},
        "sampling_params.presence_penalty: expected in [-2, 2], found 3",
    ),
    (
        {"input_ids": [5], "sampling_params": {"temperature": "hot"}},
        "sampling_params.temperature: expected float, found str",
    ),
    ({"input_ids": [5, 160]}, "input_ids: expected token ids below the vocabulary size 160, found 160"),
    ({"input_ids": [-1]}, "input_ids[0]: expected int >= 0"),
    ({"input_ids": []}, "input_ids: expected a prompt of at least one token"),
    ({"input_ids": "text"}, "input_ids: expected array, found str"),
    ({"input_ids": [5] * 512}, "input_ids: expected fewer tokens than the context length 512"),
    (
        {"input_ids": [5], "sampling_params": {"stop_token_ids": [999]}},
        "stop_token_ids: expected token ids below the vocabulary size 160, found 999",
    ),
    ({"input_ids": [[5], [6]], "stream": True}, "stream: expected false for several completions"),
]
"""Bodies of requests, and a part of the error message."""


async def test_generate_invalid_request_returns_400_and_names_the_field(server: ServerProcess) -> None:
    async with session() as http:
        for body, message in INVALID_REQUESTS:
            async with http.post(server.address + "/generate", json=body) as response:
                assert response.status == 400, body
                assert message in (await response.json())["error"]["message"]


async def test_post_without_valid_key_returns_401(server: ServerProcess) -> None:
    for key in ("", "another key"):
        async with session(key) as http:
            for path in ("/generate", "/score", "/stage_weights", "/commit_weights", "/shutdown"):
                async with http.post(server.address + path, json={}) as response:
                    assert response.status == 401, path


async def test_agenerate_wrong_key_raises_at_once(server: ServerProcess) -> None:
    engine = EmbeddedEngine()
    engine.initialize([server.address], "another key")

    with pytest.raises(InferenceError, match="no valid key"):
        await engine.agenerate(request(PROMPT))

    await engine.destroy()


async def test_generate_queue_full_returns_503_and_client_retries(
    server: ServerProcess, engine: EmbeddedEngine
) -> None:
    await engine.pause()
    queued = [asyncio.create_task(engine.agenerate(request(PROMPT, i, max_new_tokens=3))) for i in range(48)]
    async with session() as http:
        await until_counter(http, server, "waiting", lambda count: count >= 48)
        async with http.post(server.address + "/generate", json={"input_ids": PROMPT}) as response:
            assert response.status == 503
            assert response.headers["Retry-After"] == "1"
    retried = asyncio.create_task(engine.agenerate(request(PROMPT, max_new_tokens=3)))

    await engine.resume()

    assert all(len(response.output_ids) <= 3 for response in await asyncio.gather(*queued, retried))


async def test_probe_reports_load_from_other_clients(
    server: ServerProcess, engine: EmbeddedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rl_inference.client.health.PROBE_INTERVAL", 0.05)
    probing_engine = EmbeddedEngine()
    probing_engine.initialize([server.address], KEY)
    server_state = probing_engine._router.servers[0]
    server_state.open = 1  # one of the two requests counts as a request of this client
    requests = [request(PROMPT, i, max_new_tokens=400, ignore_eos=True) for i in range(2)]
    tasks = [asyncio.create_task(engine.agenerate(item)) for item in requests]
    try:
        probing_engine._monitor.start()
        async with asyncio.timeout(60):
            while server_state.other_requests != 1:
                assert not all(task.done() for task in tasks)
                await asyncio.sleep(0.01)
            assert server_state.load == 2
            await asyncio.gather(*tasks)
            while server_state.other_requests:  # noqa: ASYNC110 - another process's event
                await asyncio.sleep(0.01)
    finally:
        await asyncio.wait(tasks)
        await probing_engine.destroy()
