"""Publishing and the gap gate against the null engine, with planted faults."""

import contextlib

import pytest

from rl_contracts.aio import LoopThread
from rl_contracts.config import GenerationConfig
from rl_contracts.data import FinetuneSpec, ModelRequest
from rl_contracts.errors import StalledError, WeightUpdateError
from rl_contracts.sharding import share
from rl_contracts.testing import NullInferenceEngine, ReferenceTrainEngine
from rl_contracts.testing.batches import make_batch
from rl_contracts.testing.models import make_tiny_model
from rl_contracts.weights import checksum, open_weights, read_committed
from rl_trainers import GapConfig, GapGate, PublishConfig, WeightPublisher


@pytest.fixture
def parts(tmp_path):
    engine = ReferenceTrainEngine()
    engine.initialize(FinetuneSpec(str(make_tiny_model(tmp_path / "model", layers=1, hidden=32)), 10))
    server = NullInferenceEngine()
    with LoopThread("test") as loop:
        publisher = WeightPublisher(engine, server, loop, PublishConfig(), str(tmp_path / "weights"))
        yield engine, server, loop, publisher
        loop.run(server.destroy(), 5)
    engine.destroy()


def test_publish_all_receipts_agree_commits_the_version(parts):
    _, server, _, publisher = parts
    times = publisher.publish(1)
    assert server.version == 1
    assert times["time/stage"] > 0


def test_publish_leaves_a_record_of_what_was_committed_last(parts, tmp_path):
    _, server, _, publisher = parts
    publisher.publish(1)
    publisher.publish(2)
    server.faults.commit = lambda version: WeightUpdateError("planted")
    with pytest.raises(WeightUpdateError, match="planted"):
        publisher.publish(3)

    record = read_committed(tmp_path / "weights")

    assert record.version == server.version == 2
    assert record.receipt.checksums == {name: checksum(tensor) for name, tensor in open_weights(record.meta)}


def test_publish_one_wrong_tensor_is_named_and_nothing_is_committed(parts):
    _, server, _, publisher = parts
    server.faults.corrupt = lambda name: name.endswith("q_proj.weight")
    with pytest.raises(WeightUpdateError, match=r"version 1.*q_proj\.weight"):
        publisher.publish(1)
    assert server.version == 0


def test_publish_server_that_fails_to_commit_raises(parts):
    _, server, _, publisher = parts
    server.faults.commit = lambda version: WeightUpdateError(f"no server committed version {version}")
    with pytest.raises(WeightUpdateError, match="no server committed version 1"):
        publisher.publish(1)


@pytest.mark.parametrize(("drain", "committed"), [(60.0, 1), (0.1, 0)])
def test_publish_wait_gives_running_answers_a_time_of_their_own(parts, drain, committed):
    _, server, loop, publisher = parts
    server.config.seconds_per_token = 0.1
    publisher.config, publisher.interrupt = PublishConfig(timeout=2.0, drain_timeout=drain), "wait"
    answer = loop.submit(server.agenerate(ModelRequest([1], GenerationConfig(max_new_tokens=45, ignore_eos=True))))

    with contextlib.nullcontext() if committed else pytest.raises(StalledError, match="commit_weights"):
        publisher.publish(1)

    assert server.version == committed
    assert answer.done() == bool(committed)


class _Scores:
    """A client whose servers compute the trainer's log-probs, off by a constant."""

    def __init__(self, engine, batch, offset):
        logprobs = engine.forward(batch, lambda outputs, _: outputs.logprobs)
        self._rows = {tuple(ids.tolist()): row for ids, row in zip(batch["input_ids"], logprobs, strict=True)}
        self._offset = offset

    async def score(self, input_ids, temperature=1.0):
        row = next(row for ids, row in self._rows.items() if ids[: len(input_ids)] == tuple(input_ids))
        return [0.0, *(row[1 : len(input_ids)] + self._offset).tolist()]


@pytest.mark.parametrize("offset", [0.0, 0.1])
def test_gap_gate_measures_what_the_servers_are_off_by(parts, offset):
    engine, _, loop, _ = parts
    engine.version = 9  # no token of the batch is fresh
    batch = share(make_batch(4), engine.parallel)
    gate = GapGate(engine, _Scores(engine, batch, offset), loop.run, GapConfig(rows=4))
    gate.before_update(batch)
    gap = gate.after_commit()
    assert gap["gap/mean_abs"] == pytest.approx(offset, abs=1e-6)
    assert gap["gap/max_abs"] == pytest.approx(offset, abs=1e-6)


def test_gap_gate_servers_that_compute_something_else_stop_the_run(parts):
    engine, _, loop, _ = parts
    engine.version = 9
    batch = share(make_batch(4), engine.parallel)
    gate = GapGate(engine, _Scores(engine, batch, 3.0), loop.run, GapConfig(rows=2))
    gate.before_update(batch)
    with pytest.raises(WeightUpdateError, match=r"disagree.*differ by 3 nats on average.*at version 9.*Likely cause"):
        gate.after_commit()


def test_gap_gate_switched_off_is_null_not_zero(parts):
    engine, server, loop, _ = parts
    gate = GapGate(engine, server, loop.run, GapConfig(rows=0))
    gap = gate.before_update(make_batch(2)) | gate.after_commit()
    assert gap.pop("gap/empty") == 0.0
    assert set(gap.values()) == {None}
