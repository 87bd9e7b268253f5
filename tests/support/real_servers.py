"""Interpreters, models and weight updates for tests of real inference servers."""

from __future__ import annotations

import asyncio
import importlib.util
import inspect
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from rl_contracts.config import ClientConfig, GenerationConfig
from rl_contracts.data import ModelRequest, ModelResponse, ParamSpec, ServeSpec, WeightReceipt, WeightUpdateMeta
from rl_contracts.inference import InferenceEngine
from rl_contracts.scheduler import JobSpec
from rl_contracts.testing import make_tiny_model, put_weights
from rl_contracts.testing.waiting import until
from rl_contracts.weights import open_sender, verify_receipt
from rl_contracts.weights.rendezvous import Address
from rl_inference import SGLangEngine, VLLMEngine
from rl_inference.client.engine import HttpEngine

CONTEXT = 1024
KEY = "the run key of this test"
FAULTY = Path(__file__).with_name("faulty_plugins.py")
SHARED = [40 + i % 31 for i in range(400)]
"""Common prefix of all prompts, which fills several blocks of a prefix cache."""


def environment_of(server: str) -> tuple[Path, bool]:
    """Return the environment directory of `infra/servers/build.py` for a server, and whether it is complete."""
    path = Path(__file__).parents[2] / "infra" / "servers" / "build.py"
    spec = importlib.util.spec_from_file_location("servers_build_for_tests", path)
    builder = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = builder
    spec.loader.exec_module(builder)
    directory = builder.default_cache() / builder.read_pins()[server].key
    return directory, (directory / builder.DONE).is_file()


def interpreter_of(server: str) -> Path:
    """Return the Python of the environment of a server, or skip the test if there is none."""
    directory, complete = environment_of(server)
    if not complete:
        pytest.skip(f"no environment with {server} at {directory}: python infra/servers/build.py {server}")
    return directory / "bin" / "python"


@dataclass(frozen=True)
class Kind:
    """Real inference server: vLLM or SGLang."""

    engine: type[HttpEngine]
    """Class of the client."""
    python: Path
    """Interpreter of the environment with the server."""

    def config(self, **settings: Any) -> Any:
        """Return the settings of the server, with a context of `CONTEXT` tokens."""
        return self.engine.config_class(python=str(self.python), context_length=CONTEXT, **settings)

    def job(self, spec: ServeSpec, **settings: Any) -> JobSpec:
        """Return the job that starts a server."""
        return self.engine.server_spec(self.config(**settings), spec)

    def client(self, spec: ServeSpec, addresses: list[str], client: ClientConfig, key: str = KEY) -> HttpEngine:
        """Return a client of running servers."""
        engine = self.engine(self.config(), spec, client)
        engine.initialize(addresses, key)
        return engine


def kind_of(name: str) -> Kind:
    """Return the server named `vllm` or `sglang`, or skip the test without its environment."""
    return Kind({"vllm": VLLMEngine, "sglang": SGLangEngine}[name], interpreter_of(name))


def faulty(job: JobSpec, faults: Path) -> JobSpec:
    """Return the job with `faulty_plugins` as the plugins; the file `faults` lists the active faults."""
    command = tuple(
        str(FAULTY) if text.endswith("sglang_server.py") else text.replace("vllm_extension.", "faulty_plugins.")
        for text in job.command
    )
    path = ":".join(filter(None, [str(FAULTY.parent), job.env.get("PYTHONPATH")]))
    return replace(job, command=command, env={**job.env, "PYTHONPATH": path, "FAULT_FILE": str(faults)})


