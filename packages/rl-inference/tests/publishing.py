"""Publisher of weights and clients of real servers, for tests of the version that each server serves."""

from __future__ import annotations

import asyncio
import contextlib
import json
import urllib.request
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from probes import probes

from rl_contracts.config import ClientConfig, GenerationConfig
from rl_contracts.data import ModelRequest, ModelResponse, ServeSpec, WeightReceipt, WeightUpdateMeta
from rl_contracts.inference import ServerSource
from rl_contracts.testing import put_weights
from rl_contracts.testing.waiting import until
from rl_contracts.weights import verify_receipt, write_committed
from rl_inference import EmbeddedEngine
from rl_inference.testing import ServerProcess, reference_logprobs, reference_model

PROMPT = [5, 17, 40, 33, 21, 90]
TOKENS = 480
CORRUPTING_SERVER = """
import sys
from rl_inference.embedded_server.weights import ServedWeights
commit = ServedWeights.commit
def corrupt(self, version):
    commit(self, version)
    self._live["model.norm.weight"].data[3] += 1.0
ServedWeights.commit = corrupt
from rl_inference.embedded_server.__main__ import main
sys.exit(main(sys.argv[1:]))
"""
"""Program of a server that changes a tensor at each commit, so that it does not serve the weights that it received."""


@dataclass
class Trainer:
    """Publisher of weights. Each version is the initial weights times a different factor."""

    model: Any
    directory: Path
    version: int = 0
    sent: dict[int, WeightReceipt] = field(default_factory=dict)
    """Receipts of all versions so far."""

    def put(self, version: int) -> WeightUpdateMeta:
        factor = 1 + version / 500
        tensors = [(name, p.detach() * factor) for name, p in self.model.named_parameters()]
        meta, self.sent[version] = put_weights(self.directory, version, tensors)
        return meta

    async def stage(self, engine: EmbeddedEngine) -> WeightUpdateMeta:
        meta = self.put(self.version + 1)
        for receipt in await engine.stage_weights(meta):
            verify_receipt(self.sent[meta.version], receipt, "shm")
        return meta

    async def commit(self, engine: EmbeddedEngine, meta: WeightUpdateMeta, interrupt: str = "keep") -> None:
        await engine.commit_weights(meta.version, interrupt)
        self.version = meta.version
        write_committed(self.directory, meta, self.sent[meta.version])

    async def publish(self, engine: EmbeddedEngine, interrupt: str = "keep") -> int:
        await self.commit(engine, await self.stage(engine), interrupt)
        return self.version

    def check(self, completion: ModelResponse) -> None:
        """Assert that the log-probs of a completion with one version are those of that version's weights."""
        (version,) = set(completion.versions)
        model = reference_model(Path(self.model.name_or_path))
        for parameter in model.parameters():
            parameter.data *= 1 + version / 500
        expected = reference_logprobs(model, completion.input_ids, completion.output_ids)
        assert completion.logprobs == pytest.approx(expected, abs=1e-4)


@contextlib.asynccontextmanager
async def client[T: EmbeddedEngine](
    servers: list[ServerProcess],
    weights_dir: str = "",
    names: ServerSource | None = None,
    kind: type[T] = EmbeddedEngine,
    update_timeout: float = 300.0,
    rejoin_timeout: float = 60.0,
    progress_timeout: float = 1.5,
    probe_interval: float = 0.1,
    probe_timeout: float = 1.0,
) -> AsyncIterator[T]:
    """Yield a client that notices a lost server within seconds."""
    spec = ServeSpec(weights_dir=weights_dir, update_timeout=update_timeout, rejoin_timeout=rejoin_timeout)
    with probes(probe_interval, probe_timeout):
        engine = kind(spec=spec, client=ClientConfig(progress_timeout=progress_timeout))
        engine.initialize([server.address for server in servers])
        if names is not None:
            assert engine.follow_discovery(names)
        try:
            yield engine
        finally:
            await engine.destroy()


def request(seed: int, tokens: int = TOKENS) -> ModelRequest:
    generation = GenerationConfig(max_new_tokens=tokens, min_new_tokens=tokens, ignore_eos=True)
    return ModelRequest(list(PROMPT), generation, seed=seed)


def served_version(server: ServerProcess) -> int:
    with urllib.request.urlopen(server.address + "/health", timeout=10) as response:
        return int(json.load(response)["version"])


async def until_live(engine: EmbeddedEngine, count: int) -> None:
    await until(lambda: len(engine._router.live) == count)


async def until_running(servers: list[ServerProcess]) -> None:
    """Wait until each server generates at least one completion."""
    for server in servers:
        async with client([server], rejoin_timeout=0) as probe, asyncio.timeout(30):
            while not (await probe.stats())["running"]:  # noqa: ASYNC110 - another process
                await asyncio.sleep(0.001)


async def assert_both_serve(engine: EmbeddedEngine, trainer: Trainer, version: int) -> None:
    """Assert that both servers generate at `version`, with its weights."""
    completions = await asyncio.gather(*(engine.agenerate(request(seed, 12)) for seed in range(6)))
    assert len({completion.server for completion in completions}) == 2
    for completion in completions:
        assert completion.versions == [version] * 12
        trainer.check(completion)
