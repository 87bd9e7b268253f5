"""Log-prob gap gate on the reference engine, with servers that hold copies of its weights.

`tests/end_to_end/test_gap_faults.py` of the workspace tests faults of real servers.
"""

import asyncio
import contextlib
import copy
import logging
import math
import threading
from functools import partial

import pytest
import torch
from policy_toys import on_ranks

from rl_contracts.batch.image_entries import set_images
from rl_contracts.batch.parallel import ParallelContext
from rl_contracts.batch.redistribution import shard_batch
from rl_contracts.batch.trajectory import lengths, select
from rl_contracts.config import OptimizerConfig
from rl_contracts.data import FinetuneSpec, ModelResponse, StopReason, WeightReceipt
from rl_contracts.errors import InferenceError, WeightUpdateError
from rl_contracts.images import Image
from rl_contracts.inference import Capabilities
from rl_contracts.runtime.aio import LoopThread
from rl_contracts.testing import ReferenceTrainEngine
from rl_contracts.testing.batches import make_batch
from rl_contracts.testing.models import make_tiny_model
from rl_contracts.weights import checksum
from rl_trainers import GapConfig, GapGate, MemorySharing
from rl_trainers.weight_sync.gap import alarm as alarm_module
from rl_trainers.weight_sync.gap import recorded
from rl_trainers.weight_sync.gap.alarm import Alarm
from rl_trainers.weight_sync.gap.gate import _sample_sequences
from rl_trainers.weight_sync.gap.lag import LIMIT


@pytest.fixture(autouse=True)
def regenerate_after(monkeypatch):
    """Function that sets the steps after which the gate requests new completions; until its call they are unlimited."""
    set_steps = partial(monkeypatch.setattr, recorded, "REGENERATE_STEPS")
    set_steps(math.inf)
    return set_steps


@pytest.fixture
def stop_after(monkeypatch):
    """Function that sets the number of consecutive failures at which an alarm stops the run."""
    return partial(monkeypatch.setattr, alarm_module, "PATIENCE")


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("model"), layers=1, hidden=32)


@pytest.fixture(scope="module")
def loop():
    with LoopThread("servers") as loop:
        yield loop


def _engine(model_path, lr=1e-3):
    engine = ReferenceTrainEngine()
    engine.initialize(FinetuneSpec(str(model_path), 10, optimizer=OptimizerConfig(lr=lr, weight_decay=0.0)))
    return engine


@pytest.fixture
def engine(model_path):
    return _engine(model_path)


class Fleet:
    """Client of servers that compute in `dtype`, with their own weights and another kernel than the trainer's.

    Args:
        late: numbers of the servers that from now on always load the weights of the previous commit.
    """

    capabilities = Capabilities(checksums=False)

    def __init__(self, engine, count=1, dtype="float32", late=()):
        self.engine, self.late, self.dtype = engine, late, getattr(torch, dtype)
        self.servers = [f"http://server-{i}" for i in range(count)]
        self.model = copy.deepcopy(engine.model).to(self.dtype).eval()
        self.model.set_attn_implementation("eager")
        self.offset, self.failure = 0.0, None
        self.skips_commits, self.noise = False, 0.0
        self.requests = []
        self.weights = dict.fromkeys(self.servers, self._copy_weights())
        self.newest = self._copy_weights()

    def _copy_weights(self):
        return [parameter.detach().to(self.dtype, copy=True) for parameter in self.engine.model.parameters()]

    def commit(self):
        previous, self.newest = self.newest, self._copy_weights()
        for number, server in enumerate([] if self.skips_commits else self.servers):
            self.weights[server] = previous if number in self.late else self.newest

    def receipt(self):
        """Return the trainer's receipt of the newest weights."""
        names = (name for name, _ in self.engine.model.named_parameters())
        sums = {name: checksum(value) for name, value in zip(names, self.newest, strict=True)}
        return WeightReceipt("trainer", self.engine.version, sums)

    async def score(self, input_ids, temperature=1.0, server=None):
        self.requests.append(server)
        if self.failure is not None:
            raise self.failure
        for parameter, value in zip(self.model.parameters(), self.weights[server or self.servers[0]], strict=True):
            parameter.data.copy_(value)
        ids = torch.tensor(input_ids)
        with torch.no_grad():
            logits = self.model(input_ids=ids[None]).logits[0, :-1].float() / temperature
        logprobs = torch.log_softmax(logits, -1).gather(1, ids[1:, None])[:, 0]
        return [0.0, *(logprobs + self.offset + self.noise * torch.randn(len(logprobs))).tolist()]

    async def score_previous_weights(self, input_ids, temperature=1.0):
        raise InferenceError("these servers keep no previous weights")

    async def live_receipts(self, server=None):
        raise InferenceError("these servers have no checksums")

    async def agenerate(self, request):
        raise InferenceError("these servers only score")


