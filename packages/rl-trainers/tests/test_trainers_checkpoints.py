"""Checkpoints appear whole, beside training, and the right ones stay."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from threading import Event
from typing import Any

import pytest
from policy_toys import on_ranks
from recover_process import Counting

from rl_contracts.batch.parallel import ParallelContext
from rl_contracts.data import SaveLoadMeta
from rl_contracts.errors import ConfigError, EngineError
from rl_contracts.runtime.metrics import collect
from rl_trainers import CheckpointConfig
from rl_trainers.run_log.background_writes import wait_for_writes
from rl_trainers.run_log.checkpoints import Checkpoints, select_retained


class Model(Counting):
    """Exports its steps; fails, or waits, where it is told to."""

    def __init__(self, parallel: ParallelContext | None = None, failing: Sequence[int] = ()) -> None:
        super().__init__(parallel or ParallelContext())
        self.failing, self.let = list(failing), Event()
        self.let.set()

    def snapshot(self, meta: SaveLoadMeta) -> Any:
        return partial(self._export, Path(meta.path), self.steps) if self.parallel.is_main else list

    def _export(self, directory: Path, steps: int) -> list[Path]:
        assert self.let.wait(60)
        file = directory / "model"
        file.write_text(str(steps))
        if steps in self.failing:
            raise OSError(28, "No space left on device")
        return [file]


def go(model: Model, checkpoints: Checkpoints, figures: Sequence[dict[str, float | None]]) -> None:
    """Steps with these figures, to the end of the run."""
    for found in figures:
        model.steps += 1
        if checkpoints.is_due(model.steps):
            checkpoints.start_write(model.steps)
        checkpoints.rate(model.steps, found)
    checkpoints.finish(model.steps)
    wait_for_writes(60)


def found_in(run_dir: Path) -> dict[str, str]:
    return {path.name: (path / "model").read_text() for path in sorted((run_dir / "checkpoints").iterdir())}


def test_checkpoints_every_two_steps_and_after_the_last_hold_their_steps(tmp_path: Path) -> None:
    model = Model()
    go(model, Checkpoints(model, tmp_path, CheckpointConfig(every=2)), [{}] * 5)

    assert found_in(tmp_path) == {"step_2": "2", "step_4": "4", "step_5": "5"}


def test_checkpoint_is_there_when_it_is_whole_and_steps_go_on_meanwhile(tmp_path: Path) -> None:
    model = Model()
    model.let.clear()
    checkpoints = Checkpoints(model, tmp_path, CheckpointConfig(every=1))
    model.steps = 1
    assert checkpoints.is_due(1)
    checkpoints.start_write(1)
    model.steps = 2
    assert not [*(tmp_path / "checkpoints").glob("step_*")]
    model.let.set()

    checkpoints.finish(1)

    assert found_in(tmp_path) == {"step_1": "1"}


def test_keep_last_and_best_of_a_figure_the_others_go(tmp_path: Path) -> None:
    config = CheckpointConfig(every=1, keep_last=2, keep_best=1, best_figure="eval/accuracy")
    model = Model()
    checkpoints = Checkpoints(model, tmp_path, config)

    go(model, checkpoints, [{"eval/accuracy": value} for value in (0.1, 0.9, 0.3, None, 0.4, float("nan"))])

    assert found_in(tmp_path) == {"step_2": "2", "step_5": "5", "step_6": "6"}
    assert checkpoints.state_dict()["rated"] == [(1, 0.1), (2, 0.9), (3, 0.3), (5, 0.4)]
    again = Checkpoints(model, tmp_path, config)
    again.load_state_dict(json.loads(json.dumps(checkpoints.state_dict())))
    go(model, again, [{"eval/accuracy": 0.5}] * 2)
    assert found_in(tmp_path) == {"step_2": "2", "step_7": "7", "step_8": "8"}


def test_keep_last_leaves_what_others_put_beside_checkpoints_and_goes_on(tmp_path: Path) -> None:
    model = Model()
    checkpoints = Checkpoints(model, tmp_path, CheckpointConfig(every=1, keep_last=2))
    for foreign in ("step_1.bak", "step_1-eval", "step_99"):
        (tmp_path / "checkpoints" / foreign).mkdir(parents=True)
        (tmp_path / "checkpoints" / foreign / "model").write_text("mine")

    go(model, checkpoints, [{}] * 4)

    mine = dict.fromkeys(("step_1.bak", "step_1-eval", "step_99"), "mine")
    assert found_in(tmp_path) == {**mine, "step_3": "3", "step_4": "4"}


def test_last_checkpoint_takes_the_place_of_another_runs(tmp_path: Path) -> None:
    (tmp_path / "checkpoints" / "step_3").mkdir(parents=True)
    (tmp_path / "checkpoints" / "step_3" / "model").write_text("old")
    model = Model()

    go(model, Checkpoints(model, tmp_path, CheckpointConfig()), [{}] * 3)

    assert found_in(tmp_path) == {"step_3": "3"}
    assert len([*(tmp_path / "checkpoints").iterdir()]) == 1


def test_ratings_by_another_figure_are_forgotten(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"every": 1, "keep_last": 1, "keep_best": 1}
    model = Model()
    before = Checkpoints(model, tmp_path, CheckpointConfig(**settings, best_figure="reward"))
    go(model, before, [{"reward": 30.0}])
    again = Checkpoints(model, tmp_path, CheckpointConfig(**settings, best_figure="eval/accuracy"))

    again.load_state_dict(before.state_dict())

    go(model, again, [{"eval/accuracy": 0.9}, {"eval/accuracy": 0.5}])
    assert found_in(tmp_path) == {"step_2": "2", "step_3": "3"}


@pytest.mark.parametrize(("mode", "expected"), [("max", {3, 4}), ("min", {1, 4})])
def test_best_of_equal_ones_is_the_later_and_less_is_better_where_it_is_said(mode: str, expected: set[int]) -> None:
    config = CheckpointConfig(keep_last=1, keep_best=1, best_figure="loss/eval", best_mode=mode)
    assert select_retained([1, 2, 3, 4], {1: 0.0, 2: 1.0, 3: 1.0}, config) == expected


def test_figure_that_a_checkpoints_step_does_not_have_is_warned_of_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = Model()
    config = CheckpointConfig(every=1, keep_last=1, keep_best=1, best_figure="eval/acuracy")
    go(model, Checkpoints(model, tmp_path, config), [{"eval/accuracy": 1.0}] * 3)

    assert caplog.text.count("checkpoint.best_figure=eval/acuracy: step 1 has no such figure") == 1
    assert "no step had such a figure; did you mean eval/accuracy?" in caplog.text


@pytest.mark.parametrize("settings", [{"keep_best": 1, "best_figure": "x"}, {"keep_best": 1, "keep_last": 1}])
def test_keep_best_that_decides_nothing_is_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"checkpoint\.keep_best: expected 0, or checkpoint\.keep_last"):
        CheckpointConfig(**settings)


def test_checkpoint_that_cannot_be_written_is_counted_and_the_run_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = Model(failing=[2])
    with collect() as figures:
        go(model, Checkpoints(model, tmp_path, CheckpointConfig(every=2)), [{}] * 5)

    assert figures.results()["checkpoint/failed"] == 1
    assert "No space left" in caplog.text
    assert found_in(tmp_path) == {"step_4": "4", "step_5": "5"}


def test_last_checkpoint_that_cannot_be_written_ends_the_run_with_an_error(tmp_path: Path) -> None:
    model = Model(failing=[3])
    with pytest.raises(EngineError, match=r"step_3: the last checkpoint could not be written"):
        go(model, Checkpoints(model, tmp_path, CheckpointConfig()), [{}] * 3)

    assert not [*(tmp_path / "checkpoints").iterdir()]


class SavingAtOnce(Model):
    """Has no snapshots."""

    def snapshot(self, meta: SaveLoadMeta) -> Any:
        return None

    def save(self, meta: SaveLoadMeta) -> None:
        Path(meta.path).mkdir()
        self._export(Path(meta.path), self.steps)


def test_engine_without_snapshots_is_saved_at_once(tmp_path: Path) -> None:
    model = SavingAtOnce()
    go(model, Checkpoints(model, tmp_path, CheckpointConfig(every=1)), [{}] * 2)

    assert found_in(tmp_path) == {"step_1": "1", "step_2": "2"}


def test_ranks_take_the_same_checkpoints_by_the_clock_of_rank_0(tmp_path: Path) -> None:
    def work(parallel: ParallelContext) -> dict[str, Any]:
        model = Model(parallel)
        checkpoints = Checkpoints(model, tmp_path, CheckpointConfig(every_minutes=1.0))
        checkpoints._due._now = lambda: (40.0 if parallel.rank == 0 else 1e9) * model.steps
        checkpoints._due.restart()
        go(model, checkpoints, [{}] * 5)
        return checkpoints.state_dict()

    states = on_ranks(2, work)
    assert states[0] == states[1], "a state that differs cannot go on with another number of ranks"
    assert found_in(tmp_path) == {"step_2": "2", "step_4": "4", "step_5": "5"}
