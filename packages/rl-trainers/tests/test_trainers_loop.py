"""The training loop, for reinforcement and supervised learning, with its run log."""

import json
import math
import time
from contextlib import nullcontext

import pytest

from rl_contracts.batch.image_entries import images_of, set_images
from rl_contracts.batch.redistribution import shard_batch
from rl_contracts.batch.trajectory import load_batch
from rl_contracts.chat.rendering import ChatRenderer
from rl_contracts.config import OptimizerConfig
from rl_contracts.data import FinetuneSpec
from rl_contracts.errors import DataError, EngineError, InferenceError, RewardError, StalledError
from rl_contracts.images import Image
from rl_contracts.inference import Capabilities
from rl_contracts.runtime.aio import LoopThread
from rl_contracts.runtime.metrics import Metrics, record
from rl_contracts.testing import NullInferenceEngine, ReferenceTrainEngine
from rl_contracts.testing.batches import make_batch
from rl_contracts.testing.models import make_tiny_model, make_tiny_tokenizer
from rl_trainers import (
    CheckpointConfig,
    DataSource,
    LossEvaluation,
    LossLearner,
    MemorySharing,
    PolicyActor,
    RunLog,
    ServerSync,
    train,
)
from rl_trainers.algorithms.config import AlgorithmConfig, LossConfig
from rl_trainers.learners.supervised import shard_sequences, supervised_sequences

ROWS = [
    {"messages": [{"role": "user", "content": f"{i}+1="}, {"role": "assistant", "content": str(i + 1)}]}
    for i in range(8)
]


@pytest.fixture
def engine(tmp_path):
    engine = ReferenceTrainEngine()
    engine.initialize(
        FinetuneSpec(
            str(make_tiny_model(tmp_path / "model", layers=1, hidden=32)), 10, optimizer=OptimizerConfig(lr=3e-3)
        )
    )
    yield engine
    engine.destroy()


def _records(path):
    return [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]


class _Batches:
    """A source of `count` random batches, the last of which has `last` sequences."""

    def __init__(self, engine, count, last=6, minibatches=1):
        self.engine, self.count, self.last, self.minibatches, self.ended = engine, count, last, minibatches, []

    def next_batch(self):
        if len(self.ended) == self.count:
            raise StopIteration
        rows = self.last if len(self.ended) == self.count - 1 else 6
        batch = make_batch(rows, seed=len(self.ended)).exclude("advantages")
        return shard_batch(batch, self.engine.parallel, self.minibatches)

    def end_step(self, version):
        self.ended.append(version)


def test_train_reinforcement_steps_write_records_checkpoints_and_batches(engine, tmp_path):
    source = _Batches(engine, 5)
    run_log = RunLog(engine, tmp_path / "run", CheckpointConfig(every=2, save_batches=True))
    train(source, PolicyActor(engine, AlgorithmConfig()), run_log, total_steps=3)
    records = _records(tmp_path / "run")
    assert [r["step"] for r in records] == [1, 2, 3]
    assert source.ended == [1, 2, 3]
    for name in ("reward/mean", "staleness/max", "loss/policy", "grad_norm", "time/step", "entropy/mean"):
        assert records[-1][name] is not None
    assert sorted(p.name for p in (tmp_path / "run" / "checkpoints").iterdir()) == ["step_2", "step_3"]
    events = json.loads((tmp_path / "run" / "trace.json").read_text())["traceEvents"]
    assert {"rollout_wait", "train", "save"} <= {event["name"] for event in events}
    saved = load_batch(tmp_path / "run" / "batches" / "step_2-version_1.safetensors")
    assert len(saved) == 6
    assert "advantages" not in saved


