"""Property tests with malformed requests to every route.

Each request gets a completion or an error message. None causes a traceback or makes the process grow.
"""

from __future__ import annotations

import asyncio
import copy
import json
import re
import socket
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_workflows_endpoint import BODIES as CALLS

from rl_contracts.testing.processes import fork_script
from rl_contracts.testing.waiting import until

MESSAGES = CALLS["/v1/messages"]["messages"]
BODIES: dict[str, dict[str, Any]] = {
    **CALLS,
    "/v1/responses": {
        **CALLS["/v1/responses"],
        "previous_response_id": None,
        "include": ["message.output_text.logprobs"],
        "store": False,
    },
    "/v1/v1/messages": CALLS["/v1/messages"],
    "/v1/messages/count_tokens": {"messages": MESSAGES, "system": [{"type": "text", "text": "be brief"}]},
    "/v1/rewards": {"reward": 1.0, "call_id": None, "index": 0, "metrics": {"tries": 2}},
}
ODD = [
    2**31,
    2**63,
    -(2**63) - 1,
    10**400,
    1e308,
    float("nan"),
    "\ud800",
    "\0",
    "x" * 5000,
    [[[]]] * 50,
    {"": {"": [{}]}},
]
VALUES = st.sampled_from(ODD) | st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner, max_size=3),
    max_leaves=6,
)
KEYS = st.sampled_from(["", "rl-wrong", "é" * 300, "\t", "\xff"])
HEADERS = st.sampled_from(
    [
        "Content-Encoding: gzip",
        "Content-Type: text/plain",
        "Expect: 100-continue",
        "Expect: x",
        "Upgrade: websocket",
        f"X: {'y' * 9000}",
        "Cookie: \xff=\xfe",
        "Transfer-Encoding: chunked",
        "Content-Length: -1",
    ]
)


