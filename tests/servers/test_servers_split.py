"""The real vLLM and SGLang on a CPU with tensor parallelism over two processes: log-probs after weight updates.

The tests need the environments of `infra/servers/build.py`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import psutil
import pytest
from real_servers import KEY, Kind, Models, kind_of
from server_suite import UpdateSuite

from rl_contracts.allocation import ParallelStrategy
from rl_contracts.config import ClientConfig
from rl_contracts.data import ServeSpec
from rl_inference.client.engine import HttpEngine
from rl_inference.testing import JobProcess

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(1500)]

RANKS = 2


@pytest.fixture(scope="module", params=["vllm", "sglang"])
def kind(request: pytest.FixtureRequest) -> Kind:
    if (cores := len(psutil.Process().cpu_affinity())) < RANKS:
        pytest.skip(f"{RANKS} tensor-parallel ranks need {RANKS} CPU cores; found {cores}")
    return kind_of(request.param)


@pytest.fixture(scope="module", params=["tied", "untied"])
def models(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(tmp_path_factory.mktemp("models"), tied=request.param == "tied")


@pytest.fixture(scope="module")
def weights_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("weights")


@pytest.fixture(scope="module")
def server(
    kind: Kind, models: Models, weights_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[JobProcess]:
    strategy = ParallelStrategy(tensor=RANKS)
    job = kind.job(ServeSpec(str(models.paths[0]), strategy, str(weights_dir), device="cpu", cpus=RANKS))
    with JobProcess(models.paths[0], tmp_path_factory.mktemp("logs") / "server.log", key=KEY, job=job) as process:
        yield process


@pytest.fixture
async def engine(
    kind: Kind, server: JobProcess, models: Models, weights_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[HttpEngine]:
    monkeypatch.setattr("rl_inference.client.transport.PROBE_TIMEOUT", 60.0)  # a server on a busy CPU is slow
    spec = ServeSpec(str(models.paths[0]), ParallelStrategy(tensor=RANKS), str(weights_dir))
    engine = kind.client(spec, [server.address], ClientConfig(progress_timeout=120))
    yield engine
    await engine.destroy()


class TestSplitServer(UpdateSuite):
    pass


def test_each_tensor_parallel_rank_is_a_separate_process(server):
    children = psutil.Process(server.process.pid).children(recursive=True)
    titles = [" ".join(child.cmdline()) for child in children]

    for rank in range(RANKS):
        assert [title for title in titles if f"TP{rank}" in title] != [], titles
