"""Throughput of generation and scoring that share one embedded server.

    uv run python tests/benchmarks/embedded_server_scores.py

The model is a random float32 Qwen3 of 4 layers of width 128, on one server with one thread. 16 clients score sequences
of 256 tokens, and 1 or 32 clients generate completions of 256 tokens. Each client sends its next request when it has
the last response. A round consists of three time windows: generation alone, scoring alone, both. Tokens are counted by
the server. `retained` is the rate with both divided by the rate alone, as the median over rounds. Generation must
retain at least a third of its tokens per second, and scoring a quarter.

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
"""Minimum of `retained`, by kind of request."""
TIMEOUT = 60.0
"""Seconds within which a window must process its first token."""
COUNTERS = {"generation": "generated_tokens", "scoring": "scored_tokens"}


class Load:
    """Clients of one server, `generators` of which generate."""

    def __init__(self, address: str, generators: int) -> None:
        self.address = address
        self.engine = EmbeddedEngine()
        self.engine.initialize([address])
        self.clients = {"generation": (generators, self.generate), "scoring": (SCORERS, self.score)}
        self._draw = random.Random(generators)

    def tokens(self, count: int) -> list[int]:
        """Return `count` random token ids."""
        return [self._draw.randrange(3, VOCABULARY) for _ in range(count)]

    async def generate(self) -> None:
        """Generate one completion."""
        config = GenerationConfig(max_new_tokens=SEQUENCE_TOKENS, ignore_eos=True)
        await self.engine.agenerate(ModelRequest(self.tokens(PROMPT_TOKENS), config, seed=self._draw.getrandbits(62)))

    async def score(self) -> None:
        """Score one sequence."""
        await self.engine.score(self.tokens(SEQUENCE_TOKENS))

    async def rates(self, kinds: tuple[str, ...], seconds: float) -> dict[str, float]:
        """Return the tokens per second of these kinds while only their clients run."""
        async with working([self.clients[kind] for kind in kinds]):
            await asyncio.sleep(seconds / 4)  # until all clients have sent a request
            before, started = await self.counters(), time.perf_counter()
            await asyncio.sleep(seconds)
            after, spent = await self.counters(), time.perf_counter() - started
            async with asyncio.timeout(TIMEOUT):  # a short window on a busy machine may hold no token
                while any(after[COUNTERS[kind]] == before[COUNTERS[kind]] for kind in kinds):
                    await asyncio.sleep(0.05)
                    after, spent = await self.counters(), time.perf_counter() - started
        return {kind: (after[COUNTERS[kind]] - before[COUNTERS[kind]]) / spent for kind in kinds}

    async def counters(self) -> dict[str, Any]:
        """Return the counters of the server."""
        import aiohttp

        async with aiohttp.ClientSession() as http, http.get(self.address + "/stats") as response:
            stats: dict[str, Any] = await response.json()
        return stats


@asynccontextmanager
async def working(clients: list[tuple[int, Callable[[], Awaitable[None]]]]) -> AsyncIterator[None]:
    """Run clients that send one request after another until the block ends."""

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
    """Measure `rounds` rounds of the three windows."""
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
            print(f"{generators:2d} generating clients, tokens/s  {line}", flush=True)
    finally:
        await load.engine.destroy()
    return {
        "tokens_per_s": {name: round(statistics.median(values), 1) for name, values in rates.items()},
        "retained": {kind: round(statistics.median(values), 3) for kind, values in retained.items()},
        "required": {kind: round(share, 3) for kind, share in REQUIRED.items()},
    }


def main() -> None:
    """Measure; print a line per round and the JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="rounds per number of generating clients")
    parser.add_argument("--seconds", type=float, default=6.0, help="seconds per window")
    parser.add_argument(
        "--quick", action="store_true", help="short windows, 32 generating clients; only checks that it runs"
    )
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the server is stopped
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
