"""Inject faults that checksums miss into real servers, and check that the canary stops the commit."""

import os
import sys

import pytest

from rl_contracts.batch.redistribution import shard_batch
from rl_contracts.config import ClientConfig, OptimizerConfig
from rl_contracts.data import FinetuneSpec
from rl_contracts.errors import WeightUpdateError
from rl_contracts.runtime.aio import LoopThread
from rl_contracts.testing.batches import make_batch
from rl_contracts.testing.models import make_tiny_model
from rl_engines_fsdp import FSDPEngine, FSDPEngineConfig
from rl_inference import EmbeddedEngine
from rl_inference.testing import ServerProcess
from rl_trainers import PublishConfig, WeightPublisher

pytestmark = pytest.mark.slow

COMMAND = (sys.executable, "-m", "rl_inference.embedded_server.fault_injection")


@pytest.fixture(scope="module")
def fault_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("fault") / "fault"
    path.write_text("")
    os.environ["FAULT_FILE"] = str(path)
    yield path
    del os.environ["FAULT_FILE"]


@pytest.fixture(scope="module")
def run(tmp_path_factory, fault_file):
    """Function that takes one training step and publishes the weights to two servers."""
    directory = tmp_path_factory.mktemp("run")
    model = make_tiny_model(directory / "model", layers=2, hidden=32)
    engine = FSDPEngine(FSDPEngineConfig())
    engine.initialize(FinetuneSpec(str(model), 1000, optimizer=OptimizerConfig(lr=1e-2), device="cpu"))
    batch = shard_batch(make_batch(8, 0, lengths=(16, 24)), engine.parallel)
    client = EmbeddedEngine(client=ClientConfig(progress_timeout=20))

    def loss(outputs, packed):
        return -(outputs.logprobs * packed["advantages"]).sum(), {}

    def update():
        engine.train_batch(batch, loss, lambda rows: rows["loss_mask"].sum())
        engine.version += 1
        publisher.publish(engine.version)

    options = {"weights_dir": directory / "weights", "max_sequences": 16}
    servers = [ServerProcess(model, directory / f"{i}.log", options=options, command=COMMAND) for i in range(2)]
    with servers[0] as first, servers[1] as second, LoopThread("client") as loop:
        client.initialize([first.address, second.address])
        publisher = WeightPublisher(engine, client, loop, PublishConfig(canary="always"), str(directory / "weights"))
        publisher.publish(0)
        yield update
        loop.run(client.destroy(), 10)
    engine.destroy()


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("one behind", "its scores of 223 tokens .* match the previous version"),
        ("weights not sent", "its scores of 223 tokens .* does not serve the sent weights"),
        ("stale prefix", "its scores are correct, but .* its prefix cache"),
    ],
)
def test_publish_to_faulty_server_raises_canary_error(run, fault_file, fault, message):
    fault_file.write_text("")
    for _ in range(2):
        run()
    fault_file.write_text(fault)

    with pytest.raises(WeightUpdateError, match=rf"route shm, version \d+, http\S+: {message}"):
        run()