def _batch(seed=0, size=8):
    """Return sequences without tokens of the current version, if the trainer's version is above 0."""
    return shard_batch(make_batch(size, seed, lengths=(16, 24)), ReferenceTrainEngine().parallel)


def _loss(outputs, packed):
    return -(outputs.logprobs * packed["advantages"]).sum(), {}


@contextlib.contextmanager
def _rounded(model):
    """Round the weights to bfloat16 inside the context, as `TrainEngine.as_served` does."""
    saved = copy.deepcopy(model.state_dict())
    model.to(torch.bfloat16).to(torch.float32)
    yield
    model.load_state_dict(saved)


def _run_step(gate, fleet, seed=0):
    """Run one training step and return its metrics."""
    engine, batch = fleet.engine, _batch(seed)
    metrics = gate.before_update(batch)
    engine.train_batch(batch, _loss, lambda batch: batch["loss_mask"].sum())
    engine.version += 1
    fleet.commit()
    return metrics | gate.after_commit(fleet.receipt())


def _gate(fleet, loop, served="float32", image_token=None, **settings):
    fleet.engine.version = 1
    return GapGate(fleet.engine, fleet, loop, GapConfig(**settings), served=served, image_token=image_token)


def _run_until_error(gate, fleet, comparisons):
    """Run steps until the gate stops the run, at most `comparisons` per server, and return the message."""
    with pytest.raises(WeightUpdateError) as caught:
        _run_steps(gate, fleet, comparisons * len(fleet.servers))
    return str(caught.value)


def _run_steps(gate, fleet, count):
    return [_run_step(gate, fleet, seed) for seed in range(count)]


# ---- alarms


def _add_comparison(alarm, off, excused=False):
    if alarm.count(off):
        alarm.warn("a fault", excused)


def test_alarm_warns_at_powers_of_two_and_stops_at_patience(caplog):
    alarm = Alarm()
    for off in (True, False) * 5:  # a successful comparison resets the count
        _add_comparison(alarm, off)
    caplog.clear()
    with caplog.at_level(logging.WARNING, logger="rl"):
        for _ in range(4):
            _add_comparison(alarm, True)
        assert len(caplog.records) == 3, "at 1, 2 and 4"
        with pytest.raises(WeightUpdateError, match="a fault"):
            _add_comparison(alarm, True)


def test_alarm_too_large_gap_stops_at_once():
    alarm = Alarm()
    assert alarm.count(True, too_much=True)
    with pytest.raises(WeightUpdateError):
        alarm.warn("far off", excused=True)


def test_alarm_fault_after_excused_failures_counts_as_first(caplog):
    alarm = Alarm()
    for number in range(1, 33):
        _add_comparison(alarm, True, excused=number < 32)
    assert caplog.text.count("a fault") == 6, "warnings at 1, 2, 4, ..., 32"
    for _ in range(3):
        _add_comparison(alarm, True)
    with pytest.raises(WeightUpdateError):
        _add_comparison(alarm, True)