def test_saved_batch_keeps_images_of_sequences(engine, tmp_path):
    batch = shard_batch(make_batch(4), engine.parallel)
    red, blue = Image(b"red", 2, 3), Image(b"blue", 4, 5)
    rows = [(red, blue), (), (red,), (blue,)]
    set_images(batch, rows)
    run_log = RunLog(engine, tmp_path, CheckpointConfig(every=0, save_batches=True))

    run_log.finish_step(1, batch, {}, 0, 1)

    [file] = (tmp_path / "batches").iterdir()
    assert images_of(load_batch(file)) == rows


def test_train_writes_outcomes_of_prompts_with_their_step(engine, tmp_path):
    outcomes_of_steps = iter(
        [[{"prompt_id": 3, "outcome": "trained"}, {"prompt_id": 1, "outcome": "failed"}], [], [{"prompt_id": 2}]]
    )
    run_log = RunLog(engine, tmp_path, CheckpointConfig(every=0), outcomes=lambda: next(outcomes_of_steps))
    train(_Batches(engine, 2), PolicyActor(engine, AlgorithmConfig()), run_log, total_steps=9)
    lines = [json.loads(line) for line in (tmp_path / "groups.jsonl").read_text().splitlines()]
    assert lines == [
        {"step": 1, "prompt_id": 3, "outcome": "trained"},
        {"step": 1, "prompt_id": 1, "outcome": "failed"},
        {"step": 3, "prompt_id": 2},  # read after the last step
    ]


def test_train_error_writes_failed_prompts(engine, tmp_path):
    class Failing(_Batches):
        def next_batch(self):
            if self.ended:
                raise RewardError("too many groups failed")
            return super().next_batch()

    outcomes_of_steps = iter(
        [[], [{"prompt_id": 4, "outcome": "trained"}, {"prompt_id": 5, "outcome": "failed", "reason": "reward"}]]
    )
    run_log = RunLog(engine, tmp_path, CheckpointConfig(every=0), outcomes=lambda: next(outcomes_of_steps))
    with pytest.raises(RewardError, match="too many"):
        train(Failing(engine, 9), PolicyActor(engine, AlgorithmConfig()), run_log, total_steps=9)
    lines = [json.loads(line) for line in (tmp_path / "groups.jsonl").read_text().splitlines()]
    # no step trained on prompt 4
    assert lines == [{"step": 2, "prompt_id": 5, "outcome": "failed", "reason": "reward"}]


def test_train_error_is_raised_even_if_outcomes_cannot_be_written(engine, tmp_path):
    class Failing(_Batches):
        def next_batch(self):
            (tmp_path / "groups.jsonl").mkdir()
            raise RewardError("too many groups failed")

    run_log = RunLog(engine, tmp_path, CheckpointConfig(every=0), outcomes=lambda: [{"outcome": "failed"}])
    with pytest.raises(RewardError, match="too many"):
        train(Failing(engine, 9), PolicyActor(engine, AlgorithmConfig()), run_log, total_steps=9)


def test_train_stall_does_not_read_outcomes(engine, tmp_path):
    class Stalled(_Batches):
        def next_batch(self):
            raise StalledError("nothing moved")

    def read_outcomes():
        raise AssertionError("outcomes were read")

    run_log = RunLog(engine, tmp_path, CheckpointConfig(every=0), outcomes=read_outcomes)
    with pytest.raises(StalledError, match="nothing moved"):
        train(Stalled(engine, 9), PolicyActor(engine, AlgorithmConfig()), run_log, total_steps=9)


def test_run_log_with_unwritten_records_saves_no_state(engine, tmp_path):
    run_log = RunLog(engine, tmp_path, CheckpointConfig(every=0))
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left on device"):  # the last record must be written
        train(_Batches(engine, 2), PolicyActor(engine, AlgorithmConfig()), run_log, total_steps=1)
    with pytest.raises(OSError, match="No space left on device"):
        run_log.state_dict()
    (tmp_path / "metrics.jsonl").unlink()
    assert run_log.state_dict()["step"] == 1
    assert [record["step"] for record in _records(tmp_path)] == [1]


