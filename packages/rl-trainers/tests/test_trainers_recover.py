"""A run stopped at any step resumes bit for bit, and never from an unfinished recovery checkpoint."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from threading import Event
from typing import Any

import pytest
import torch

from rl_contracts.batch.parallel import ParallelContext
from rl_contracts.batch.redistribution import shard_batch
from rl_contracts.batch.trajectory import load_batch, save_batch
from rl_contracts.chat.rendering import ChatRenderer
from rl_contracts.config import OptimizerConfig
from rl_contracts.data import FinetuneSpec
from rl_contracts.errors import ConfigError, InferenceError, StopRequestedError, WeightUpdateError
from rl_contracts.models import step_gate
from rl_contracts.models.step_gate import StepGate
from rl_contracts.runtime.run_files import last_recovery_checkpoint
from rl_contracts.testing import ReferenceTrainEngine, make_batch, make_tiny_model
from rl_contracts.testing.models import make_tiny_tokenizer
from rl_trainers import (
    CheckpointConfig,
    DataSource,
    LossLearner,
    PolicyActor,
    RecoverConfig,
    RecoveryCheckpoints,
    RunLog,
    ServerSync,
    train,
)
from rl_trainers.algorithms.config import AlgorithmConfig
from rl_trainers.learners.supervised import shard_sequences, supervised_sequences

STEPS = 6


class KilledError(Exception):
    """Stands for the death of the process."""


class Loader:
    """Endless batches of two conversations, which can be saved at any batch; kills the run at one of them."""

    def __init__(self, stop_at: int = 0) -> None:
        self.position, self.stop_at = 0, stop_at

    def __iter__(self) -> Loader:
        return self

    def __next__(self) -> list[dict[str, Any]]:
        self.position += 1
        if self.position == self.stop_at:
            raise KilledError
        numbers = (self.position, 3 * self.position)
        return [
            {"messages": [{"role": "user", "content": f"{n}+1="}, {"role": "assistant", "content": str(n + 1)}]}
            for n in numbers
        ]

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["position"]


class StoppingReplay:
    """Saved batches, in order; kills the run at one of them."""

    def __init__(self, paths: list[Path], stop_at: int, minibatches: int = 1) -> None:
        self.paths, self.stop_at, self.position, self.minibatches = paths, stop_at, 0, minibatches

    def next_batch(self) -> Any:
        if self.position + 1 == self.stop_at:
            raise KilledError
        batch = load_batch(self.paths[self.position])
        self.position += 1
        return shard_batch(batch, ParallelContext(), self.minibatches)

    def return_batch(self) -> None:
        self.position -= 1

    def end_step(self, version: int) -> None:
        pass

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["position"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_tiny_model(tmp_path_factory.mktemp("model"), layers=1, hidden=32))


@pytest.fixture(scope="module")
def batches(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    directory = tmp_path_factory.mktemp("batches")
    paths = [directory / f"step_{step}.safetensors" for step in range(1, STEPS + 1)]
    for step, path in enumerate(paths):
        save_batch(make_batch(6, seed=step).exclude("advantages"), path)
    return paths


def run(
    kind: str,
    model: str,
    batches: list[Path],
    run_dir: Path,
    stop_at: int = 0,
    every: int = 2,
    stop: Callable[[], bool] = lambda: False,
    checkpoint: int = 3,
    publisher: Any = None,
    evaluation: Any = None,
    minibatches: int = 1,
) -> Any:
    """Run until the end, or until the run is stopped. Return the weights."""
    engine = ReferenceTrainEngine()
    engine.initialize(FinetuneSpec(model, STEPS, optimizer=OptimizerConfig(lr=3e-3, schedule="cosine", warmup_steps=2)))
    source: Any
    learner: Any
    if kind == "sft":
        renderer = ChatRenderer(make_tiny_tokenizer())
        source = DataSource(
            Loader(stop_at), lambda rows: shard_sequences(supervised_sequences(rows, renderer, 64), ParallelContext())
        )
        learner = LossLearner(engine)
    else:
        source, learner = (
            StoppingReplay(batches, stop_at, minibatches),
            PolicyActor(engine, AlgorithmConfig(), minibatches),
        )
    evaluations = [] if evaluation is None else [evaluation]
    run_log = RunLog(engine, run_dir, CheckpointConfig(every=checkpoint), evaluations=evaluations, evaluate_every=3)
    components = {"source": source, "run_log": run_log}
    recover = RecoveryCheckpoints(run_dir, RecoverConfig(every), {"actor": engine}, components, stop)
    try:
        servers = ServerSync(run_log, publisher) if publisher else None
        train(source, learner, run_log, STEPS, servers, recover)
        return {name: value.clone() for name, value in engine.model.state_dict().items()}
    finally:
        engine.destroy()


def metrics_of(run_dir: Path) -> list[dict[str, Any]]:
    """Return the records without metrics that depend on the clock."""
    records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in r.items() if not k.startswith(("time", "throughput/", "memory/"))} for r in records]


@pytest.mark.guarantee(
    "A run on fixed data that resumes ends with the same weights and metrics bit for bit.", area="failures"
)
@pytest.mark.parametrize(
    ("kind", "stops"),
    [("sft", [3]), *(pytest.param(*case, marks=pytest.mark.slow) for case in (("replayed", [2, 6]), ("sft", [4, 6])))],
)
def test_resume_after_stop_at_any_step_is_bitwise_identical(
    kind: str, stops: list[int], model: str, batches: list[Path], tmp_path: Path
) -> None:
    expected = run(kind, model, batches, tmp_path / "uninterrupted")
    for stop_at in stops:
        with pytest.raises(KilledError):
            run(kind, model, batches, tmp_path / "interrupted", stop_at)

    weights = run(kind, model, batches, tmp_path / "interrupted")

    assert weights.keys() == expected.keys()
    for name in expected:
        assert torch.equal(weights[name], expected[name]), name
    assert metrics_of(tmp_path / "interrupted") == metrics_of(tmp_path / "uninterrupted")
    assert sorted(p.name for p in (tmp_path / "interrupted" / "checkpoints").iterdir()) == ["step_3", "step_6"]


def test_component_that_cannot_be_saved_is_rejected_before_the_run(model: str, tmp_path: Path) -> None:
    engine = ReferenceTrainEngine()
    engine.initialize(FinetuneSpec(model, STEPS))

    with pytest.raises(ConfigError, match=r"recover\.every=2: .*source \(object\)"):
        RecoveryCheckpoints(tmp_path, RecoverConfig(2), {"actor": engine}, {"source": object()})
    engine.destroy()


def test_checkpoint_is_synced_before_older_ones_are_removed(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = ReferenceTrainEngine()
    engine.initialize(FinetuneSpec(model, STEPS, optimizer=OptimizerConfig()))
    monkeypatch.setattr("rl_trainers.recovery.checkpoints.RETAINED", 1)
    checkpoints = RecoveryCheckpoints(tmp_path, RecoverConfig(1), {"actor": engine}, {"source": Loader()})
    checkpoints.save(1)
    synced: set[int] = set()
    sync, remove = os.fsync, shutil.rmtree

    def fsync(descriptor: int) -> None:
        synced.add(os.fstat(descriptor).st_ino)
        sync(descriptor)

    def rmtree(path: Path, **options: Any) -> None:
        if Path(path).name == ".step_1.removed.partial" and Path(path).exists():
            new = tmp_path / "recover" / "step_2"
            needed = [new.parent, new, *new.rglob("*")]
            assert {entry.stat().st_ino for entry in needed} <= synced
            removed.append(path)
        remove(path, **options)

    removed: list[Path] = []
    monkeypatch.setattr("os.fsync", fsync)
    monkeypatch.setattr("shutil.rmtree", rmtree)
    checkpoints.save(2)

    assert removed == [tmp_path / "recover" / ".step_1.removed.partial"]
    engine.destroy()


def test_stop_request_saves_checkpoint_after_step(model: str, batches: list[Path], tmp_path: Path) -> None:
    every = 4  # no recovery checkpoint is due after step 3
    expected = run("sft", model, batches, tmp_path / "uninterrupted", every=every)
    stop_requests = iter([False, False, True])
    with pytest.raises(SystemExit) as stopped:
        run("sft", model, batches, tmp_path / "interrupted", every=every, stop=lambda: next(stop_requests))
    assert stopped.value.code == 143
    assert last_recovery_checkpoint(tmp_path / "interrupted" / "recover") == 3

    weights = run("sft", model, batches, tmp_path / "interrupted", every=every)

    assert all(torch.equal(weights[name], expected[name]) for name in expected)
    assert metrics_of(tmp_path / "interrupted") == metrics_of(tmp_path / "uninterrupted")


@pytest.mark.parametrize("every", [0, 3])
def test_stop_while_waiting_for_batch_saves_previous_step(
    every: int, model: str, batches: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = run("replay", model, batches, tmp_path / "uninterrupted", every=0)
    stop_requested, saved, start_write = Event(), list[int](), RecoveryCheckpoints._start_write

    def interrupted(source: StoppingReplay) -> Any:
        if source.position == 3:
            stop_requested.set()
            raise StopRequestedError
        return next_batch(source)

    def record_step(checkpoints: RecoveryCheckpoints, step: int) -> None:
        saved.append(step)
        start_write(checkpoints, step)

    next_batch = StoppingReplay.next_batch
    with monkeypatch.context() as patch:
        patch.setattr(StoppingReplay, "next_batch", interrupted)
        patch.setattr(RecoveryCheckpoints, "_start_write", record_step)
        with pytest.raises(SystemExit) as stopped:
            run("replay", model, batches, tmp_path / "interrupted", every=every, stop=stop_requested.is_set)
    assert stopped.value.code == 143
    assert saved == [3]

    weights = run("replay", model, batches, tmp_path / "interrupted", every=every)

    assert all(torch.equal(weights[name], expected[name]) for name in expected)
    assert metrics_of(tmp_path / "interrupted") == metrics_of(tmp_path / "uninterrupted")


def abandon_at(micro_batch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Abandon the step before the given micro-batch, as a second request to stop does."""
    gate, begin_micro_batch, count = StepGate(), StepGate.begin_micro_batch, [0]

    def count_micro_batch(gate: StepGate) -> None:
        count[0] += 1
        if count[0] == micro_batch:
            gate.abandon(lambda number: number)
        begin_micro_batch(gate)

    monkeypatch.setattr(step_gate, "STEP", gate)
    monkeypatch.setattr(StepGate, "begin_micro_batch", count_micro_batch)


