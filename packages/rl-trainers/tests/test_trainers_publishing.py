"""Publishing to the null engine, with injected faults."""

import contextlib
import threading
from concurrent.futures import Future
from pathlib import Path

import pytest
import torch

from rl_contracts.config import GenerationConfig
from rl_contracts.data import AdapterSpec, FinetuneSpec, ModelRequest, ParamSpec
from rl_contracts.errors import ConfigError, StalledError, WeightUpdateError
from rl_contracts.inference import Capabilities
from rl_contracts.runtime.aio import LoopThread
from rl_contracts.testing import NullInferenceEngine, ReferenceTrainEngine
from rl_contracts.testing.models import make_tiny_model
from rl_contracts.weights import checksum, open_weights, read_committed
from rl_trainers import PublishConfig, WeightPublisher
from rl_trainers.weight_sync.publisher import _transfer_error


@pytest.fixture
def components(tmp_path):
    engine = ReferenceTrainEngine()
    engine.initialize(FinetuneSpec(str(make_tiny_model(tmp_path / "model", layers=1, hidden=32)), 10))
    server = NullInferenceEngine()
    with LoopThread("test") as loop:
        publisher = WeightPublisher(engine, server, loop, PublishConfig(), str(tmp_path / "weights"))
        yield engine, server, loop, publisher
        loop.run(server.destroy(), 5)
    engine.destroy()


def test_publish_writes_record_of_last_committed_version(components, tmp_path):
    _, server, _, publisher = components
    assert publisher.publish(1)["time/stage"] > 0
    publisher.publish(2)
    server.faults.commit = lambda version: WeightUpdateError("injected")
    with pytest.raises(WeightUpdateError, match="injected"):
        publisher.publish(3)

    record = read_committed(tmp_path / "weights")

    assert record.version == server.version == 2
    assert record.receipt.checksums == {name: checksum(tensor) for name, tensor in open_weights(record.meta)}


@pytest.mark.guarantee("No server commits a version whose checksums differ from those of the trainer.", area="weights")
def test_publish_corrupt_tensor_is_named_and_not_committed(components):
    _, server, _, publisher = components
    server.faults.corrupt = lambda name: name.endswith("q_proj.weight")
    with pytest.raises(WeightUpdateError, match=r"version 1.*q_proj\.weight"):
        publisher.publish(1)
    assert server.version == 0


class AdaptedEngine(ReferenceTrainEngine):
    """Engine that reports a trained adapter."""

    def adapter(self):
        return AdapterSpec({"x.weight": 2.0}, {"x.weight": "1"}, "float32")

    def adapter_specs(self):
        return tuple(ParamSpec(name, tuple(t.shape), "float32") for name, t in self.adapter_parameters())

    def adapter_parameters(self):
        return iter([("x.lora_A.weight", torch.ones(2, 5)), ("x.lora_B.weight", torch.ones(4, 2))])


class AdapterServers(NullInferenceEngine):
    """Servers that can add an adapter to their base weights."""

    capabilities = Capabilities(lora=True)


@pytest.mark.parametrize(
    ("setting", "servers", "alone"),
    [
        ("auto", AdapterServers, True),
        ("always", AdapterServers, True),
        ("never", AdapterServers, False),
        ("auto", NullInferenceEngine, False),
    ],
)
def test_publish_adapter_setting_selects_adapter_or_full_weights(components, tmp_path, setting, servers, alone):
    _, _, loop, _ = components
    engine, server = AdaptedEngine(), servers()
    engine.initialize(FinetuneSpec(str(tmp_path / "model"), 10))
    publisher = WeightPublisher(engine, server, loop, PublishConfig(adapter=setting), str(tmp_path / "adapters"))

    publisher.publish(1)

    record = read_committed(tmp_path / "adapters")
    assert record.meta.adapter == (engine.adapter() if alone else None)
    expected = engine.adapter_specs() if alone else engine.param_specs()
    assert record.receipt.checksums.keys() == {spec.name for spec in expected}
    publisher.destroy()
    assert not any(Path(part.location).exists() for part in record.meta.parts)


@pytest.mark.parametrize(
    ("engine_class", "reason"),
    [(AdaptedEngine, "only full weights"), (ReferenceTrainEngine, "no adapter is trained")],
)
def test_publisher_adapter_always_without_support_is_rejected(components, tmp_path, engine_class, reason):
    _, server, loop, _ = components
    engine = engine_class()
    engine.initialize(FinetuneSpec(str(tmp_path / "model"), 10))

    with pytest.raises(ConfigError, match=rf"publish\.adapter: .*'always, .*{reason}"):
        WeightPublisher(engine, server, loop, PublishConfig(adapter="always"), str(tmp_path / "weights"))


@pytest.mark.parametrize(("interrupt", "seconds"), [("keep", 5.0), ("wait", 25.0)])
def test_commit_timeout_includes_drain_seconds_only_to_wait(components, interrupt, seconds, monkeypatch):
    monkeypatch.setattr("rl_trainers.weight_sync.publisher.DRAIN_SECONDS", 20.0)
    *_, publisher = components
    publisher.config, publisher.interrupt = PublishConfig(timeout=5.0), interrupt
    assert publisher._commit_timeout == seconds


@pytest.mark.slow
@pytest.mark.parametrize(("drain", "committed"), [pytest.param(60.0, 1, marks=pytest.mark.nightly), (0.1, 0)])
def test_publish_interrupt_wait_uses_drain_seconds(components, drain, committed, monkeypatch):
    monkeypatch.setattr("rl_trainers.weight_sync.publisher.DRAIN_SECONDS", drain)
    _, server, loop, publisher = components
    server.config.seconds_per_token = 0.1
    publisher.config, publisher.interrupt = PublishConfig(route="shm", timeout=2.0), "wait"
    completion = loop.submit(server.agenerate(ModelRequest([1], GenerationConfig(max_new_tokens=45, ignore_eos=True))))

    with contextlib.nullcontext() if committed else pytest.raises(StalledError, match="committing version 1"):
        publisher.publish(1)

    assert server.version == committed
    assert completion.done() == bool(committed)


def test_transfer_error_waits_longer_for_servers_without_own_error(monkeypatch):
    monkeypatch.setattr("rl_trainers.weight_sync.publisher.SHUTDOWN_SECONDS", 0.0)
    staging, error = Future(), OSError("injected")
    threading.Timer(0.1, staging.set_result, [[]]).start()

    assert _transfer_error(None, staging) is None
    assert _transfer_error(error, Future()) is error
