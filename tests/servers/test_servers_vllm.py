"""The real vLLM on a CPU with the command of a run: conformance suite, and log-probs after weight updates.

The tests need the environment of `infra/servers/build.py vllm`. The server starts in half a minute on an idle machine
and in minutes on a busy one.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from real_servers import CONTEXT, KEY, SHARED, Models, interpreter_of, make_request
from server_suite import TOLERANCE, ServerSuite
from transformers import AutoTokenizer

from rl_apps.cli.driver import main
from rl_contracts.config import ClientConfig
from rl_contracts.data import ModelResponse, ServeSpec
from rl_contracts.errors import InferenceError
from rl_contracts.testing import put_weights
from rl_inference import VLLMEngine, VLLMEngineConfig
from rl_inference.testing import JobProcess

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]

MAX_SEQUENCES = 8
"""Sequences that the server generates at the same time; further requests wait in its queue."""


@pytest.fixture(scope="module", params=["tied", pytest.param("untied", marks=pytest.mark.nightly)])
def models(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(tmp_path_factory.mktemp("models"), tied=request.param == "tied")


@pytest.fixture(scope="module")
def weights_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("weights")


@pytest.fixture(scope="module")
def server(models: Models, weights_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[JobProcess]:
    config = VLLMEngineConfig(python=str(interpreter_of("vllm")), context_length=CONTEXT, max_sequences=MAX_SEQUENCES)
    spec = ServeSpec(model_path=str(models.paths[0]), device="cpu", weights_dir=str(weights_dir))
    job = VLLMEngine.server_spec(config, spec)
    log = tmp_path_factory.mktemp("logs") / "vllm.log"
    with JobProcess(models.paths[0], log, key=KEY, job=job) as process:
        yield process


@pytest.fixture
async def engine(
    server: JobProcess, models: Models, weights_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[VLLMEngine]:
    monkeypatch.setattr("rl_inference.client.transport.PROBE_TIMEOUT", 60.0)  # a server on a busy CPU is slow
    spec = ServeSpec(model_path=str(models.paths[0]), weights_dir=str(weights_dir))
    client = ClientConfig(progress_timeout=120)
    engine = VLLMEngine(VLLMEngineConfig(context_length=CONTEXT), spec, client)
    engine.initialize([server.address], KEY)
    yield engine
    await engine.destroy()


class TestVLLMEngine(ServerSuite):
    long_completion = 900  # a tiny model generates 2,500 tokens per second
    drains = False  # queued requests begin after the update

    @pytest.fixture
    async def engine(self, engine: VLLMEngine) -> VLLMEngine:
        return engine

    async def check(self, engine: VLLMEngine, response: ModelResponse, temperature: float = 1.0) -> None:
        """Compare with transformers, because vLLM scores only at temperature 1 and below the context length."""
        assert len(response.output_ids) == len(response.logprobs) == len(response.versions) > 0
        assert self.models.difference(response, temperature) < TOLERANCE


def test_attached_server_passes_a_dry_run(server, models, monkeypatch, tmp_path):
    monkeypatch.setenv("RL_RUN_KEY", KEY)
    settings = ("recipe=embedded", "allocation=vllm:d1+fsdp:d1", "publish.route=broadcast", f"run_dir={tmp_path}")

    code = main(
        "gsm8k-grpo",
        [f"model.path={models.paths[0]}", f"rollout.server.addresses=[{server.address}]", *settings, "--dry-run"],
    )

    assert code == 0


async def test_queued_group_members_do_not_reuse_an_outdated_kv_cache(engine, models, weights_dir):
    """Queued requests carry the cache salt of the previous version, under which their group has blocks in the cache."""
    await engine.stats()
    first = engine.version
    await engine.stage_weights(put_weights(weights_dir, first + 1, models.tensors(first + 1))[0])
    running = []
    waits = False
    while not waits:  # retry if all requests ended before the stats showed a queue
        await asyncio.gather(*running)
        requests = [make_request([*SHARED, 9], i, tokens=400) for i in range(4 * MAX_SEQUENCES)]
        running = [asyncio.ensure_future(engine.agenerate(request)) for request in requests]
        while not waits and not all(task.done() for task in running):
            stats = await engine.stats()
            waits = stats["running"] >= 1 and stats["waiting"] >= MAX_SEQUENCES
    await engine.commit_weights(first + 1, "keep")
    responses = await asyncio.gather(*running)

    assert {each.versions[0] for each in responses} == {first, first + 1}
    assert max(models.difference(each) for each in responses) < TOLERANCE


async def test_stop_string_ends_the_completion(engine, models):
    free = await engine.agenerate(make_request(SHARED, 1, tokens=40, temperature=0.0))
    tokenizer = AutoTokenizer.from_pretrained(models.paths[0])
    text = tokenizer.decode(free.output_ids[8:10])
    stopped = await engine.agenerate(make_request(SHARED, 1, tokens=40, temperature=0.0, stop=[text]))

    assert stopped.output_ids == free.output_ids[: len(stopped.output_ids)]
    assert (len(stopped.output_ids) <= 10, stopped.stop_reason) == (True, "stop")


async def test_invalid_requests_raise_inference_error(engine, server):
    for prompt, message in (
        ([1, 100000], "out of vocabulary"),
        ([5] * CONTEXT, "longer than the maximum model length"),
    ):
        with pytest.raises(InferenceError, match=message):
            await engine.agenerate(make_request(prompt, 1))
    unauthorized = VLLMEngine()
    unauthorized.initialize([server.address], "another key")
    with pytest.raises(InferenceError, match=r"401.*no valid key"):
        await unauthorized.agenerate(make_request(SHARED, 1))
    await unauthorized.destroy()
