"""The gap gate on the reference engine, with servers that hold copies of its weights. Faults of real servers:
tests/end_to_end/test_gap_faults.py of the workspace."""

import asyncio
import contextlib
import copy
import logging
import threading

import pytest
import torch
from policy_toys import on_ranks

from rl_contracts.batch.parallel import ParallelContext
from rl_contracts.batch.redistribution import shard_batch
from rl_contracts.config import OptimizerConfig
from rl_contracts.data import FinetuneSpec, WeightReceipt
from rl_contracts.errors import InferenceError, WeightUpdateError
from rl_contracts.inference import Capabilities
from rl_contracts.runtime.aio import LoopThread
from rl_contracts.testing import ReferenceTrainEngine
from rl_contracts.testing.batches import make_batch
from rl_contracts.testing.models import make_tiny_model
from rl_contracts.weights import checksum
from rl_trainers import GapConfig, GapGate, MemorySharing
from rl_trainers.weight_sync.gap.gate import Alarm, _sample_sequences
from rl_trainers.weight_sync.gap.lag import LIMIT


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
    """A client of servers that compute with their own weights in `dtype`, by another kernel than the trainer's.

    Args:
        late: numbers of those that serve, from now on, what they should have served one commit before.
    """

    capabilities = Capabilities(checksums=False)

    def __init__(self, engine, count=1, dtype="float32", late=()):
        self.engine, self.late, self.dtype = engine, late, getattr(torch, dtype)
        self.servers = [f"http://server-{i}" for i in range(count)]
        self.model = copy.deepcopy(engine.model).to(self.dtype).eval()
        self.model.set_attn_implementation("eager")
        self.offset, self.failure = 0.0, None
        self.stays, self.noise = False, 0.0
        self.asked = []
        self.held = dict.fromkeys(self.servers, self._weights())
        self.newest = self._weights()

    def _weights(self):
        return [parameter.detach().to(self.dtype, copy=True) for parameter in self.engine.model.parameters()]

    def commit(self):
        before, self.newest = self.newest, self._weights()
        for number, server in enumerate([] if self.stays else self.servers):
            self.held[server] = before if number in self.late else self.newest

    def receipt(self):
        """The trainer's."""
        names = (name for name, _ in self.engine.model.named_parameters())
        sums = {name: checksum(value) for name, value in zip(names, self.newest, strict=True)}
        return WeightReceipt("trainer", self.engine.version, sums)

    async def score(self, input_ids, temperature=1.0, server=None):
        self.asked.append(server)
        if self.failure is not None:
            raise self.failure
        for parameter, value in zip(self.model.parameters(), self.held[server or self.servers[0]], strict=True):
            parameter.data.copy_(value)
        ids = torch.tensor(input_ids)
        with torch.no_grad():
            logits = self.model(input_ids=ids[None]).logits[0, :-1].float() / temperature
        logprobs = torch.log_softmax(logits, -1).gather(1, ids[1:, None])[:, 0]
        return [0.0, *(logprobs + self.offset + self.noise * torch.randn(len(logprobs))).tolist()]

    async def score_previous_weights(self, input_ids, temperature=1.0):
        raise InferenceError("these servers keep no older weights")

    async def live_receipts(self, server=None):
        raise InferenceError("these servers have no checksums")

    async def agenerate(self, request):
        raise InferenceError("these servers only score")


def _batch(seed=0, rows=8):
    """Rows without a fresh token, where the trainer's version is above 0."""
    return shard_batch(make_batch(rows, seed, lengths=(16, 24)), ReferenceTrainEngine().parallel)


def _loss(outputs, packed):
    return -(outputs.logprobs * packed["advantages"]).sum(), {}


@contextlib.contextmanager
def _rounded(model):
    """`TrainEngine.as_served` of the reference engine's model, served in bfloat16."""
    kept = copy.deepcopy(model.state_dict())
    model.to(torch.bfloat16).to(torch.float32)
    yield
    model.load_state_dict(kept)


def _step(gate, fleet, seed=0):
    """What a run does in one step."""
    engine, batch = fleet.engine, _batch(seed)
    figures = gate.before_update(batch)
    engine.train_batch(batch, _loss, lambda rows: rows["loss_mask"].sum())
    engine.version += 1
    fleet.commit()
    return figures | gate.after_commit(fleet.receipt())


def _gate(fleet, loop, served="float32", **settings):
    fleet.engine.version = 1
    return GapGate(fleet.engine, fleet, loop, GapConfig(answer_every=0, **settings), served=served, trained="float32")


