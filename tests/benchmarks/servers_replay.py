"""Server that replays recorded responses of vLLM or SGLang, to measure the CPU time of the client alone.

    python servers_replay.py vllm 8 0.02     # protocol, tokens per message, seconds between two messages

The first output line is its address. Responses have the requested number of tokens, in messages with the format of the
recordings for the protocol tests. All open responses get their next message at the same time, like after one decode
pass. The server computes nothing.
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
EXCHANGES = {"vllm": ("vllm/tokens.json", "length, stream"), "sglang": ("sglang/stream.json", "length")}
STREAM_HEADERS = (
    b"HTTP/1.1 200 OK\r\ndate: Mon, 23 Nov 2026 12:00:00 GMT\r\nserver: uvicorn\r\n"
    b"content-type: text/event-stream; charset=utf-8\r\nx-server-instance: 0123456789abcdef\r\nx-rl-version: 0\r\n"
    b"transfer-encoding: chunked\r\n\r\n"
)
JSON_HEADERS = b"HTTP/1.1 200 OK\r\nx-server-instance: 0123456789abcdef\r\ncontent-type: application/json\r\n"


class RecordedStream:
    """Stream messages in the recorded format.

    Args:
        server: `vllm` or `sglang`.
        interval: tokens per message after the first, which has one token.
    """

    def __init__(self, server: str, interval: int) -> None:
        self.server, self.interval = server, interval
        path, name = EXCHANGES[server]
        exchanges = json.loads((RECORDED / path).read_text())["exchanges"]
        lines = next(each for each in exchanges if each["name"] == name)["response"]["lines"]
        chunks = [json.loads(line.removeprefix("data: ")) for line in lines if "[DONE]" not in line]
        self._middle, self._last = chunks[1], chunks[-1]

    def tokens_of(self, body: dict[str, Any]) -> int:
        """Return the number of tokens that a request asks for."""
        sampling = body["sampling_params"]
        return int(sampling["max_tokens" if self.server == "vllm" else "max_new_tokens"])

    def messages(self, tokens: int) -> Iterator[bytes]:
        """Yield the messages of one response, encoded as HTTP chunks."""
        fill = self._vllm if self.server == "vllm" else self._sglang
        sent = 0
        while sent < tokens:
            new = min(self.interval if sent else 1, tokens - sent)
            sent += new
            chunk = copy.deepcopy(self._last if sent == tokens else self._middle)
            fill(chunk, new, sent, sent == tokens)
            yield _chunk(b"data: " + json.dumps(chunk, separators=(",", ":")).encode() + b"\n\n")
        yield _chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"

    def _vllm(self, chunk: dict[str, Any], new: int, sent: int, last: bool) -> None:
        choice = chunk["choices"][0]
        choice["token_ids"] = [100 + token % 50 for token in range(sent - new, sent)]
        token_entry = choice["logprobs"]["content"][0]
        choice["logprobs"]["content"] = [
            {**token_entry, "token_id": token, "top_logprobs": [{**token_entry["top_logprobs"][0], "token_id": token}]}
            for token in choice["token_ids"]
        ]
        if last:
            choice["weight_versions"] = [{"version": "0", "start": 0, "end": sent}]

    def _sglang(self, chunk: dict[str, Any], new: int, sent: int, last: bool) -> None:
        chunk["output_ids"] = [100 + token % 50 for token in range(sent - new, sent)]
        meta = chunk["meta_info"]
        value = meta["output_token_logprobs"][0][0]
        meta["output_token_logprobs"] = [[value, token, None] for token in chunk["output_ids"]]
        meta["completion_tokens"] = meta["output_token_logprobs_length"] = sent
        if last:
            meta["finish_reason"] = {"type": "length", "length": sent}
            meta["weight_versions"] = [{"version": "0", "start": 0, "end": sent}]


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


class Replay:
    """Server that advances all open responses together."""

    def __init__(self, stream: RecordedStream, seconds: float) -> None:
        self.stream, self.seconds = stream, seconds
        self.messages: dict[int, list[bytes]] = {}
        self.open: dict[asyncio.Transport, Iterator[bytes]] = {}

    def begin(self, transport: asyncio.Transport, tokens: int) -> None:
        """Start the response to a request; its first message follows after the next interval."""
        if tokens not in self.messages:
            self.messages[tokens] = [*self.stream.messages(tokens)]
        transport.write(STREAM_HEADERS)
        self.open[transport] = iter(self.messages[tokens])

    async def run(self) -> None:
        """Send the next message of every open response after each interval."""
        while True:
            await asyncio.sleep(self.seconds)
            for transport, messages in [*self.open.items()]:
                message = next(messages, None)
                if message is None or transport.is_closing():
                    del self.open[transport]
                else:
                    transport.write(message)


class Connection(asyncio.Protocol):
    """Connection of one client, which sends one request at a time."""

    def __init__(self, replay: Replay) -> None:
        self.replay, self.data = replay, b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.data += data
        head, separator, body = self.data.partition(b"\r\n\r\n")
        fields = dict(line.lower().split(b": ", 1) for line in head.split(b"\r\n")[1:] if b": " in line)
        length = int(fields.get(b"content-length", 0))
        if not separator or len(body) < length:
            return
        self.data = body[length:]
        if b"/generate " in head.split(b"\r\n")[0]:
            self.replay.begin(self.transport, self.replay.stream.tokens_of(json.loads(body[:length])))
        else:  # health and stats
            stats = {"version": 0, "open": 0, "paused": False, "running": 0, "waiting": 0}
            body = json.dumps({**stats, "generated_tokens": 0, "busy_seconds": 0}).encode()
            self.transport.write(JSON_HEADERS + b"content-length: %d\r\n\r\n%s" % (len(body), body))


async def main(server: str, interval: int, seconds: float) -> None:
    """Serve until the process is killed."""
    replay = Replay(RecordedStream(server, interval), seconds)
    listening = await asyncio.get_running_loop().create_server(lambda: Connection(replay), "127.0.0.1", 0, backlog=512)
    print(f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}", flush=True)
    await replay.run()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2]), float(sys.argv[3])))
