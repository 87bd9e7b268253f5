"""Stopped at any step and resumed, a run goes on bit for bit; and nothing half-written is ever taken for a point."""

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
from rl_contracts.errors import ConfigError, EngineError, InferenceError, StopRequestedError, WeightUpdateError
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
    train,
)
from rl_trainers.algorithms.config import AlgorithmConfig
from rl_trainers.learners.supervised import shard_sequences, supervised_sequences

STEPS = 6


class KilledError(Exception):
    """The process was killed here."""


class Loader:
    """Batches of two conversations for ever, which can be saved at any batch; stops the run at one of them."""

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
    """Saved batches, in order; stops the run at one of them."""

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
    """One life of a run: to its end, or until it is stopped. Returns the weights."""
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
    books = RunLog(engine, run_dir, CheckpointConfig(every=checkpoint), evaluations=evaluations, evaluate_every=3)
    parts = {"source": source, "books": books}
    recover = RecoveryCheckpoints(run_dir, RecoverConfig(every), {"actor": engine}, parts, stop)
    try:
        train(source, learner, books, STEPS, recover=recover, publisher=publisher)
        return {name: value.clone() for name, value in engine.model.state_dict().items()}
    finally:
        engine.destroy()


def figures(run_dir: Path) -> list[dict[str, Any]]:
    """The records without what the clock says."""
    records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in r.items() if not k.startswith(("time", "throughput/", "memory/"))} for r in records]


@pytest.mark.parametrize("kind", ["sft", pytest.param("replayed", marks=pytest.mark.slow)])
@pytest.mark.parametrize("stop_at", [3, *(pytest.param(step, marks=pytest.mark.slow) for step in (2, 4, 6))])
def test_resume_after_a_stop_at_any_step_is_bit_for_bit(
    kind: str, stop_at: int, model: str, batches: list[Path], tmp_path: Path
) -> None:
    expected = run(kind, model, batches, tmp_path / "whole")
    with pytest.raises(KilledError):
        run(kind, model, batches, tmp_path / "cut", stop_at)

    found = run(kind, model, batches, tmp_path / "cut")

    assert found.keys() == expected.keys()
    for name in expected:
        assert torch.equal(found[name], expected[name]), name
    assert figures(tmp_path / "cut") == figures(tmp_path / "whole")
    assert sorted(p.name for p in (tmp_path / "cut" / "checkpoints").iterdir()) == ["step_3", "step_6"]


@pytest.mark.slow
def test_resume_twice_in_one_run_is_bit_for_bit(model: str, batches: list[Path], tmp_path: Path) -> None:
    expected = run("sft", model, batches, tmp_path / "whole")
    for stop_at in (4, 6):
        with pytest.raises(KilledError):
            run("sft", model, batches, tmp_path / "cut", stop_at)

    found = run("sft", model, batches, tmp_path / "cut")

    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.slow
def test_points_only_the_last_two_are_kept(model: str, batches: list[Path], tmp_path: Path) -> None:
    run("sft", model, batches, tmp_path, every=1)

    assert sorted(p.name for p in (tmp_path / "recover").iterdir()) == ["step_5", "step_6"]


@pytest.mark.slow
def test_resume_half_written_point_is_not_taken(model: str, batches: list[Path], tmp_path: Path) -> None:
    expected = run("sft", model, batches, tmp_path / "whole")
    with pytest.raises(KilledError):
        run("sft", model, batches, tmp_path / "cut", 4)
    (tmp_path / "cut" / "recover" / ".step_3.partial").mkdir()  # what a kill in the middle of saving leaves

    assert last_recovery_checkpoint(tmp_path / "cut" / "recover") == 2
    found = run("sft", model, batches, tmp_path / "cut")

    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_resume_switched_off_begins_anew(model: str, batches: list[Path], tmp_path: Path) -> None:
    run("sft", model, batches, tmp_path)
    engine = ReferenceTrainEngine()
    engine.initialize(FinetuneSpec(model, STEPS))

    points = RecoveryCheckpoints(tmp_path, RecoverConfig(2, resume=False), {"actor": engine}, {})

    assert points.resume() is None
    engine.destroy()


def test_resume_part_that_the_saved_run_did_not_have_is_an_error_that_names_it(
    model: str, batches: list[Path], tmp_path: Path
) -> None:
    run("sft", model, batches, tmp_path)
    point = tmp_path / "recover" / "step_6"
    manifest = json.loads((point / "manifest.json").read_text())
    del manifest["files"]["source-0.json"]
    (point / "manifest.json").write_text(json.dumps(manifest))
    (point / "source-0.json").unlink()

    with pytest.raises(EngineError, match=r"source-0.*recover\.resume=false"):
        run("sft", model, batches, tmp_path)


def test_part_that_cannot_be_saved_is_refused_before_the_run(model: str, tmp_path: Path) -> None:
    engine = ReferenceTrainEngine()
    engine.initialize(FinetuneSpec(model, STEPS))

    with pytest.raises(ConfigError, match=r"recover\.every=2: source \(object\) cannot be saved"):
        RecoveryCheckpoints(tmp_path, RecoverConfig(2), {"actor": engine}, {"source": object()})
    engine.destroy()


