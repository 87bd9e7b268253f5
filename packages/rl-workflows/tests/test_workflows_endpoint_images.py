"""Images in requests to the endpoint: all APIs, several turns, and malformed requests."""

from __future__ import annotations

import base64
import copy
import json
import random
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from agent_model import ScriptedEngine, served
from image_model import load_processor, noise, vision_engine
from test_workflows_endpoint import Agent, error_message, fixed_message
from test_workflows_endpoint_malformed import Endpoint, RawRequest

from rl_contracts.errors import DataError
from rl_contracts.images import Image
from rl_contracts.testing.image_files import broken_image_files, unusual_image_files
from rl_contracts.testing.vision_families import make_vision_model
from rl_workflows.agents.endpoint import session as session_module

pytestmark = pytest.mark.slow
RED, BLUE = noise(24, 16, 1), noise(24, 16, 2)
CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"


@pytest.fixture(scope="module")
def processor(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return load_processor("qwen2_5_vl", tmp_path_factory.mktemp("model"), tools=True)


def chat_part(url: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url, "detail": "low"}}


def responses_part(url: str) -> dict[str, Any]:
    return {"type": "input_image", "image_url": url, "detail": "low"}


def messages_part(url: str) -> dict[str, Any]:
    kind, _, data = url.removeprefix("data:").partition(";base64,")
    return {"type": "image", "source": {"type": "base64", "media_type": kind, "data": data}}


def text(content: str, kind: str = "text") -> dict[str, Any]:
    return {"type": kind, "text": content}


def bodies(first: str, second: str) -> dict[str, dict[str, Any]]:
    """Return a request of each API whose user message has the image `first`, and whose tool result has `second`."""
    function = {"name": "look", "arguments": "{}"}
    return {
        CHAT: {
            "messages": [
                {"role": "user", "content": [chat_part(first), text("color?")]},
                {"role": "assistant", "tool_calls": [{"id": "a", "type": "function", "function": function}]},
                {"role": "tool", "tool_call_id": "a", "content": [text("it is "), chat_part(second)]},
            ]
        },
        RESPONSES: {
            "input": [
                {"role": "user", "content": [responses_part(first), text("color?", "input_text")]},
                {"type": "function_call", "call_id": "a", **function},
                {
                    "type": "function_call_output",
                    "call_id": "a",
                    "output": [text("it is ", "input_text"), responses_part(second)],
                },
            ]
        },
        MESSAGES: {
            "max_tokens": 9,
            "messages": [
                {"role": "user", "content": [messages_part(first), text("color?")]},
                {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "look", "input": {}}]},
                {
                    "role": "user",
                    "content": [
                        {
                            "type": "tool_result",
                            "tool_use_id": "a",
                            "content": [text("it is "), messages_part(second)],
                        }
                    ],
                },
            ],
        },
    }


async def test_every_api_sends_the_same_prompt_and_images(processor: Any) -> None:
    engine = vision_engine(processor)
    async with served(engine) as session, aiohttp.ClientSession() as http:
        for path, body in bodies(RED.data_url, BLUE.data_url).items():
            status, reply = await Agent(session, http).post(path, body)
            assert status == 200, reply
        assert [request.images for request in engine.requests] == [(RED, BLUE)] * 3
        assert len({tuple(request.input_ids) for request in engine.requests}) == 1
        await session.close()
        assert [trajectory.images for trajectory in session.trajectories(1.0)] == [(RED, BLUE)] * 3


