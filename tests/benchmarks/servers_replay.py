"""A server that says what a real one said, as fast as it is told to: for the client's processor time alone.

    python servers_replay.py vllm 8 0.02     # protocol, tokens per message, seconds between two messages

Its first line is its address. Answers have as many tokens as are asked for, in messages of the shape that the real
servers' answers have which are recorded for the protocols' tests; all answers get their next message at the same time,
as from one pass of a server. Nothing is computed.
"""

from __future__ import annotations

import asyncio
import copy
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

RECORDED = Path(__file__).parents[2] / "packages" / "rl-inference" / "tests" / "recorded"
SCENES = {"vllm": ("vllm/tokens.json", "length, stream"), "sglang": ("sglang/stream.json", "length")}
HEAD = (
    b"HTTP/1.1 200 OK\r\ndate: Mon, 23 Nov 2026 12:00:00 GMT\r\nserver: uvicorn\r\n"
    b"content-type: text/event-stream; charset=utf-8\r\nx-server-instance: 0123456789abcdef\r\nx-rl-version: 0\r\n"
    b"transfer-encoding: chunked\r\n\r\n"
)
OTHER = b"HTTP/1.1 200 OK\r\nx-server-instance: 0123456789abcdef\r\ncontent-type: application/json\r\n"


class Answers:
    """Messages of the shape that was recorded.

    Args:
        server: `vllm` or `sglang`.
        interval: tokens per message after the first one, which has one.
    """

    def __init__(self, server: str, interval: int) -> None:
        self.server, self.interval = server, interval
        path, name = SCENES[server]
        exchanges = json.loads((RECORDED / path).read_text())["exchanges"]
        lines = next(each for each in exchanges if each["name"] == name)["response"]["lines"]
        said = [json.loads(line.removeprefix("data: ")) for line in lines if "[DONE]" not in line]
        self._between, self._last = said[1], said[-1]

    def tokens_of(self, body: dict[str, Any]) -> int:
        """How many are asked for."""
        sampling = body["sampling_params"]
        return int(sampling["max_tokens" if self.server == "vllm" else "max_new_tokens"])

    def messages(self, tokens: int) -> Iterator[bytes]:
        """Those of one answer, in chunks of HTTP."""
        fill = self._vllm if self.server == "vllm" else self._sglang
        have = 0
        while have < tokens:
            new = min(self.interval if have else 1, tokens - have)
            have += new
            said = copy.deepcopy(self._last if have == tokens else self._between)
            fill(said, new, have, have == tokens)
            yield _chunk(b"data: " + json.dumps(said, separators=(",", ":")).encode() + b"\n\n")
        yield _chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"

    def _vllm(self, said: dict[str, Any], new: int, have: int, last: bool) -> None:
        choice = said["choices"][0]
        choice["token_ids"] = [100 + token % 50 for token in range(have - new, have)]
        one = choice["logprobs"]["content"][0]
        choice["logprobs"]["content"] = [
            {**one, "token_id": token, "top_logprobs": [{**one["top_logprobs"][0], "token_id": token}]}
            for token in choice["token_ids"]
        ]
        if last:
            choice["weight_versions"] = [{"version": "0", "start": 0, "end": have}]

    def _sglang(self, said: dict[str, Any], new: int, have: int, last: bool) -> None:
        said["output_ids"] = [100 + token % 50 for token in range(have - new, have)]
        meta = said["meta_info"]
        value = meta["output_token_logprobs"][0][0]
        meta["output_token_logprobs"] = [[value, token, None] for token in said["output_ids"]]
        meta["completion_tokens"] = meta["output_token_logprobs_length"] = have
        if last:
            meta["finish_reason"] = {"type": "length", "length": have}
            meta["weight_versions"] = [{"version": "0", "start": 0, "end": have}]


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


class Replay:
    """The server: all open answers go on together."""

    def __init__(self, answers: Answers, seconds: float) -> None:
        self.answers, self.seconds = answers, seconds
        self.made: dict[int, list[bytes]] = {}
        self.open: dict[asyncio.Transport, Iterator[bytes]] = {}

    def begin(self, transport: asyncio.Transport, tokens: int) -> None:
        """Answer a request from the next turn on."""
        if tokens not in self.made:
            self.made[tokens] = [*self.answers.messages(tokens)]
        transport.write(HEAD)
        self.open[transport] = iter(self.made[tokens])

    async def run(self) -> None:
        """Send each its next message, again and again."""
        while True:
            await asyncio.sleep(self.seconds)
            for transport, messages in [*self.open.items()]:
                message = next(messages, None)
                if message is None or transport.is_closing():
                    del self.open[transport]
                else:
                    transport.write(message)


class Connection(asyncio.Protocol):
    """One client's; requests one after the other, whole bodies."""

    def __init__(self, replay: Replay) -> None:
        self.replay, self.data = replay, b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.data += data
        head, found, body = self.data.partition(b"\r\n\r\n")
        fields = dict(line.lower().split(b": ", 1) for line in head.split(b"\r\n")[1:] if b": " in line)
        length = int(fields.get(b"content-length", 0))
        if not found or len(body) < length:
            return
        self.data = body[length:]
        if b"/generate " in head.split(b"\r\n")[0]:
            self.replay.begin(self.transport, self.replay.answers.tokens_of(json.loads(body[:length])))
        else:  # how it is, its figures
            figures = {"version": 0, "open": 0, "paused": False, "running": 0, "waiting": 0}
            said = json.dumps({**figures, "generated_tokens": 0, "busy_seconds": 0}).encode()
            self.transport.write(OTHER + b"content-length: %d\r\n\r\n%s" % (len(said), said))


async def main(server: str, interval: int, seconds: float) -> None:
    """Serve until the process is ended."""
    replay = Replay(Answers(server, interval), seconds)
    listening = await asyncio.get_running_loop().create_server(lambda: Connection(replay), "127.0.0.1", 0, backlog=512)
    print(f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}", flush=True)
    await replay.run()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2]), float(sys.argv[3])))