def recording_loss(terms):
    """A policy loss that records metrics of its tokens."""
    record("advantage/positive", terms.advantages > 0, weight=terms.trained)
    record("advantage/largest", terms.advantages, weight=terms.trained, kind="max")
    record("grad_norm", 1.0)  # a name that the run log uses itself
    return -terms.ratio * terms.advantages, {}


class _Recording:
    """An evaluation that records metrics, as the episodes of a workflow do."""

    def __call__(self, step):
        record("turns", step)
        record("turns", step + 2, weight=3)
        return {"eval/reward": 0.5}


def test_train_recorded_metrics_are_written_with_correct_denominators(engine, tmp_path, caplog):
    source, batches = _Batches(engine, 2), []
    take_batch = source.next_batch
    source.next_batch = lambda: batches.append(take_batch()) or batches[-1]
    rollouts = Metrics()
    rollouts.add("turns", 7.0)
    run_log = RunLog(
        engine,
        tmp_path / "run",
        CheckpointConfig(),
        evaluations=[_Recording()],
        evaluate_every=2,
        counters=rollouts.drain,
    )
    algorithm = AlgorithmConfig(loss=LossConfig(f"{__name__}:recording_loss"))
    train(source, PolicyActor(engine, algorithm), run_log, total_steps=2)

    before, first, second = _records(tmp_path / "run")
    for line, batch in ((first, batches[0]), (second, batches[1])):
        trained = batch["advantages"][batch["loss_mask"]]
        assert line["advantage/positive"] == pytest.approx((trained > 0).double().mean().item())
        assert line["advantage/largest"] == pytest.approx(trained.max().item())
    assert (first["turns"], second["turns"]) == (7.0, None)
    assert (before["eval/turns"], second["eval/turns"]) == (1.5, 3.5)
    assert "turns" not in before
    assert "eval/turns" not in first
    assert first["grad_norm"] != 1.0
    assert caplog.text.count("['grad_norm']") == 1


def test_train_records_have_timestamp_and_mark_evaluations(engine, tmp_path):
    run_log = RunLog(engine, tmp_path / "run", CheckpointConfig(), evaluations=[_Recording()], evaluate_every=2)
    before = time.time()
    train(_Batches(engine, 3), PolicyActor(engine, AlgorithmConfig()), run_log, total_steps=3)
    records, after = _records(tmp_path / "run"), time.time()
    assert [(r["step"], r.get("evaluation"), "sequences" in r) for r in records] == [
        (0, True, False),
        (1, None, True),
        (2, None, True),  # also has the evaluation at the end of the step
        (3, None, True),
        (3, True, False),
    ]
    times = [record["timestamp"] for record in records]
    assert [before, *times, after] == sorted([before, *times, after])


def test_train_without_steps_evaluates_once_and_saves_no_model(engine, tmp_path):
    run_log = RunLog(engine, tmp_path / "run", CheckpointConfig(), evaluations=[_Recording()])
    train(_Batches(engine, 3), PolicyActor(engine, AlgorithmConfig()), run_log, total_steps=0)
    assert [(r["step"], r["evaluation"]) for r in _records(tmp_path / "run")] == [(0, True)]
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_train_shows_stages_of_first_step_and_of_evaluations(engine, tmp_path, monkeypatch):
    stages = []

    def show(file, stage):
        stages.append(stage)
        return nullcontext()

    monkeypatch.setattr("rl_contracts.runtime.run_files.StageFile.show", show)
    run_log = RunLog(engine, tmp_path, CheckpointConfig(every=1), evaluations=[_Recording()], evaluate_every=2)
    train(_Batches(engine, 3), PolicyActor(engine, AlgorithmConfig()), run_log, total_steps=3)

    first_step = [stages.pop(0) for _ in range(4)]
    assert first_step == ["evaluate", "rollout_wait", "train", "save"]
    assert stages == ["evaluate", "evaluate"], "after steps 2 and 3"


