"""Malformed requests of many kinds: each is rejected with one sentence, and none ends the server."""

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
from server_program import server_with_constants

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
        "images": [],
    },
    "/score": {"input_ids": [5, 6, 7], "temperature": 1.0, "before": False},
    "/abort_request": {"rid": "a", "abort_all": False},
    "/stage_weights": {"meta": META},
    "/commit_weights": {"version": 1, "mode": "keep"},
    "/pause_generation": {"mode": "keep", "lease": 5.0},
    "/continue_generation": {},
    "/shutdown": {},
}
STATUS_ROUTES = ["/health", "/model_info", "/stats", "/weight_receipt"]


@pytest.fixture(scope="module")
def server(model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    scratch = tmp_path_factory.mktemp("server")
    options, command = {"max_sequences": 8, "weights_dir": scratch / "weights"}, server_with_constants(MAX_WAITING=64)
    with ServerProcess(model_path, scratch / "server.log", key=KEY, options=options, command=command) as server:
        yield server


@dataclass
class RawRequest:
    """A request as bytes."""

    head: bytes
    body: bytes
    cut: int = 0
    """Number of bytes at the end of the body that are never sent."""
    chunked: bool = False
    size: bytes = b""
    """Chunk size as sent; empty: the true size."""

    @property
    def wire(self) -> bytes:
        """Bytes sent over the connection."""
        body = self.body[: len(self.body) - self.cut] if self.cut else self.body
        if self.chunked:
            return self.head + b"Transfer-Encoding: chunked\r\n\r\n%s\r\n%s\r\n0\r\n\r\n" % (
                self.size or b"%x" % len(body),
                body,
            )
        return self.head + b"Content-Length: %d\r\n\r\n" % len(self.body) + body


def post(path: str, body: bytes, **changes: Any) -> RawRequest:
    head = (
        f"POST {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
        f"Authorization: Bearer {KEY}\r\nContent-Type: application/json\r\n"
    )
    return RawRequest(head.encode(), body, **changes)


async def send(server: ServerProcess, request: RawRequest) -> tuple[int, bytes]:
    """Return the status and the response; the status is 0 if the connection closed without a response."""
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    try:
        writer.write(request.wire)
        if request.cut:
            writer.write_eof()
        async with asyncio.timeout(60):
            response = await reader.read()
    except ConnectionError:
        return 0, b""
    finally:
        writer.close()
    match = re.match(rb"HTTP/1\.\d (\d{3})", response)
    return int(match[1]) if match else 0, response


def memory(server: ServerProcess) -> int:
    """Return the resident memory of the server in KiB."""
    assert server.process is not None
    text = Path(f"/proc/{server.process.pid}/status").read_text()
    return int(re.search(r"VmRSS:\s+(\d+)", text)[1])  # type: ignore[index]


def assert_healthy(server: ServerProcess) -> None:
    """Assert that the server runs and has logged no traceback."""
    assert server.exit_code is None, server.log.read_text()
    log = server.log.read_text()
    assert "Traceback" not in log, log[log.index("Traceback") - 200 :][:4000]


def with_params(**params: Any) -> bytes:
    return json.dumps({"input_ids": [5, 6], "sampling_params": {"max_new_tokens": 2, **params}}).encode()


def literal_field(name: str, text: str, path: str = "/generate") -> tuple[str, bytes]:
    """Return a body with a field as text that no JSON library would write."""
    if path == "/generate":
        return path, f'{{"input_ids": [5], "sampling_params": {{"{name}": {text}}}}}'.encode()
    return path, f'{{"input_ids": [5, 6], "version": 1, "{name}": {text}}}'.encode()


def stage_body(**changes: Any) -> tuple[str, bytes]:
    return "/stage_weights", json.dumps({"meta": {**META, **changes}}).encode()


def stage_part_body(**changes: Any) -> tuple[str, bytes]:
    return stage_body(parts=[{**META["parts"][0], **changes}])  # type: ignore[index]


DIGITS = "9" * 400
REJECTED: list[tuple[str, bytes]] = [
    literal_field("stop", '["\\ud800"]'),
    literal_field("stop", '"\\udfff"'),
    literal_field("top_k", str(2**63)),
    literal_field("top_k", DIGITS),
    literal_field("temperature", DIGITS),
    literal_field("temperature", "1e-46"),
    literal_field("temperature", "1e-40"),
    literal_field("temperature", "NaN"),
    literal_field("temperature", "Infinity"),
    literal_field("repetition_penalty", DIGITS),
    literal_field("repetition_penalty", "1e-46"),
    literal_field("presence_penalty", DIGITS),
    literal_field("top_p", DIGITS),
    literal_field("sampling_seed", str(2**63)),
    literal_field("max_new_tokens", "9" * 5000),
    literal_field("stop_token_ids", f"[{DIGITS}]"),
    literal_field("temperature", "[" * 20_000),
    literal_field("temperature", DIGITS, "/score"),
    literal_field("temperature", "1e-46", "/score"),
    literal_field("temperature", "NaN", "/score"),
    ("/generate", with_params(min_new_tokens=1, stop_token_ids=list(range(160)))),
    ("/generate", with_params(stop=["x" * 10_000])),
    ("/generate", with_params(n=0)),
    ("/generate", with_params(n=4096)),
    ("/generate", b'{"input_ids": [5], "rid": "\\ud800"}'),
    ("/generate", b'{"input_ids": [[5], 5]}'),
    ("/generate", b'{"input_ids": [5], "images": ["AAAA"]}'),
    ("/generate", b'{"input_ids": [5, [5]]}'),
    *((path, b"[" * 5000) for path in BODIES if path != "/shutdown"),
    *((path, b'{"a":' * 5000) for path in BODIES if path != "/shutdown"),
    *((path, b"\xff\xfe{}") for path in BODIES if path != "/shutdown"),
    literal_field("version", DIGITS, "/commit_weights"),
    ("/commit_weights", b'{"version": -1}'),
    ("/stage_weights", b'{"meta": {"route": "disk", "version": Infinity, "parts": []}}'),
    ("/stage_weights", b'{"meta": {"route": "disk", "version": 1e999, "parts": []}}'),
    stage_body(version=-1),
    stage_body(route="unknown"),
    stage_body(parts=[]),
    stage_body(route="disk"),
    stage_body(route="ipc"),
    stage_body(route="shm", parts=[{**META["parts"][0], "location": "/a\0b"}]),  # type: ignore[index]
    stage_part_body(params=[{"name": "model.norm.weight", "shape": [2**64], "dtype": "float32"}]),
    stage_part_body(params=[{"name": "model.norm.weight", "shape": [32], "dtype": "Tensor"}]),
    stage_part_body(location="tcp://127.0.0.1:99999/x/0?timeout=1&rank=1&world=2"),
    *(
        stage_part_body(location=f"tcp://127.0.0.1:{CLOSED}/x/0?{query}")
        for query in ("timeout=nan", "timeout=1e300", "timeout=-1", "rank=inf", "rank=1&world=1e300", "rank=-1&world=2")
    ),
]
"""Routes and bodies. Most of them caused an unhandled exception or the end of a server in the past."""


async def test_request_with_invalid_values_is_rejected_with_one_sentence(server: ServerProcess) -> None:
    for path, body in REJECTED:
        status, response = await send(server, post(path, body))

        assert status in (400, 409), (path, body[:200], response)
        message = json.loads(response.partition(b"\r\n\r\n")[2])["error"]["message"]
        assert len(message) > 10
        assert "Error(" not in message, message
    assert_healthy(server)


async def test_key_that_is_no_text_returns_401(server: ServerProcess) -> None:
    for path in ("/generate", "/stats"):
        request = post(path, b"{}")
        status, _ = await send(server, RawRequest(request.head.replace(KEY.encode(), b"\xff\xfe\x80"), b"{}"))

        assert status == 401
    assert_healthy(server)


async def test_body_with_invalid_chunk_size_is_rejected(server: ServerProcess) -> None:
    for size in (b"zz", b"-1", b"1", b" "):
        request = post("/generate", with_params(), chunked=True, size=size)
        request.head += b"Connection: close\r\n"

        assert (await send(server, request))[0] == 400
    assert_healthy(server)


async def test_generation_key_on_control_route_returns_403(server: ServerProcess) -> None:
    key = generation_key(KEY).encode()
    for path, body in BODIES.items():
        status, _ = await send(
            server, RawRequest(post(path, b"").head.replace(KEY.encode(), key), json.dumps(body).encode())
        )

        assert status == (200 if path in ("/generate", "/score") else 403), path
    assert_healthy(server)


async def test_post_with_other_content_type_returns_415(server: ServerProcess) -> None:
    """A page of another origin can send these types without a preflight request."""
    request = post("/shutdown", b"{}")
    for kind in (b"text/plain", b"application/x-www-form-urlencoded", b"multipart/form-data"):
        status, _ = await send(server, RawRequest(request.head.replace(b"application/json", kind), b"{}"))

        assert status == 415, kind
    assert_healthy(server)


async def test_body_larger_than_context_is_rejected_without_delay(server: ServerProcess) -> None:
    slowest, done = 0.0, asyncio.Event()

    async def probe_health() -> None:
        nonlocal slowest
        while not done.is_set():
            start = time.monotonic()
            status, _ = await send(server, RawRequest(b"GET /health HTTP/1.1\r\nConnection: close\r\nHost: x\r\n", b""))
            assert status == 200
            slowest = max(slowest, time.monotonic() - start)

    probe = asyncio.create_task(probe_health())
    status, _ = await send(server, post("/generate", b'{"input_ids": [' + b"5," * 2**25 + b"5]}"))
    done.set()
    await probe

    assert status in (0, 413)  # 0: the connection was closed while the client still wrote
    assert slowest < 2
    assert_healthy(server)


BAD_VALUES: list[Any] = [
    None, True, False, 0, -1, 1, 2**31, 2**53 + 1, 2**63, -(2**63) - 1, 2**64, 10**400, 0.0, -0.5, 1e-46, 1e-320, 1e38,
    1e308,    "", "a", "\0", "\U0010ffff", "e\u0301", "nan", "x" * 5000, "../../etc/passwd", "/dev/zero",
    [], [[]], [None], ["a"], [0] * 600, [[1, 2], [3]], [1.5], [True], [-1], [2**70], {}, {"a": 1}, {"": {}},
]  # fmt: skip
BAD_LITERALS = [
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
PATHS = [*STATUS_ROUTES, "/", "//generate", "/generate/", "/%67enerate", "/../stats", "/%ff", f"/x?{'y' * 900}"]


class RequestFuzzer:
    """Generator of random requests with zero to three errors each."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    def request(self) -> RawRequest:
        draw = self.random
        path = draw.choice(list(BODIES))
        value = json.loads(json.dumps(BODIES[path]))
        for _ in range(draw.randint(0, 3)):
            self._change_value(value)
        body = json.dumps(value).encode()
        if draw.random() < 0.2:
            body = re.sub(rb'(?<=: )([\d.]+|"a")(?=[,}])', lambda m: self._bad_literal(m[0]), body, count=0)
        if draw.random() < 0.2:
            body = self._corrupt_body(body)
        return self._raw_request(path, body)

    def _bad_literal(self, literal: bytes) -> bytes:
        return self.random.choice(BAD_LITERALS).encode() if self.random.random() < 0.3 else literal

    def _change_value(self, value: Any) -> None:
        """Change one leaf or key at a random place."""
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
                value[key] = copy.deepcopy(draw.choice(BAD_VALUES))
            elif action < 0.85:
                del value[key]
            elif isinstance(value, dict):
                value[draw.choice(["x", "", "input_id", "max_tokens", "\0", "é"])] = copy.deepcopy(
                    draw.choice(BAD_VALUES)
                )
            return

    def _corrupt_body(self, body: bytes) -> bytes:
        draw = self.random
        kind = draw.randrange(7)
        if kind == 0:
            return body[: draw.randrange(len(body) + 1)]
        if kind == 1:
            return bytes(draw.randrange(256) for _ in range(draw.randrange(300)))
        if kind == 2:
            position = draw.randrange(len(body) + 1)
            return body[:position] + bytes([draw.randrange(256)]) + body[position:]
        if kind == 3:
            return body.decode().encode(draw.choice(["utf-16", "utf-32", "utf-7", "utf-8-sig"]))
        if kind == 4:
            return draw.choice([b"[", b'{"a":', b'{"input_ids":[']) * draw.choice([10, 1500, 20_000])
        if kind == 5:
            return b"\x1f\x8b\x08\0\0\0\0\0" + body
        return body[:-1] + b"," + body[1:]

    def _raw_request(self, path: str, body: bytes) -> RawRequest:
        draw = self.random
        method, key, content_type = "POST", KEY, "application/json"
        extra_header = ""
        if path == "/shutdown" or draw.random() < 0.1:  # the correct key would shut the server down
            key = draw.choice(["", "another", "\xff\x80", KEY[:-1], KEY + "x", KEY.upper(), "\t", "é" * 300])
        elif draw.random() < 0.1:
            content_type = draw.choice(
                ["text/plain", "", "application/json; charset=utf-16", "application/xml", "/", "\xff"]
            )
        if draw.random() < 0.05:
            method = draw.choice(["GET", "PUT", "DELETE", "HEAD", "OPTIONS", "PATCH", "TRACE", "X"])
        if draw.random() < 0.05:
            path = draw.choice(PATHS)
        if draw.random() < 0.05:
            extra_header = draw.choice(HEADERS)
        head = (
            f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n{extra_header}"
            f"Authorization: Bearer {key}\r\nContent-Type: {content_type}\r\n"
        )
        cut = draw.randrange(1, len(body) + 1) if body and draw.random() < 0.03 else 0
        size = draw.choice([b"zz", b"-1", b"1", b"5;x=y", b" "]) if draw.random() < 0.2 else b""
        return RawRequest(head.encode("latin-1"), body, cut, chunked=draw.random() < 0.1, size=size)


@pytest.mark.nightly
@pytest.mark.timeout(3600)
async def test_random_requests_neither_end_the_server_nor_leak_memory(
    server: ServerProcess, record_property: Any
) -> None:
    count = 20_000
    fuzzer, counts, start = RequestFuzzer(seed=count), Counter[int](), time.monotonic()
    resume = post("/continue_generation", b"{}")

    async def run_one() -> None:
        request = fuzzer.request()
        status, response = await send(server, request)
        counts[status] += 1
        # if the server rejects a request before it has read all of it, a reset may arrive instead of the response
        assert status or request.cut or len(request.wire) > 8190, request
        if status == 503:
            assert b"of this kind are waiting already" in response, response
            assert b"Retry-After" in response
        else:
            assert status < 500, (request, response)
        if b"/pause_generation" in request.head and status == 200:
            assert (await send(server, resume))[0] == 200

    async def run_half() -> int:
        for _ in range(count // 2 // 8):
            await asyncio.gather(*(run_one() for _ in range(8)))
        return memory(server)

    first_kib, second_kib = await run_half(), await run_half()

    assert_healthy(server)
    status, response = await send(server, post("/generate", with_params()))
    assert status == 200, response
    assert second_kib <= 1.05 * first_kib, (first_kib, second_kib)
    assert counts[200] > count / 100
    record_property("requests", sum(counts.values()))
    record_property("responses by status", dict(counts))
    record_property("seconds", round(time.monotonic() - start, 1))
    record_property("KiB after each half", [first_kib, second_kib])
