"""Checkpoints are written atomically in the background, and the configured ones are kept."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from threading import Event
from typing import Any

import pytest
from policy_toys import on_ranks
from recover_process import CountingEngine

from rl_contracts.batch.parallel import ParallelContext
from rl_contracts.data import SaveLoadMeta
from rl_contracts.errors import ConfigError, EngineError
from rl_contracts.runtime.metrics import collect
from rl_trainers import CheckpointConfig
from rl_trainers.run_log.background_writes import wait_for_writes
from rl_trainers.run_log.checkpoints import Checkpoints, select_retained


class ExportingEngine(CountingEngine):
    """Engine that exports its step number; it fails at some steps, and waits until `may_write` is set."""

    def __init__(self, parallel: ParallelContext | None = None, failing: Sequence[int] = ()) -> None:
        super().__init__(parallel or ParallelContext())
        self.failing, self.may_write = list(failing), Event()
        self.may_write.set()

    def snapshot(self, meta: SaveLoadMeta) -> Any:
        return partial(self._export, Path(meta.path), self.steps) if self.parallel.is_main else list

    def _export(self, directory: Path, steps: int) -> list[Path]:
        assert self.may_write.wait(60)
        file = directory / "model"
        file.write_text(str(steps))
        if steps in self.failing:
            raise OSError(28, "No space left on device")
        return [file]


def run(engine: ExportingEngine, checkpoints: Checkpoints, metrics: Sequence[dict[str, float | None]]) -> None:
    """Take one step per entry of `metrics`, and finish the run."""
    for step_metrics in metrics:
        engine.steps += 1
        if checkpoints.is_due(engine.steps):
            checkpoints.start_write(engine.steps)
        checkpoints.rate(engine.steps, step_metrics)
    checkpoints.finish(engine.steps)
    wait_for_writes(60)


def saved_models(run_dir: Path) -> dict[str, str]:
    return {path.name: (path / "model").read_text() for path in sorted((run_dir / "checkpoints").iterdir())}


def test_checkpoint_appears_only_when_complete_while_steps_continue(tmp_path: Path) -> None:
    engine = ExportingEngine()
    engine.may_write.clear()
    checkpoints = Checkpoints(engine, tmp_path, CheckpointConfig(every=1))
    engine.steps = 1
    assert checkpoints.is_due(1)
    checkpoints.start_write(1)
    engine.steps = 2
    assert not [*(tmp_path / "checkpoints").glob("step_*")]
    engine.may_write.set()

    checkpoints.finish(1)

    assert saved_models(tmp_path) == {"step_1": "1"}


def test_keep_last_and_keep_best_remove_other_checkpoints(tmp_path: Path) -> None:
    config = CheckpointConfig(every=1, keep_last=2, keep_best=1, best_metric="eval/accuracy")
    engine = ExportingEngine()
    checkpoints = Checkpoints(engine, tmp_path, config)

    run(engine, checkpoints, [{"eval/accuracy": value} for value in (0.1, 0.9, 0.3, None, 0.4, float("nan"))])

    assert saved_models(tmp_path) == {"step_2": "2", "step_5": "5", "step_6": "6"}
    assert checkpoints.state_dict()["rated"] == [(1, 0.1), (2, 0.9), (3, 0.3), (5, 0.4)]
    resumed = Checkpoints(engine, tmp_path, config)
    resumed.load_state_dict(json.loads(json.dumps(checkpoints.state_dict())))
    run(engine, resumed, [{"eval/accuracy": 0.5}] * 2)
    assert saved_models(tmp_path) == {"step_2": "2", "step_7": "7", "step_8": "8"}


def test_keep_last_ignores_foreign_directories(tmp_path: Path) -> None:
    engine = ExportingEngine()
    checkpoints = Checkpoints(engine, tmp_path, CheckpointConfig(every=1, keep_last=2))
    for foreign in ("step_1.bak", "step_1-eval", "step_99"):
        (tmp_path / "checkpoints" / foreign).mkdir(parents=True)
        (tmp_path / "checkpoints" / foreign / "model").write_text("foreign")

    run(engine, checkpoints, [{}] * 4)

    foreign_models = dict.fromkeys(("step_1.bak", "step_1-eval", "step_99"), "foreign")
    assert saved_models(tmp_path) == {**foreign_models, "step_3": "3", "step_4": "4"}


def test_last_checkpoint_replaces_one_of_earlier_run(tmp_path: Path) -> None:
    (tmp_path / "checkpoints" / "step_3").mkdir(parents=True)
    (tmp_path / "checkpoints" / "step_3" / "model").write_text("old")
    engine = ExportingEngine()

    run(engine, Checkpoints(engine, tmp_path, CheckpointConfig()), [{}] * 3)

    assert saved_models(tmp_path) == {"step_3": "3"}
    assert len([*(tmp_path / "checkpoints").iterdir()]) == 1


def test_load_state_dict_other_metric_discards_ratings(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"every": 1, "keep_last": 1, "keep_best": 1}
    engine = ExportingEngine()
    before = Checkpoints(engine, tmp_path, CheckpointConfig(**settings, best_metric="reward"))
    run(engine, before, [{"reward": 30.0}])
    resumed = Checkpoints(engine, tmp_path, CheckpointConfig(**settings, best_metric="eval/accuracy"))

    resumed.load_state_dict(before.state_dict())

    run(engine, resumed, [{"eval/accuracy": 0.9}, {"eval/accuracy": 0.5}])
    assert saved_models(tmp_path) == {"step_2": "2", "step_3": "3"}


@pytest.mark.parametrize(("mode", "expected"), [("max", {3, 4}), ("min", {1, 4})])
def test_select_retained_ties_prefer_later_step_and_min_mode_lower_value(mode: str, expected: set[int]) -> None:
    config = CheckpointConfig(keep_last=1, keep_best=1, best_metric="loss/eval", best_mode=mode)
    assert select_retained([1, 2, 3, 4], {1: 0.0, 2: 1.0, 3: 1.0}, config) == expected


def test_rate_missing_metric_warns_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    engine = ExportingEngine()
    config = CheckpointConfig(every=1, keep_last=1, keep_best=1, best_metric="eval/acuracy")
    run(engine, Checkpoints(engine, tmp_path, config), [{"eval/accuracy": 1.0}] * 3)

    assert caplog.text.count("checkpoint.best_metric=eval/acuracy: step 1 ") == 1
    assert "did you mean eval/accuracy?" in caplog.text


@pytest.mark.parametrize(
    "settings", [{"keep_best": 1, "best_metric": "x"}, {"keep_best": 1, "keep_last": 1}, {"best_metric": "x"}]
)
def test_keep_best_without_metric_or_keep_last_is_rejected(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"checkpoint\.(keep_best|best_metric): expected"):
        CheckpointConfig(**settings)


def test_checkpoint_write_failure_is_counted_and_run_continues(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    engine = ExportingEngine(failing=[2])
    with collect() as metrics:
        run(engine, Checkpoints(engine, tmp_path, CheckpointConfig(every=2)), [{}] * 5)

    assert metrics.results()["checkpoint/failed"] == 1
    assert "No space left" in caplog.text
    assert saved_models(tmp_path) == {"step_4": "4", "step_5": "5"}


def test_last_checkpoint_write_failure_raises(tmp_path: Path) -> None:
    engine = ExportingEngine(failing=[3])
    with pytest.raises(EngineError, match="step_3"):
        run(engine, Checkpoints(engine, tmp_path, CheckpointConfig()), [{}] * 3)

    assert not [*(tmp_path / "checkpoints").iterdir()]


class SynchronousEngine(ExportingEngine):
    """Engine without snapshots."""

    def snapshot(self, meta: SaveLoadMeta) -> Any:
        return None

    def save(self, meta: SaveLoadMeta) -> None:
        Path(meta.path).mkdir()
        self._export(Path(meta.path), self.steps)


def test_engine_without_snapshots_is_saved_synchronously(tmp_path: Path) -> None:
    engine = SynchronousEngine()
    run(engine, Checkpoints(engine, tmp_path, CheckpointConfig(every=1)), [{}] * 2)

    assert saved_models(tmp_path) == {"step_1": "1", "step_2": "2"}


def test_every_epochs_saves_at_first_step_after_last_example(tmp_path: Path) -> None:
    engine, epochs = ExportingEngine(), [0, 0, 1, 1, 1, 2, 3]
    config = CheckpointConfig(every_epochs=2)
    with pytest.raises(ConfigError, match=r"checkpoint\.every_epochs=2"):
        Checkpoints(engine, tmp_path, config)
    checkpoints = Checkpoints(engine, tmp_path, config, epochs=lambda: epochs[engine.steps])

    run(engine, checkpoints, [{}] * 6)

    assert saved_models(tmp_path) == {"step_5": "5", "step_6": "6"}
    resumed = Checkpoints(engine, tmp_path, config, epochs=lambda: 3)
    resumed.load_state_dict(json.loads(json.dumps(checkpoints.state_dict())))
    assert not resumed.is_due(7)
    resumed.load_state_dict({**checkpoints.state_dict(), "due": {"seconds": 9.0, "passed": 1}})  # of an earlier commit
    assert resumed.is_due(7)


def test_ranks_with_different_epochs_follow_rank_0(tmp_path: Path) -> None:
    def run_rank(parallel: ParallelContext) -> dict[str, Any]:
        engine = ExportingEngine(parallel)
        config = CheckpointConfig(every_epochs=1)
        checkpoints = Checkpoints(
            engine, tmp_path, config, epochs=lambda: engine.steps // 2 if parallel.rank == 0 else 9 * engine.steps
        )
        run(engine, checkpoints, [{}] * 5)
        return checkpoints.state_dict()

    states = on_ranks(2, run_rank)
    assert states[0] == states[1], "states that differ cannot be restored on another number of ranks"
    assert saved_models(tmp_path) == {"step_2": "2", "step_4": "4", "step_5": "5"}
