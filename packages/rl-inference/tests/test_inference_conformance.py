"""Conformance suite of inference engines, against two embedded servers."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from rl_contracts.config import ClientConfig
from rl_contracts.conformance import inference_engine as suite
from rl_contracts.data import WeightReceipt, WeightUpdateMeta
from rl_contracts.testing import put_weights
from rl_inference import EmbeddedEngine
from rl_inference.testing import ServerProcess, reference_model


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("conformance")


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def servers(request: pytest.FixtureRequest, model_path: Path, scratch: Path) -> Iterator[list[ServerProcess]]:
    options = {"max_sequences": 16, "weights_dir": scratch, "device": request.param}
    pair = [ServerProcess(model_path, scratch / f"server-{i}.log", options=dict(options)).start() for i in range(2)]
    try:
        yield [server.wait_ready() for server in pair]
    finally:
        for server in pair:
            server.stop()


class TestEmbeddedEngine(suite.InferenceEngineConformance):
    logprob_tolerance = 1e-5
    context_length = 512

    @pytest.fixture(autouse=True)
    def _weights(self, model_path: Path, scratch: Path) -> None:
        self.model_path, self.scratch = model_path, scratch

    @pytest.fixture
    async def engine(self, servers: list[ServerProcess]) -> AsyncIterator[EmbeddedEngine]:
        engine = EmbeddedEngine(client=ClientConfig(progress_timeout=20))
        engine.initialize([server.address for server in servers])
        yield engine
        await engine.destroy()

    async def next_weights(self, version: int) -> tuple[WeightUpdateMeta, WeightReceipt]:
        tensors = [(name, p.detach() * 1.01) for name, p in reference_model(self.model_path).named_parameters()]
        return put_weights(self.scratch, version, tensors)