def test_state_of_nested_values_and_tensors_comes_back(model: str, tmp_path: Path) -> None:
    engine = ReferenceTrainEngine()
    engine.initialize(FinetuneSpec(model, STEPS))
    state = {"a": [1, {"b": torch.arange(3), "c": None}], "d": {"e": torch.zeros(0, dtype=torch.bool)}, "f": "text"}
    seen: list[dict[str, Any]] = []

    class Part:
        def state_dict(self) -> dict[str, Any]:
            return state

        def load_state_dict(self, found: dict[str, Any]) -> None:
            seen.append(found)

    points = RecoveryCheckpoints(tmp_path, RecoverConfig(1), {"actor": engine}, {"part": Part()})
    points.save(4)

    assert points.resume() == 4
    (found,) = seen
    assert found["a"][1]["b"].tolist() == [0, 1, 2]
    assert found["a"][1]["c"] is None
    assert found["d"]["e"].dtype == torch.bool
    assert found["f"] == "text"
    engine.destroy()


def test_point_is_on_the_disk_before_older_ones_go(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = ReferenceTrainEngine()
    engine.initialize(FinetuneSpec(model, STEPS, optimizer=OptimizerConfig()))
    points = RecoveryCheckpoints(tmp_path, RecoverConfig(1, keep=1), {"actor": engine}, {"source": Loader()})
    points.save(1)
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
            gone.append(path)
        remove(path, **options)

    gone: list[Path] = []
    monkeypatch.setattr("os.fsync", fsync)
    monkeypatch.setattr("shutil.rmtree", rmtree)
    points.save(2)

    assert gone == [tmp_path / "recover" / ".step_1.removed.partial"]
    engine.destroy()


@pytest.mark.parametrize("every", [0, 4])
def test_stop_that_was_asked_for_ends_the_step_with_a_point(
    every: int, model: str, batches: list[Path], tmp_path: Path
) -> None:
    expected = run("sft", model, batches, tmp_path / "whole", every=every)
    asked = iter([False, False, True])
    with pytest.raises(SystemExit) as stopped:
        run("sft", model, batches, tmp_path / "cut", every=every, stop=lambda: next(asked))
    assert stopped.value.code == 143
    assert last_recovery_checkpoint(tmp_path / "cut" / "recover") == 3

    found = run("sft", model, batches, tmp_path / "cut", every=every)

    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert figures(tmp_path / "cut") == figures(tmp_path / "whole")


@pytest.mark.parametrize("every", [0, 3])
def test_stop_that_was_asked_for_in_a_wait_for_a_batch_leaves_a_point_of_the_step_before(
    every: int, model: str, batches: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = run("replay", model, batches, tmp_path / "whole", every=0)
    asked, saved, begin = Event(), list[int](), RecoveryCheckpoints._start_write

    def interrupted(source: StoppingReplay) -> Any:
        if source.position == 3:
            asked.set()
            raise StopRequestedError
        return next_batch(source)

    def noted(points: RecoveryCheckpoints, step: int) -> None:
        saved.append(step)
        begin(points, step)

    next_batch = StoppingReplay.next_batch
    with monkeypatch.context() as patch:
        patch.setattr(StoppingReplay, "next_batch", interrupted)
        patch.setattr(RecoveryCheckpoints, "_start_write", noted)
        with pytest.raises(SystemExit) as stopped:
            run("replay", model, batches, tmp_path / "cut", every=every, stop=asked.is_set)
    assert stopped.value.code == 143
    assert saved == [3]

    found = run("replay", model, batches, tmp_path / "cut", every=every)

    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert figures(tmp_path / "cut") == figures(tmp_path / "whole")


def abandon_at(micro_batch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the process be asked to stop twice before one of its micro-batches."""
    gate, begin, begun = StepGate(), StepGate.begin_micro_batch, [0]

    def counted(gate: StepGate) -> None:
        begun[0] += 1
        if begun[0] == micro_batch:
            gate.abandon(lambda number: number)
        begin(gate)

    monkeypatch.setattr(step_gate, "STEP", gate)
    monkeypatch.setattr(StepGate, "begin_micro_batch", counted)


@pytest.mark.parametrize(("kind", "micro_batch"), [("sft", 6), ("replay", 15)])
def test_step_abandoned_leaves_a_point_of_the_step_before(
    kind: str, micro_batch: int, model: str, batches: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = run(kind, model, batches, tmp_path / "whole", every=0)
    with monkeypatch.context() as patch:
        abandon_at(micro_batch, patch)
        with pytest.raises(SystemExit) as stopped:
            run(kind, model, batches, tmp_path / "cut", every=0)
    assert stopped.value.code == 143
    assert last_recovery_checkpoint(tmp_path / "cut" / "recover") == 2

    found = run(kind, model, batches, tmp_path / "cut", every=0)

    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert figures(tmp_path / "cut") == figures(tmp_path / "whole")


def test_step_abandoned_between_its_optimizer_steps_saves_nothing(
    model: str, batches: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    abandon_at(35, monkeypatch)
    with pytest.raises(SystemExit):
        run("replay", model, batches, tmp_path, every=2, minibatches=2)
    assert last_recovery_checkpoint(tmp_path / "recover") == 2
    assert "the abandoned step 3 leaves no recovery checkpoint: it had changed the weights" in caplog.text


class ServersEnd:
    """A publisher whose servers are told to end together with the trainer, before they have a version."""

    def __init__(self, asked: Event, version: int) -> None:
        self.asked, self.version, self.receipt = asked, version, None

    def publish(self, version: int) -> dict[str, float]:
        if version == self.version:
            self.asked.set()
            raise WeightUpdateError("no live server could stage it")
        return {}


def test_stop_that_was_asked_for_while_the_servers_ended_leaves_a_point_of_the_step_that_they_never_had(
    model: str, batches: list[Path], tmp_path: Path
) -> None:
    expected, asked = run("replay", model, batches, tmp_path / "whole", every=0), Event()
    with pytest.raises(SystemExit) as stopped:
        run("replay", model, batches, tmp_path / "cut", every=0, stop=asked.is_set, publisher=ServersEnd(asked, 3))
    assert stopped.value.code == 143
    assert last_recovery_checkpoint(tmp_path / "cut" / "recover") == 3

    found = run("replay", model, batches, tmp_path / "cut", every=0)

    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert figures(tmp_path / "cut") == figures(tmp_path / "whole")


class ServersEndMeanwhile:
    """An evaluation whose servers are told to end together with the trainer, once."""

    def __init__(self, asked: Event, step: int) -> None:
        self.asked, self.step, self.done = asked, step, list[int]()

    def __call__(self, step: int) -> dict[str, float | None]:
        if step == self.step:
            self.step = -1
            self.asked.set()
            raise InferenceError("no server goes on with it")
        self.done.append(step)
        return {"eval/reward": 1.0}


@pytest.mark.parametrize("step", [3, STEPS])
def test_stop_that_was_asked_for_during_an_evaluation_leaves_a_point_and_the_record_of_the_step(
    step: int, model: str, batches: list[Path], tmp_path: Path
) -> None:
    whole, evaluation = ServersEndMeanwhile(Event(), -1), ServersEndMeanwhile(asked := Event(), step)
    expected = run("replay", model, batches, tmp_path / "whole", every=0, evaluation=whole)
    with pytest.raises(SystemExit) as stopped:
        run("replay", model, batches, tmp_path / "cut", every=0, stop=asked.is_set, evaluation=evaluation)
    assert stopped.value.code == 143
    assert last_recovery_checkpoint(tmp_path / "cut" / "recover") == step
    assert figures(tmp_path / "cut")[-1]["step"] == step

    found = run("replay", model, batches, tmp_path / "cut", every=0, evaluation=evaluation)

    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert evaluation.done == [each for each in whole.done if each != step or each == STEPS]


def test_evaluation_that_fails_by_itself_ends_the_run(model: str, batches: list[Path], tmp_path: Path) -> None:
    evaluation = ServersEndMeanwhile(Event(), 3)
    with pytest.raises(InferenceError, match="goes on with it"):
        run("replay", model, batches, tmp_path, every=0, stop=Event().is_set, evaluation=evaluation)
    assert last_recovery_checkpoint(tmp_path / "recover") is None
    assert figures(tmp_path)[-1]["step"] == 3


def test_servers_that_end_by_themselves_end_the_run(model: str, batches: list[Path], tmp_path: Path) -> None:
    with pytest.raises(WeightUpdateError, match="no live server"):
        run("replay", model, batches, tmp_path, every=0, stop=Event().is_set, publisher=ServersEnd(Event(), 3))
    assert last_recovery_checkpoint(tmp_path / "recover") is None


def test_stop_that_was_asked_for_before_the_first_batch_leaves_no_point(
    model: str, batches: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(source: StoppingReplay) -> Any:
        raise StopRequestedError

    monkeypatch.setattr(StoppingReplay, "next_batch", interrupted)
    with pytest.raises(SystemExit):
        run("replay", model, batches, tmp_path, stop=lambda: True)
    assert last_recovery_checkpoint(tmp_path / "recover") is None


def test_stop_that_was_asked_for_ends_a_run_that_cannot_be_saved(model: str, tmp_path: Path) -> None:
    engine = ReferenceTrainEngine()
    engine.initialize(FinetuneSpec(model, STEPS, optimizer=OptimizerConfig()))
    points = RecoveryCheckpoints(tmp_path, RecoverConfig(0), {"actor": engine}, {"source": object()}, lambda: True)

    with pytest.raises(SystemExit):
        points.after_step(1)

    assert last_recovery_checkpoint(tmp_path / "recover") is None
    engine.destroy()


@pytest.mark.slow
def test_run_that_was_stopped_between_its_last_checkpoint_and_its_end_ends(
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