def test_alarm_certain_fault_after_excused_failures_restarts_count():
    alarm = Alarm()
    for _ in range(33):
        _add_comparison(alarm, True, excused=True)
    for is_reported in (True, True, False, True):
        assert alarm.count(True, certain=True) is is_reported
        if is_reported:
            alarm.warn("a server is behind")
    assert alarm.count(True, certain=True)
    with pytest.raises(WeightUpdateError, match="a server is behind"):
        alarm.warn("a server is behind")


# ---- before the update


def _exact_batch(engine, offset=0.0):
    """Return a batch whose recorded log-probs are the engine's own plus a constant."""
    batch = _batch()
    logprobs = engine.forward(batch, lambda outputs, _: outputs.logprobs) + offset
    batch["logprobs"] = torch.where(batch["versions"] >= 0, logprobs, 0.0)
    return batch


def test_gate_current_version_tokens_are_compared_before_update(engine, loop):
    batch, gate = _exact_batch(engine, -0.125), _gate(Fleet(engine), loop, sequences=4, warn=1.0, stop=1.0)
    current = [1, 3, 6, 7]
    batch["versions"][current] = torch.where(batch["versions"][current] >= 0, 1, -1).int()
    stats = gate.before_update(batch)
    assert stats["gap/fresh_mean_abs"] == pytest.approx(0.125, abs=1e-5)
    assert stats["gap/fresh_max_abs"] == pytest.approx(0.125, abs=1e-5)
    assert stats["gap/fresh_k3"] > 0
    assert stats["gap/fresh_tokens"] == float((batch["versions"][current] >= 0).sum())


def test_gate_batch_without_current_version_tokens_reports_none(engine, loop):
    stats = _gate(Fleet(engine), loop).before_update(_exact_batch(engine))
    assert stats.pop("gap/fresh_tokens") == 0.0
    assert set(stats.values()) == {None}


def test_gate_samples_sequences_of_as_many_groups_as_possible(engine, loop):
    fleet = Fleet(engine)
    gate, batch = _gate(fleet, loop, sequences=4), _batch(size=16)
    gate.before_update(batch)
    assert sorted(gate._scores._comparison.sequences["group_ids"].tolist()) == [0, 1, 2, 3]


class ImageFleet(Fleet):
    """Servers that generate the tokens 7 and 8, and record the images of requests and the scored sequences."""

    def __init__(self, engine):
        super().__init__(engine)
        self.images, self.scored = [], []

    async def score(self, input_ids, temperature=1.0, server=None):
        self.scored.append(input_ids)
        return await super().score(input_ids, temperature, server)

    async def agenerate(self, request):
        self.images.append(request.images)
        return ModelResponse(request.input_ids, [7, 8], [-1.0, -1.0], [self.engine.version] * 2, StopReason.STOP)


@pytest.mark.parametrize("count", [3, 8])
def test_gate_servers_score_only_sequences_without_images(engine, loop, count):
    fleet, batch, picture = ImageFleet(engine), _exact_batch(engine), Image(b"image", 1, 1)
    gate = _gate(fleet, loop, sequences=8)
    set_images(batch, [(picture,)] * count + [()] * (8 - count))

    gate.before_update(batch)
    metrics = gate.after_commit()

    texts = select(batch, range(count, 8))
    expected = [ids[:size].tolist() for ids, size in zip(texts["input_ids"], lengths(texts), strict=True)]
    assert sorted(fleet.scored) == sorted(expected)
    assert (metrics["gap/mean_abs"] is None) == (count == 8)
    assert metrics["gap/empty"] == 1.0  # no token of the current version


def test_gate_completions_are_generated_with_the_images_of_prompts(engine, loop, regenerate_after):
    regenerate_after(1)
    fleet, batch, picture = ImageFleet(engine), _exact_batch(engine), Image(b"image", 1, 1)
    set_images(batch, [(picture,)] * 3 + [()] * 5)

    metrics = _gate(fleet, loop, sequences=8, warn=1e9, stop=1e9).before_update(batch)

    assert sorted(map(len, fleet.images)) == [0] * 5 + [1] * 3
    assert metrics["gap/fresh_tokens"] == 16


