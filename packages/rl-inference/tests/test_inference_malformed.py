"""Requests that are wrong in every way that we could think of: each is refused in one sentence, none ends a server."""

from __future__ import annotations

import asyncio
import copy
import json
import random
import re
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from rl_contracts.testing.processes import free_port
from rl_inference.backends.embedded.protocol import generation_key
from rl_inference.testing import ServerProcess

KEY = "a key for tests"
CLOSED = free_port()
META = {
    "route": "broadcast",
    "version": 1,
    "parts": [
        {
            "location": f"tcp://127.0.0.1:{CLOSED}/update/0?timeout=0.05&rank=1&world=2",
            "params": [{"name": "model.norm.weight", "shape": [32], "dtype": "float32"}],
        }
    ],
}
PARAMS = {
    "max_new_tokens": 3,
    "min_new_tokens": 1,
    "temperature": 0.7,
    "top_p": 0.9,
    "top_k": 5,
    "min_p": 0.01,
    "presence_penalty": 0.5,
    "frequency_penalty": 0.5,
    "repetition_penalty": 1.1,
    "stop": ["xy"],
    "stop_token_ids": [7],
    "ignore_eos": False,
    "sampling_seed": 1,
    "n": 1,
}
BODIES: dict[str, dict[str, Any]] = {
    "/generate": {
        "input_ids": [5, 6],
        "sampling_params": PARAMS,
        "rid": "a",
        "return_logprob": True,
        "stream": False,
        "resumed_tokens": 1,
    },
    "/score": {"input_ids": [5, 6, 7], "temperature": 1.0, "before": False},
    "/abort_request": {"rid": "a", "abort_all": False},
    "/stage_weights": {"meta": META},
    "/commit_weights": {"version": 1, "mode": "keep"},
    "/pause_generation": {"mode": "keep", "lease": 5.0},
    "/continue_generation": {},
    "/shutdown": {},
}
LOOKS = ["/health", "/model_info", "/stats", "/weight_receipt"]