def test_train_exhausted_data_with_short_batch_saves_model(engine, tmp_path):
    run_log = RunLog(engine, tmp_path / "run", CheckpointConfig(every=0))
    source = _Batches(engine, 2, last=2, minibatches=4)

    train(source, PolicyActor(engine, AlgorithmConfig(), minibatches=4), run_log, total_steps=9)

    last = _records(tmp_path / "run")[-1]
    assert (last["step"], last["minibatches/empty"], last["applied"]) == (2, 2.0, 1.0)
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step_2"]


def nan_loss(terms):
    """A policy loss that is always NaN."""
    return terms.ratio * math.nan, {}


def test_train_resumed_without_applied_step_fails_at_end(engine, tmp_path):
    run_log = RunLog(engine, tmp_path / "run", CheckpointConfig())
    train(_Batches(engine, 3), PolicyActor(engine, AlgorithmConfig()), run_log, total_steps=3)
    assert engine.version == 3
    diverged = PolicyActor(engine, AlgorithmConfig(loss=LossConfig(f"{__name__}:nan_loss")))

    with pytest.raises(EngineError, match="none of 2"):
        train(_Batches(engine, 2), diverged, run_log, total_steps=5)
    train(_Batches(engine, 0), diverged, run_log, total_steps=5)  # a run without remaining steps does not fail


def test_run_log_of_supervised_step_has_no_reward(engine, tmp_path):
    batch = shard_sequences(supervised_sequences(ROWS, ChatRenderer(make_tiny_tokenizer()), 64), engine.parallel)
    run_log = RunLog(engine, tmp_path / "run", CheckpointConfig())
    run_log.finish_step(1, batch, {}, 0, 1)
    record = _records(tmp_path / "run")[-1]
    assert record["sequences"] == len(ROWS)
    assert [record[name] for name in ("reward/mean", "reward/std", "truncated/fraction")] == [None] * 3


@pytest.mark.slow
def test_train_supervised_lowers_held_out_loss(engine, tmp_path):
    renderer = ChatRenderer(make_tiny_tokenizer())

    def batch_of(rows):
        return shard_sequences(supervised_sequences(rows, renderer, 64), engine.parallel)

    run_log = RunLog(
        engine,
        tmp_path / "run",
        CheckpointConfig(),
        evaluations=[LossEvaluation(LossLearner(engine), batch_of(ROWS), len(ROWS))],
        renamed={"loss": "loss/train"},
    )
    source = DataSource([ROWS] * 10, batch_of)
    train(source, LossLearner(engine), run_log, total_steps=10)
    losses = [r["loss/eval"] for r in _records(tmp_path / "run") if "loss/eval" in r]
    assert losses[-1] < 0.8 * losses[0]
    assert _records(tmp_path / "run")[1]["loss/train"] == pytest.approx(losses[0], rel=1e-4)


def test_supervised_sequences_truncation_keeps_beginning():
    renderer = ChatRenderer(make_tiny_tokenizer())
    whole = supervised_sequences(ROWS, renderer, 1000)[0]
    first = int(whole.loss_mask.argmax())

    truncated = supervised_sequences(ROWS, renderer, first + 1, truncate=True)[0]

    assert truncated.input_ids.tolist() == whole.input_ids[: first + 1].tolist()
    assert truncated.loss_mask.sum() == 1
    for truncate in (True, False):
        with pytest.raises(DataError, match=f"example 0 .*data.max_length={first}"):
            supervised_sequences(ROWS, renderer, first, truncate=truncate)


class _Servers(NullInferenceEngine):
    """Servers that can sleep and record the calls of `sleep` and `wake`."""

    capabilities = Capabilities(sleeps=True)
    fails = False

    def __init__(self, calls):
        super().__init__()
        self.calls = calls

    async def sleep(self):
        if self.fails:
            raise InferenceError("injected")
        self.calls.append("sleep")
        return 2.0**29

    async def wake(self):
        self.calls.append("wake")