def _until_named(gate, fleet, looks):
    """Steps until the gate stops the run, at most so many looks at each server; what it says."""
    with pytest.raises(WeightUpdateError) as caught:
        _steps(gate, fleet, looks * len(fleet.servers))
    return str(caught.value)


def _steps(gate, fleet, count):
    return [_step(gate, fleet, seed) for seed in range(count)]


# ---- alarms


def _judge(alarm, off, excused=False):
    if alarm.count(off):
        alarm.warn("a fault", excused)


def test_alarm_warns_seldom_and_stops_at_patience(caplog):
    alarm = Alarm(patience=7)
    with caplog.at_level(logging.WARNING, logger="rl"):
        for _ in range(6):
            _judge(alarm, True)
        assert len(caplog.records) == 3, "at 1, 2 and 4"
        with pytest.raises(WeightUpdateError, match="a fault"):
            _judge(alarm, True)


def test_alarm_one_good_comparison_begins_the_count_anew():
    alarm = Alarm(patience=2)
    for _ in range(5):
        _judge(alarm, True)
        _judge(alarm, False)
    assert alarm.in_row == 0


def test_alarm_too_much_stops_at_once():
    alarm = Alarm(patience=5)
    assert alarm.count(True, too_much=True)
    with pytest.raises(WeightUpdateError):
        alarm.warn("far off", excused=True)


def test_alarm_what_is_excused_never_stops_by_patience_and_is_not_examined_at_every_step():
    alarm, examined = Alarm(patience=3), 0
    for _ in range(64):
        if alarm.count(True):
            examined += 1
            alarm.warn("rounding", excused=True)
    assert examined == 7, "at 1, 2, 4, ..., 64"


def test_alarm_a_fault_after_what_was_excused_counts_as_the_first(caplog):
    alarm = Alarm(patience=3)
    for number in range(1, 33):
        _judge(alarm, True, excused=number < 32)
    assert caplog.text.count("a fault") == 6, "warned of, at 1, 2, 4, ..., 32"
    _judge(alarm, True)
    with pytest.raises(WeightUpdateError):
        _judge(alarm, True)


def test_alarm_what_is_certain_is_counted_anew_after_what_was_excused():
    alarm = Alarm(patience=3)
    for _ in range(33):
        _judge(alarm, True, excused=True)
    for _ in range(2):
        assert alarm.count(True, certain=True)
        alarm.warn("a server is behind")
    assert alarm.count(True, certain=True)
    with pytest.raises(WeightUpdateError, match="a server is behind"):
        alarm.warn("a server is behind")


# ---- before the update


def _exact_batch(engine, offset=0.0):
    """Rows whose recorded log-probs are the engine's own, off by a constant."""
    batch = _batch()
    ours = engine.forward(batch, lambda outputs, _: outputs.logprobs) + offset
    batch["logprobs"] = torch.where(batch["versions"] >= 0, ours, 0.0)
    return batch


def test_gate_fresh_tokens_are_compared_before_the_update_on_rows_that_have_some(engine, loop):
    batch, gate = _exact_batch(engine, -0.125), _gate(Fleet(engine), loop, rows=4, warn=1.0, stop=1.0)
    fresh = [1, 3, 6, 7]
    batch["versions"][fresh] = torch.where(batch["versions"][fresh] >= 0, 1, -1).int()
    stats = gate.before_update(batch)
    assert stats["gap/fresh_mean_abs"] == pytest.approx(0.125, abs=1e-5)
    assert stats["gap/fresh_max_abs"] == pytest.approx(0.125, abs=1e-5)
    assert stats["gap/fresh_k3"] > 0
    assert stats["gap/fresh_tokens"] == float((batch["versions"][fresh] >= 0).sum())


def test_gate_batch_without_fresh_tokens_gives_null_and_a_count_of_zero(engine, loop):
    stats = _gate(Fleet(engine), loop).before_update(_exact_batch(engine))
    assert stats.pop("gap/fresh_tokens") == 0.0
    assert set(stats.values()) == {None}


def test_gate_takes_rows_of_as_many_groups_as_there_are(engine, loop):
    fleet = Fleet(engine)
    gate, batch = _gate(fleet, loop, rows=4), _batch(rows=16)
    gate.before_update(batch)
    assert sorted(gate._look.rows["group_ids"].tolist()) == [0, 1, 2, 3]


