"""`resume_from`: the recovery checkpoint from which a command starts."""

import json
from pathlib import Path

import pytest

from rl_apps.programs import gsm8k_sft
from rl_apps.run.app import Run
from rl_apps.run.directory import PreviousRun, previous_run, write_config
from rl_apps.run.resuming import named_point, step_of, take_over
from rl_apps.settings.device_layout import layout_of
from rl_contracts.errors import ConfigError
from rl_contracts.runtime.run_files import recovery_checkpoint_steps
from rl_monitor.run_directory import FINISHED


def _run(directory, *overrides):
    config = gsm8k_sft.APP.config([f"run_dir={directory}", *overrides])
    return Run(config, layout_of(config.allocation, "optional"), Path(directory), "cpu")


@pytest.fixture
def other(tmp_path):
    """A run of 30 steps with two recovery checkpoints."""
    directory = tmp_path / "other"
    for step in (10, 20):
        point = directory / "recover" / f"step_{step}"
        (point / "actor").mkdir(parents=True)
        (point / "actor" / "0").write_text(f"weights of step {step}")
        (point / "manifest.json").write_text(json.dumps({"step": step, "ranks": 1, "files": {}}))
    (directory / "metrics.jsonl").write_text("".join(f'{{"step": {n}}}\n' for n in range(1, 31)))
    write_config(_run(directory))
    return directory


@pytest.mark.parametrize(("path", "step"), [("", 20), ("recover/step_10", 10)])
def test_resume_from_another_run_links_its_checkpoint(other, tmp_path, path, step):
    run = _run(tmp_path / "new", f"resume_from={other / path}")
    assert previous_run(run, step_of(named_point(run))) == PreviousRun(step)

    take_over(run)

    assert recovery_checkpoint_steps(run.directory) == [step]
    linked = run.directory / "recover" / f"step_{step}" / "actor" / "0"
    assert linked.samefile(other / "recover" / f"step_{step}" / "actor" / "0")
    assert recovery_checkpoint_steps(other) == [10, 20]


def test_resume_from_a_step_of_this_run_removes_later_checkpoints(other):
    (other / FINISHED).touch()
    run = _run(other, "resume_from=10")
    past = previous_run(run, step_of(named_point(run)))
    assert (past.step, past.finished) == (10, False)

    take_over(run)

    assert recovery_checkpoint_steps(other) == [10]


def test_resume_from_in_a_repeated_command_uses_the_newest_checkpoint(other):
    run = _run(other, "resume_from=10")
    write_config(run)
    assert named_point(run) is None
    take_over(run)
    assert previous_run(run).step == 20


@pytest.mark.parametrize(("name", "found"), [("15", "only those of steps 10, 20"), ("recover", "none in recover")])
def test_resume_from_without_a_checkpoint_raises(other, name, found):
    with pytest.raises(ConfigError, match=f"resume_from={name}: expected a recovery checkpoint, found {found}"):
        named_point(_run(other, f"resume_from={name}"))


def test_resume_from_another_run_in_the_directory_of_a_run_raises(other, tmp_path):
    (tmp_path / "metrics.jsonl").touch()
    with pytest.raises(ConfigError, match="already holds one"):
        named_point(_run(tmp_path, f"resume_from={other}"))


def test_resume_from_with_resuming_off_raises(other):
    with pytest.raises(ConfigError, match=r"recover\.resume"):
        named_point(_run(other, "resume_from=10", "recover.resume=false"))