def test_gate_completions_with_a_placeholder_of_an_image_are_omitted(engine, loop, regenerate_after):
    regenerate_after(1)
    fleet, batch = ImageFleet(engine), _exact_batch(engine)
    gate = _gate(fleet, loop, image_token=8, sequences=8)
    set_images(batch, [(Image(b"image", 1, 1),)] * 8)

    metrics = gate.before_update(batch)

    assert len(fleet.images) == 8
    assert metrics["gap/fresh_tokens"] == 0


@pytest.mark.parametrize(("replicas", "seed"), [(2, 0), (3, 1), (4, 2)])
def test_sample_sequences_replicas_choose_different_groups(replicas, seed):
    """Sequences of a group are spread over the replicas. No replica knows the sequences of the others."""
    batch = make_batch(64, seed, lengths=(4, 100))
    groups = []
    for rank in range(replicas):
        parallel = ParallelContext(rank, replicas, dp_rank=rank, dp_size=replicas)
        groups += _sample_sequences(shard_batch(batch, parallel), 4, 0, parallel)["group_ids"].tolist()
    assert len(set(groups)) >= 4


class SleepingFleet(Fleet):
    """Servers that fail requests while they sleep, and record every call."""

    capabilities = Capabilities(checksums=True, live_checksums=True, sleeps=True)

    def __init__(self, engine, **options):
        super().__init__(engine, **options)
        self.is_sleeping, self.calls = False, []

    async def sleep(self):
        self.is_sleeping = True
        self.calls.append("sleep")
        return 0.0

    async def wake(self):
        self.is_sleeping = False
        self.calls.append("wake")

    async def score(self, input_ids, temperature=1.0, server=None):
        assert not self.is_sleeping
        self.calls.append("score")
        return await super().score(input_ids, temperature, server)

    async def agenerate(self, request):
        assert not self.is_sleeping
        self.calls.append("generate")
        return await super().agenerate(request)


def _gate_with_sleep(fleet, loop, served="float32", **settings):
    """Return a gate that is about to call `before_update`, with sleeping servers if it allows that."""
    gate = _gate(fleet, loop, served, **settings)
    gate.measurements.sharing = MemorySharing(fleet.engine, fleet, loop, 10)
    if not gate.scores_before_update():
        gate.measurements.sharing.sleep()
    return gate


@pytest.mark.parametrize(
    ("options", "served", "scores"),
    [
        ({"count": 2}, "float32", False),
        ({}, "bfloat16", False),
        ({"count": 2}, "bfloat16", True),
    ],
)
def test_gate_sleeping_servers_score_each_batch_only_as_reference(engine, loop, options, served, scores):
    fleet = SleepingFleet(engine, **options)
    _gate_with_sleep(fleet, loop, served, sequences=4).before_update(_exact_batch(engine))
    assert set(fleet.calls) == ({"score"} if scores else {"sleep"})


def test_gate_server_as_own_reference_scores_before_sleep(engine, loop):
    fleet = SleepingFleet(engine, dtype="bfloat16")
    fleet.capabilities = Capabilities(checksums=False, sleeps=True)
    engine.as_served = lambda: _rounded(engine.model)
    _gate_with_sleep(fleet, loop, "bfloat16", sequences=4).before_update(_exact_batch(engine))
    assert fleet.calls == ["score"] * 8, "each of 4 sequences twice"


def test_gate_sleeping_servers_wake_to_generate_and_sleep_again(engine, loop, regenerate_after):
    regenerate_after(1)
    fleet = SleepingFleet(engine)
    gate = _gate_with_sleep(fleet, loop, sequences=4)
    gate.before_update(_exact_batch(engine))
    assert fleet.calls == ["sleep", "wake", *["generate"] * 4, "sleep"]


