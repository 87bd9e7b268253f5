"""Locks of a run directory, and resuming the run in it."""

import errno
import json
import os
import subprocess
import sys
import time

import pytest

from rl_apps.cli import driver
from rl_apps.cli.driver import main
from rl_apps.programs import gsm8k_grpo
from rl_apps.run import directory as directories
from rl_apps.run.app import Run
from rl_apps.run.directory import (
    PreviousRun,
    leftover_files,
    lock_run_directory,
    previous_run,
    resumption,
    write_config,
)
from rl_apps.settings.compose import to_yaml
from rl_apps.settings.device_layout import layout_of
from rl_apps.settings.dtypes import resolve_dtypes
from rl_contracts.errors import ConfigError
from rl_monitor.run_directory import FINISHED
from rl_trainers.recovery.lookup import truncate_to_checkpoint


def _run(directory, *overrides):
    config = gsm8k_grpo.APP.config(overrides)
    resolve_dtypes(config, has_bfloat16=False)
    return Run(config, layout_of(config.allocation, "required"), directory, "cpu")


@pytest.fixture
def past_run(tmp_path):
    """Directory of a run of four steps with a recovery checkpoint after the second."""
    directory = tmp_path / "run"
    (directory / "recover" / "step_2").mkdir(parents=True)
    (directory / "recover" / "step_2" / "manifest.json").write_text('{"files": {}}')
    (directory / "metrics.jsonl").write_text("".join(json.dumps({"step": n}) + "\n" for n in range(1, 5)))
    write_config(_run(directory, "total_steps=4", "recover.every=2"))
    return directory


