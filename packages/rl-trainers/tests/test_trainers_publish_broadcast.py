"""Publishing over a route with a rendezvous of both ends, with injected faults."""

import pytest

from rl_contracts.data import FinetuneSpec
from rl_contracts.errors import ReceiversLostError, WeightUpdateError
from rl_contracts.runtime.aio import LoopThread
from rl_contracts.testing import NullInferenceEngine, ReferenceTrainEngine
from rl_contracts.testing.models import make_tiny_model
from rl_trainers import PublishConfig, WeightPublisher
from rl_trainers.weight_sync.publisher import MAX_ATTEMPTS


@pytest.fixture
def components(tmp_path):
    engine = ReferenceTrainEngine()
    engine.initialize(FinetuneSpec(str(make_tiny_model(tmp_path / "model", layers=1, hidden=32)), 10))
    server = NullInferenceEngine()
    with LoopThread("test") as loop:
        config = PublishConfig(route="broadcast", timeout=20)
        yield server, WeightPublisher(engine, server, loop, config, str(tmp_path / "weights"))
        loop.run(server.destroy(), 5)
    engine.destroy()


def inject_stage_errors(server, *errors):
    """Inject errors into the next calls of `stage_weights`; return the list that collects the location of each call."""
    remaining, calls = list(errors), []

    def stage(meta):
        calls.append(meta.parts[0].location)
        return remaining.pop(0) if remaining else None

    server.faults.stage = stage
    return calls


def test_publish_receivers_lost_once_sends_again(components):
    server, publisher = components
    calls = inject_stage_errors(server, ReceiversLostError("server 1 died"))
    publisher.publish(1)
    assert server.version == 1
    assert len(set(calls)) == 2  # each attempt has its own rendezvous
    publisher.publish(2)
    assert server.version == 2


def test_publish_receivers_lost_repeatedly_raises_reason(components):
    server, publisher = components
    calls = inject_stage_errors(server, *[ReceiversLostError("server 1 died")] * MAX_ATTEMPTS)
    with pytest.raises(WeightUpdateError, match="server 1 died"):
        publisher.publish(1)
    assert len(calls) == MAX_ATTEMPTS
    publisher.publish(1)
    assert server.version == 1


def test_publish_rejected_update_is_not_retried(components):
    server, publisher = components
    calls = inject_stage_errors(server, WeightUpdateError("the model has no parameter 'x'"))
    with pytest.raises(WeightUpdateError, match="no parameter 'x'"):
        publisher.publish(1)
    assert len(calls) == 1
    assert server.version == 0


def test_publish_broadcast_corrupt_tensor_is_named_and_not_committed(components):
    server, publisher = components
    server.faults.corrupt = lambda name: name.endswith("q_proj.weight")
    with pytest.raises(WeightUpdateError, match=r"route broadcast, version 1.*q_proj\.weight"):
        publisher.publish(1)
    assert server.version == 0


def test_publisher_ipc_without_gpu_raises_alternative(components, tmp_path):
    server, publisher = components
    with pytest.raises(WeightUpdateError, match=r"publish.route=ipc: expected .* CUDA device.*publish.route=shm"):
        WeightPublisher(publisher.engine, server, publisher.loop, PublishConfig(route="ipc"), str(tmp_path))
