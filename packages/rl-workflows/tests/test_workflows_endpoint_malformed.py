"""Requests of every route that are wrong in generated ways: each is answered, or refused in a sentence, and none leaves
a traceback or grows the process."""

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
    "/v1/rewards": {"reward": 1.0, "call_id": None, "index": 0, "figures": {"tries": 2}},
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
    """All (container, key) of a JSON value."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [place for key, inner in items for place in ((value, key), *places(inner))]


@st.composite
def bodies(draw: st.DrawFn, path: str) -> bytes:
    """A body that is wrong in up to three places, damaged as bytes, or no JSON at all."""
    body = json.loads(json.dumps(BODIES[path]))
    for _ in range(draw(st.integers(0, 3))):
        if not (there := places(body)):
            break
        container, key = there[draw(st.integers(0, len(there) - 1))]
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
            at = draw(st.integers(0, len(data)))
            return data[:at] + draw(st.binary(min_size=1, max_size=4)) + data[at:]
        case 2:
            return draw(st.binary(max_size=300))
        case 3:
            return draw(st.sampled_from([b"[", b'{"messages":', b'{"a":['])) * draw(st.sampled_from([10, 1500, 20_000]))
        case 4:
            return data.decode().encode(draw(st.sampled_from(["utf-16", "utf-7", "utf-8-sig"])))
    return data


@dataclass(frozen=True)
class Sent:
    head: str
    body: bytes
    whole: bool
    """Whether it says how long it is, and is that long."""
    known: bool
    """Whether it is for a route; what is no HTTP is refused by the parser of HTTP, in its own words."""


@st.composite
def requests(draw: st.DrawFn, key: str) -> Sent:
    rare = st.integers(0, 19).map(lambda number: number == 0)
    path = draw(st.sampled_from(sorted(BODIES)))
    body, method, more = draw(bodies(path)), "POST", ""
    key = draw(KEYS) if draw(rare) else key
    if draw(rare):
        method = draw(st.sampled_from(["GET", "PUT", "DELETE", "HEAD", "OPTIONS", "X"]))
    if draw(rare):
        path = draw(st.sampled_from(["/", "/v1", "/v1/models", "/health", "//v1/messages", "/v1/%ff", "/v1/rewards/"]))
    if draw(rare):
        more = draw(HEADERS) + "\r\n"
    cut = draw(st.integers(1, len(body))) if body and draw(rare) else 0
    head = (
        f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nAuthorization: Bearer {key}\r\n"
        f"{more}Content-Length: {len(body)}\r\n\r\n"
    )
    return Sent(head, body[: len(body) - cut], not cut and not more, path in BODIES and method not in ("X", "HEAD"))


class Endpoint:
    """A process with an endpoint."""

    def __init__(self, folder: Path) -> None:
        self.log, told = folder / "log", folder / "told"
        script = Path(__file__).with_name("endpoint_process.py")
        self.process = fork_script(script, [str(told)], self.log)
        asyncio.run(until(told.exists, 120))
        url, self.key = told.read_text().split("\n")
        self.address = urlsplit(url).hostname, urlsplit(url).port

    @property
    def kib(self) -> int:
        """Resident memory."""
        text = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(re.search(r"VmRSS:\s+(\d+)", text)[1])  # type: ignore[index]

    def ask(self, sent: Sent) -> tuple[int, bytes]:
        """Status and body of the answer; status 0: none."""
        with socket.create_connection(self.address, timeout=60) as connection:
            try:
                connection.sendall(sent.head.encode("latin-1") + sent.body)
                if not sent.whole:  # or it would be waited for; a whole one that ends so has gone away
                    connection.shutdown(socket.SHUT_WR)
                answer = b"".join(iter(lambda: connection.recv(1 << 16), b""))
            except ConnectionError:
                return 0, b""
        found = re.match(rb"HTTP/1\.\d (\d{3})", answer)
        return int(found[1]) if found else 0, answer.partition(b"\r\n\r\n")[2]


@pytest.fixture
def endpoint(tmp_path: Path) -> Iterator[Endpoint]:
    endpoint = Endpoint(tmp_path)
    yield endpoint
    endpoint.process.kill()
    endpoint.process.join()


def _survives(endpoint: Endpoint, requests_: int, record: Any) -> None:
    found: Counter[int] = Counter()

    @settings(max_examples=requests_ // 2, deadline=None, suppress_health_check=list(HealthCheck), database=None)
    @given(sent=requests(endpoint.key))
    def one(sent: Sent) -> None:
        status, answer = endpoint.ask(sent)
        found[status] += 1
        assert status or not sent.whole, sent
        assert status < 500, (sent, answer)
        assert b"Traceback" not in answer
        if sent.whole and sent.known and status >= 400:
            error = json.loads(answer)["error"]
            assert re.search(r"\w+ \w+", error["message"]), (sent, answer)
            assert (json.loads(answer).get("type") == "error") == ("/messages" in sent.head.split("\r\n")[0])

    one()
    first = endpoint.kib
    one()
    log = endpoint.log.read_text()
    record("answers by status", dict(sorted(found.items())))
    record("KiB after each half", [first, endpoint.kib])
    assert "Traceback" not in log, log[:4000]
    assert endpoint.kib <= 1.1 * first
    assert found[200] > requests_ / 50
    assert found[400] > requests_ / 4
    assert endpoint.process.is_alive()


@pytest.mark.slow
def test_2_000_malformed_requests_are_answered_or_refused_in_a_sentence(
    endpoint: Endpoint, record_property: Any
) -> None:
    _survives(endpoint, 2_000, record_property)


@pytest.mark.nightly
@pytest.mark.timeout(1200)
def test_20_000_malformed_requests_are_answered_or_refused_in_a_sentence(
    endpoint: Endpoint, record_property: Any
) -> None:
    _survives(endpoint, 20_000, record_property)
