"""Points are written in the background, whole or not at all; damaged ones are named and passed over."""

from __future__ import annotations

import json
import os
import random
import resource
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from policy_toys import on_ranks
from recover_process import Counting
from safetensors.torch import save_file

from rl_contracts.batch.parallel import ParallelContext
from rl_contracts.errors import ConfigError, DataError, EngineError
from rl_contracts.runtime.metrics import collect
from rl_contracts.runtime.run_files import MANIFEST, last_recovery_checkpoint, recovery_checkpoint_steps
from rl_contracts.testing.processes import fork_script, run_ranks
from rl_trainers import DataSource, RecoverConfig, RecoveryCheckpoints
from rl_trainers.recovery.lookup import resumed_step, truncate_to_checkpoint
from rl_trainers.run_log import background_writes
from rl_trainers.run_log.background_writes import (
    MARKER_PREFIX,
    BackgroundDirectory,
    wait_for_writes,
    write_in_background,
)
from rl_trainers.run_log.schedule import Schedule

SCRIPT = Path(__file__).with_name("recover_process.py")


def points_in(run_dir: Path, **settings: Any) -> tuple[Counting, RecoveryCheckpoints]:
    """A run that has not begun."""
    engine = Counting(ParallelContext())
    settings = {"every": 1, "timeout": 30.0, **settings}
    return engine, RecoveryCheckpoints(run_dir, RecoverConfig(**settings), {"actor": engine}, {"part": engine})


def go(engine: Counting, points: RecoveryCheckpoints, steps: int) -> None:
    for _ in range(steps):
        engine.steps += 1
        points.after_step(engine.steps)
    points.finish()


def resumed(run_dir: Path) -> int:
    """The step of a run that goes on there."""
    engine, points = points_in(run_dir)
    assert points.resume() == engine.steps
    return engine.steps


def shorten(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])


def alter(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1] + b"?")