class Models:
    """Two random models of the same shape: even versions are the first model, odd versions the second."""

    def __init__(self, directory: Path, tied: bool) -> None:
        self.paths = [make_tiny_model(directory / str(seed), seed=seed, tied=tied) for seed in range(2)]
        load = AutoModelForCausalLM.from_pretrained
        self._models = [load(path, dtype=torch.float32).eval() for path in self.paths]

    def tensors(self, version: int) -> list[tuple[str, torch.Tensor]]:
        """Return names and parameters of a version."""
        return [(name, p.detach()) for name, p in self._models[version % 2].named_parameters()]

    @torch.no_grad()
    def logprobs(self, version: int, ids: list[int], temperature: float = 1.0) -> list[float]:
        """Return the log-prob of each token according to transformers; the first is 0."""
        logits = self._models[version % 2](torch.tensor([ids])).logits[0].float() / temperature
        chosen = torch.log_softmax(logits[:-1], -1).gather(1, torch.tensor(ids)[1:, None])[:, 0]
        return [0.0, *chosen.tolist()]

    def difference(self, response: ModelResponse, temperature: float = 1.0) -> float:
        """Return the largest difference from the log-probs of each token's recorded version."""
        ids, begin = response.input_ids + response.output_ids, len(response.input_ids)
        by_version = {v: self.logprobs(v, ids, temperature)[begin:] for v in set(response.versions)}
        pairs = zip(response.versions, response.logprobs, strict=True)
        return max(abs(by_version[version][index] - logprob) for index, (version, logprob) in enumerate(pairs))


def make_request(prompt: list[int], seed: int, tokens: int = 16, **generation: Any) -> ModelRequest:
    """Return a request for exactly `tokens` tokens by default: end tokens are ignored."""
    options = {"max_new_tokens": tokens, "ignore_eos": True, **generation}
    return ModelRequest(prompt, GenerationConfig(**options), seed=seed)


async def publish(
    engine: InferenceEngine, models: Models, weights_dir: Path, route: str, interrupt: str = "keep"
) -> int:
    """Publish the next version to the servers as a trainer does, and return its number."""
    await engine.stats()
    version = engine.version + 1
    if route == "broadcast":
        meta, sent, receipts = await _broadcast(engine, models, version)
    else:
        meta, sent = put_weights(weights_dir, version, models.tensors(version), route)
        receipts = await engine.stage_weights(meta)
    for receipt in receipts:
        verify_receipt(sent, receipt, meta.route)
    await engine.commit_weights(version, interrupt)
    return version


async def _broadcast(
    engine: InferenceEngine, models: Models, version: int
) -> tuple[WeightUpdateMeta, WeightReceipt, list[WeightReceipt]]:
    tensors = models.tensors(version)
    sender = open_sender("broadcast", Address("127.0.0.1", timeout=60.0).location)
    sums: dict[str, int] = {}
    try:
        meta = sender.begin(version, tuple(ParamSpec(name, tuple(t.shape), "float32") for name, t in tensors))
        thread = threading.Thread(target=lambda: sums.update(sender.send(tensors)))
        thread.start()
        receipts = await engine.stage_weights(meta)
        await asyncio.to_thread(thread.join, 60)
    finally:
        sender.close()
    return meta, WeightReceipt("trainer", version, sums), receipts


async def until_stats(engine: InferenceEngine, condition: Callable[[dict[str, float]], bool]) -> None:
    """Wait until the metrics of the servers fulfill the condition."""

    async def holds() -> bool:
        return condition(await engine.stats())

    await until(holds, 120.0, what=lambda: inspect.getsource(condition))


async def aborted_and_resumed(engine: Any) -> ModelResponse:
    """Return a completion of 300 tokens that was aborted and resumed; retry if it ended before the abort."""
    [server] = engine._router.servers
    async with asyncio.timeout(120):
        while True:
            request = make_request(SHARED, 2, tokens=300)
            request.request_id = "aborted"
            task = asyncio.create_task(engine.agenerate(request))
            while not task.done() and (await engine.stats())["running"] < 1:  # noqa: ASYNC110 - no event
                await asyncio.sleep(0.002)
            await engine._transport.call_until_evicted(server, engine._protocol.abort("aborted/"))
            response = await task
            if response.resubmissions:
                return response