async def test_chat_repeated_images_continue_the_conversation(processor: Any) -> None:
    engine = vision_engine(processor)
    messages: list[Any] = [{"role": "user", "content": [chat_part(RED.data_url), text("color?")]}]
    following = {"role": "user", "content": [text("and "), chat_part(BLUE.data_url)]}
    async with served(engine) as session, aiohttp.ClientSession() as http:
        agent = Agent(session, http)
        for message in (following, {"role": "user", "content": "sure?"}, None):
            status, reply = await agent.chat(messages=messages)
            assert status == 200, reply
            messages += [json.loads(reply)["choices"][0]["message"], message]
        await session.close()
        [trajectory] = session.trajectories(1.0)

    first, second, third = engine.requests
    assert second.input_ids[: len(first.input_ids)] == first.input_ids
    assert third.input_ids[: len(second.input_ids)] == second.input_ids
    assert (first.images, second.images, third.images) == ((RED,), (RED, BLUE), (RED, BLUE))
    assert trajectory.images == (RED, BLUE)
    json.dumps(trajectory.info)


async def test_stored_response_keeps_its_images(processor: Any) -> None:
    engine = vision_engine(processor)
    async with served(engine) as session, aiohttp.ClientSession() as http:
        agent = Agent(session, http)
        _, reply = await agent.post(RESPONSES, bodies(RED.data_url, BLUE.data_url)[RESPONSES])
        body = {"input": "sure?", "previous_response_id": json.loads(reply)["id"]}
        assert (await agent.post(RESPONSES, body))[0] == 200
    assert engine.requests[1].images == (RED, BLUE)


