"""Tests of failover: servers that die, freeze, restart or reject a request. Versions must never mix."""

from __future__ import annotations

import asyncio
import contextlib
import json
import urllib.request
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rl_contracts.allocation import ParallelStrategy
from rl_contracts.config import ClientConfig, GenerationConfig
from rl_contracts.data import ModelRequest, ServeSpec, WeightUpdateMeta
from rl_contracts.errors import ConfigError, InferenceError, WeightUpdateError
from rl_contracts.testing import put_weights
from rl_contracts.testing.processes import free_port
from rl_inference import EmbeddedEngine, EmbeddedEngineConfig
from rl_inference.backends.embedded.config import parse
from rl_inference.testing import ServerProcess, reference_logprobs, reference_model

PROMPT = [5, 17, 40, 33, 21, 90]
TOKENS = 480


@pytest.fixture(scope="module")
def servers(model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Start two servers. `ready_servers` restarts those that a test killed, at the same address."""
    scratch = tmp_path_factory.mktemp("servers")
    options = {"max_sequences": 8, "weights_dir": scratch / "weights"}
    pair = [ServerProcess(model_path, scratch / f"server-{i}.log", options=dict(options)) for i in range(2)]
    for server in pair:
        server.start()
    yield pair
    for server in pair:
        server.stop()


@pytest.fixture
async def ready_servers(servers: list[ServerProcess], model_path: Path) -> list[ServerProcess]:
    """Return both servers, running and at the same version, whatever earlier tests did."""
    for server in servers:
        if server.exit_code is not None:
            server.start()
    for server in servers:
        server.wait_ready()
    version = 2 + max(served_version(server) for server in servers)
    async with client([server.address for server in servers]) as engine:
        await engine.stage_weights(staged(servers[0], model_path, version))
        await engine.commit_weights(version)
    return servers


def served_version(server: ServerProcess) -> int:
    with urllib.request.urlopen(server.address + "/health", timeout=10) as response:
        return int(json.load(response)["version"])


@contextlib.asynccontextmanager
async def client(addresses: list[str], **config: Any) -> AsyncIterator[EmbeddedEngine]:
    engine = EmbeddedEngine(client=ClientConfig(**{"progress_timeout": 20, **config}))
    engine.initialize(addresses)
    try:
        yield engine
    finally:
        await engine.destroy()


def request(seed: int, tokens: int = TOKENS) -> ModelRequest:
    generation = GenerationConfig(max_new_tokens=tokens, min_new_tokens=tokens, ignore_eos=True)
    return ModelRequest(list(PROMPT), generation, seed=seed)


async def until_both_running(servers: list[ServerProcess]) -> None:
    """Wait until each server generates at least one completion."""
    for server in servers:
        async with client([server.address]) as probe, asyncio.timeout(30):
            while not (await probe.stats())["running"]:  # noqa: ASYNC110 - another process
                await asyncio.sleep(0.001)


@pytest.mark.guarantee(
    "The unfinished completions of a dead server continue on another server and lose no token.", area="prompts"
)
async def test_agenerate_server_killed_resumes_elsewhere(ready_servers: list[ServerProcess], model_path: Path) -> None:
    model = reference_model(model_path)
    async with client([server.address for server in ready_servers]) as engine:
        alone = [await engine.agenerate(request(seed)) for seed in range(2)]
        completions = [asyncio.create_task(engine.agenerate(request(seed))) for seed in range(6)]
        await until_both_running(ready_servers)

        ready_servers[0].stop()
        finished = await asyncio.gather(*completions)

    assert sum(completion.resubmissions for completion in finished) >= 3
    assert {completion.server for completion in finished if completion.resubmissions} == {ready_servers[1].address}
    assert [completion.output_ids for completion in finished[:2]] == [completion.output_ids for completion in alone]
    for completion in finished:
        assert len(completion.output_ids) == len(completion.versions) == TOKENS
        expected = reference_logprobs(model, PROMPT, completion.output_ids)
        assert completion.logprobs == pytest.approx(expected, abs=1e-5)


async def test_agenerate_no_server_left_raises_with_last_error_of_each() -> None:
    addresses = [f"http://127.0.0.1:{free_port()}" for _ in range(2)]
    async with client(addresses, progress_timeout=1.0) as engine:
        with pytest.raises(InferenceError, match="Connect call failed") as caught:
            await engine.agenerate(request(0))

        assert all(address in str(caught.value) for address in addresses)
        with pytest.raises(InferenceError, match="no live server could score"):
            await engine.score(PROMPT)
        with pytest.raises(WeightUpdateError, match="no live server could stage version 1"):
            await engine.stage_weights(WeightUpdateMeta("disk", 1))


@pytest.mark.slow
async def test_agenerate_server_restarted_with_old_weights_is_evicted(
    ready_servers: list[ServerProcess], model_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    version = served_version(ready_servers[0]) + 1
    meta = staged(ready_servers[0], model_path, version)
    async with client([server.address for server in ready_servers]) as engine:
        await engine.stage_weights(meta)
        await engine.commit_weights(version)
        ready_servers[0].stop()
        ready_servers[0].start().wait_ready()

        completions = await asyncio.gather(*(engine.agenerate(request(seed, 10)) for seed in range(4)))

        assert all(completion.versions == [version] * 10 for completion in completions)
        assert f"server {ready_servers[0].address} is evicted" in caplog.text  # it may already have rejoined


def staged(server: ServerProcess, model_path: Path, version: int) -> WeightUpdateMeta:
    """Publish the initial weights of the served model as `version`."""
    model = reference_model(model_path)
    tensors = [(name, p.detach()) for name, p in model.named_parameters()]
    return put_weights(server.options["weights_dir"], version, tensors)[0]


@pytest.mark.parametrize("addresses", [[], ["localhost:8000"], ["http://"]])
def test_initialize_invalid_addresses_raise(addresses: list[str]) -> None:
    with pytest.raises(ConfigError, match="inference servers"):
        EmbeddedEngine().initialize(addresses)


def test_server_spec_command_contains_all_settings(model_path: Path, tmp_path: Path) -> None:
    run = ServeSpec(str(model_path), ParallelStrategy(data=2), str(tmp_path), version=3, cpus=2, device="cpu")
    config = EmbeddedEngineConfig(max_sequences=5, dtype="bfloat16", cache_gib=0.5)

    spec = EmbeddedEngine.server_spec(config, run)

    assert (spec.count, spec.cpus, spec.gpus) == (2, 2, 0)
    assert spec.needs_port
    assert spec.ready_path == "/health"
    arguments = parse([text.format(host="127.0.0.1", port=1, index=0) for text in spec.command[3:]])
    assert arguments.config == config, "all server settings must be passed"
    assert arguments.spec == replace(run, strategy=ParallelStrategy()), "all settings of the run must be passed"
    assert (arguments.host, arguments.port, arguments.name) == ("127.0.0.1", 1, "rollout-0")
    assert arguments.sharing == 2, "both servers share the machine's memory"
    alone = EmbeddedEngine.server_spec(config, replace(run, gpus=1)).command
    assert alone[alone.index("--sharing") + 1] == "1", "each server has its own GPU"
    with pytest.raises(ConfigError, match="model_path"):
        EmbeddedEngine.server_spec(config, replace(run, model_path=""))


@pytest.mark.parametrize("split", [{"tensor": 2}, {"data": 2, "expert": 2}])
def test_check_split_model_raises_with_supported_allocation(split: dict[str, int]) -> None:
    spec = ServeSpec("m", ParallelStrategy(**split))

    with pytest.raises(ConfigError, match=rf"expected embedded:d{split.get('data', 1)} .*one process per replica"):
        EmbeddedEngineConfig().check(spec)
    with pytest.raises(ConfigError, match="one process per replica"):
        EmbeddedEngine.server_spec(EmbeddedEngineConfig(), spec)
