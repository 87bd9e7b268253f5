"""The real SGLang on a CPU with the command of a run: conformance suite, and log-probs after weight updates.

The tests need the environment of `infra/servers/build.py sglang`. They start one server with a tied and one with an
untied `lm_head`, each in about one minute.
"""

from __future__ import annotations

import asyncio
import urllib.request
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from real_servers import CONTEXT, KEY, SHARED, Models, interpreter_of, make_request
from server_suite import TOLERANCE, ServerSuite
from transformers import AutoTokenizer

from rl_contracts.config import ClientConfig
from rl_contracts.data import ModelResponse, ServeSpec
from rl_contracts.errors import InferenceError
from rl_inference import SGLangEngine, SGLangEngineConfig
from rl_inference.testing import JobProcess

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(1500)]


@pytest.fixture(scope="module", params=["tied", "untied"])
def models(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(tmp_path_factory.mktemp("models"), tied=request.param == "tied")


@pytest.fixture(scope="module")
def weights_dir(models: Models, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("weights")


@pytest.fixture(scope="module")
def server(models: Models, weights_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[JobProcess]:
    config = SGLangEngineConfig(
        python=str(interpreter_of("sglang")), context_length=CONTEXT, arguments=["--stream-interval", "4"]
    )
    spec = ServeSpec(model_path=str(models.paths[0]), device="cpu", weights_dir=str(weights_dir), cpus=1)
    log = tmp_path_factory.mktemp("logs") / "sglang.log"
    with JobProcess(models.paths[0], log, key=KEY, job=SGLangEngine.server_spec(config, spec)) as process:
        yield process


@pytest.fixture
async def engine(
    server: JobProcess, models: Models, weights_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[SGLangEngine]:
    monkeypatch.setattr("rl_inference.client.transport.PROBE_TIMEOUT", 60.0)  # a server on a busy CPU is slow
    spec = ServeSpec(model_path=str(models.paths[0]), weights_dir=str(weights_dir))
    client = ClientConfig(progress_timeout=120)
    engine = SGLangEngine(SGLangEngineConfig(context_length=CONTEXT), spec, client)
    engine.initialize([server.address], KEY)
    yield engine
    await engine.destroy()


class TestSGLangEngine(ServerSuite):
    seeded = False

    @pytest.fixture
    async def engine(self, engine: SGLangEngine) -> SGLangEngine:
        return engine

    async def check(self, engine: SGLangEngine, response: ModelResponse, temperature: float = 1.0) -> None:
        """Compare with transformers, and at temperature 1 also with the scores of the server."""
        if temperature == 1:
            await super().check(engine, response, temperature)
        assert self.models.difference(response, temperature) < TOLERANCE


async def test_completion_continues_after_an_ignored_end_token(engine, models):
    """SGLang cannot ignore end tokens and stop at other tokens, so the client resubmits after each end token.

    The temperature makes all tokens equally likely: with probability 1/65,000, none of 16 completions has an end token
    before its stop token.
    """
    end, stop = AutoTokenizer.from_pretrained(models.paths[0]).eos_token_id, 9
    requests = [make_request([*SHARED, i], i, tokens=500, temperature=1e4, stop_token_ids=[stop]) for i in range(16)]

    responses = await asyncio.gather(*map(engine.agenerate, requests))

    assert all(r.output_ids.index(stop) == len(r.output_ids) - 1 for r in responses if stop in r.output_ids)
    assert all(stop in r.output_ids or len(r.output_ids) == 500 for r in responses)
    assert [r.resubmissions for r in responses] == [r.output_ids.count(end) for r in responses]
    assert any(r.resubmissions for r in responses)


async def test_invalid_requests_raise_inference_error_and_the_server_stays_up(engine, server):
    for prompt, message in (([1, 100000], "from 0 to"), ([5] * CONTEXT, "expected at most 1023 tokens")):
        with pytest.raises(InferenceError, match=message):
            await engine.agenerate(make_request(prompt, 1))
    unauthorized = SGLangEngine(spec=engine.spec)
    unauthorized.initialize([server.address], "another key")
    with pytest.raises(InferenceError, match=r"401.*no valid key"):
        await unauthorized.agenerate(make_request(SHARED, 1))
    await unauthorized.destroy()

    assert server.exit_code is None
    assert len((await engine.agenerate(make_request(SHARED, 1))).output_ids) == 16


def test_key_is_absent_from_log_command_line_and_server_info(server):
    request = urllib.request.Request(f"{server.address}/server_info", headers={"Authorization": f"Bearer {KEY}"})
    with urllib.request.urlopen(request, timeout=60) as response:
        assert KEY not in response.read().decode()

    assert KEY not in server.log.read_text()
    assert KEY not in Path(f"/proc/{server.process.pid}/cmdline").read_text()