@pytest.fixture(scope="module")
def server(model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    scratch = tmp_path_factory.mktemp("server")
    options = {"slots": 8, "max_waiting": 64, "weights_dir": scratch / "weights"}
    with ServerProcess(model_path, scratch / "server.log", key=KEY, options=options) as server:
        yield server


@dataclass
class Sent:
    """A request as bytes, and what its answer may be."""

    head: bytes
    body: bytes
    cut: int = 0
    """Bytes of the body that never come."""
    chunked: bool = False
    size: bytes = b""
    """What stands for the size of a chunk; empty: its size."""

    @property
    def wire(self) -> bytes:
        kept = self.body[: len(self.body) - self.cut] if self.cut else self.body
        if self.chunked:
            return self.head + b"Transfer-Encoding: chunked\r\n\r\n%s\r\n%s\r\n0\r\n\r\n" % (
                self.size or b"%x" % len(kept),
                kept,
            )
        return self.head + b"Content-Length: %d\r\n\r\n" % len(self.body) + kept


def post(path: str, body: bytes, **changes: Any) -> Sent:
    head = (
        f"POST {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
        f"Authorization: Bearer {KEY}\r\nContent-Type: application/json\r\n"
    )
    return Sent(head.encode(), body, **changes)


async def ask(server: ServerProcess, request: Sent) -> tuple[int, bytes]:
    """Status and the rest of the answer; status 0: none."""
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    try:
        writer.write(request.wire)
        if request.cut:
            writer.write_eof()
        async with asyncio.timeout(60):
            answer = await reader.read()
    except ConnectionError:
        return 0, b""
    finally:
        writer.close()
    found = re.match(rb"HTTP/1\.\d (\d{3})", answer)
    return int(found[1]) if found else 0, answer


def memory(server: ServerProcess) -> int:
    """Resident KiB of the server."""
    assert server.process is not None
    text = Path(f"/proc/{server.process.pid}/status").read_text()
    return int(re.search(r"VmRSS:\s+(\d+)", text)[1])  # type: ignore[index]


def assert_well(server: ServerProcess) -> None:
    assert server.exit_code is None, server.log.read_text()
    log = server.log.read_text()
    assert "Traceback" not in log, log[log.index("Traceback") - 200 :][:4000]


def with_params(**params: Any) -> bytes:
    return json.dumps({"input_ids": [5, 6], "sampling_params": {"max_new_tokens": 2, **params}}).encode()


def literal(name: str, text: str, path: str = "/generate") -> tuple[str, bytes]:
    """A sampling parameter, or a field, as text that no JSON library would write."""
    if path == "/generate":
        return path, f'{{"input_ids": [5], "sampling_params": {{"{name}": {text}}}}}'.encode()
    return path, f'{{"input_ids": [5, 6], "version": 1, "{name}": {text}}}'.encode()


def staged(**changes: Any) -> tuple[str, bytes]:
    return "/stage_weights", json.dumps({"meta": {**META, **changes}}).encode()


def part(**changes: Any) -> tuple[str, bytes]:
    return staged(parts=[{**META["parts"][0], **changes}])  # type: ignore[index]


DIGITS = "9" * 400
REFUSED: list[tuple[str, bytes]] = [
    literal("stop", '["\\ud800"]'),
    literal("stop", '"\\udfff"'),
    literal("top_k", str(2**63)),
    literal("top_k", DIGITS),
    literal("temperature", DIGITS),
    literal("temperature", "1e-46"),
    literal("temperature", "1e-40"),
    literal("temperature", "NaN"),
    literal("temperature", "Infinity"),
    literal("repetition_penalty", DIGITS),
    literal("repetition_penalty", "1e-46"),
    literal("presence_penalty", DIGITS),
    literal("top_p", DIGITS),
    literal("sampling_seed", str(2**63)),
    literal("max_new_tokens", "9" * 5000),
    literal("stop_token_ids", f"[{DIGITS}]"),
    literal("temperature", "[" * 20_000),
    literal("temperature", DIGITS, "/score"),
    literal("temperature", "1e-46", "/score"),
    literal("temperature", "NaN", "/score"),
    ("/generate", with_params(min_new_tokens=1, stop_token_ids=list(range(160)))),
    ("/generate", with_params(stop=["x" * 10_000])),
    ("/generate", with_params(n=0)),
    ("/generate", with_params(n=4096)),
    ("/generate", b'{"input_ids": [5], "rid": "\\ud800"}'),
    ("/generate", b'{"input_ids": [[5], 5]}'),
    ("/generate", b'{"input_ids": [5, [5]]}'),
    *((path, b"[" * 5000) for path in BODIES if path != "/shutdown"),
    *((path, b'{"a":' * 5000) for path in BODIES if path != "/shutdown"),
    *((path, b"\xff\xfe{}") for path in BODIES if path != "/shutdown"),
    literal("version", DIGITS, "/commit_weights"),
    ("/commit_weights", b'{"version": -1}'),
    ("/stage_weights", b'{"meta": {"route": "disk", "version": Infinity, "parts": []}}'),
    ("/stage_weights", b'{"meta": {"route": "disk", "version": 1e999, "parts": []}}'),
    staged(version=-1),
    staged(route="carrier pigeon"),
    staged(parts=[]),
    staged(route="disk"),
    staged(route="ipc"),
    staged(route="shm", parts=[{**META["parts"][0], "location": "/a\0b"}]),  # type: ignore[index]
    part(params=[{"name": "model.norm.weight", "shape": [2**64], "dtype": "float32"}]),
    part(params=[{"name": "model.norm.weight", "shape": [32], "dtype": "Tensor"}]),
    part(location="tcp://127.0.0.1:99999/x/0?timeout=1&rank=1&world=2"),
    *(
        part(location=f"tcp://127.0.0.1:{CLOSED}/x/0?{query}")
        for query in ("timeout=nan", "timeout=1e300", "timeout=-1", "rank=inf", "rank=1&world=1e300", "rank=-1&world=2")
    ),
]
"""Route and body; each was an unhandled exception or the end of a server once, or is like one that was."""


async def test_request_of_wrong_values_is_refused_with_one_sentence_and_ends_nothing(server: ServerProcess) -> None:
    for path, body in REFUSED:
        status, answer = await ask(server, post(path, body))

        assert status in (400, 409), (path, body[:200], answer)
        message = json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["message"]
        assert len(message) > 10
        assert "Error(" not in message, message
    assert_well(server)


async def test_key_of_bytes_that_are_no_text_answers_401(server: ServerProcess) -> None:
    for path in ("/generate", "/stats"):
        request = post(path, b"{}")
        status, _ = await ask(server, Sent(request.head.replace(KEY.encode(), b"\xff\xfe\x80"), b"{}"))

        assert status == 401
    assert_well(server)


async def test_body_of_chunks_that_are_none_is_refused(server: ServerProcess) -> None:
    for size in (b"zz", b"-1", b"1", b" "):
        request = post("/generate", with_params(), chunked=True, size=size)
        request.head += b"Connection: close\r\n"

        assert (await ask(server, request))[0] == 400
    assert_well(server)


async def test_key_of_generation_opens_no_control(server: ServerProcess) -> None:
    key = generation_key(KEY).encode()
    for path, body in BODIES.items():
        status, _ = await ask(server, Sent(post(path, b"").head.replace(KEY.encode(), key), json.dumps(body).encode()))

        assert status == (200 if path in ("/generate", "/score") else 403), path
    assert_well(server)


@pytest.mark.parametrize("kind", [b"text/plain", b"application/x-www-form-urlencoded", b"multipart/form-data"])
async def test_post_of_another_kind_than_json_answers_415(server: ServerProcess, kind: bytes) -> None:
    """A page of another origin can send these without being asked first."""
    request = post("/shutdown", b"{}")

    status, _ = await ask(server, Sent(request.head.replace(b"application/json", kind), b"{}"))

    assert status == 415
    assert_well(server)


async def test_body_larger_than_the_context_can_take_is_refused_and_nobody_waits(server: ServerProcess) -> None:
    slowest, done = 0.0, asyncio.Event()

    async def look() -> None:
        nonlocal slowest
        while not done.is_set():
            begin = time.monotonic()
            status, _ = await ask(server, Sent(b"GET /health HTTP/1.1\r\nConnection: close\r\nHost: x\r\n", b""))
            assert status == 200
            slowest = max(slowest, time.monotonic() - begin)

    looking = asyncio.create_task(look())
    status, _ = await ask(server, post("/generate", b'{"input_ids": [' + b"5," * 2**25 + b"5]}"))
    done.set()
    await looking

    assert status in (0, 413)  # 0: the connection was closed while the client still wrote
    assert slowest < 2
    assert_well(server)


NASTY: list[Any] = [
    None, True, False, 0, -1, 1, 2**31, 2**53 + 1, 2**63, -(2**63) - 1, 2**64, 10**400, 0.0, -0.5, 1e-46, 1e-320, 1e38,
    1e308,    "", "a", "\0", "\U0010ffff", "e\u0301", "nan", "x" * 5000, "../../etc/passwd", "/dev/zero",
    [], [[]], [None], ["a"], [0] * 600, [[1, 2], [3]], [1.5], [True], [-1], [2**70], {}, {"a": 1}, {"": {}},
]  # fmt: skip
RAW = [
    "NaN",
    "Infinity",
    "-Infinity",
    "1e999",
    "-1e999",
    '"\\ud800"',
    "9" * 400,
    "9" * 5000,
    "01",
    "'a'",
    "1.",
    "[" * 3000,
]


HEADERS = [
    "Content-Encoding: gzip\r\n",
    "Content-Encoding: br\r\n",
    "Expect: 100-continue\r\n",
    "Expect: x\r\n",
    "Upgrade: websocket\r\n",
    f"X: {'y' * 9000}\r\n",
    "Cookie: \xff=\xfe\r\n",
    "Range: bytes=0-1\r\n",
]
PATHS = [*LOOKS, "/", "//generate", "/generate/", "/%67enerate", "/../stats", "/%ff", f"/x?{'y' * 900}"]


class Maker:
    """Random requests, each wrong in one to three ways, and some in none."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    def request(self) -> Sent:
        draw = self.random
        path = draw.choice(list(BODIES))
        value = json.loads(json.dumps(BODIES[path]))
        for _ in range(draw.randint(0, 3)):
            self._spoil(value)
        body = json.dumps(value).encode()
        if draw.random() < 0.2:
            body = re.sub(rb'(?<=: )([\d.]+|"a")(?=[,}])', lambda m: self._raw(m[0]), body, count=0)
        if draw.random() < 0.2:
            body = self._damage(body)
        return self._sent(path, body)

    def _raw(self, found: bytes) -> bytes:
        return self.random.choice(RAW).encode() if self.random.random() < 0.3 else found

    def _spoil(self, value: Any) -> None:
        """Change one leaf, or one key, somewhere."""
        draw = self.random
        while isinstance(value, (dict, list)) and value:
            keys = list(value) if isinstance(value, dict) else range(len(value))
            key = draw.choice(list(keys))
            inner = value[key]
            if isinstance(inner, (dict, list)) and inner and draw.random() < 0.7:
                value = inner
                continue
            action = draw.random()
            if action < 0.7:
                value[key] = copy.deepcopy(draw.choice(NASTY))
            elif action < 0.85:
                del value[key]
            elif isinstance(value, dict):
                value[draw.choice(["x", "", "input_id", "max_tokens", "\0", "é"])] = copy.deepcopy(draw.choice(NASTY))
            return

    def _damage(self, body: bytes) -> bytes:
        draw = self.random
        kind = draw.randrange(7)
        if kind == 0:
            return body[: draw.randrange(len(body) + 1)]
        if kind == 1:
            return bytes(draw.randrange(256) for _ in range(draw.randrange(300)))
        if kind == 2:
            place = draw.randrange(len(body) + 1)
            return body[:place] + bytes([draw.randrange(256)]) + body[place:]
        if kind == 3:
            return body.decode().encode(draw.choice(["utf-16", "utf-32", "utf-7", "utf-8-sig"]))
        if kind == 4:
            return draw.choice([b"[", b'{"a":', b'{"input_ids":[']) * draw.choice([10, 1500, 20_000])
        if kind == 5:
            return b"\x1f\x8b\x08\0\0\0\0\0" + body
        return body[:-1] + b"," + body[1:]

    def _sent(self, path: str, body: bytes) -> Sent:
        draw = self.random
        method, key, kind = "POST", KEY, "application/json"
        more = ""
        if path == "/shutdown" or draw.random() < 0.1:  # with the right key it would end
            key = draw.choice(["", "another", "\xff\x80", KEY[:-1], KEY + "x", KEY.upper(), "\t", "é" * 300])
        elif draw.random() < 0.1:
            kind = draw.choice(["text/plain", "", "application/json; charset=utf-16", "application/xml", "/", "\xff"])
        if draw.random() < 0.05:
            method = draw.choice(["GET", "PUT", "DELETE", "HEAD", "OPTIONS", "PATCH", "TRACE", "X"])
        if draw.random() < 0.05:
            path = draw.choice(PATHS)
        if draw.random() < 0.05:
            more = draw.choice(HEADERS)
        head = (
            f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n{more}"
            f"Authorization: Bearer {key}\r\nContent-Type: {kind}\r\n"
        )
        cut = draw.randrange(1, len(body) + 1) if body and draw.random() < 0.03 else 0
        size = draw.choice([b"zz", b"-1", b"1", b"5;x=y", b" "]) if draw.random() < 0.2 else b""
        return Sent(head.encode("latin-1"), body, cut, chunked=draw.random() < 0.1, size=size)


@pytest.mark.nightly
@pytest.mark.timeout(3600)
async def test_generated_requests_end_nothing_and_leave_nothing(server: ServerProcess, record_property: Any) -> None:
    count = 20_000
    maker, found, begin = Maker(seed=count), Counter[int](), time.monotonic()
    resume = post("/continue_generation", b"{}")

    async def one() -> None:
        sent = maker.request()
        status, answer = await ask(server, sent)
        found[status] += 1
        # where a request is refused before all of it was read, the connection may be reset before the answer is
        assert status or sent.cut or len(sent.wire) > 8190, sent
        if status == 503:
            assert b"of this kind are waiting already" in answer, answer
            assert b"Retry-After" in answer
        else:
            assert status < 500, (sent, answer)
        if b"/pause_generation" in sent.head and status == 200:
            assert (await ask(server, resume))[0] == 200

    async def half() -> int:
        for _ in range(count // 2 // 8):
            await asyncio.gather(*(one() for _ in range(8)))
        return memory(server)

    first, second = await half(), await half()

    assert_well(server)
    status, answer = await ask(server, post("/generate", with_params()))
    assert status == 200, answer
    assert second <= 1.05 * first, (first, second)
    assert found[200] > count / 100
    record_property("requests", sum(found.values()))
    record_property("answers by status", dict(found))
    record_property("seconds", round(time.monotonic() - begin, 1))
    record_property("KiB after each half", [first, second])
