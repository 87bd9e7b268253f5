"""Trackers in the settings of a command, and what is wrong with them said before anything starts."""

import subprocess
import sys

import pytest

from rl_apps.cli.driver import main
from rl_apps.programs.gsm8k_grpo import APP
from rl_apps.settings.compose import to_yaml

LACKING = """
from rl_contracts.tracker import Tracker

class Lacking(Tracker):
    library, install = "no_such_library", "the-package"
    def open(self, run): return ""
    def log(self, figures, step, time): pass
"""


@pytest.fixture
def lacking(tmp_path, monkeypatch):
    (tmp_path / "lacking.py").write_text(LACKING)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop("lacking", None)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("said", "kind"),
    [
        ("trackers=tensorboard", "tensorboard"),
        ("trackers=[tensorboard,wandb]", "tensorboard+wandb"),
        ("trackers=[]", "none"),
        ("trackers.kind=wandb", "wandb"),
    ],
)
def test_trackers_may_be_named_by_themselves_and_as_a_list(said, kind, tmp_path):
    config = APP.config([said, "trackers.project=mine"])
    assert (config.trackers.kind, config.trackers.project) == (kind, "mine")
    file = tmp_path / "config.yaml"
    file.write_text(to_yaml(config))
    assert APP.config(file=file).trackers == config.trackers


@pytest.mark.parametrize(
    ("said", "answer"),
    [
        ("trackers=tensorbord", "rl.trackers: unknown name 'tensorbord'; did you mean 'tensorboard'?"),
        ("trackers=lacking:Lacking", "library no_such_library, which is not installed; install the-package"),
        ("trackers.close_seconds=-1", "trackers.close_seconds: expected 0 or more, found -1"),
        ("report_to=wandb", "unknown setting 'report_to'. Did you mean 'trackers.kind'?"),
    ],
)
def test_trackers_that_cannot_be_are_refused_before_anything_starts(said, answer, lacking, tmp_path, capsys):
    assert main("gsm8k-grpo", [said, f"run_dir={tmp_path / 'run'}"]) == 2
    (sentence,) = [line for line in capsys.readouterr().err.splitlines() if line]
    assert answer in sentence
    assert not (tmp_path / "run").exists()


def test_trackers_options_of_nobody_are_refused(tmp_path, capsys):
    pytest.importorskip("tensorboard")
    assert main("gsm8k-grpo", ["trackers=tensorboard", "trackers.options.mood=1", f"run_dir={tmp_path / 'run'}"]) == 2
    assert "trackers.options: expected options of trackers.kind=tensorboard (" in capsys.readouterr().err


ENDLESS = """
import atexit
import sys
import threading
from pathlib import Path

from rl_apps.cli import driver
from rl_contracts.tracker import Tracker
from rl_trainers import TrackersConfig, Tracking

class Endless(Tracker):
    def open(self, run):
        threading.Event().wait()
    def log(self, figures, step, time): pass

def run(*_):
    with Tracking(TrackersConfig(kind="endless:Endless", close_seconds=0), Path("run"), "sums", {}, print):
        return 3

if __name__ == "__main__":
    atexit.register(threading.Event().wait)
    driver._run = run
    sys.exit(driver.main("gsm8k-grpo"))
"""


def test_command_whose_tracker_hangs_ends_with_its_exit_code(tmp_path):
    (tmp_path / "endless.py").write_text(ENDLESS)
    done = subprocess.run([sys.executable, "endless.py"], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 3
    assert "trackers.close_seconds=0 s" in done.stdout
