"""What scores cost generators, and answers scores, at one embedded server over HTTP.

    uv run python tests/benchmarks/embedded_server_scores.py

A random Qwen3 of 4 layers of width 128 in float32, one server with one thread, spoken to by `EmbeddedEngine`. 16
clients score rows of 256 tokens, each the next when it has the last; 1 or 32 clients generate answers of 256 tokens in
the same way. Three windows of time follow each other and are repeated: answers alone, scores alone, both. Tokens are
those that the server counted within a window; a ratio is both over alone, of the windows of one round, and the median
of the rounds is told. What is expected: answers keep at least a third of their tokens per second, scores a quarter.

The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from rl_contracts.config import GenerationConfig
from rl_contracts.data import ModelRequest
from rl_inference import EmbeddedEngine
from rl_inference.testing import ServerProcess, tiny_model

VOCABULARY = 1024
SCORERS = 16
SEQUENCE_TOKENS = 256
PROMPT_TOKENS = 32
REQUIRED = {"generation": 1 / 3, "scoring": 1 / 4}
"""What is kept of the tokens per second alone."""
TIMEOUT = 60.0
"""Seconds within which a window must have its first token."""
COUNTERS = {"generation": "generated_tokens", "scoring": "scored_tokens"}


class Load:
    """Clients of one server.

    Args:
        generators: how many generate.
    """

    def __init__(self, address: str, generators: int) -> None:
        self.address = address
        self.engine = EmbeddedEngine()
        self.engine.initialize([address])
        self.clients = {"generation": (generators, self.generate), "scoring": (SCORERS, self.score)}
        self._draw = random.Random(generators)

    def tokens(self, count: int) -> list[int]:
        """Random ones, which share nothing with others."""
        return [self._draw.randrange(3, VOCABULARY) for _ in range(count)]

    async def generate(self) -> None:
        """One answer."""
        config = GenerationConfig(max_new_tokens=SEQUENCE_TOKENS, ignore_eos=True)
        await self.engine.agenerate(ModelRequest(self.tokens(PROMPT_TOKENS), config, seed=self._draw.getrandbits(62)))

    async def score(self) -> None:
        """One row."""
        await self.engine.score(self.tokens(SEQUENCE_TOKENS))

    async def rates(self, kinds: tuple[str, ...], seconds: float) -> dict[str, float]:
        """Tokens per second of each kind while clients of these kinds work."""
        async with working([self.clients[kind] for kind in kinds]):
            await asyncio.sleep(seconds / 4)  # until all are under way
            before, started = await self.counters(), time.perf_counter()
            await asyncio.sleep(seconds)
            after, spent = await self.counters(), time.perf_counter() - started
            async with asyncio.timeout(TIMEOUT):  # a short window on a busy machine may hold no token
                while any(after[COUNTERS[kind]] == before[COUNTERS[kind]] for kind in kinds):
                    await asyncio.sleep(0.05)
                    after, spent = await self.counters(), time.perf_counter() - started
        return {kind: (after[COUNTERS[kind]] - before[COUNTERS[kind]]) / spent for kind in kinds}

    async def counters(self) -> dict[str, Any]:
        """The server's own."""
        import aiohttp

        async with aiohttp.ClientSession() as http, http.get(self.address + "/stats") as response:
            stats: dict[str, Any] = await response.json()
        return stats


@asynccontextmanager
async def working(clients: list[tuple[int, Callable[[], Awaitable[None]]]]) -> AsyncIterator[None]:
    """Clients that send again and again, until the end of the block."""

    async def repeat(send: Callable[[], Awaitable[None]]) -> None:
        while True:
            await send()

    tasks = [asyncio.create_task(repeat(send)) for count, send in clients for _ in range(count)]
    try:
        yield
        failed = [task for task in tasks if task.done()]
        if failed:
            await failed[0]
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def measure(address: str, generators: int, rounds: int, seconds: float) -> dict[str, Any]:
    """The three windows in turn, `rounds` times."""
    load = Load(address, generators)
    retained: dict[str, list[float]] = {kind: [] for kind in REQUIRED}
    rates: dict[str, list[float]] = {}
    try:
        await load.rates(("generation", "scoring"), seconds / 4)
        for _ in range(rounds):
            alone = await load.rates(("generation",), seconds) | await load.rates(("scoring",), seconds)
            both = await load.rates(("generation", "scoring"), seconds)
            for kind in REQUIRED:
                retained[kind].append(both[kind] / alone[kind])
                rates.setdefault(kind + "_alone", []).append(alone[kind])
                rates.setdefault(kind + "_shared", []).append(both[kind])
            line = "  ".join(f"{name} {values[-1]:7.0f}" for name, values in rates.items())
            print(f"{generators:2d} generators, tokens/s  {line}", flush=True)
    finally:
        await load.engine.destroy()
    return {
        "tokens_per_s": {name: round(statistics.median(values), 1) for name, values in rates.items()},
        "retained": {kind: round(statistics.median(values), 3) for kind, values in retained.items()},
        "required": {kind: round(share, 3) for kind, share in REQUIRED.items()},
    }


def main() -> None:
    """Measure, and print a line per round and the JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="of the three windows, per number of answers")
    parser.add_argument("--seconds", type=float, default=6.0, help="of a window")
    parser.add_argument(
        "--quick", action="store_true", help="short windows, one number of answers; checks only that it runs"
    )
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the server is ended
    rounds, seconds = (1, 0.4) if options.quick else (options.rounds, options.seconds)
    result: dict[str, Any] = {
        "benchmark": "embedded_server_scores",
        "scorers": SCORERS,
        "sequence_tokens": SEQUENCE_TOKENS,
    }
    with tempfile.TemporaryDirectory() as temporary:
        scratch = Path(temporary)
        shape = {"num_hidden_layers": 4, "hidden_size": 128, "head_dim": 32, "intermediate_size": 384}
        heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
        limits = {"vocab_size": VOCABULARY, "max_position_embeddings": 1024}
        model = tiny_model(scratch / "model", "qwen3", **shape, **heads, **limits)
        command = None if options.quick else (sys.executable, "-m", "rl_inference.embedded_server")
        with ServerProcess(model, scratch / "server.log", options={"device": "cpu"}, command=command) as server:
            for generators in (32,) if options.quick else (1, 32):
                result[f"{generators}_generating"] = asyncio.run(measure(server.address, generators, rounds, seconds))
    print(json.dumps(result))


if __name__ == "__main__":
    main()