@pytest.mark.parametrize(
    ("damage", "name"),
    [
        *((damage, name) for damage in (Path.unlink, shorten, alter) for name in ("actor/0-3", "part-0.json")),
        *((damage, MANIFEST) for damage in (Path.unlink, shorten, alter)),
    ],
)
def test_resume_damaged_point_is_named_and_the_one_before_it_is_taken(
    damage: Callable[[Path], None], name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    go(*points_in(tmp_path), 4)
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps({"step": n}) + "\n" for n in range(1, 5)))
    (tmp_path / "groups.jsonl").write_text('{"step": 3}\n{"step": 3}\n{"step": 4}\n{"step')
    damage(tmp_path / "recover" / "step_4" / name)

    assert last_recovery_checkpoint(tmp_path / "recover") == 3
    assert resumed_step(tmp_path, RecoverConfig(1)) == 3
    assert resumed(tmp_path) == 3
    assert f"step_4 is damaged, the run goes on after step 3: {name}" in caplog.text
    assert [json.loads(line)["step"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()] == [1, 2, 3]
    assert (tmp_path / "groups.jsonl").read_text() == '{"step": 3}\n{"step": 3}\n'
    assert recovery_checkpoint_steps(tmp_path) == [3]


def test_points_a_copy_that_somebody_made_of_one_stays(tmp_path: Path) -> None:
    engine, points = points_in(tmp_path)
    go(engine, points, 2)
    (tmp_path / "recover" / "step_2").rename(tmp_path / "recover" / "step_2.mine")

    go(engine, points, 2)

    assert sorted(path.name for path in (tmp_path / "recover").iterdir()) == ["step_2.mine", "step_3", "step_4"]


def test_resume_damaged_point_does_not_stand_in_the_way_of_the_next(tmp_path: Path) -> None:
    go(*points_in(tmp_path), 4)
    shorten(tmp_path / "recover" / "step_4" / "actor" / "0-3")
    engine, points = points_in(tmp_path)
    points.resume()

    go(engine, points, 3)

    assert sorted(path.name for path in (tmp_path / "recover").iterdir()) == ["step_5", "step_6"]
    assert resumed(tmp_path) == 6


def test_resume_removes_later_checkpoints_and_not_what_else_lies_there(tmp_path: Path) -> None:
    go(*points_in(tmp_path), 2)
    for name in ("step_2", "step_3", "step_3.mine", "step_3-eval"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)

    assert resumed(tmp_path) == 2

    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == [
        "step_2",
        "step_3-eval",
        "step_3.mine",
    ]


def test_resume_lines_that_a_loss_of_power_spoiled_are_cut_off(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    go(*points_in(tmp_path), 2)
    spoiled = b'{"step": 1}\n\0\0\0\n[]\n{"step": 2}\n{"st'
    (tmp_path / "metrics.jsonl").write_bytes(spoiled)

    assert resumed(tmp_path) == 2

    assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 1}\n{"step": 2}\n'
    assert "metrics.jsonl: 2 lines cannot be read" in caplog.text


def test_records_are_on_the_disk_before_a_point_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced, sync = set[int](), os.fsync

    def fsync(descriptor: int) -> None:
        assert not recovery_checkpoint_steps(tmp_path) or records <= synced
        synced.add(os.fstat(descriptor).st_ino)
        sync(descriptor)

    files = [tmp_path / name for name in ("metrics.jsonl", "groups.jsonl")]
    for file in files:
        file.write_text('{"step": 1}\n')
    records = {file.stat().st_ino for file in files}
    monkeypatch.setattr("os.fsync", fsync)
    go(*points_in(tmp_path), 1)

    assert recovery_checkpoint_steps(tmp_path) == [1]
    assert records <= synced


def test_resume_only_damaged_points_is_refused_and_nothing_is_cut_off(tmp_path: Path) -> None:
    go(*points_in(tmp_path), 3)
    (tmp_path / "checkpoints" / "step_2").mkdir(parents=True)
    for step in (2, 3):
        shorten(tmp_path / "recover" / f"step_{step}" / "part-0.json")

    for refused in (truncate_to_checkpoint, resumed_step):
        with pytest.raises(ConfigError, match=r"damaged ones: step_2: part-0\.json.*step_3"):
            refused(tmp_path, RecoverConfig(1))
    assert (tmp_path / "checkpoints" / "step_2").exists()
    assert resumed_step(tmp_path, RecoverConfig(1, resume=False)) == 0


def test_start_removes_what_was_half_written(tmp_path: Path) -> None:
    go(*points_in(tmp_path), 2)
    for folder in ("recover", "checkpoints"):
        (tmp_path / folder / ".step_3.partial").mkdir(parents=True)

    assert resumed(tmp_path) == 2

    assert not [*tmp_path.rglob(".step_*")]


class Held(Counting):
    """Writes when it is let."""

    def __init__(self) -> None:
        super().__init__(ParallelContext())
        self.let = threading.Event()

    def _write(self, directory: Path, steps: int) -> Any:
        assert self.let.wait(60)
        return super()._write(directory, steps)


@pytest.fixture
def held(tmp_path: Path) -> Iterator[tuple[Held, RecoveryCheckpoints]]:
    engine = Held()
    yield engine, RecoveryCheckpoints(tmp_path, RecoverConfig(2, timeout=30.0), {"actor": engine}, {"part": engine})
    engine.let.set()
    wait_for_writes(60)


def test_point_holds_what_was_at_its_step_while_steps_go_on(
    held: tuple[Held, RecoveryCheckpoints], tmp_path: Path
) -> None:
    engine, points = held
    for _ in range(3):
        engine.steps += 1
        points.after_step(engine.steps)
    assert recovery_checkpoint_steps(tmp_path) == []
    engine.let.set()
    points.finish()

    assert resumed(tmp_path) == 2


class Private(Counting):
    """Writes a file for the owner alone, as safetensors does."""

    def _write(self, directory: Path, steps: int) -> Any:
        written = super()._write(directory, steps)
        for file in written:
            file.chmod(0o600)
        return written


def test_point_has_files_that_follow_the_umask(tmp_path: Path) -> None:
    points = RecoveryCheckpoints(tmp_path, RecoverConfig(1), {"actor": Private(ParallelContext())}, {})
    points.after_step(1)
    points.finish()

    modes = [path.stat().st_mode & 0o777 for path in (tmp_path / "recover").rglob("*") if path.is_file()]
    assert set(modes) == {(tmp_path / "recover").stat().st_mode & 0o666}


def test_point_that_is_due_waits_for_the_one_before(held: tuple[Held, RecoveryCheckpoints], tmp_path: Path) -> None:
    engine, points = held
    engine.steps = 2
    points.after_step(2)
    threading.Timer(0.1, engine.let.set).start()

    engine.steps = 4
    points.after_step(4)

    assert recovery_checkpoint_steps(tmp_path)[0] == 2
    points.finish()
    assert recovery_checkpoint_steps(tmp_path) == [2, 4]


def test_point_that_takes_longer_than_the_timeout_counts_as_failed_and_steps_go_on(
    held: tuple[Held, RecoveryCheckpoints], tmp_path: Path
) -> None:
    engine, points = held
    points.config.timeout = 0.05
    points.after_step(2)
    with collect() as figures:
        points.after_step(4)
    assert figures.results()["recover/failed"] == 1
    engine.let.set()
    wait_for_writes(60)

    points.config.timeout = 30.0
    points.after_step(6)
    points.finish()

    assert 6 in recovery_checkpoint_steps(tmp_path)


class Failing(Counting):
    """Cannot write for some steps."""

    def __init__(self, parallel: ParallelContext, steps: set[int]) -> None:
        super().__init__(parallel)
        self.failing = steps

    def _write(self, directory: Path, steps: int) -> Any:
        files = super()._write(directory, steps)
        if steps in self.failing:
            raise OSError(28, "No space left on device")
        return files


def test_writer_that_raises_is_warned_of_counted_and_tried_again_with_the_next_step(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    engine = Failing(ParallelContext(), {2, 3})
    points = RecoveryCheckpoints(tmp_path, RecoverConfig(1, max_failures=2), {"actor": engine}, {"part": engine})
    with collect() as figures:
        go(engine, points, 3)

    assert figures.results()["recover/failed"] == 1
    assert "could not be written; the last one is of step 1" in caplog.text
    assert "No space left" in caplog.text
    assert [path.name for path in (tmp_path / "recover").iterdir()] == ["step_1"]
    go(engine, points, 1)
    assert recovery_checkpoint_steps(tmp_path) == [1, 4]


def test_writer_that_raises_more_often_than_allowed_ends_the_run(tmp_path: Path) -> None:
    engine = Failing(ParallelContext(), {2, 4, 5, 6})
    points = RecoveryCheckpoints(tmp_path, RecoverConfig(1, max_failures=2), {"actor": engine}, {"part": engine})

    with pytest.raises(EngineError, match=r"3 recover points in a row .*recover\.max_failures=2"):
        go(engine, points, 9)

    assert engine.steps == 7  # where the failure of step 6 is heard
    assert recovery_checkpoint_steps(tmp_path) == [1, 3]


def test_stop_after_a_point_that_failed_writes_it_again_and_waits(tmp_path: Path) -> None:
    engine, asked = Failing(ParallelContext(), {1}), threading.Event()
    points = RecoveryCheckpoints(tmp_path, RecoverConfig(1), {"actor": engine}, {"part": engine}, asked.is_set)
    engine.steps = 1
    points.after_step(1)
    wait_for_writes(60)
    engine.failing = set()
    asked.set()

    with pytest.raises(SystemExit):
        points.after_step(1)

    assert resumed(tmp_path) == 1


def test_stop_that_cannot_be_saved_ends_the_run_all_the_same(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    engine = Failing(ParallelContext(), {1})
    points = RecoveryCheckpoints(tmp_path, RecoverConfig(), {"actor": engine}, {"part": engine}, lambda: True)
    engine.steps = 1

    with pytest.raises(SystemExit):
        points.after_step(1)

    assert "there is no recover point" in caplog.text


def assert_waited(event: threading.Event) -> None:
    assert event.wait(60)


def test_file_that_is_shorter_than_its_header_says_makes_no_point(tmp_path: Path) -> None:
    def write(directory: Path, cut: int) -> list[Path]:
        file = directory / "model.safetensors"
        save_file({"a": torch.arange(7), "b": torch.zeros(2, 3)}, file, {"made": "by a test"})
        os.truncate(file, file.stat().st_size - cut)
        return [file]

    found = []
    for cut in (0, 1):
        path = tmp_path / f"step_{cut}"
        point = BackgroundDirectory(
            path, ParallelContext(), lambda directory, cut=cut: [partial(write, directory, cut)], 30.0
        )
        assert point.wait()
        found.append((path.exists(), "bytes, found" in point.error))

    assert found == [(True, False), (False, True)]


class Wordless(Counting):
    """Cannot say how it is."""

    def state_dict(self) -> dict[str, Any]:
        raise DataError("an image has no JSON")


def test_state_that_cannot_be_described_costs_the_point_and_a_stop_ends_the_run_all_the_same(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    engine, asked = Wordless(ParallelContext()), threading.Event()
    points = RecoveryCheckpoints(tmp_path, RecoverConfig(1), {"actor": engine}, {"part": engine}, asked.is_set)
    go(engine, points, 1)
    asked.set()

    with pytest.raises(SystemExit):
        points.after_step(1)

    assert caplog.text.count("DataError: an image has no JSON") == 2
    assert "there is no recover point" in caplog.text


def test_job_that_raises_does_not_end_the_writer(caplog: pytest.LogCaptureFixture) -> None:
    done = threading.Event()
    write_in_background(lambda: [][0])
    write_in_background(done.set)

    assert done.wait(60)
    assert "IndexError" in caplog.text


def test_end_with_a_point_that_is_not_there_in_time_counts_it_as_failed(held: tuple[Held, RecoveryCheckpoints]) -> None:
    _, points = held
    points.config.timeout = 0.05
    points.after_step(2)

    with collect() as figures:
        points.finish()

    assert figures.results()["recover/failed"] == 1


def test_rank_that_is_late_writes_nothing_into_what_rank_0_gave_up(tmp_path: Path) -> None:
    def write(directory: Path) -> list[Path]:
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "file").touch()
        return [directory / "file"]

    let = threading.Event()
    write_in_background(lambda: assert_waited(let))
    (tmp_path / ".step_1.partial").mkdir()
    late = ParallelContext(rank=1, world_size=2)
    point = BackgroundDirectory(
        tmp_path / "step_1", late, lambda directory: [partial(write, directory / "actor")], 30.0
    )
    shutil.rmtree(tmp_path / ".step_1.partial")  # as rank 0 does
    let.set()
    wait_for_writes(60)

    assert point.status() == [True, True, "EngineError: given up"]
    assert not [*tmp_path.iterdir()]


class Watched(ParallelContext):
    """A rank that notes when it met the others."""

    def __init__(self) -> None:
        super().__init__()
        self.met: list[float] = []

    def gather_json(self, value: Any, replicas: bool = False) -> list[Any]:
        self.met.append(time.monotonic())
        return super().gather_json(value, replicas)


def test_wait_for_a_slow_disk_meets_the_other_ranks_meanwhile(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(background_writes, "SYNC_SECONDS", 0.05)
    engine, watched = Held(), Watched()
    engine.parallel = watched
    points = RecoveryCheckpoints(tmp_path, RecoverConfig(1, timeout=30.0), {"actor": engine}, {"part": engine})
    points.after_step(1)
    before = len(watched.met)
    waiting = threading.Thread(target=points.finish)
    waiting.start()
    deadline = time.monotonic() + 20
    while len(watched.met) < before + 3:
        assert time.monotonic() < deadline, "nobody met while the disk was slow"
        time.sleep(0.01)
    engine.let.set()
    waiting.join(30)

    assert recovery_checkpoint_steps(tmp_path) == [1]


def test_file_size_limit_while_a_point_is_written_leaves_the_one_before(tmp_path: Path) -> None:
    engine, points = points_in(tmp_path)
    go(engine, points, 1)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))  # what a full disk does to the files of a point
    try:
        go(engine, points, 1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)

    assert [path.name for path in (tmp_path / "recover").iterdir()] == ["step_1"]
    go(engine, points, 1)
    assert resumed(tmp_path) == 3


def test_ranks_one_that_fails_costs_all_of_them_the_point_and_no_more(tmp_path: Path) -> None:
    def work(parallel: ParallelContext) -> list[int]:
        engine = Failing(parallel, {2} if parallel.rank == 1 else set())
        points = RecoveryCheckpoints(tmp_path, RecoverConfig(1, timeout=30.0), {"actor": engine}, {"part": engine})
        go(engine, points, 3)
        assert points._failures == 0
        return points._kept

    assert on_ranks(2, work) == [[1, 3], [1, 3]]
    assert sorted(path.name for path in (tmp_path / "recover").iterdir()) == ["step_1", "step_3"]
    files = json.loads((tmp_path / "recover" / "step_3" / MANIFEST).read_text())
    assert files["ranks"] == 2
    assert {"part-0.json", "part-1.json", "actor/0-0", "actor/1-0"} <= files["files"].keys()


def test_ranks_whose_clocks_differ_go_by_rank_0(tmp_path: Path) -> None:
    def work(parallel: ParallelContext) -> list[int]:
        engine = Counting(parallel)
        points = RecoveryCheckpoints(tmp_path, RecoverConfig(every_minutes=1.0), {"actor": engine}, {"part": engine})
        clock = {0: 0.0, 1: 59.0, 2: 61.0, 3: 90.0} if parallel.rank == 0 else {n: 1e9 * n for n in range(4)}
        points._due._now = lambda: clock[engine.steps]
        points._due.restart()
        go(engine, points, 3)
        return points._kept

    assert on_ranks(2, work) == [[2], [2]]


def test_minutes_stretch_to_fifty_times_the_seconds_that_a_point_held(tmp_path: Path) -> None:
    _, points = points_in(tmp_path, every=0, every_minutes=1.0)
    began = time.monotonic()
    points.save(1)
    assert 0 < points._due.least <= 50 * (time.monotonic() - began)
    clock = [0.0]
    due = Schedule(points.config, now=lambda: clock[0])
    due.least = 90.0
    for clock[0], expected in ((61.0, False), (91.0, True)):
        assert due.is_due(1) is expected


def test_part_that_cannot_be_saved_leaves_a_default_run_without_points(tmp_path: Path) -> None:
    source = DataSource(iter([[{}]]), lambda rows: rows)
    points = RecoveryCheckpoints(tmp_path, RecoverConfig(), {"actor": Counting(ParallelContext())}, {"source": source})
    assert not points.config.regular


def test_epochs_a_point_is_due_at_the_first_step_after_the_last_row(tmp_path: Path) -> None:
    engine, epochs = Counting(ParallelContext()), iter([0, 0, 1, 1, 1, 2, 3, 3])
    with pytest.raises(ConfigError, match=r"recover\.every_epochs=2"):
        RecoveryCheckpoints(tmp_path, RecoverConfig(every_epochs=2), {"actor": engine}, {"part": engine})
    points = RecoveryCheckpoints(
        tmp_path, RecoverConfig(every_epochs=2), {"actor": engine}, {"part": engine}, epochs=lambda: next(epochs)
    )

    go(engine, points, 5)

    assert recovery_checkpoint_steps(tmp_path) == [5]


def test_directory_whose_writer_lists_the_mark_of_another_rank_is_complete(tmp_path: Path) -> None:
    def write(scratch: Path) -> list[Path]:
        (scratch / "weights").write_text("w")
        return [scratch / "weights", scratch / f"{MARKER_PREFIX}1.partial"]  # which was renamed meanwhile

    made = BackgroundDirectory(tmp_path / "step_1", ParallelContext(), lambda scratch: [lambda: write(scratch)], 30.0)

    assert made.wait()
    assert made.error == ""
    assert [path.name for path in (tmp_path / "step_1").iterdir()] == ["weights"]


@pytest.mark.slow
def test_killed_at_any_moment_the_last_point_is_whole_and_of_one_step(tmp_path: Path) -> None:
    run_dir, draw, reached = tmp_path / "run", random.Random(5), 0
    for life in range(8):
        process = fork_script(SCRIPT, [str(run_dir), "1000000"], tmp_path / f"log-{life}")
        deadline = time.monotonic() + 60
        while (last_recovery_checkpoint(run_dir / "recover") or 0) < reached + 2:
            assert process.is_alive(), (tmp_path / f"log-{life}").read_text()
            assert time.monotonic() < deadline
            time.sleep(0.001)
        time.sleep(draw.random() / 50)
        os.kill(process.pid, signal.SIGKILL)
        process.join(30)
        step = last_recovery_checkpoint(run_dir / "recover")
        assert step is not None
        assert step >= reached + 2
        reached = step
    assert resumed(run_dir) == reached


@pytest.mark.slow
def test_two_processes_write_points_go_on_from_them_and_pass_over_one_that_misses_a_ranks_file(tmp_path: Path) -> None:
    run_ranks(SCRIPT, [str(tmp_path), "5"], 2)
    assert recovery_checkpoint_steps(tmp_path) == [4, 5]
    (tmp_path / "recover" / "step_5" / "actor" / "1-7").unlink()

    seen = run_ranks(SCRIPT, [str(tmp_path), "7"], 2)

    assert all(json.loads(text.splitlines()[-1])["resumed"] == 4 for text in seen)
    assert sorted(path.name for path in (tmp_path / "recover").iterdir()) == ["step_6", "step_7"]
