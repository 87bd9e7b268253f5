"""Details of requests and responses that clients rely on."""

from __future__ import annotations

import json

import aiohttp
import openai
import pytest
from agent_model import ScriptedEngine, served
from test_workflows_endpoint import MESSAGES, Agent, fixed_message

from rl_workflows.agents.endpoint.config import EndpointConfig
from rl_workflows.agents.endpoint.request_parsing import token_bytes


async def test_logprobs_bytes_of_split_characters_join_to_the_text() -> None:
    engine = ScriptedEngine("llama3", lambda prompt: {"content": "é 🦜 €"})
    async with served(engine) as session, aiohttp.ClientSession() as http:
        text = (await Agent(session, http).chat(logprobs=True))[1]
        entries = json.loads(text)["choices"][0]["logprobs"]["content"]
        joined = bytes(byte for entry in entries for byte in entry["bytes"])
        assert joined.decode() == "é 🦜 €<|eot_id|>"
        assert len(entries) > len("é 🦜 €") + 1


def test_token_bytes_sentencepiece_byte_token_returns_byte() -> None:
    class Tokenizer:
        def convert_ids_to_tokens(self, token: int) -> str:
            return "<0xE2>"

    assert token_bytes(Tokenizer(), 7) == b"\xe2"


async def test_endpoint_calls_of_agents_bypass_the_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = ScriptedEngine("llama3", fixed_message)
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.setenv(name, "")
    async with (
        served(engine) as session,
        openai.AsyncOpenAI(base_url=session.base_url, api_key=session.api_key, max_retries=0) as agent,
    ):
        await agent.chat.completions.create(model="policy", messages=MESSAGES)  # type: ignore[arg-type]


async def test_endpoint_on_all_ipv6_addresses_is_reachable_at_its_url() -> None:
    engine = ScriptedEngine("llama3", fixed_message)
    async with served(engine, EndpointConfig(host="::")) as session, aiohttp.ClientSession() as http:
        assert session.base_url.startswith("http://[")
        assert (await Agent(session, http).chat())[0] == 200
