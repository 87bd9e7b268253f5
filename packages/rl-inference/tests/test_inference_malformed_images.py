"""Malformed requests with images: each gets a completion or one sentence, and none ends or grows the server."""

from __future__ import annotations

import asyncio
import base64
import copy
import json
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from image_prompts import prompt_ids
from PIL import Image as Picture
from test_inference_malformed import BAD_VALUES, KEY, RawRequest, assert_healthy, memory, post, send

from rl_contracts.images import read_image
from rl_contracts.images.features import ImageProcessor, placeholder_id
from rl_contracts.testing.image_files import broken_image_files, unusual_image_files
from rl_contracts.testing.vision_families import make_vision_model
from rl_inference.testing import ServerProcess

pytestmark = pytest.mark.slow
READABLE, BROKEN = unusual_image_files(), broken_image_files()


@pytest.fixture(scope="module", params=["qwen2_vl", pytest.param("idefics3", marks=pytest.mark.nightly)])
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_vision_model(request.param, tmp_path_factory.mktemp(request.param) / "model")


@pytest.fixture(scope="module")
def server(directory: Path) -> Iterator[ServerProcess]:
    with ServerProcess(directory, directory.parent / "log", key=KEY, options={"max_sequences": 8}) as server:
        yield server


class ImageRequestFuzzer:
    """Generator of random bodies of `/generate` with images, most of them wrong in one place."""

    def __init__(self, directory: Path, seed: int) -> None:
        from transformers import AutoConfig

        self.random = random.Random(seed)
        self._directory, self._processor = directory, ImageProcessor(str(directory))
        self._placeholder = placeholder_id(AutoConfig.from_pretrained(directory))
        self._ids: dict[tuple[str, ...], list[int]] = {}

    def body(self) -> tuple[bytes, bool]:
        """Return a body, and whether it must be rejected."""
        draw = self.random
        names = draw.choices([name for name in READABLE if name != "one row"], k=draw.randint(1, 3))
        images = [base64.b64encode(READABLE[name]).decode() for name in names]
        body = {"input_ids": self._prompt(tuple(names)), "images": images, "sampling_params": {"max_new_tokens": 2}}
        if draw.random() < 0.1:
            return json.dumps(body).encode(), False
        self._break(body)
        return json.dumps(body).encode(), True

    def _prompt(self, names: tuple[str, ...]) -> list[int]:
        if names not in self._ids:
            self._ids[names] = prompt_ids(self._directory, [read_image(READABLE[name]) for name in names])
        return [*self._ids[names]]

    def _break(self, body: dict[str, Any]) -> None:
        """Change the images or the placeholders so that the request is invalid."""
        draw, images, ids = self.random, body["images"], body["input_ids"]
        kind = draw.randrange(8)
        if kind == 0:
            body["images"] = copy.deepcopy(draw.choice([v for v in BAD_VALUES if v not in ([], None)]))
        elif kind == 1:
            images[draw.randrange(len(images))] = copy.deepcopy(draw.choice(BAD_VALUES))
        elif kind == 2:
            images[draw.randrange(len(images))] = base64.b64encode(draw.choice([*BROKEN.values()])).decode()
        elif kind == 3:
            text = images[0]
            position = draw.randrange(len(text))
            images[0] = draw.choice([text[:position] + "é", text[: position // 4 * 4 + 1], f"data:image/png,{text}"])
        elif kind == 4:
            body["images"] = draw.choice(
                [images * 65, images[1:], [*images, base64.b64encode(READABLE["plain"]).decode()]]
            )
        elif kind == 5:
            ids.insert(draw.randrange(len(ids) + 1), self._placeholder)
        elif kind == 6:
            body["input_ids"] = draw.choice([[], [ids], [ids, ids], ids * 200, [65], [self._placeholder] * len(ids)])
        else:
            body["resumed_tokens"] = draw.choice([len(ids), len(ids) - 2, 2**40])


@pytest.mark.parametrize("count", [120, pytest.param(2_000, marks=pytest.mark.nightly)])
@pytest.mark.timeout(1800)
async def test_malformed_images_neither_end_nor_grow_the_server(
    server: ServerProcess, directory: Path, count: int, record_property: Any
) -> None:
    fuzzer, counts = ImageRequestFuzzer(directory, seed=count), Counter[int]()

    async def run_one() -> None:
        body, is_invalid = fuzzer.body()
        status, response = await send(server, post("/generate", body))
        counts[status] += 1
        assert status in ((400, 413) if is_invalid else (200,)), (status, body[:2000], response)
        if is_invalid:
            message = json.loads(response.partition(b"\r\n\r\n")[2])["error"]["message"]
            assert len(message) > 10
            assert "Error(" not in message, message

    async def run_half() -> int:
        for _ in range(count // 2 // 4):
            await asyncio.gather(*(run_one() for _ in range(4)))
        return memory(server)

    first_kib, second_kib = await run_half(), await run_half()

    assert_healthy(server)
    assert second_kib <= 1.05 * first_kib, (first_kib, second_kib)
    record_property("responses by status", dict(counts))
    record_property("KiB after each half", [first_kib, second_kib])


async def test_every_unusual_image_is_answered_or_rejected_by_size(server: ServerProcess, directory: Path) -> None:
    for name, file in READABLE.items():
        try:
            ids = prompt_ids(directory, [read_image(file)])
        except Exception:  # the processor of the model rejects the image
            ids = [65]
        body = {"input_ids": ids, "images": [base64.b64encode(file).decode()], "sampling_params": {"max_new_tokens": 2}}

        status, response = await send(server, post("/generate", json.dumps(body).encode()))

        assert status == 200 or (name == "one row" and b"300 x 1" in response), (name, response)
    assert_healthy(server)


async def test_every_broken_image_is_rejected_with_its_number(server: ServerProcess, directory: Path) -> None:
    plain = base64.b64encode(READABLE["plain"]).decode()
    ids = prompt_ids(directory, [read_image(READABLE["plain"])] * 2)
    for name, file in BROKEN.items():
        body = {"input_ids": ids, "images": [plain, base64.b64encode(file).decode()]}

        status, response = await send(server, post("/generate", json.dumps(body).encode()))

        assert (status, b"images[1]: " in response) == (400, True), (name, response)
    assert_healthy(server)


async def test_image_requests_of_lost_clients_leave_nothing_open(server: ServerProcess, directory: Path) -> None:
    picture = Picture.new("RGB", (2000, 2000), "red")
    image = read_image(picture)
    body = {"input_ids": prompt_ids(directory, [image]), "images": [base64.b64encode(image.data).decode()]}
    body["sampling_params"] = {"max_new_tokens": 300, "ignore_eos": True}
    request = post("/generate", json.dumps(body).encode())

    for _ in range(20):
        _, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(request.wire)
        await writer.drain()
        writer.close()

    async def is_idle() -> bool:
        get = RawRequest(b"GET /health HTTP/1.1\r\nConnection: close\r\nHost: x\r\n", b"")
        _, response = await send(server, get)
        return json.loads(response.partition(b"\r\n\r\n")[2])["open"] == 0

    async with asyncio.timeout(60):
        while not await is_idle():  # noqa: ASYNC110 - another process
            await asyncio.sleep(0.01)
    body["sampling_params"] = {"max_new_tokens": 2}
    status, _ = await send(server, post("/generate", json.dumps(body).encode()))
    assert status == 200
    assert_healthy(server)