@pytest.mark.parametrize(("kind", "micro_batch"), [("sft", 6), ("replay", 15)])
def test_abandoned_step_saves_previous_step(
    kind: str, micro_batch: int, model: str, batches: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = run(kind, model, batches, tmp_path / "uninterrupted", every=0)
    with monkeypatch.context() as patch:
        abandon_at(micro_batch, patch)
        with pytest.raises(SystemExit) as stopped:
            run(kind, model, batches, tmp_path / "interrupted", every=0)
    assert stopped.value.code == 143
    assert last_recovery_checkpoint(tmp_path / "interrupted" / "recover") == 2

    weights = run(kind, model, batches, tmp_path / "interrupted", every=0)

    assert all(torch.equal(weights[name], expected[name]) for name in expected)
    assert metrics_of(tmp_path / "interrupted") == metrics_of(tmp_path / "uninterrupted")


def test_step_abandoned_between_optimizer_steps_saves_nothing(
    model: str, batches: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    abandon_at(35, monkeypatch)
    with pytest.raises(SystemExit):
        run("replay", model, batches, tmp_path, every=2, minibatches=2)
    assert last_recovery_checkpoint(tmp_path / "recover") == 2
    assert "step 3 was abandoned" in caplog.text
    assert "updated the weights" in caplog.text


class StoppedPublisher:
    """Publisher whose servers stop together with the trainer, before they receive a version."""

    def __init__(self, stop_requested: Event, version: int) -> None:
        self.stop_requested, self.version, self.receipt = stop_requested, version, None

    def publish(self, version: int) -> dict[str, float]:
        if version == self.version:
            self.stop_requested.set()
            raise WeightUpdateError("no live server could stage it")
        return {}


def test_stop_during_server_shutdown_saves_unpublished_step(model: str, batches: list[Path], tmp_path: Path) -> None:
    expected, stop_requested = run("replay", model, batches, tmp_path / "uninterrupted", every=0), Event()
    with pytest.raises(SystemExit) as stopped:
        run(
            "replay",
            model,
            batches,
            tmp_path / "interrupted",
            every=0,
            stop=stop_requested.is_set,
            publisher=StoppedPublisher(stop_requested, 3),
        )
    assert stopped.value.code == 143
    assert last_recovery_checkpoint(tmp_path / "interrupted" / "recover") == 3

    weights = run("replay", model, batches, tmp_path / "interrupted", every=0)

    assert all(torch.equal(weights[name], expected[name]) for name in expected)
    assert metrics_of(tmp_path / "interrupted") == metrics_of(tmp_path / "uninterrupted")


class StoppedEvaluation:
    """Evaluation whose servers stop together with the trainer, once."""

    def __init__(self, stop_requested: Event, step: int) -> None:
        self.stop_requested, self.step, self.finished_steps = stop_requested, step, list[int]()

    def __call__(self, step: int) -> dict[str, float | None]:
        if step == self.step:
            self.step = -1
            self.stop_requested.set()
            raise InferenceError("no live server")
        self.finished_steps.append(step)
        return {"eval/reward": 1.0}


@pytest.mark.parametrize("step", [3, STEPS])
def test_stop_during_evaluation_saves_step_and_its_record(
    step: int, model: str, batches: list[Path], tmp_path: Path
) -> None:
    uninterrupted, evaluation = StoppedEvaluation(Event(), -1), StoppedEvaluation(stop_requested := Event(), step)
    expected = run("replay", model, batches, tmp_path / "uninterrupted", every=0, evaluation=uninterrupted)
    with pytest.raises(SystemExit) as stopped:
        run(
            "replay",
            model,
            batches,
            tmp_path / "interrupted",
            every=0,
            stop=stop_requested.is_set,
            evaluation=evaluation,
        )
    assert stopped.value.code == 143
    assert last_recovery_checkpoint(tmp_path / "interrupted" / "recover") == step
    assert metrics_of(tmp_path / "interrupted")[-1]["step"] == step

    weights = run("replay", model, batches, tmp_path / "interrupted", every=0, evaluation=evaluation)

    assert all(torch.equal(weights[name], expected[name]) for name in expected)
    assert evaluation.finished_steps == [done for done in uninterrupted.finished_steps if done != step or done == STEPS]


def test_evaluation_failure_without_stop_request_ends_run(model: str, batches: list[Path], tmp_path: Path) -> None:
    evaluation = StoppedEvaluation(Event(), 3)
    with pytest.raises(InferenceError, match="no live server"):
        run("replay", model, batches, tmp_path, every=0, stop=Event().is_set, evaluation=evaluation)
    assert last_recovery_checkpoint(tmp_path / "recover") is None
    assert metrics_of(tmp_path)[-1]["step"] == 3


def test_stop_before_first_batch_saves_nothing(
    model: str, batches: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(source: StoppingReplay) -> Any:
        raise StopRequestedError

    monkeypatch.setattr(StoppingReplay, "next_batch", interrupted)
    with pytest.raises(SystemExit):
        run("replay", model, batches, tmp_path, stop=lambda: True)
    assert last_recovery_checkpoint(tmp_path / "recover") is None


def test_stop_request_ends_run_that_cannot_be_saved(model: str, tmp_path: Path) -> None:
    engine = ReferenceTrainEngine()
    engine.initialize(FinetuneSpec(model, STEPS, optimizer=OptimizerConfig()))
    checkpoints = RecoveryCheckpoints(tmp_path, RecoverConfig(0), {"actor": engine}, {"source": object()}, lambda: True)

    with pytest.raises(SystemExit):
        checkpoints.after_step(1)

    assert last_recovery_checkpoint(tmp_path / "recover") is None
    engine.destroy()


@pytest.mark.slow
def test_run_killed_after_last_checkpoint_finishes_on_resume(
    model: str, batches: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(trace: Any, path: Path) -> None:
        raise KilledError

    with monkeypatch.context() as patch:
        patch.setattr("rl_trainers.run_log.trace.Trace.save", killed)
        with pytest.raises(KilledError):
            run("sft", model, batches, tmp_path, checkpoint=0)
    lines = (tmp_path / "metrics.jsonl").read_text()

    run("sft", model, batches, tmp_path, checkpoint=0)

    assert (tmp_path / "metrics.jsonl").read_text() == lines
