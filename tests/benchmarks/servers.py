"""Run one workload on the embedded server, vLLM and SGLang, and measure the CPU time of the client.

    uv run python tests/benchmarks/servers.py [--server embedded] [--server vllm] [--server sglang]

The model is a random float32 Qwen3 of 4 layers of width 128 on the CPU. Each server starts as in a run, one after the
other, in the environments that `infra/servers/build.py` creates. A server whose environment is missing is skipped, with
the reason in the results. Prompts are 32 random tokens, all different. Sampling is at temperature 1 without end tokens,
and returns the log-prob and version of every token. Results per server:

- `tokens_per_s`: through the client, with 64 concurrent requests. `uniform` is 64 completions of 64 tokens, `long_tail`
  is 512 completions of log-normal length (mean about 54, at most 256).
- `client_ms`: CPU milliseconds of this process per completion of 64 tokens, for the client and for a minimal aiohttp
  client. The minimal client posts the same requests and reads the same streams without parsing them. They alternate.
- `max_lost_tokens`: tokens in the largest stream message of 64 concurrent completions of 256 tokens. A server that dies
  just before it sends a message loses at most these tokens.
- `publish`: seconds of an update by the publisher of a run over each route, on an idle server and while the server
  generates, and how long the update pauses generation.

`client` measures only the CPU time, with a program that replays recorded responses of vLLM and SGLang. It needs no real
server. `required` is the limit for the default stream interval.

The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "support"))  # for `real_servers`

import aiohttp  # noqa: E402
from imposed_lengths import long_tail, uniform  # noqa: E402
from real_servers import environment_of  # noqa: E402

from rl_contracts.config import ClientConfig, GenerationConfig  # noqa: E402
from rl_contracts.data import FinetuneSpec, ModelRequest, ServeSpec  # noqa: E402
from rl_contracts.runtime.aio import LoopThread  # noqa: E402
from rl_engines_fsdp import FSDPEngine, FSDPEngineConfig  # noqa: E402
from rl_inference import HttpEngine  # noqa: E402
from rl_inference.backends.external_program import STREAM_INTERVAL  # noqa: E402
from rl_inference.testing import JobProcess, tiny_model  # noqa: E402
from rl_trainers import PublishConfig, WeightPublisher  # noqa: E402

VOCABULARY = 1024
PROMPT_TOKENS = 32
CONCURRENCY = 64
"""Concurrent requests per server."""
CONTEXT = 1024
KEY = "the key of this benchmark"
LIMIT_MS = 2.0
"""Limit of the client's CPU time per completion of 64 tokens."""
REPLAY_INTERVAL = 0.02
"""Seconds between two messages of a replayed response."""
SERVERS = ("embedded", "vllm", "sglang")
ROUTES = ("shm", "disk", "broadcast")

Send = Callable[[ModelRequest], Awaitable[Any]]


def make_requests(lengths: list[int], seed: int) -> list[ModelRequest]:
    """Return one request per length, with random prompts without a common prefix."""
    draw = random.Random(seed)
    return [
        ModelRequest(
            [draw.randrange(3, VOCABULARY) for _ in range(PROMPT_TOKENS)],
            GenerationConfig(max_new_tokens=tokens, ignore_eos=True),
            seed=draw.getrandbits(62),
        )
        for tokens in lengths
    ]