def test_gate_sleeping_servers_wake_for_diagnosis(engine, loop, caplog):
    fleet, batch = SleepingFleet(engine), _exact_batch(engine, -0.1)
    gate = _gate_with_sleep(fleet, loop, sequences=4)
    batch["versions"][:] = torch.where(batch["versions"] >= 0, 1, -1).int()
    gate.before_update(batch)
    assert "servers and trainer disagree" in caplog.text
    assert fleet.calls[:3] == ["sleep", "wake", "score"]
    assert fleet.calls[-1] == "sleep"


# ---- after the commit


def test_gate_measures_offset_of_servers_and_stops_if_it_is_large(engine, loop):
    fleet = Fleet(engine)
    gate, fleet.offset = _gate(fleet, loop), 0.1
    gap = _run_step(gate, fleet)
    assert gap["gap/mean_abs"] == pytest.approx(0.1, abs=1e-5)
    assert gap["gap/max_abs"] == pytest.approx(0.1, abs=1e-5)
    fleet.offset = 3.0
    with pytest.raises(WeightUpdateError, match=r"by 3 nats .* version 3;.*Likely cause"):
        _run_step(gate, fleet)


def test_gate_supervised_sequences_are_compared_at_loss_tokens(engine, loop):
    fleet, batch = Fleet(engine), _batch()
    fleet.offset = 0.1
    batch["versions"][:] = -1
    gate = _gate(fleet, loop)
    gate.before_update(batch)
    gap = gate.after_commit()
    assert gap["gap/mean_abs"] == pytest.approx(0.1, abs=1e-5)
    assert gap["gap/empty"] == 1.0  # there are no tokens of the current version


def test_gate_prompt_tokens_are_ignored(engine, loop):
    fleet = Fleet(engine)
    gate, batch = _gate(fleet, loop, sequences=3), _batch()
    gate.before_update(batch)
    sequences = gate._scores._comparison.sequences
    generated, score = sequences["versions"] >= 0, fleet.score

    async def score_with_wrong_prompts(input_ids, temperature=1.0, server=None):
        index = (sequences["attention_mask"].sum(-1) == len(input_ids)).nonzero()[0]
        return [
            value - 5 * (not is_generated)
            for value, is_generated in zip(
                await score(input_ids, temperature, server), generated[index][0], strict=False
            )
        ]

    fleet.score = score_with_wrong_prompts
    assert gate.after_commit()["gap/max_abs"] < 1e-4


def test_gate_switched_off_reports_none(engine, loop):
    gap = _run_step(_gate(Fleet(engine), loop, sequences=0), Fleet(engine))
    assert gap.pop("gap/empty") == 0.0
    assert set(gap.values()) == {None}


def test_gate_server_and_trainer_compute_scores_concurrently(engine, loop):
    fleet = Fleet(engine)
    gate, score, forward = _gate(fleet, loop), fleet.score, engine.forward
    requested, computing = threading.Event(), threading.Event()

    async def score_while_trainer_computes(*arguments, **options):
        requested.set()
        assert await asyncio.to_thread(computing.wait, 20)
        return await score(*arguments, **options)

    def forward_after_request(*arguments):
        assert requested.wait(20)
        computing.set()
        return forward(*arguments)

    gate.before_update(_batch())
    fleet.commit()
    fleet.score, engine.forward = score_while_trainer_computes, forward_after_request
    assert gate.after_commit(fleet.receipt())["gap/mean_abs"] < 1e-5


class UnitTemperatureFleet(Fleet):
    """Servers that ignore the requested temperature and score at 1, as vLLM and SGLang do."""

    capabilities = Capabilities(checksums=False, any_score_temperature=False)

    async def score(self, input_ids, temperature=1.0, server=None):
        self.requests.append(temperature)
        return await super().score(input_ids, 1.0, server)


def test_gate_servers_that_only_score_at_temperature_1_compare_there(engine, loop):
    fleet = UnitTemperatureFleet(engine)
    gate = _gate(fleet, loop)
    batch = _batch()
    batch["temperature"] = torch.full_like(batch["temperature"], 0.6)

    gate.before_update(batch)
    metrics = gate.after_commit()

    assert {request for request in fleet.requests if isinstance(request, float)} == {1.0}
    assert metrics["gap/mean_abs"] < 1e-4
    fleet.capabilities = Capabilities(checksums=False)  # now compare at 0.6, where the servers' scores at 1 differ
    gate.before_update(batch)
    with pytest.raises(WeightUpdateError, match="temperature 1 "):
        gate.after_commit()


