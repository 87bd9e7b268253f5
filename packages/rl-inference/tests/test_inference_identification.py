"""Engines that reach another program than their servers."""

from __future__ import annotations

import asyncio
import gc
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from scripted_server import Handler, serving

from rl_contracts.config import GenerationConfig
from rl_contracts.data import ModelRequest
from rl_contracts.errors import InferenceError
from rl_inference import EmbeddedEngine, HttpEngine, SGLangEngine, VLLMEngine
from rl_inference.testing import ServerProcess, tiny_model

REQUEST = ModelRequest([5, 6], GenerationConfig(max_new_tokens=2))


def reply(value: Any, **headers: str) -> Handler:
    async def handle(_: web.Request) -> web.Response:
        return web.json_response(value, headers=headers)

    return handle


def models(owner: str) -> Handler:
    return reply({"object": "list", "data": [{"id": "m", "owned_by": owner}]})


async def generate(engine: HttpEngine, address: str) -> None:
    async with engine:
        engine.initialize([address])
        await engine.agenerate(REQUEST)


@pytest.mark.parametrize(
    ("routes", "program"),
    [
        ({"/v1/models": models("vllm"), "/version": reply({"version": "0.32.0"})}, "vLLM 0.32.0"),
        ({"/version": reply({"version": "0.32.0"})}, "vLLM 0.32.0"),
        ({"/v1/models": models("sglang")}, "SGLang"),
        ({"/v1/models": models("x" * 500)}, "x" * 40),
        ({"/v1/models": reply([1]), "/version": reply("2")}, "another HTTP server (Python"),
        ({}, "another HTTP server (Python"),
    ],
)
async def test_first_request_to_another_program_names_it(routes: dict[str, Handler], program: str) -> None:
    async with serving(routes) as address:
        with pytest.raises(InferenceError) as error:
            await generate(EmbeddedEngine(), address)

    message = str(error.value)
    assert f"{address}/generate answered 404" in message
    assert f"the program at this address is {program}" in message
    assert "x" * 41 not in message


@pytest.mark.slow
def test_first_vllm_request_to_an_embedded_server_names_it(tmp_path: Path) -> None:
    with (
        ServerProcess(tiny_model(tmp_path / "model"), tmp_path / "log") as server,
        pytest.raises(InferenceError, match="/inference/v1/generate answered 404") as error,
    ):
        asyncio.run(generate(VLLMEngine(), server.address))

    assert str(error.value).endswith("the program at this address is an embedded server")


@pytest.mark.parametrize("engine_class", [EmbeddedEngine, SGLangEngine, VLLMEngine])
def test_engine_in_async_with_closes_its_session_after_an_error(engine_class: type[HttpEngine]) -> None:
    problems: list[dict[str, Any]] = []

    async def describe(address: str) -> None:
        async with engine_class() as engine:
            engine.initialize([address])
            await engine.describe(address)

    async def fail() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: problems.append(context))
        async with serving({}) as address:
            with pytest.raises(InferenceError, match="404"):
                await describe(address)
        gc.collect()

    asyncio.run(fail())

    assert problems == []
