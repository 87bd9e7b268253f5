"""Fields of requests and replies that clients rely on in detail."""

from __future__ import annotations

import json

import aiohttp
from agent_model import ScriptedEngine, served
from test_inference_endpoint import MESSAGES, Agent, says_it, sentence

from rl_inference.endpoint.wire import token_bytes


async def test_endpoint_empty_stop_string_is_rejected() -> None:
    engine = ScriptedEngine("llama3", says_it)
    async with served(engine) as session, aiohttp.ClientSession() as http:
        for path, more in (("/v1/chat/completions", {"messages": MESSAGES}), ("/v1/completions", {"prompt": "a"})):
            status, text = await Agent(session, http).post(path, {**more, "stop": ""})
            assert (status, "stop" in sentence(text)) == (400, True)
        assert session.failure is None


async def test_logprobs_bytes_of_split_characters_join_to_the_text() -> None:
    engine = ScriptedEngine("llama3", lambda prompt: {"content": "é 🦜 €"})
    async with served(engine) as session, aiohttp.ClientSession() as http:
        text = (await Agent(session, http).ask(logprobs=True))[1]
        entries = json.loads(text)["choices"][0]["logprobs"]["content"]
        joined = bytes(byte for entry in entries for byte in entry["bytes"])
        assert joined.decode() == "é 🦜 €<|eot_id|>"
        assert len(entries) > len("é 🦜 €") + 1


def test_token_bytes_of_a_sentencepiece_byte_is_that_byte() -> None:
    class Tokenizer:
        def convert_ids_to_tokens(self, token: int) -> str:
            return "<0xE2>"

    assert token_bytes(Tokenizer(), 7) == b"\xe2"