def test_gate_compares_in_turn_each_server_known_to_all_dp_leaders(engine, loop):
    fleet = Fleet(engine, 3)

    class Leaders(ParallelContext):
        def gather_json(self, value, replicas=False):
            return [value, value[1:], None] if value == fleet.servers else [value]

    engine.parallel = Leaders()
    gate = _gate(fleet, loop, sequences=1)
    _run_steps(gate, fleet, 4)
    assert fleet.requests == [*fleet.servers[1:], *fleet.servers[1:]]


@pytest.mark.guarantee("A failed comparison is null and counted, never 0, and stops the run if it repeats.", area="gap")
@pytest.mark.slow
def test_gate_failed_scoring_reports_none_and_stops_at_patience(engine, loop, caplog, stop_after):
    stop_after(3)
    fleet = Fleet(engine)
    gate = _gate(fleet, loop)
    for _ in range(3):
        fleet.failure = InferenceError("the single server is gone")
        for _ in range(2):
            stats = _run_step(gate, fleet)
            assert stats["gap/mean_abs"] is None
            assert stats["gap/empty"] == 2, "neither recorded log-probs nor scores could be compared"
        fleet.failure = None
        assert _run_step(gate, fleet)["gap/empty"] == 1
    assert "(consecutive failures: 1, limit: 3): the single server is gone" in caplog.text
    fleet.failure = InferenceError("the single server is gone")
    with pytest.raises(WeightUpdateError, match="consecutive failures: 3, limit: 3"):
        _run_steps(gate, fleet, 3)


def test_gate_without_live_server_reports_none(engine, loop):
    fleet = Fleet(engine)
    gate, fleet.servers = _gate(fleet, loop), []
    fleet.failure = InferenceError("no such server")
    gate.before_update(_batch())
    assert gate.after_commit()["gap/mean_abs"] is None


# ---- servers that are behind


@pytest.mark.guarantee(
    "One server of four that is one version behind is named, even at a learning rate of 1e-6.", area="gap"
)
def test_gate_one_of_four_servers_behind_is_named_at_lr_1e_6(model_path, loop, stop_after):
    stop_after(1)
    fleet = Fleet(_engine(model_path, lr=1e-6), 4, late=(2,))
    message = _run_until_error(_gate(fleet, loop), fleet, comparisons=3)
    assert "the scores of http://server-2, closer to the log-probs before the update" in message
    assert "Likely cause: weights not received" in message


@pytest.mark.nightly
def test_gate_server_falls_behind_after_excused_rounding_is_named(model_path, loop, stop_after):
    stop_after(2)
    fleet = Fleet(_engine(model_path, lr=1e-5), 2, "bfloat16")
    gate = _gate(fleet, loop, "bfloat16", sequences=8, warn=0.004)
    assert all(stats["gap/mean_abs"] > 0.004 for stats in _run_steps(gate, fleet, 12)), (
        "failed at each of 6 comparisons per server"
    )
    fleet.late = (1,)
    assert "server-1, closer to the log-probs before the update" in _run_until_error(gate, fleet, comparisons=4)


@pytest.mark.slow
def test_gate_server_behind_warns_until_patience(model_path, loop, caplog, stop_after):
    stop_after(3)
    fleet = Fleet(_engine(model_path, lr=1e-6), 1, late=(0,))
    gate = _gate(fleet, loop)
    _run_steps(gate, fleet, 3)
    assert "closer to the log-probs before the update" in caplog.text
    fleet.late = ()
    assert all(stats["gap/lag"] == 0.0 for stats in _run_steps(gate, fleet, 3))