async def test_images_are_decoded_and_rendered_off_the_event_loop(
    processor: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, threads = vision_engine(processor), list[str]()
    read, opened = session_module.with_read_images, Image.open

    def reading(messages: Any) -> Any:
        threads.append(threading.current_thread().name)
        return read(messages)

    def opening(image: Image) -> Any:
        threads.append(threading.current_thread().name)
        return opened(image)

    monkeypatch.setattr(session_module, "with_read_images", reading)
    monkeypatch.setattr(Image, "open", opening)
    async with served(engine) as session, aiohttp.ClientSession() as http:
        await Agent(session, http).post(CHAT, bodies(RED.data_url, BLUE.data_url)[CHAT])

    assert len(threads) == 3
    assert all(name.startswith("rollout-endpoint-prompts") for name in threads)


async def test_images_a_model_or_server_cannot_read_are_rejected(processor: Any) -> None:
    without_images = vision_engine(processor)
    without_images.images = False
    for engine in (ScriptedEngine("llama3", fixed_message), without_images):
        async with served(engine) as session, aiohttp.ClientSession() as http:
            for path, body in bodies(RED.data_url, BLUE.data_url).items():
                status, reply = await Agent(session, http).post(path, body)
                assert (status, "images" in error_message(reply)) == (400, True)
            assert session.failure is None
            assert not engine.requests


async def test_image_urls_and_files_are_rejected_unopened(processor: Any, tmp_path: Path) -> None:
    file = tmp_path / "red.png"
    file.write_bytes(RED.data)
    async with served(vision_engine(processor)) as session, aiohttp.ClientSession() as http:
        for url in (str(file), f"file://{file}", "http://127.0.0.1:9/red.png", "DATA:image/png,x", ""):
            content = [{"type": "image_url", "image_url": {"url": url}}]
            status, reply = await Agent(session, http).chat(messages=[{"role": "user", "content": content}])
            assert (status, "base64" in error_message(reply)) == (400, True)
            body = {"input": [{"role": "user", "content": [responses_part(url)]}]}
            assert (await Agent(session, http).post(RESPONSES, body))[0] == 400


async def test_session_with_sampled_placeholder_fails(processor: Any) -> None:
    engine = vision_engine(processor, lambda prompt: f"{processor.image_token}<|im_end|>")
    async with served(engine) as session, aiohttp.ClientSession() as http:
        status, reply = await Agent(session, http).post(CHAT, bodies(RED.data_url, BLUE.data_url)[CHAT])
        assert (status, "placeholder" in error_message(reply)) == (500, True)
        assert isinstance(session.failure, DataError)


async def test_session_memory_counts_images_once(processor: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    image = noise(100, 100, 5)
    monkeypatch.setattr(session_module, "MAX_MEMORY", int(2.5 * len(image.data)))
    messages: list[Any] = [{"role": "user", "content": [chat_part(image.data_url)]}]
    async with served(vision_engine(processor)) as session, aiohttp.ClientSession() as http:
        agent, statuses = Agent(session, http), []
        for message in ({"role": "user", "content": "sure?"}, messages[0], messages[0], None):
            status, reply = await agent.chat(messages=messages)
            statuses.append(status)
            if status == 200:
                messages = [*messages, json.loads(reply)["choices"][0]["message"], message]
    assert statuses == [200, 200, 200, 429]


class ImageRequestFuzzer:
    """Generator of malformed requests with images to all APIs."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self._broken = [*broken_image_files().values()]
        self._readable = [file for name, file in unusual_image_files().items() if name != "one row"]

    def request(self, key: str) -> tuple[RawRequest, bool]:
        """Return a request, and whether it must be rejected."""
        draw = self.random
        path = draw.choice([CHAT, RESPONSES, MESSAGES])
        first, second = (self._url(draw.choice(self._readable)) for _ in range(2))
        body, is_valid = copy.deepcopy(bodies(first, second)[path]), draw.random() < 0.1
        if not is_valid:
            self._break(path, body)
        data = json.dumps(body).encode()
        head = (
            f"POST {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nAuthorization: Bearer {key}\r\n"
            f"Content-Length: {len(data)}\r\n\r\n"
        )
        return RawRequest(head, data, True, True), not is_valid

    @staticmethod
    def _url(file: bytes) -> str:
        return f"data:image/png;base64,{base64.b64encode(file).decode()}"

    def _break(self, path: str, body: dict[str, Any]) -> None:
        """Break the image or the text of the first message."""
        draw, make = self.random, {CHAT: chat_part, RESPONSES: responses_part, MESSAGES: messages_part}[path]
        content = body["input" if path == RESPONSES else "messages"][0]["content"]
        valid = self._url(self._readable[0])
        if draw.random() < 0.2:  # more placeholders than images
            content[1]["text"] = "<|image_pad|>" * draw.randint(1, 3)
        elif draw.random() < 0.5:
            cut = draw.randrange(len("data:image/png;base64,"), len(valid) - 8) // 4 * 4 + 1
            url = draw.choice([self._url(draw.choice(self._broken)), valid[:cut], valid[:40] + "é", "data:,", "x"])
            content[0] = make(url)
        else:
            key = draw.choice([key for key in content[0] if key not in ("detail", "type")])
            content[0][key] = draw.choice([None, True, 0, 1.5, "", "x", [], [valid], {}, {"url": None}, {"url": {}}])


@pytest.fixture
def endpoint(tmp_path: Path) -> Iterator[Endpoint]:
    endpoint = Endpoint(tmp_path, str(make_vision_model("qwen2_5_vl", tmp_path / "model")))
    yield endpoint
    endpoint.process.kill()
    endpoint.process.join()


@pytest.mark.parametrize("count", [60, pytest.param(200, marks=pytest.mark.nightly)])
def test_malformed_images_neither_end_nor_grow_the_endpoint(
    endpoint: Endpoint, count: int, record_property: Any
) -> None:
    fuzzer, statuses = ImageRequestFuzzer(seed=count), Counter[int]()

    def send_half() -> int:
        for _ in range(count // 2):
            request, is_invalid = fuzzer.request(endpoint.key)
            status, body = endpoint.send(request)
            statuses[status] += 1
            assert status == (400 if is_invalid else 200), (request, body)
            assert len(json.loads(body)["error"]["message"]) > 10 if is_invalid else True
        return endpoint.kib

    first, second = send_half(), send_half()

    log = endpoint.log.read_text()
    record_property("responses by status", dict(statuses))
    record_property("KiB after each half", [first, second])
    assert "Traceback" not in log, log[:4000]
    assert endpoint.process.is_alive()
    assert second <= 1.05 * first