class _Publisher:
    receipt = None

    def __init__(self, calls):
        self.calls = calls

    def publish(self, version):
        self.calls.append(f"publish {version}")
        return {}


class _Learner(PolicyActor):
    def update(self, batch):
        self.calls.append("update")
        return super().update(batch)


@pytest.mark.parametrize("can_sleep", [True, False])
def test_train_servers_sleep_from_batch_to_commit(engine, tmp_path, monkeypatch, can_sleep):
    """The commit wakes the servers, which `calls` does not record."""
    monkeypatch.setattr(_Servers, "capabilities", Capabilities(sleeps=can_sleep))
    calls = []
    learner = _Learner(engine, AlgorithmConfig())
    learner.calls = calls
    with LoopThread("test") as loop:
        sharing = MemorySharing(engine, _Servers(calls), loop, 10)
        run_log = RunLog(engine, tmp_path, CheckpointConfig(every=0))
        train(_Batches(engine, 2), learner, run_log, 2, ServerSync(run_log, _Publisher(calls), sharing=sharing))

    step = ["sleep", "update"] if can_sleep else ["update"]
    assert calls == ["publish 0", *step, "publish 1", *step, "publish 2"]
    assert [record["sharing/freed_gib"] for record in _records(tmp_path)] == [0.5 * can_sleep] * 2


@pytest.mark.parametrize("scores", [True, False])
def test_train_servers_sleep_before_gap_check_unless_it_scores(engine, tmp_path, scores):
    calls = []

    class Gate:
        def scores_before_update(self):
            return scores

        def before_update(self, batch):
            calls.append("before")
            return {}

        def after_commit(self, sent):
            calls.append("after")
            return {}

    with LoopThread("test") as loop:
        sharing = MemorySharing(engine, _Servers(calls), loop, 10)
        run_log = RunLog(engine, tmp_path, CheckpointConfig(every=0))
        actor = PolicyActor(engine, AlgorithmConfig())
        train(_Batches(engine, 1), actor, run_log, 1, ServerSync(run_log, _Publisher(calls), Gate(), sharing))

    first = ["before", "sleep"] if scores else ["sleep", "before"]
    assert calls == ["publish 0", *first, "publish 1", "after"]


def test_train_without_publication_wakes_servers(engine, tmp_path):
    calls = []

    class Skips(PolicyActor):
        def update(self, batch):
            return {"minibatches/empty": float(len(batch) > 0)}

    with LoopThread("test") as loop:
        sharing = MemorySharing(engine, _Servers(calls), loop, 10)
        run_log = RunLog(engine, tmp_path, CheckpointConfig(every=0))
        actor = Skips(engine, AlgorithmConfig())
        with pytest.raises(EngineError, match="none of 2"):
            train(_Batches(engine, 2), actor, run_log, 2, ServerSync(run_log, _Publisher(calls), sharing=sharing))

    assert calls == ["publish 0", *["sleep", "wake"] * 2]


def test_servers_awake_block_that_raises_puts_servers_back_to_sleep(engine):
    calls = []
    with LoopThread("test") as loop:
        sharing = MemorySharing(engine, _Servers(calls), loop, 10)
        with pytest.raises(InferenceError, match="no scores"), sharing.servers_awake():
            raise InferenceError("no scores")

    assert calls == ["wake", "sleep"]


def test_train_servers_that_fail_to_sleep_end_run(engine, tmp_path):
    servers = _Servers([])
    servers.fails = True
    with LoopThread("test") as loop:
        sharing = MemorySharing(engine, servers, loop, 10)
        run_log = RunLog(engine, tmp_path, CheckpointConfig(every=0))
        actor = PolicyActor(engine, AlgorithmConfig())
        with pytest.raises(InferenceError, match="injected"):
            train(_Batches(engine, 2), actor, run_log, 2, ServerSync(run_log, _Publisher([]), sharing=sharing))