@pytest.mark.slow
@pytest.mark.parametrize("repeats", [True, False])
def test_gate_bfloat16_server_without_updates_named_if_deterministic(model_path, loop, repeats, stop_after):
    stop_after(1)
    fleet = Fleet(_engine(model_path, lr=1e-4), 1, "bfloat16")
    fleet.skips_commits, fleet.noise = True, 0.0 if repeats else 1e-6
    fleet.engine.as_served = lambda: _rounded(fleet.engine.model)
    gate = _gate(fleet, loop, "bfloat16", warn=0.4)
    if repeats:
        assert "server-0, bitwise identical" in _run_until_error(gate, fleet, comparisons=2)
    else:
        assert all(stats["gap/lag"] is None for stats in _run_steps(gate, fleet, 6))


@pytest.mark.nightly
def test_gate_tiny_bfloat16_update_raises_no_lag_alarm(model_path, loop, stop_after):
    stop_after(1)
    fleet = Fleet(_engine(model_path, lr=1e-8), 1, "bfloat16")
    fleet.engine.as_served = lambda: _rounded(fleet.engine.model)
    gate = _gate(fleet, loop, "bfloat16", warn=0.4)
    assert not any((stats["gap/lag"] or 0.0) > LIMIT for stats in _run_steps(gate, fleet, 40))


@pytest.mark.slow
def test_gate_update_lost_to_rounding_warns_without_lag_alarm(model_path, loop, caplog, stop_after):
    stop_after(1)
    fleet = Fleet(_engine(model_path, lr=1e-60), 2, "bfloat16", late=(1,))
    gate = _gate(fleet, loop, "bfloat16", warn=0.4)
    stats = _run_steps(gate, fleet, 6)
    assert "version 3 are bitwise identical to the previous version in bfloat16" in caplog.text
    assert all(stat["gap/lag"] is None for stat in stats)


@pytest.mark.parametrize(("servers", "served", "times"), [(1, "bfloat16", 1), (2, "bfloat16", 0), (1, "float32", 0)])
def test_gate_without_lag_reference_warns_once_and_reports_none(model_path, loop, caplog, servers, served, times):
    fleet = Fleet(_engine(model_path), servers, served)
    lags = [stats["gap/lag"] for stats in _run_steps(_gate(fleet, loop, served, warn=0.4), fleet, 6)]
    assert (lags == [None] * 6) == (times == 1)
    assert caplog.text.count("the trainer computes in float32, and there is no second server") == times


# ---- ranks


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_gate_dp_leader_shares_scores_with_other_ranks(model_path, loop, dtype):
    fleets = [Fleet(_engine(model_path), 2, dtype) for _ in range(2)]

    def work(rank):
        fleet = fleets[rank.rank]
        fleet.engine.parallel = rank
        fleet.engine.as_served = lambda: _rounded(fleet.engine.model)
        return _run_steps(_gate(fleet, loop, dtype, sequences=3), fleet, 4)[-1]

    first, second = on_ranks(2, work)
    assert first == second
    assert first["gap/mean_abs"] is not None
    assert [bool(fleet.requests) for fleet in fleets] == [True, False]


def test_gate_dp_leader_loop_dies_every_rank_reports_none(model_path, stop_after, regenerate_after):
    stop_after(2)
    regenerate_after(1)
    fleets, loops = [Fleet(_engine(model_path), 2) for _ in range(2)], [LoopThread("dies"), LoopThread("unused")]

    def work(rank):
        fleet, loop = fleets[rank.rank], loops[rank.rank]
        fleet.engine.parallel, gate = rank, _gate(fleet, loop, sequences=3)
        if rank.is_dp_leader:
            loop.close()
        metrics = [_run_step(gate, fleet)]
        with pytest.raises(WeightUpdateError, match="consecutive failures: 2, limit: 2"):
            _run_step(gate, fleet)
        return metrics

    first, second = on_ranks(2, work)
    assert first == second
    assert first[0]["gap/mean_abs"] is None
    assert first[0]["gap/empty"] == 2
