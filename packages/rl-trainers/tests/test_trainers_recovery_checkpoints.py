"""Recovery checkpoints are written atomically in the background; damaged ones are logged and skipped."""

from __future__ import annotations

import json
import os
import random
import re
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
from recover_process import CountingEngine
from safetensors.torch import save_file

from rl_contracts.batch.parallel import ParallelContext
from rl_contracts.errors import ConfigError, DataError, EngineError
from rl_contracts.runtime.metrics import collect
from rl_contracts.runtime.run_files import MANIFEST, last_recovery_checkpoint, recovery_checkpoint_steps
from rl_contracts.testing.processes import fork_script, run_ranks
from rl_trainers import DataSource, RecoverConfig, RecoveryCheckpoints
from rl_trainers.recovery.lookup import resumed_step, truncate_to_checkpoint
from rl_trainers.recovery.schedule import Schedule
from rl_trainers.run_log import background_writes
from rl_trainers.run_log.background_writes import (
    MARKER_PREFIX,
    BackgroundDirectory,
    wait_for_writes,
    write_in_background,
)

SCRIPT = Path(__file__).with_name("recover_process.py")


def new_run(run_dir: Path, **settings: Any) -> tuple[CountingEngine, RecoveryCheckpoints]:
    """Return the engine and the recovery checkpoints of a run that has not started."""
    engine = CountingEngine(ParallelContext())
    settings = {"every": 1, **settings}
    return engine, RecoveryCheckpoints(run_dir, RecoverConfig(**settings), {"actor": engine}, {"component": engine})


def run(engine: CountingEngine, checkpoints: RecoveryCheckpoints, steps: int) -> None:
    for _ in range(steps):
        engine.steps += 1
        checkpoints.after_step(engine.steps)
    checkpoints.finish()


def resume(run_dir: Path) -> int:
    """Resume a run, and return its step."""
    engine, checkpoints = new_run(run_dir)
    assert checkpoints.resume() == engine.steps
    return engine.steps


def truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])


def corrupt(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1] + b"?")