class MinimalClient:
    """Client that posts the same requests as the inference engine and reads the streams."""

    def __init__(self, engine: HttpEngine, address: str) -> None:
        self._protocol, self._address = engine._protocol, address
        headers = {"Authorization": f"Bearer {KEY}"}
        self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), headers=headers)
        self._requests = 0

    async def send(self, request: ModelRequest) -> None:
        """Request one completion and discard it."""
        async with self._post(request) as response:
            async for _ in response.content.iter_any():
                pass

    async def largest_message(self, request: ModelRequest) -> int:
        """Return the tokens of the largest stream message of one completion."""
        call, largest = self._call(request), 0
        async with self._session.post(self._address + call.path, json=call.body) as response:
            async for line in response.content:
                chunk = call.parse(line.rstrip(b"\n"))
                largest = max(largest, len(chunk.output_ids) if chunk else 0)
        return largest

    def _call(self, request: ModelRequest) -> Any:
        self._requests += 1
        return self._protocol.generate(
            f"minimal-{self._requests}/", request.input_ids, request.generation, request.seed, 0
        )

    def _post(self, request: ModelRequest) -> Any:
        call = self._call(request)
        return self._session.post(self._address + call.path, json=call.body)

    async def close(self) -> None:
        """Close connections."""
        await self._session.close()


async def cpu_ms(send: Send, seed: int) -> float:
    """Return the CPU milliseconds of this process per completion of 64 tokens, with 64 concurrent requests."""
    requests = make_requests([64] * CONCURRENCY, seed)
    begin = time.process_time()
    await asyncio.gather(*map(send, requests))
    return (time.process_time() - begin) / CONCURRENCY * 1e3


async def compare_clients(engine: HttpEngine, minimal: MinimalClient, rounds: int) -> dict[str, Any]:
    """Measure the CPU time of the client and of the minimal client, in alternating order; return medians."""
    milliseconds: dict[str, list[float]] = {"client": [], "minimal": []}
    sides: list[tuple[str, Send]] = [("client", engine.agenerate), ("minimal", minimal.send)]
    for _, send in sides:
        await cpu_ms(send, seed=0)  # opens the connections
    for index in range(rounds):
        for name, send in sides if index % 2 == 0 else sides[::-1]:
            milliseconds[name].append(await cpu_ms(send, seed=1 + index))
    return {name: round(statistics.median(values), 3) for name, values in milliseconds.items()} | {"required": LIMIT_MS}


# ---- with replayed responses