def _command(capsys, directory, *arguments):
    code = main("gsm8k-grpo", [f"run_dir={directory}", "recover.every=2", *arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_directory_in_use_is_rejected_with_the_process(tmp_path, capsys):
    with lock_run_directory(tmp_path):
        code, out, err = _command(capsys, tmp_path)

    assert (code, out) == (2, "")
    assert f"is in use by process {os.getpid()} on " in err
    with lock_run_directory(tmp_path):
        pass


TRAINER_APP = """
import time
from dataclasses import replace
from rl_apps.programs import gsm8k_sft

def train(run):
    (run.directory / "training").touch()
    while not (run.directory / "go").exists():
        time.sleep(0.01)

APP = replace(gsm8k_sft.APP, train=train)
"""


@pytest.fixture
def trainer(tmp_path):
    """Trainer process in `tmp_path/run` without its command. The process ends when the file `go` exists."""
    (tmp_path / "at_work.py").write_text(TRAINER_APP)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_text("allocation: fsdp:d1")
    command = [sys.executable, "-m", "rl_apps.run.worker", "at_work:APP", str(tmp_path / "run"), "cpu", ""]
    process = subprocess.Popen(command, cwd=tmp_path)
    deadline = time.monotonic() + 120
    while not (tmp_path / "run" / "training").exists():
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.05)
    yield process
    process.kill()
    process.wait()


def test_lock_waits_for_trainers_of_a_killed_command(trainer, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(directories, "TRAINERS_END", 0.1)
    in_use = f"in use by trainers .*: process {trainer.pid} on .*Stop them"
    with pytest.raises(ConfigError, match=in_use), lock_run_directory(tmp_path / "run"):
        pytest.fail("the directory was locked while a trainer runs")

    def sleep(_):
        (tmp_path / "run" / "go").touch()
        trainer.wait()

    monkeypatch.setattr(directories, "TRAINERS_END", 60.0)
    monkeypatch.setattr(directories.time, "sleep", sleep)
    capsys.readouterr()
    with lock_run_directory(tmp_path / "run"):
        assert trainer.poll() == 0
    assert capsys.readouterr().out.startswith(
        f"waiting up to 60 s for trainers of an earlier command: process {trainer.pid}"
    )
    assert (tmp_path / "run" / FINISHED).exists()


def test_directory_not_writable_is_rejected(tmp_path, capsys):
    (tmp_path / "file").touch()
    for place in (tmp_path / "file", tmp_path / "file" / "below", "/proc/nowhere"):
        code, out, err = _command(capsys, place)
        assert (code, out) == (2, "")
        assert "expected a directory that can be written" in err
        assert "Traceback" not in err


def test_finished_run_started_again_changes_nothing(past_run, capsys):
    (past_run / FINISHED).touch()
    before = {path: path.read_bytes() for path in past_run.rglob("*") if path.is_file()}

    code, out, _ = _command(capsys, past_run, "total_steps=4")

    assert code == 0
    assert "this run is already finished" in out
    after = {path: path.read_bytes() for path in past_run.rglob("*") if path.is_file() and path.name != "lock"}
    assert after == before


def test_finished_run_without_checkpoint_rejects_other_settings(tmp_path):
    (tmp_path / "metrics.jsonl").touch()
    write_config(_run(tmp_path, "total_steps=4"))
    (tmp_path / FINISHED).touch()

    assert previous_run(_run(tmp_path, "total_steps=4")).finished
    for other in ("total_steps=5", "actor.optimizer.lr=1", "total_epochs=2"):
        with pytest.raises(ConfigError, match="contains an earlier run"):
            previous_run(_run(tmp_path, "total_steps=4", other))


def test_finished_run_resumes_for_more_steps(past_run):
    (past_run / FINISHED).touch()

    previous = previous_run(_run(past_run, "total_steps=9", "recover.every=2"))

    assert previous == PreviousRun(2, changes=("total_steps changed from 4 to 9",))


def test_stopped_run_lists_changed_settings_and_keeps_old_config(past_run):
    first = (past_run / "config.yaml").read_text()
    run = _run(past_run, "total_steps=4", "recover.every=2", "actor.optimizer.lr=0.5")

    assert previous_run(run).changes == ("actor.optimizer.lr changed from 0.0003 to 0.5",)
    write_config(run)
    write_config(run)

    assert (past_run / "config-1.yaml").read_text() == first
    assert (past_run / "config.yaml").read_text() == to_yaml(run.config)
    assert not (past_run / "config-2.yaml").exists()


def test_write_config_failure_keeps_the_old_config(past_run, monkeypatch):
    before = (past_run / "config.yaml").read_text()

    def broken(run, text):
        raise OSError("no space left")

    monkeypatch.setattr("pathlib.Path.replace", broken)
    with pytest.raises(OSError, match="no space left"):
        write_config(_run(past_run, "total_steps=9"))

    assert (past_run / "config.yaml").read_text() == before


def test_stopped_run_with_another_seed_is_rejected(past_run, capsys):
    before = (past_run / "config.yaml").read_text()

    code, out, err = _command(capsys, past_run, "total_steps=4", "seed=7")

    assert (code, out) == (2, "")
    assert "ConfigError: seed: expected 1, the seed of the run in" in err
    assert (past_run / "config.yaml").read_text() == before


def test_directory_of_another_kind_of_run_is_rejected(past_run, capsys):
    before = {path: path.read_bytes() for path in past_run.rglob("*") if path.is_file()}

    assert main("gsm8k-sft", ["recover.every=2", f"run_dir={past_run}"]) == 2
    assert (
        "holds a run of another kind: only one of the two has the settings algorithm, critic" in capsys.readouterr().err
    )
    after = {path: path.read_bytes() for path in past_run.rglob("*") if path.is_file() and path.name != "lock"}
    assert after == before


def test_resume_reports_steps_that_run_again(past_run, capsys, monkeypatch):
    def refuse(*_):
        raise ConfigError("stop here")

    monkeypatch.setattr(driver, "check_program", refuse)

    _, out, _ = _command(capsys, past_run, "total_steps=6")

    assert "resuming after step 2 of 6, the newest recovery checkpoint; steps up to 4 run again" in out


def test_resumed_run_keeps_its_dtypes(past_run, capsys):
    write_config(_run(past_run, "total_steps=4", "recover.every=2", "model.dtype=bfloat16", "actor.dtype=float32"))

    _, plan, _ = _command(capsys, past_run, "total_steps=6", "--dry-run")
    _, changed, _ = _command(capsys, past_run, "total_steps=6", "model.dtype=float32", "--dry-run")

    assert "Dtype: trainer float32, servers bfloat16" in plan
    assert "Dtype: trainer float32, servers float32" in changed


def test_directory_of_a_run_that_cannot_resume_is_rejected(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    write_config(_run(tmp_path, "recover.every=2"))

    for overrides in ("recover.every_minutes=0",), ("recover.every=2", "recover.resume=false"):
        with pytest.raises(ConfigError, match="contains an earlier run"):
            previous_run(_run(tmp_path, *overrides))
    assert previous_run(_run(tmp_path, "recover.every=2")) == PreviousRun()


@pytest.mark.parametrize(
    ("settings", "finished"),
    [(("recover.every_minutes=0",), False), (("recover.every_minutes=5",), True), (None, False)],
)
def test_directory_without_checkpoints_is_rejected(tmp_path, settings, finished):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    if settings is not None:
        write_config(_run(tmp_path, "total_steps=4", *settings))
    if finished:
        (tmp_path / FINISHED).touch()

    with pytest.raises(ConfigError, match="contains an earlier run"):
        previous_run(_run(tmp_path, "total_steps=8", "recover.every=2"))


@pytest.mark.parametrize(("minutes", "record"), [(0, '{"step": 0, "reward": 10}\n'), (10, '{"step": 3}\n'), (0, "")])
def test_directory_stopped_before_first_checkpoint_starts_again(tmp_path, minutes, record):
    (tmp_path / "metrics.jsonl").write_text(record)
    run = _run(tmp_path, f"recover.every_minutes={minutes}")
    write_config(run)

    assert previous_run(run) == PreviousRun()
    assert resumption(tmp_path).endswith("the same command starts again at step 1.")
    truncate_to_checkpoint(tmp_path, run.config.recover)
    assert (tmp_path / "metrics.jsonl").read_text() == ""


def test_command_with_a_full_disk_prints_one_sentence(monkeypatch, capsys):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device", "config.partial")

    monkeypatch.setattr("rl_apps.cli.driver._main", full)
    assert main("rl_apps.programs.gsm8k_grpo:APP", []) == 1
    error = capsys.readouterr().err
    assert error.startswith("gsm8k-grpo: OSError: [Errno 28] No space left on device: 'config.partial'")
    assert "Traceback" not in error


def test_other_files_in_a_new_run_directory_are_a_warning(tmp_path):
    assert leftover_files(tmp_path) == []
    for name in ("lock", "train.jsonl", "test.jsonl"):
        (tmp_path / name).touch()
    (warning,) = leftover_files(tmp_path)
    assert "contains other files (test.jsonl, train.jsonl)" in warning
    (tmp_path / "config.yaml").touch()
    assert leftover_files(tmp_path) == []
