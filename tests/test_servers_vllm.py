"""The real vLLM on a CPU, as a run starts it: the contract of inference engines, and what it serves after updates.

Needs the environment that `infra/servers/build.py vllm` makes, and is skipped where there is none. One server per
module, which starts in half a minute on an idle machine and in minutes on a busy one.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import torch
from real_servers import SHARED, Models, aborted_and_resumed, interpreter_of, make_request, publish, until
from transformers import AutoTokenizer

from rl_contracts.config import ClientConfig
from rl_contracts.conformance import inference_engine as suite
from rl_contracts.data import ModelResponse, ServeSpec, WeightReceipt, WeightUpdateMeta
from rl_contracts.errors import InferenceError, WeightUpdateError
from rl_contracts.testing import put_weights
from rl_inference import VLLMEngine, VLLMEngineConfig
from rl_inference.testing import JobProcess

CONTEXT = 1024
KEY = "a key of this run"
TOLERANCE = 1e-4
AT_ONCE = 8
"""Sequences that the server generates at the same time: others wait inside, behind the door."""


@pytest.fixture(scope="module", params=["tied", "untied"])
def models(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Models:
    if request.param == "untied" and not request.config.getoption("--nightly"):
        pytest.skip("untied heads: run with --nightly")
    return Models(tmp_path_factory.mktemp("models"), tied=request.param == "tied")


@pytest.fixture(scope="module")
def weights_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("weights")


@pytest.fixture(scope="module")
def server(models: Models, weights_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[JobProcess]:
    config = VLLMEngineConfig(python=str(interpreter_of("vllm")), context_length=CONTEXT, max_sequences=AT_ONCE)
    spec = ServeSpec(model_path=str(models.paths[0]), device="cpu", weights_dir=str(weights_dir))
    job = VLLMEngine.server_spec(config, spec)
    log = tmp_path_factory.mktemp("logs") / "vllm.log"
    with JobProcess(models.paths[0], log, key=KEY, job=job) as process:
        yield process


@pytest.fixture
async def engine(server: JobProcess, models: Models, weights_dir: Path) -> AsyncIterator[VLLMEngine]:
    spec = ServeSpec(model_path=str(models.paths[0]), weights_dir=str(weights_dir))
    client = ClientConfig(progress_timeout=120, probe_timeout=60)
    engine = VLLMEngine(VLLMEngineConfig(context_length=CONTEXT), spec, client)
    engine.initialize([server.address], KEY)
    yield engine
    await engine.destroy()


@pytest.mark.slow
@pytest.mark.timeout(1500)
class TestVLLMEngine(suite.InferenceEngineConformance):
    logprob_tolerance = TOLERANCE
    context_length = CONTEXT
    long_answer = 900  # a tiny model makes 2,500 tokens a second

    @pytest.fixture(autouse=True)
    def _inputs(self, models: Models, weights_dir: Path) -> None:
        self.models, self.weights_dir = models, weights_dir

    @pytest.fixture
    async def engine(self, engine: VLLMEngine) -> VLLMEngine:
        return engine

    async def check(self, engine: VLLMEngine, response: ModelResponse, temperature: float = 1.0) -> None:
        """Against transformers: vLLM scores at temperature 1 alone, and no row that fills the context."""
        assert len(response.output_ids) == len(response.logprobs) == len(response.versions) > 0
        assert self.models.difference(response, temperature) < TOLERANCE

    async def next_weights(self, version: int) -> tuple[WeightUpdateMeta, WeightReceipt]:
        return put_weights(self.weights_dir, version, self.models.tensors(version))


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("route", ["shm", "disk", "broadcast"])
async def test_update_over_each_route_serves_what_transformers_computes(engine, models, weights_dir, route):
    """Prompts of several hundred tokens were served before the update, so that a stale prefix would be used."""
    before = await engine.agenerate(make_request([*SHARED, 7], 1, temperature=0.7))

    for _ in range(2):
        version = await publish(engine, models, weights_dir, route)
        requests = [make_request([*SHARED, 7 + i], i, temperature=0.7) for i in range(8)]
        after = await asyncio.gather(*map(engine.agenerate, requests))

        assert {v for response in after for v in response.versions} == {version}
        assert max(models.difference(response, 0.7) for response in after) < TOLERANCE
        scores = await engine.score([*SHARED, 5])
        assert scores == pytest.approx(models.logprobs(version, [*SHARED, 5]), abs=TOLERANCE)
    assert models.difference(before, 0.7) < TOLERANCE


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("interrupt", ["keep", "recompute", "wait"])
async def test_many_requests_across_three_updates_lose_nothing(engine, models, weights_dir, interrupt):
    """64 at once, most of which wait inside. The KV cache is computed anew or drained: each token's log-prob is that of
    its own version."""
    await engine.stats()
    first = engine.version
    asked = [make_request([*SHARED[: 300 + i], 9], i, tokens=48 + i % 32) for i in range(64)]
    running = [asyncio.ensure_future(engine.agenerate(each)) for each in asked]
    for _ in range(3):
        await until(engine, lambda stats: stats["running"] >= 1 or all(task.done() for task in running))
        await publish(engine, models, weights_dir, "shm", interrupt)
    responses = await asyncio.gather(*running)
    later = await engine.agenerate(make_request([*SHARED, 9], 0))

    assert [len(each.output_ids) for each in responses] == [each.generation.max_new_tokens for each in asked]
    assert all(each.versions == sorted(each.versions) for each in responses)
    assert {v for each in responses for v in each.versions} <= set(range(first, first + 4))
    assert (set(later.versions), models.difference(later) < TOLERANCE) == ({first + 3}, True)
    assert max(models.difference(each) for each in responses) < TOLERANCE


@pytest.mark.slow
@pytest.mark.timeout(1500)
async def test_group_members_that_wait_inside_read_no_keys_and_values_of_older_weights(engine, models, weights_dir):
    """They passed the door with the salt of the version before, whose blocks the others of their group hold."""
    await engine.stats()
    first = engine.version
    await engine.stage_weights(put_weights(weights_dir, first + 1, models.tensors(first + 1))[0])
    asked = [make_request([*SHARED, 9], i, tokens=400) for i in range(4 * AT_ONCE)]
    running = [asyncio.ensure_future(engine.agenerate(each)) for each in asked]
    await until(engine, lambda stats: stats["running"] >= 1 and stats["waiting"] >= AT_ONCE)
    await engine.commit_weights(first + 1, "keep")
    responses = await asyncio.gather(*running)

    assert {each.versions[0] for each in responses} == {first, first + 1}
    assert max(models.difference(each) for each in responses) < TOLERANCE


@pytest.mark.slow
@pytest.mark.timeout(1500)
async def test_answer_that_is_aborted_is_resumed_with_its_tokens_and_stop_strings_are_found(engine, models):
    free = await engine.agenerate(make_request(SHARED, 1, tokens=40, temperature=0.0))
    resumed = await aborted_and_resumed(engine)
    tokenizer = AutoTokenizer.from_pretrained(models.paths[0])
    text = tokenizer.decode(free.output_ids[8:10])
    stopped = await engine.agenerate(make_request(SHARED, 1, tokens=40, temperature=0.0, stop=[text]))

    assert (resumed.resubmissions, len(resumed.output_ids)) == (1, 300)
    assert models.difference(resumed) < TOLERANCE
    assert stopped.output_ids == free.output_ids[: len(stopped.output_ids)]
    assert (len(stopped.output_ids) <= 10, stopped.stop_reason) == (True, "stop")


@pytest.mark.slow
@pytest.mark.timeout(1500)
async def test_weights_that_vllm_could_not_load_are_refused_and_it_goes_on(engine, models, weights_dir):
    await engine.stats()
    version = engine.version + 1
    tensors = models.tensors(version)
    fewer, _ = put_weights(weights_dir, version, tensors[1:])
    with pytest.raises(WeightUpdateError, match="1 parameters were not sent"):
        await engine.stage_weights(fewer)
    nan, _ = put_weights(weights_dir, version, [(name, t * torch.nan) for name, t in tensors])
    with pytest.raises(WeightUpdateError, match="expected finite numbers"):
        await engine.stage_weights(nan)

    response = await engine.agenerate(make_request(SHARED, 3))

    assert set(response.versions) == {version - 1}
    assert models.difference(response) < TOLERANCE


@pytest.mark.slow
@pytest.mark.timeout(1500)
async def test_requests_that_the_server_refuses_say_why(engine, server):
    for bad, told in (([1, 100000], "out of vocabulary"), ([5] * CONTEXT, "longer than the maximum model length")):
        with pytest.raises(InferenceError, match=told):
            await engine.agenerate(make_request(bad, 1))
    stranger = VLLMEngine()
    stranger.initialize([server.address], "another key")
    with pytest.raises(InferenceError, match=r"401.*no valid key"):
        await stranger.agenerate(make_request(SHARED, 1))
    await stranger.destroy()