@pytest.mark.parametrize("replicas", [2, 3, 4])
@pytest.mark.parametrize("seed", range(5))
def test_gate_replicas_take_rows_of_different_groups(replicas, seed):
    """Rows of a group are spread over the replicas, which know nothing of each other's."""
    batch = make_batch(64, seed, lengths=(4, 100))
    taken = []
    for rank in range(replicas):
        parallel = ParallelContext(rank, replicas, dp_rank=rank, dp_size=replicas)
        taken += _sample_sequences(shard_batch(batch, parallel), 4, 0, parallel)["group_ids"].tolist()
    assert len(set(taken)) >= 4


class Sleeper(Fleet):
    """Servers that answer nothing while they sleep, and tell when they were asked, woken and put to sleep."""

    capabilities = Capabilities(checksums=True, live_checksums=True, sleeps=True)

    def __init__(self, engine, **options):
        super().__init__(engine, **options)
        self.asleep, self.told = False, []

    async def sleep(self):
        self.asleep = True
        self.told.append("sleep")
        return 0.0

    async def wake(self):
        self.asleep = False
        self.told.append("wake")

    async def score(self, input_ids, temperature=1.0, server=None):
        assert not self.asleep
        self.told.append("score")
        return await super().score(input_ids, temperature, server)

    async def agenerate(self, request):
        assert not self.asleep
        self.told.append("answer")
        return await super().agenerate(request)


def _sleeping(fleet, loop, served="float32", **settings):
    """A gate before its update, and how the loop came there; what was told of the servers."""
    gate = _gate(fleet, loop, served, **settings)
    gate.sharing = MemorySharing(fleet.engine, fleet, loop, 10)
    if not gate.scores_before_update():
        gate.sharing.sleep()
    return gate


@pytest.mark.parametrize(
    ("options", "served", "asks"),
    [
        ({}, "float32", False),
        ({"count": 2}, "float32", False),
        ({}, "bfloat16", False),
        ({"count": 2}, "bfloat16", True),
    ],
)
def test_gate_sleeping_servers_are_asked_of_each_batch_only_where_they_are_the_reference(
    engine, loop, options, served, asks
):
    fleet = Sleeper(engine, **options)
    _sleeping(fleet, loop, served, rows=4).before_update(_exact_batch(engine))
    assert set(fleet.told) == ({"score"} if asks else {"sleep"})


def test_gate_server_that_is_its_own_reference_is_asked_before_it_sleeps(engine, loop):
    fleet = Sleeper(engine, dtype="bfloat16")
    fleet.capabilities = Capabilities(checksums=False, sleeps=True)
    engine.as_served = lambda: _rounded(engine.model)
    _sleeping(fleet, loop, "bfloat16", rows=4).before_update(_exact_batch(engine))
    assert fleet.told == ["score"] * 8, "twice of each row"


def test_gate_sleeping_servers_are_woken_to_answer_and_sleep_again(engine, loop):
    fleet = Sleeper(engine)
    gate = _sleeping(fleet, loop, rows=4)
    gate.config.answer_every = 1
    gate.before_update(_exact_batch(engine))
    assert fleet.told == ["sleep", "wake", *["answer"] * 4, "sleep"]


def test_gate_sleeping_servers_are_woken_where_something_is_off(engine, loop, caplog):
    fleet, batch = Sleeper(engine), _exact_batch(engine, -0.1)
    gate = _sleeping(fleet, loop, rows=4)
    batch["versions"][:] = torch.where(batch["versions"] >= 0, 1, -1).int()
    gate.before_update(batch)
    assert "servers and trainer disagree" in caplog.text
    assert fleet.told[:3] == ["sleep", "wake", "score"]
    assert fleet.told[-1] == "sleep"


# ---- after the commit


@pytest.mark.parametrize("offset", [0.0, 0.1])
def test_gate_measures_what_the_servers_are_off_by(engine, loop, offset):
    fleet = Fleet(engine)
    fleet.offset = offset
    gap = _step(_gate(fleet, loop), fleet)
    assert gap["gap/mean_abs"] == pytest.approx(offset, abs=1e-5)
    assert gap["gap/max_abs"] == pytest.approx(offset, abs=1e-5)