@contextmanager
def replaying(server: str, interval: int) -> Iterator[str]:
    """Start a program that replays responses and yield its address."""
    command = [sys.executable, str(HERE / "servers_replay.py"), server, str(interval), str(REPLAY_INTERVAL)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield process.stdout.readline().strip()
    finally:
        process.kill()
        process.wait(10)


def measure_client(model: Path, loop: LoopThread, rounds: int) -> dict[str, Any]:
    """Measure the client with replayed responses, per kind of server."""

    async def compare(engine: HttpEngine, address: str) -> dict[str, Any]:
        minimal = MinimalClient(engine, address)
        try:
            return await compare_clients(engine, minimal, rounds)
        finally:
            await minimal.close()
            await engine.destroy()

    result: dict[str, Any] = {}
    for server in ("vllm", "sglang"):
        engine = make_engine(server, model)
        with replaying(server, STREAM_INTERVAL) as address:
            engine.initialize([address], KEY)
            result[server] = {"stream_interval": STREAM_INTERVAL, **loop.run(compare(engine, address), 600)}
        print(f"client with replayed responses of {server:7s} {result[server]}", flush=True)
    return result


# ---- with servers


def make_engine(server: str, model: Path, python: str = "", threads: int = 1) -> HttpEngine:
    """Return the client for a kind of server, with the settings of the server."""
    import rl_inference

    names = {"embedded": "Embedded", "vllm": "VLLM", "sglang": "SGLang"}
    kind = getattr(rl_inference, f"{names[server]}Engine")
    config = kind.config_class(python=python, context_length=CONTEXT, max_sequences=CONCURRENCY)
    spec = ServeSpec(
        model_path=str(model),
        device="cpu",
        weights_dir="/",  # the server reads from disk and from /dev/shm, so it supports all routes
        cpus=threads,
    )
    engine: HttpEngine = kind(config, spec, ClientConfig())
    return engine


@contextmanager
def started(server: str, model: Path, scratch: Path, threads: int) -> Iterator[tuple[HttpEngine, str]]:
    """Start a server as in a run; yield its client and its address.

    Raises:
        FileNotFoundError: the environment is missing.
    """
    python = ""
    if server != "embedded":
        directory, complete = environment_of(server)
        if not complete:
            raise FileNotFoundError(f"no environment with {server} at {directory}; run python infra/servers/build.py")
        python = str(directory / "bin" / "python")
    engine = make_engine(server, model, python, threads)
    job = type(engine).server_spec(engine.server_config, engine.spec)
    job = replace(job, env={**job.env, "OMP_NUM_THREADS": str(threads)})
    with JobProcess(model, scratch / f"{server}.log", key=KEY, job=job) as process:
        engine.initialize([process.address], KEY)
        yield engine, process.address


async def generate(
    engine: HttpEngine, cases: dict[str, list[int]], rounds: int, minimal: MinimalClient
) -> dict[str, Any]:
    """Measure tokens per second of both cases, the client's CPU time, and the largest stream message."""
    metrics: dict[str, Any] = {"tokens_per_s": {}}
    for case, lengths in cases.items():
        rates = []
        for index in range(rounds + 1):
            requests = make_requests(lengths if index else lengths[:CONCURRENCY], seed=index)
            begin = time.perf_counter()
            completions = await asyncio.gather(*map(engine.agenerate, requests))
            rates.append(sum(len(completion.output_ids) for completion in completions) / (time.perf_counter() - begin))
        metrics["tokens_per_s"][case] = round(statistics.median(rates[1:]), 1)  # the first round is a warm-up
        print(f"  {case:10s} {metrics['tokens_per_s'][case]:8.0f} tokens/s (load {os.getloadavg()[0]:.1f})", flush=True)
    metrics["client_ms"] = await compare_clients(engine, minimal, 2 * rounds)
    print(f"  client, CPU ms per completion: {metrics['client_ms']}", flush=True)
    requests = make_requests([max(cases["long_tail"])] * CONCURRENCY, seed=7)
    metrics["max_lost_tokens"] = max(await asyncio.gather(*map(minimal.largest_message, requests)))
    return metrics


class Trainer:
    """Train engine that publishes its weights to one server after the other."""

    def __init__(self, stack: ExitStack, model: Path, loop: LoopThread, scratch: Path) -> None:
        memory = Path("/dev/shm")
        base = memory if memory.is_dir() else scratch
        shared = stack.enter_context(tempfile.TemporaryDirectory(dir=base, prefix="rl-servers-"))
        self.loop, self.folders = loop, {"shm": shared, "disk": str(scratch / "disk"), "broadcast": str(scratch)}
        Path(self.folders["disk"]).mkdir()
        self.engine = FSDPEngine(FSDPEngineConfig())
        self.engine.initialize(FinetuneSpec(str(model), 1, optimizer=None))
        stack.callback(self.engine.destroy)

    @property
    def mebibytes(self) -> float:
        """Size of the published weights."""
        return sum(p.numel() * p.element_size() for _, p in self.engine._model.hugging_face_parameters()) / 2**20

    def measure(self, client: HttpEngine, route: str, rounds: int) -> dict[str, float]:
        """Return median times of updates on an idle server and while the server generates 8 completions."""
        publisher = WeightPublisher(self.engine, client, self.loop, PublishConfig(route=route), self.folders[route])
        try:
            idle = [self._publish(client, publisher) for _ in range(rounds + 1)][1:]
            with self._generating(client):
                busy = [self._publish(client, publisher) for _ in range(rounds)]
        finally:
            publisher.destroy()
        metrics = {
            "seconds": round(statistics.median(seconds for seconds, _ in idle), 4),
            "seconds_while_generating": round(statistics.median(seconds for seconds, _ in busy), 4),
            "paused_s": round(statistics.median(paused for _, paused in busy), 4),
        }
        print(f"  {route:10s} {metrics}", flush=True)
        return metrics

    def _publish(self, client: HttpEngine, publisher: WeightPublisher) -> tuple[float, float]:
        begin, version = time.perf_counter(), client.version + 1
        times = publisher.publish(version)
        seconds = time.perf_counter() - begin
        assert client.version == version
        return seconds, times["time/paused"]

    @contextmanager
    def _generating(self, client: HttpEngine) -> Iterator[None]:
        async def work() -> None:
            while True:
                await asyncio.gather(*map(client.agenerate, make_requests([256] * 8, seed=3)))

        async def wait_running() -> None:
            while (await client.stats())["running"] < 1:  # noqa: ASYNC110 - another process
                await asyncio.sleep(0.01)

        future = self.loop.submit(work())
        self.loop.run(wait_running(), 120)
        try:
            yield
        finally:
            future.cancel()


def measure_server(
    server: str,
    model: Path,
    scratch: Path,
    threads: int,
    cases: dict[str, list[int]],
    rounds: int,
    trainer: Trainer,
) -> dict[str, Any]:
    """Start a server and return all its results, or `skipped` with the reason."""
    print(server, flush=True)
    try:
        with started(server, model, scratch, threads) as (engine, address):
            loop = trainer.loop

            async def work() -> dict[str, Any]:
                minimal = MinimalClient(engine, address)
                try:
                    return await generate(engine, cases, rounds, minimal)
                finally:
                    await minimal.close()

            try:
                metrics = loop.run(work(), 1800)
                metrics["publish"] = {route: trainer.measure(engine, route, rounds) for route in ROUTES}
            finally:
                loop.run(engine.destroy(), 30)
    except FileNotFoundError as missing:
        print(f"  skipped: {missing}", flush=True)
        return {"skipped": str(missing)}
    metrics["stream_interval"] = "every half second" if server == "embedded" else STREAM_INTERVAL
    return metrics


def main() -> None:
    """Measure; print lines per server and the JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--server",
        choices=SERVERS,
        action="append",
        help="only this server; may be repeated; default: all, with --quick only embedded",
    )
    parser.add_argument("--client", action="store_true", help="only the client, with replayed responses")
    parser.add_argument("--rounds", type=int, default=3, help="rounds per measurement")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1, help="threads per server")
    parser.add_argument("--quick", action="store_true", help="small model, few requests; only checks that it runs")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the servers are stopped
    layers, hidden = (1, 64) if options.quick else (4, 128)
    if options.quick:
        cases = {"uniform": [8] * 8, "long_tail": [min(long_tail(i, 0), 16) for i in range(80)]}
    else:
        cases = {"uniform": [uniform(i, 0) for i in range(64)], "long_tail": [long_tail(i, 0) for i in range(512)]}
    rounds = 1 if options.quick else options.rounds
    result: dict[str, Any] = {"benchmark": "servers", "layers": layers, "hidden": hidden, "threads": options.threads}
    with tempfile.TemporaryDirectory() as temporary, ExitStack() as stack:
        scratch = Path(temporary)
        shape = {"num_hidden_layers": layers, "hidden_size": hidden, "head_dim": 32, "intermediate_size": 3 * hidden}
        heads = {"num_attention_heads": hidden // 32, "num_key_value_heads": hidden // 64}
        limits = {"vocab_size": VOCABULARY, "max_position_embeddings": CONTEXT}
        model = tiny_model(scratch / "model", "qwen3", **shape, **heads, **limits)
        loop = stack.enter_context(LoopThread("benchmark"))
        result["client"] = measure_client(model, loop, 1 if options.quick and not options.client else 4 * rounds)
        if not options.client:
            trainer = Trainer(stack, model, loop, scratch)
            result["mebibytes"] = round(trainer.mebibytes, 2)
            for server in options.server or (SERVERS[:1] if options.quick else SERVERS):
                result[server] = measure_server(server, model, scratch, options.threads, cases, rounds, trainer)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
