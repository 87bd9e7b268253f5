"""Publishing over a route on which both ends must be there at once, with planted faults."""

import pytest

from rl_contracts.data import FinetuneSpec
from rl_contracts.errors import ConfigError, ReceiversLostError, WeightUpdateError
from rl_contracts.runtime.aio import LoopThread
from rl_contracts.testing import NullInferenceEngine, ReferenceTrainEngine
from rl_contracts.testing.models import make_tiny_model
from rl_trainers import PublishConfig, WeightPublisher
from rl_trainers.weight_sync.publisher import MAX_ATTEMPTS


@pytest.fixture
def parts(tmp_path):
    engine = ReferenceTrainEngine()
    engine.initialize(FinetuneSpec(str(make_tiny_model(tmp_path / "model", layers=1, hidden=32)), 10))
    server = NullInferenceEngine()
    with LoopThread("test") as loop:
        config = PublishConfig(route="broadcast", timeout=20)
        yield server, WeightPublisher(engine, server, loop, config, str(tmp_path / "weights"))
        loop.run(server.destroy(), 5)
    engine.destroy()


def failing(server, *errors):
    """Plant errors into the next calls of `stage_weights`; the list of all calls."""
    left, calls = list(errors), []

    def stage(meta):
        calls.append(meta.parts[0].location)
        return left.pop(0) if left else None

    server.faults.stage = stage
    return calls


def test_publish_by_broadcast_commits_what_arrived(parts):
    server, publisher = parts
    for version in (1, 2):
        assert publisher.publish(version)["time/stage"] >= 0
        assert server.version == version


def test_publish_servers_lost_in_the_middle_sends_again(parts):
    server, publisher = parts
    calls = failing(server, ReceiversLostError("server 1 died"))
    publisher.publish(1)
    assert server.version == 1
    assert len(set(calls)) == 2  # each try has a meeting of its own


def test_publish_servers_lost_again_and_again_gives_up_with_the_reason(parts):
    server, publisher = parts
    calls = failing(server, *[ReceiversLostError("server 1 died")] * MAX_ATTEMPTS)
    with pytest.raises(WeightUpdateError, match="server 1 died"):
        publisher.publish(1)
    assert len(calls) == MAX_ATTEMPTS
    publisher.publish(1)
    assert server.version == 1


def test_publish_refusal_is_not_tried_again(parts):
    server, publisher = parts
    calls = failing(server, WeightUpdateError("the model has no parameter 'x'"))
    with pytest.raises(WeightUpdateError, match="no parameter 'x'"):
        publisher.publish(1)
    assert len(calls) == 1
    assert server.version == 0


def test_publish_one_wrong_tensor_over_broadcast_is_named_and_nothing_is_committed(parts):
    server, publisher = parts
    server.faults.corrupt = lambda name: name.endswith("q_proj.weight")
    with pytest.raises(WeightUpdateError, match=r"route broadcast, version 1.*q_proj\.weight"):
        publisher.publish(1)
    assert server.version == 0


def test_config_host_of_a_route_that_does_not_listen_is_refused():
    assert PublishConfig(route="broadcast", host="10.0.0.7").host == "10.0.0.7"
    with pytest.raises(ConfigError, match=r"publish.host: expected nothing where publish.route=shm.*10.0.0.7"):
        PublishConfig(route="shm", host="10.0.0.7")


def test_connect_ipc_without_a_gpu_is_refused_with_what_to_use(parts, tmp_path):
    server, publisher = parts
    with pytest.raises(WeightUpdateError, match=r"publish.route=ipc: expected .* CUDA device.*publish.route=shm"):
        WeightPublisher(publisher.engine, server, publisher.loop, PublishConfig(route="ipc"), str(tmp_path))