@pytest.mark.parametrize("offset", [0.0, 0.1])
def test_gate_rows_that_nobody_sampled_are_compared_at_the_tokens_that_are_learned(engine, loop, offset):
    fleet, batch = Fleet(engine), _batch()
    fleet.offset = offset
    batch["versions"][:] = -1
    gate = _gate(fleet, loop)
    gate.before_update(batch)
    gap = gate.after_commit()
    assert gap["gap/mean_abs"] == pytest.approx(offset, abs=1e-5)
    assert gap["gap/empty"] == 1.0  # there are no fresh tokens


def test_gate_prompt_tokens_do_not_count(engine, loop):
    fleet = Fleet(engine)
    gate, batch = _gate(fleet, loop, rows=3), _batch()
    gate.before_update(batch)
    rows = gate._look.rows
    generated, score = rows["versions"] >= 0, fleet.score

    async def wrong_prompts(input_ids, temperature=1.0, server=None):
        row = (rows["attention_mask"].sum(-1) == len(input_ids)).nonzero()[0]
        return [
            value - 5 * (not counts)
            for value, counts in zip(await score(input_ids, temperature, server), generated[row][0], strict=False)
        ]

    fleet.score = wrong_prompts
    assert gate.after_commit()["gap/max_abs"] < 1e-4


def test_gate_servers_that_compute_something_else_stop_the_run(engine, loop):
    fleet = Fleet(engine)
    fleet.offset = 3.0
    with pytest.raises(WeightUpdateError, match=r"disagree.*differ by 3 nats on average.*at version 2.*Likely cause"):
        _step(_gate(fleet, loop), fleet)


def test_gate_switched_off_is_null_not_zero(engine, loop):
    gap = _step(_gate(Fleet(engine), loop, rows=0), Fleet(engine))
    assert gap.pop("gap/empty") == 0.0
    assert set(gap.values()) == {None}


def test_gate_server_computes_its_scores_while_the_trainer_computes_its_own(engine, loop):
    fleet = Fleet(engine)
    gate, score, forward = _gate(fleet, loop), fleet.score, engine.forward
    asked, computes = threading.Event(), threading.Event()

    async def scored_while_the_trainer_computes(*arguments, **options):
        asked.set()
        assert await asyncio.to_thread(computes.wait, 20)
        return await score(*arguments, **options)

    def forward_once_the_server_was_asked(*arguments):
        assert asked.wait(20)
        computes.set()
        return forward(*arguments)

    gate.before_update(_batch())
    fleet.commit()
    fleet.score, engine.forward = scored_while_the_trainer_computes, forward_once_the_server_was_asked
    assert gate.after_commit(fleet.receipt())["gap/mean_abs"] < 1e-5


class AtOneOnly(Fleet):
    """Servers that score at temperature 1 whatever they are told, as vLLM and SGLang do."""

    capabilities = Capabilities(checksums=False, any_score_temperature=False)

    async def score(self, input_ids, temperature=1.0, server=None):
        self.asked.append(temperature)
        return await super().score(input_ids, 1.0, server)


def test_gate_servers_that_score_at_temperature_1_alone_are_compared_there(engine, loop):
    fleet = AtOneOnly(engine)
    gate = _gate(fleet, loop)
    batch = _batch()
    batch["temperature"] = torch.full_like(batch["temperature"], 0.6)

    gate.before_update(batch)
    figures = gate.after_commit()

    assert {asked for asked in fleet.asked if isinstance(asked, float)} == {1.0}
    assert figures["gap/mean_abs"] < 1e-4
    fleet.capabilities = Capabilities(checksums=False)  # were it asked at the rows' own, the difference would be seen
    gate.before_update(batch)
    with pytest.raises(WeightUpdateError, match="temperature 1 "):
        gate.after_commit()


def test_gate_looks_at_each_server_in_turn(engine, loop):
    fleet = Fleet(engine, 3)
    gate = _gate(fleet, loop, rows=1)
    _steps(gate, fleet, 6)
    assert fleet.asked == [*fleet.servers, *fleet.servers]


def test_gate_server_that_another_head_does_not_know_yet_is_not_looked_at(engine, loop):
    fleet = Fleet(engine, 3)

    class Heads(ParallelContext):
        def gather_json(self, value, replicas=False):
            return [value, value[1:], None] if value == fleet.servers else [value]

    engine.parallel = Heads()
    gate = _gate(fleet, loop, rows=1)
    _steps(gate, fleet, 4)
    assert fleet.asked == [*fleet.servers[1:], *fleet.servers[1:]]