def places(value: Any) -> list[tuple[Any, Any]]:
    """Return all pairs (container, key) of a JSON value."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [place for key, inner in items for place in ((value, key), *places(inner))]


@st.composite
def bodies(draw: st.DrawFn, path: str) -> bytes:
    """Generate a body with up to three wrong values, damaged bytes, or no JSON at all."""
    body = json.loads(json.dumps(BODIES[path]))
    for _ in range(draw(st.integers(0, 3))):
        if not (locations := places(body)):
            break
        container, key = locations[draw(st.integers(0, len(locations) - 1))]
        match draw(st.integers(0, 4)):
            case 0:
                del container[key]
            case 1 if isinstance(container, dict):
                name = draw(st.sampled_from(["content", "type", "role", "id", "x"]) | st.text(max_size=9))
                container[name] = copy.deepcopy(draw(VALUES))
            case 2:
                container[key] = [container[key]] * 3
            case _:
                container[key] = copy.deepcopy(draw(VALUES))
    data = json.dumps(body).encode()
    match draw(st.integers(0, 15)):
        case 0:
            return data[: draw(st.integers(0, len(data)))]
        case 1:
            offset = draw(st.integers(0, len(data)))
            return data[:offset] + draw(st.binary(min_size=1, max_size=4)) + data[offset:]
        case 2:
            return draw(st.binary(max_size=300))
        case 3:
            return draw(st.sampled_from([b"[", b'{"messages":', b'{"a":['])) * draw(st.sampled_from([10, 1500, 20_000]))
        case 4:
            return data.decode().encode(draw(st.sampled_from(["utf-16", "utf-7", "utf-8-sig"])))
    return data


@dataclass(frozen=True)
class RawRequest:
    """Head and body of an HTTP request as sent."""

    head: str
    body: bytes
    is_complete: bool
    """True if the body has the length that the head declares."""
    has_route: bool
    """True if the request reaches a route. Otherwise the HTTP parser may reject it with its own message."""


@st.composite
def requests(draw: st.DrawFn, key: str) -> RawRequest:
    """Generate a request that is usually valid HTTP, with a body from `bodies`."""
    rare = st.integers(0, 19).map(lambda number: number == 0)
    path = draw(st.sampled_from(sorted(BODIES)))
    body, method, extra_header = draw(bodies(path)), "POST", ""
    key = draw(KEYS) if draw(rare) else key
    if draw(rare):
        method = draw(st.sampled_from(["GET", "PUT", "DELETE", "HEAD", "OPTIONS", "X"]))
    if draw(rare):
        path = draw(st.sampled_from(["/", "/v1", "/v1/models", "/health", "//v1/messages", "/v1/%ff", "/v1/rewards/"]))
    if draw(rare):
        extra_header = draw(HEADERS) + "\r\n"
    cut = draw(st.integers(1, len(body))) if body and draw(rare) else 0
    head = (
        f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nAuthorization: Bearer {key}\r\n"
        f"{extra_header}Content-Length: {len(body)}\r\n\r\n"
    )
    return RawRequest(
        head, body[: len(body) - cut], not cut and not extra_header, path in BODIES and method not in ("X", "HEAD")
    )


class Endpoint:
    """Separate process with an endpoint. `options` are further arguments of `endpoint_process.py`."""

    def __init__(self, folder: Path, *options: str) -> None:
        self.log, connection_file = folder / "log", folder / "connection"
        script = Path(__file__).with_name("endpoint_process.py")
        self.process = fork_script(script, [str(connection_file), *options], self.log)
        asyncio.run(until(connection_file.exists, 120))
        url, self.key = connection_file.read_text().split("\n")
        self.address = urlsplit(url).hostname, urlsplit(url).port

    @property
    def kib(self) -> int:
        """Resident memory of the process in KiB."""
        text = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(re.search(r"VmRSS:\s+(\d+)", text)[1])  # type: ignore[index]

    def send(self, request: RawRequest) -> tuple[int, bytes]:
        """Return the status and the body of the response; status 0 if there is none."""
        with socket.create_connection(self.address, timeout=60) as connection:
            try:
                connection.sendall(request.head.encode("latin-1") + request.body)
                if not request.is_complete:
                    # else the server waits for the rest; after a complete request it would count as a disconnect
                    connection.shutdown(socket.SHUT_WR)
                response = b"".join(iter(lambda: connection.recv(1 << 16), b""))
            except ConnectionError:
                return 0, b""
        status = re.match(rb"HTTP/1\.\d (\d{3})", response)
        return int(status[1]) if status else 0, response.partition(b"\r\n\r\n")[2]


@pytest.fixture
def endpoint(tmp_path: Path) -> Iterator[Endpoint]:
    endpoint = Endpoint(tmp_path)
    yield endpoint
    endpoint.process.kill()
    endpoint.process.join()


@pytest.mark.slow
def test_2_000_malformed_requests_get_completion_or_error(endpoint: Endpoint, record_property: Any) -> None:
    number, statuses = 2_000, Counter[int]()

    @settings(max_examples=number // 2, deadline=None, suppress_health_check=list(HealthCheck), database=None)
    @given(request=requests(endpoint.key))
    def send_and_check(request: RawRequest) -> None:
        status, body = endpoint.send(request)
        statuses[status] += 1
        assert status or not request.is_complete, request
        assert status < 500, (request, body)
        assert b"Traceback" not in body
        if request.is_complete and request.has_route and status >= 400:
            error = json.loads(body)["error"]
            assert re.search(r"\w+ \w+", error["message"]), (request, body)
            assert (json.loads(body).get("type") == "error") == ("/messages" in request.head.split("\r\n")[0])

    send_and_check()
    first = endpoint.kib
    send_and_check()
    log = endpoint.log.read_text()
    record_property("responses by status", dict(sorted(statuses.items())))
    record_property("KiB after each half", [first, endpoint.kib])
    assert "Traceback" not in log, log[:4000]
    assert endpoint.kib <= 1.1 * first
    assert statuses[200] > number / 50
    assert statuses[400] > number / 4
    assert endpoint.process.is_alive()