@pytest.mark.parametrize(
    ("damage", "name"),
    [
        (Path.unlink, "actor/0-3"),
        (corrupt, "actor/0-3"),
        (truncate, "component-0.json"),
        (Path.unlink, MANIFEST),
        (truncate, MANIFEST),
    ],
)
def test_resume_damaged_checkpoint_is_logged_and_previous_one_used(
    damage: Callable[[Path], None], name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run(*new_run(tmp_path), 4)
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps({"step": n}) + "\n" for n in range(1, 5)))
    (tmp_path / "groups.jsonl").write_text('{"step": 3}\n{"step": 3}\n{"step": 4}\n{"step')
    damage(tmp_path / "recover" / "step_4" / name)

    assert last_recovery_checkpoint(tmp_path / "recover") == 3
    assert resumed_step(tmp_path, RecoverConfig(1)) == 3
    assert resume(tmp_path) == 3
    assert re.search(rf"step_4 .* step 3: {re.escape(name)}", caplog.text)
    assert [json.loads(line)["step"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()] == [1, 2, 3]
    assert (tmp_path / "groups.jsonl").read_text() == '{"step": 3}\n{"step": 3}\n'
    assert recovery_checkpoint_steps(tmp_path) == [3]


def test_resume_damaged_checkpoint_neither_blocks_nor_outlives_later_ones(tmp_path: Path) -> None:
    run(*new_run(tmp_path), 4)
    truncate(tmp_path / "recover" / "step_4" / "actor" / "0-3")
    engine, checkpoints = new_run(tmp_path)
    checkpoints.resume()

    (tmp_path / "recover" / "step_2.copy").mkdir()  # made by the user

    run(engine, checkpoints, 3)

    assert sorted(path.name for path in (tmp_path / "recover").iterdir()) == ["step_2.copy", "step_5", "step_6"]
    assert resume(tmp_path) == 6


def test_resume_removes_later_and_unfinished_checkpoints_only(tmp_path: Path) -> None:
    run(*new_run(tmp_path), 2)
    for name in ("step_2", "step_3", "step_3.copy", "step_3-eval", ".step_3.partial"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    (tmp_path / "recover" / ".step_3.partial").mkdir()

    assert resume(tmp_path) == 2

    assert not [*tmp_path.rglob(".step_*")]
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == [
        "step_2",
        "step_3-eval",
        "step_3.copy",
    ]


def test_resume_disabled_starts_over(tmp_path: Path) -> None:
    run(*new_run(tmp_path), 2)

    assert new_run(tmp_path, resume=False)[1].resume() is None


def test_resume_removes_lines_damaged_by_power_loss(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run(*new_run(tmp_path), 2)
    damaged = b'{"step": 1}\n\0\0\0\n[]\n{"step": 2}\n{"st'
    (tmp_path / "metrics.jsonl").write_bytes(damaged)

    assert resume(tmp_path) == 2

    assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 1}\n{"step": 2}\n'
    assert (tmp_path / "metrics.jsonl", 2) in [record.args for record in caplog.records]


def test_records_are_synced_before_checkpoint_appears(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
    run(*new_run(tmp_path), 1)

    assert recovery_checkpoint_steps(tmp_path) == [1]
    assert records <= synced


def test_resume_with_only_damaged_checkpoints_raises_and_removes_nothing(tmp_path: Path) -> None:
    run(*new_run(tmp_path), 3)
    (tmp_path / "checkpoints" / "step_2").mkdir(parents=True)
    for step in (2, 3):
        truncate(tmp_path / "recover" / f"step_{step}" / "component-0.json")

    for function in (truncate_to_checkpoint, resumed_step):
        with pytest.raises(ConfigError, match=r"step_2: component-0\.json.*step_3"):
            function(tmp_path, RecoverConfig(1))
    assert (tmp_path / "checkpoints" / "step_2").exists()
    assert resumed_step(tmp_path, RecoverConfig(1, resume=False)) == 0


class BlockedEngine(CountingEngine):
    """Engine whose writes wait until `may_write` is set."""

    def __init__(self) -> None:
        super().__init__(ParallelContext())
        self.may_write = threading.Event()

    def _write(self, directory: Path, steps: int) -> Any:
        assert self.may_write.wait(60)
        return super()._write(directory, steps)


@pytest.fixture
def blocked(tmp_path: Path) -> Iterator[tuple[BlockedEngine, RecoveryCheckpoints]]:
    engine = BlockedEngine()
    yield (
        engine,
        RecoveryCheckpoints(tmp_path, RecoverConfig(2), {"actor": engine}, {"component": engine}),
    )
    engine.may_write.set()
    wait_for_writes(60)


def test_checkpoint_has_state_of_its_step_while_steps_continue(
    blocked: tuple[BlockedEngine, RecoveryCheckpoints], tmp_path: Path
) -> None:
    engine, checkpoints = blocked
    for _ in range(3):
        engine.steps += 1
        checkpoints.after_step(engine.steps)
    assert recovery_checkpoint_steps(tmp_path) == []
    engine.may_write.set()
    checkpoints.finish()

    assert resume(tmp_path) == 2


class PrivateFilesEngine(CountingEngine):
    """Engine that writes files only the owner may read, as safetensors does."""

    def _write(self, directory: Path, steps: int) -> Any:
        files = super()._write(directory, steps)
        for file in files:
            file.chmod(0o600)
        return files


def test_checkpoint_files_follow_umask(tmp_path: Path) -> None:
    checkpoints = RecoveryCheckpoints(tmp_path, RecoverConfig(1), {"actor": PrivateFilesEngine(ParallelContext())}, {})
    checkpoints.after_step(1)
    checkpoints.finish()

    modes = [path.stat().st_mode & 0o777 for path in (tmp_path / "recover").rglob("*") if path.is_file()]
    assert set(modes) == {(tmp_path / "recover").stat().st_mode & 0o666}


def test_due_checkpoint_waits_for_pending_one(
    blocked: tuple[BlockedEngine, RecoveryCheckpoints], tmp_path: Path
) -> None:
    engine, checkpoints = blocked
    engine.steps = 2
    checkpoints.after_step(2)
    threading.Timer(0.1, engine.may_write.set).start()

    engine.steps = 4
    checkpoints.after_step(4)

    assert recovery_checkpoint_steps(tmp_path)[0] == 2
    checkpoints.finish()
    assert recovery_checkpoint_steps(tmp_path) == [2, 4]


def test_checkpoint_beyond_timeout_counts_as_failed_and_run_continues(
    blocked: tuple[BlockedEngine, RecoveryCheckpoints], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, checkpoints = blocked
    monkeypatch.setattr(background_writes, "WRITE_SECONDS", 0.05)
    checkpoints.after_step(2)
    with collect() as metrics:
        checkpoints.after_step(4)
    assert metrics.results()["recover/failed"] == 1
    engine.may_write.set()
    wait_for_writes(60)

    monkeypatch.undo()
    checkpoints.after_step(6)
    checkpoints.finish()

    assert 6 in recovery_checkpoint_steps(tmp_path)


class FailingEngine(CountingEngine):
    """Engine whose writes fail at some steps."""

    def __init__(self, parallel: ParallelContext, steps: set[int]) -> None:
        super().__init__(parallel)
        self.failing = steps

    def _write(self, directory: Path, steps: int) -> Any:
        files = super()._write(directory, steps)
        if steps in self.failing:
            raise OSError(28, "No space left on device")
        return files


def test_write_failure_is_logged_counted_and_retried_at_next_step(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    engine = FailingEngine(ParallelContext(), {2, 3})
    checkpoints = RecoveryCheckpoints(tmp_path, RecoverConfig(1), {"actor": engine}, {"component": engine})
    with collect() as metrics:
        run(engine, checkpoints, 3)

    assert metrics.results()["recover/failed"] == 1
    assert "newest: step 1" in caplog.text
    assert "No space left" in caplog.text
    assert [path.name for path in (tmp_path / "recover").iterdir()] == ["step_1"]
    run(engine, checkpoints, 1)
    assert recovery_checkpoint_steps(tmp_path) == [1, 4]


def test_write_failures_above_max_failures_raise(tmp_path: Path) -> None:
    engine = FailingEngine(ParallelContext(), {2, 4, 5, 6, 7})
    checkpoints = RecoveryCheckpoints(tmp_path, RecoverConfig(1), {"actor": engine}, {"component": engine})

    with pytest.raises(EngineError, match="4 consecutive"):
        run(engine, checkpoints, 9)

    assert engine.steps == 8  # at step 8 the trainer learns that step 7 failed
    assert recovery_checkpoint_steps(tmp_path) == [1, 3]


def test_stop_after_write_failure_retries_and_waits(tmp_path: Path) -> None:
    engine, stop_requested = FailingEngine(ParallelContext(), {1}), threading.Event()
    checkpoints = RecoveryCheckpoints(
        tmp_path, RecoverConfig(1), {"actor": engine}, {"component": engine}, stop_requested.is_set
    )
    engine.steps = 1
    checkpoints.after_step(1)
    wait_for_writes(60)
    engine.failing = set()
    stop_requested.set()

    with pytest.raises(SystemExit):
        checkpoints.after_step(1)

    assert resume(tmp_path) == 1


def test_stop_with_write_failure_still_exits(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    engine = FailingEngine(ParallelContext(), {1})
    checkpoints = RecoveryCheckpoints(tmp_path, RecoverConfig(), {"actor": engine}, {"component": engine}, lambda: True)
    engine.steps = 1

    with pytest.raises(SystemExit):
        checkpoints.after_step(1)

    assert "no recovery checkpoint" in caplog.text


def wait_for(event: threading.Event) -> None:
    assert event.wait(60)


def test_safetensors_file_shorter_than_header_fails_the_write(tmp_path: Path) -> None:
    def write(directory: Path, missing: int) -> list[Path]:
        file = directory / "model.safetensors"
        save_file({"a": torch.arange(7), "b": torch.zeros(2, 3)}, file, {"made": "by a test"})
        os.truncate(file, file.stat().st_size - missing)
        return [file]

    results = []
    for missing in (0, 1):
        path = tmp_path / f"step_{missing}"
        directory = BackgroundDirectory(
            path, ParallelContext(), lambda directory, missing=missing: [partial(write, directory, missing)]
        )
        assert directory.wait()
        results.append((path.exists(), "bytes, found" in directory.error))

    assert results == [(True, False), (False, True)]


class FailingStateEngine(CountingEngine):
    """Engine whose `state_dict` fails."""

    def state_dict(self) -> dict[str, Any]:
        raise DataError("an image has no JSON")


def test_state_dict_error_fails_the_checkpoint_and_stop_still_exits(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    engine, stop_requested = FailingStateEngine(ParallelContext()), threading.Event()
    checkpoints = RecoveryCheckpoints(
        tmp_path, RecoverConfig(1), {"actor": engine}, {"component": engine}, stop_requested.is_set
    )
    run(engine, checkpoints, 1)
    stop_requested.set()

    with pytest.raises(SystemExit):
        checkpoints.after_step(1)

    assert caplog.text.count("DataError: an image has no JSON") == 2
    assert "no recovery checkpoint" in caplog.text


def test_background_job_error_does_not_end_writer_thread(caplog: pytest.LogCaptureFixture) -> None:
    done = threading.Event()
    write_in_background(lambda: [][0])
    write_in_background(done.set)

    assert done.wait(60)
    assert "IndexError" in caplog.text


def test_finish_beyond_timeout_counts_checkpoint_as_failed(
    blocked: tuple[BlockedEngine, RecoveryCheckpoints], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, checkpoints = blocked
    monkeypatch.setattr(background_writes, "WRITE_SECONDS", 0.05)
    checkpoints.after_step(2)

    with collect() as metrics:
        checkpoints.finish()

    assert metrics.results()["recover/failed"] == 1


def test_late_rank_writes_nothing_after_rank_0_abandoned_directory(tmp_path: Path) -> None:
    def write(directory: Path) -> list[Path]:
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "file").touch()
        return [directory / "file"]

    may_write = threading.Event()
    write_in_background(lambda: wait_for(may_write))
    (tmp_path / ".step_1.partial").mkdir()
    late = ParallelContext(rank=1, world_size=2)
    directory = BackgroundDirectory(tmp_path / "step_1", late, lambda directory: [partial(write, directory / "actor")])
    shutil.rmtree(tmp_path / ".step_1.partial")  # as rank 0 does when it abandons the write
    may_write.set()
    wait_for_writes(60)

    written, finished, failure = directory.status()
    assert (written, finished) == (True, True)
    assert failure.startswith("EngineError: ")
    assert not [*tmp_path.iterdir()]


class RecordingContext(ParallelContext):
    """Context that records the times of status exchanges."""

    def __init__(self) -> None:
        super().__init__()
        self.exchange_times: list[float] = []

    def gather_json(self, value: Any, replicas: bool = False) -> list[Any]:
        self.exchange_times.append(time.monotonic())
        return super().gather_json(value, replicas)


def test_wait_for_slow_disk_keeps_exchanging_status_with_ranks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(background_writes, "SYNC_SECONDS", 0.05)
    engine, parallel = BlockedEngine(), RecordingContext()
    engine.parallel = parallel
    checkpoints = RecoveryCheckpoints(tmp_path, RecoverConfig(1), {"actor": engine}, {"component": engine})
    checkpoints.after_step(1)
    before = len(parallel.exchange_times)
    finishing = threading.Thread(target=checkpoints.finish)
    finishing.start()
    deadline = time.monotonic() + 20
    while len(parallel.exchange_times) < before + 3:
        assert time.monotonic() < deadline, "ranks exchanged no status while the disk was slow"
        time.sleep(0.01)
    engine.may_write.set()
    finishing.join(30)

    assert recovery_checkpoint_steps(tmp_path) == [1]


def test_full_disk_during_write_keeps_previous_checkpoint(tmp_path: Path) -> None:
    engine, checkpoints = new_run(tmp_path)
    run(engine, checkpoints, 1)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))  # the files of a checkpoint fail as on a full disk
    try:
        run(engine, checkpoints, 1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)

    assert [path.name for path in (tmp_path / "recover").iterdir()] == ["step_1"]
    run(engine, checkpoints, 1)
    assert resume(tmp_path) == 3


def test_write_failure_on_one_rank_fails_only_that_checkpoint(tmp_path: Path) -> None:
    def run_rank(parallel: ParallelContext) -> list[int]:
        engine = FailingEngine(parallel, {2} if parallel.rank == 1 else set())
        checkpoints = RecoveryCheckpoints(tmp_path, RecoverConfig(1), {"actor": engine}, {"component": engine})
        run(engine, checkpoints, 3)
        assert checkpoints._failures == 0
        return checkpoints._completed_steps

    assert on_ranks(2, run_rank) == [[1, 3], [1, 3]]
    assert sorted(path.name for path in (tmp_path / "recover").iterdir()) == ["step_1", "step_3"]
    manifest = json.loads((tmp_path / "recover" / "step_3" / MANIFEST).read_text())
    assert manifest["ranks"] == 2
    assert {"component-0.json", "component-1.json", "actor/0-0", "actor/1-0"} <= manifest["files"].keys()


def test_ranks_with_different_clocks_follow_rank_0(tmp_path: Path) -> None:
    def run_rank(parallel: ParallelContext) -> list[int]:
        engine = CountingEngine(parallel)
        checkpoints = RecoveryCheckpoints(
            tmp_path, RecoverConfig(every_minutes=1.0), {"actor": engine}, {"component": engine}
        )
        clock = {0: 0.0, 1: 59.0, 2: 61.0, 3: 90.0} if parallel.rank == 0 else {n: 1e9 * n for n in range(4)}
        checkpoints._schedule._now = lambda: clock[engine.steps]
        checkpoints._schedule.restart()
        run(engine, checkpoints, 3)
        return checkpoints._completed_steps

    assert on_ranks(2, run_rank) == [[2], [2]]


def test_minutes_interval_is_at_least_fifty_times_the_pause(tmp_path: Path) -> None:
    _, checkpoints = new_run(tmp_path, every=0, every_minutes=1.0)
    start = time.monotonic()
    checkpoints.save(1)
    assert 0 < checkpoints._schedule.min_seconds <= 50 * (time.monotonic() - start)
    clock = [0.0]
    schedule = Schedule(checkpoints.config, now=lambda: clock[0])
    schedule.min_seconds = 90.0
    for clock[0], expected in ((61.0, False), (91.0, True)):
        assert schedule.is_due(1) is expected


def test_component_that_cannot_be_saved_disables_default_checkpoints(tmp_path: Path) -> None:
    source = DataSource(iter([[{}]]), lambda rows: rows)
    checkpoints = RecoveryCheckpoints(
        tmp_path, RecoverConfig(), {"actor": CountingEngine(ParallelContext())}, {"source": source}
    )
    assert not checkpoints.config.regular


def test_directory_with_listed_marker_of_other_rank_completes(tmp_path: Path) -> None:
    def write(scratch: Path) -> list[Path]:
        (scratch / "weights").write_text("w")
        # the second is a temporary file, which the other rank has renamed since
        return [scratch / "weights", scratch / f"{MARKER_PREFIX}1.partial"]

    directory = BackgroundDirectory(tmp_path / "step_1", ParallelContext(), lambda scratch: [lambda: write(scratch)])

    assert directory.wait()
    assert directory.error == ""
    assert [path.name for path in (tmp_path / "step_1").iterdir()] == ["weights"]


@pytest.mark.guarantee("SIGKILL at any moment leaves a complete recovery checkpoint of one step.", area="failures")
@pytest.mark.slow
def test_kill_at_any_moment_leaves_complete_checkpoint_of_one_step(tmp_path: Path) -> None:
    run_dir, rng, reached = tmp_path / "run", random.Random(5), 0
    for attempt in range(8):
        process = fork_script(SCRIPT, [str(run_dir), "1000000"], tmp_path / f"log-{attempt}")
        deadline = time.monotonic() + 60
        while (last_recovery_checkpoint(run_dir / "recover") or 0) < reached + 2:
            assert process.is_alive(), (tmp_path / f"log-{attempt}").read_text()
            assert time.monotonic() < deadline
            time.sleep(0.001)
        time.sleep(rng.random() / 50)
        os.kill(process.pid, signal.SIGKILL)
        process.join(30)
        step = last_recovery_checkpoint(run_dir / "recover")
        assert step is not None
        assert step >= reached + 2
        reached = step
    assert resume(run_dir) == reached


@pytest.mark.slow
def test_two_processes_resume_and_skip_checkpoint_without_a_rank_file(tmp_path: Path) -> None:
    run_ranks(SCRIPT, [str(tmp_path), "5"], 2)
    assert recovery_checkpoint_steps(tmp_path) == [4, 5]
    (tmp_path / "recover" / "step_5" / "actor" / "1-7").unlink()

    outputs = run_ranks(SCRIPT, [str(tmp_path), "7"], 2)

    assert all(json.loads(text.splitlines()[-1])["resumed"] == 4 for text in outputs)
    assert sorted(path.name for path in (tmp_path / "recover").iterdir()) == ["step_6", "step_7"]