@pytest.mark.slow
def test_gate_check_that_cannot_be_made_is_null_and_counted_and_stops_the_run_only_when_it_repeats(
    engine, loop, caplog
):
    fleet = Fleet(engine)
    gate = _gate(fleet, loop, patience=3)
    for _ in range(3):
        fleet.failure = InferenceError("the only server is gone")
        for _ in range(2):
            stats = _step(gate, fleet)
            assert stats["gap/mean_abs"] is None
            assert stats["gap/empty"] == 2, "no fresh token either"
        fleet.failure = None
        assert _step(gate, fleet)["gap/empty"] == 1
    assert "could not be compared (1 times in a row, the run stops at 3): the only server is gone" in caplog.text
    fleet.failure = InferenceError("the only server is gone")
    with pytest.raises(WeightUpdateError, match="3 times in a row"):
        _steps(gate, fleet, 3)


def test_gate_without_a_live_server_cannot_compare(engine, loop):
    fleet = Fleet(engine)
    gate, fleet.servers = _gate(fleet, loop), []
    fleet.failure = InferenceError("no such server")
    gate.before_update(_batch())
    assert gate.after_commit()["gap/mean_abs"] is None


# ---- servers that are behind


@pytest.mark.parametrize("number", [2, *(pytest.param(number, marks=pytest.mark.nightly) for number in (0, 1, 3))])
def test_gate_one_of_four_servers_behind_is_named_within_three_looks_at_lr_1e_6(model_path, loop, number):
    fleet = Fleet(_engine(model_path, lr=1e-6), 4, late=(number,))
    message = _until_named(_gate(fleet, loop, patience=1), fleet, looks=3)
    assert f"the scores of http://server-{number}, nearer to those before the update" in message
    assert "Likely cause: weights not received" in message


@pytest.mark.slow
@pytest.mark.parametrize(("count", "number"), [(1, 0), (2, 1)])
def test_gate_all_or_one_of_two_servers_behind_are_named_at_lr_1e_6(model_path, loop, count, number):
    fleet = Fleet(_engine(model_path, lr=1e-6), count, late=(number,))
    assert f"server-{number}, nearer to" in _until_named(_gate(fleet, loop, patience=1), fleet, looks=3)


@pytest.mark.slow
@pytest.mark.parametrize("number", [2, *(pytest.param(number, marks=pytest.mark.nightly) for number in (0, 1, 3))])
def test_gate_one_of_four_bfloat16_servers_behind_is_named_by_its_peers_at_lr_1e_6(model_path, loop, number):
    fleet = Fleet(_engine(model_path, lr=1e-6), 4, "bfloat16", late=(number,))
    gate = _gate(fleet, loop, "bfloat16", patience=1, warn=0.4)
    message = _until_named(gate, fleet, looks=20)
    assert f"the scores of http://server-{number}, nearer to those before the update" in message


@pytest.mark.nightly
def test_gate_server_that_falls_behind_is_named_although_rounding_was_excused_before(model_path, loop):
    fleet = Fleet(_engine(model_path, lr=1e-5), 2, "bfloat16")
    gate = _gate(fleet, loop, "bfloat16", rows=8, patience=2, warn=0.004)
    assert all(stats["gap/mean_abs"] > 0.004 for stats in _steps(gate, fleet, 12)), "off at each of 6 looks"
    fleet.late = (1,)
    assert "server-1, nearer to those before the update" in _until_named(gate, fleet, looks=4)


@pytest.mark.slow
def test_gate_server_that_is_behind_is_only_warned_of_until_patience_is_over(model_path, loop, caplog):
    fleet = Fleet(_engine(model_path, lr=1e-6), 1, late=(0,))
    gate = _gate(fleet, loop, patience=3)
    _steps(gate, fleet, 3)
    assert "nearer to those before the update" in caplog.text
    fleet.late = ()
    assert all(stats["gap/lag"] == 0.0 for stats in _steps(gate, fleet, 3))


@pytest.mark.slow
@pytest.mark.parametrize("repeats", [True, False])
def test_gate_bfloat16_server_that_stays_is_named_if_it_repeats_its_scores_to_the_last_bit(model_path, loop, repeats):
    fleet = Fleet(_engine(model_path, lr=1e-4), 1, "bfloat16")
    fleet.stays, fleet.noise = True, 0.0 if repeats else 1e-6
    fleet.engine.as_served = lambda: _rounded(fleet.engine.model)
    gate = _gate(fleet, loop, "bfloat16", patience=1, warn=0.4)
    if repeats:
        assert "server-0, to the last bit its own before the update" in _until_named(gate, fleet, looks=2)
    else:
        assert all(stats["gap/lag"] is None for stats in _steps(gate, fleet, 6))


@pytest.mark.nightly
@pytest.mark.parametrize("lr", [1e-60, 1e-9, 1e-8])
def test_gate_update_that_bfloat16_hardly_resolves_accuses_no_server_that_has_it(model_path, loop, lr):
    fleet = Fleet(_engine(model_path, lr=lr), 1, "bfloat16")
    fleet.engine.as_served = lambda: _rounded(fleet.engine.model)
    gate = _gate(fleet, loop, "bfloat16", patience=1, warn=0.4)
    assert not any((stats["gap/lag"] or 0.0) > LIMIT for stats in _steps(gate, fleet, 40))


@pytest.mark.slow
def test_gate_weights_that_rounding_leaves_as_they_were_are_said_and_accuse_nobody(model_path, loop, caplog):
    fleet = Fleet(_engine(model_path, lr=1e-60), 2, "bfloat16", late=(1,))
    gate = _gate(fleet, loop, "bfloat16", patience=1, warn=0.4)
    stats = _steps(gate, fleet, 6)
    assert "version 3 is the one before to the last bit, as it is served in bfloat16" in caplog.text
    assert all(stat["gap/lag"] is None for stat in stats)


@pytest.mark.slow
def test_gate_trainer_in_float32_is_no_judge_of_versions_that_bfloat16_servers_hold(model_path, loop):
    engine = _engine(model_path, lr=1e-5)
    for parameter in engine.model.parameters():  # as loaded from a bfloat16 checkpoint: rounding swallows the updates
        parameter.data = parameter.data.bfloat16().float()
    gate = _gate(Fleet(engine, 1, "bfloat16"), loop, "bfloat16", warn=0.4)
    assert all(stats["gap/lag"] is None for stats in _steps(gate, gate.inference, 12))


@pytest.mark.parametrize(("servers", "served", "times"), [(1, "bfloat16", 1), (2, "bfloat16", 0), (1, "float32", 0)])
def test_gate_without_a_reference_for_what_a_server_holds_says_so_once(
    model_path, loop, caplog, servers, served, times
):
    fleet = Fleet(_engine(model_path), servers, served)
    _steps(_gate(fleet, loop, served, warn=0.4), fleet, 3)
    assert caplog.text.count("a trainer in float32 is no reference") == times


# ---- ranks


def _steps_on_two_ranks(model_path, loop, count, fail=False, dtype="float32"):
    """The figures of the last step on each of two ranks of one replica, and which of them asked a server."""
    fleets = [Fleet(_engine(model_path), 2, dtype) for _ in range(2)]

    def work(rank):
        fleet = fleets[rank.rank]
        fleet.engine.parallel = rank
        fleet.failure = InferenceError("evicted") if fail and rank.is_dp_leader else None
        fleet.engine.as_served = lambda: _rounded(fleet.engine.model)
        return _steps(_gate(fleet, loop, dtype, rows=3), fleet, count)[-1]

    return on_ranks(2, work), [bool(fleet.asked) for fleet in fleets]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_gate_head_of_a_replica_asks_and_tells_its_other_ranks(model_path, loop, dtype):
    (first, second), asked = _steps_on_two_ranks(model_path, loop, 4, dtype=dtype)
    assert first == second
    assert first["gap/mean_abs"] is not None
    assert asked == [True, False]


def test_gate_what_the_head_cannot_ask_is_missing_on_every_rank(model_path, loop):
    (first, second), _ = _steps_on_two_ranks(model_path, loop, 1, fail=True)
    assert first == second
    assert first["gap/mean_abs"] is None


def test_gate_loop_of_the_head_that_died_is_missing_on_every_rank_at_once(model_path):
    fleets, loops = [Fleet(_engine(model_path), 2) for _ in range(2)], [LoopThread("dies"), LoopThread("unused")]

    def work(rank):
        fleet, loop = fleets[rank.rank], loops[rank.rank]
        fleet.engine.parallel, gate = rank, _gate(fleet, loop, rows=3, patience=2)
        gate.config.answer_every = 1
        if rank.is_dp_leader:
            loop.close()
        figures = [_step(gate, fleet)]
        with pytest.raises(WeightUpdateError, match="2 times in a row"):
            _step(gate, fleet)
        return figures

    first, second = on_ranks(2, work)
    assert first == second
    assert first[0]["gap/mean_abs"] is None
    assert first[0]["gap/empty"] == 2
