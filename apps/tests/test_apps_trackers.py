"""Tracker settings of a command, and rejection of invalid ones before a run starts."""

import subprocess
import sys

import pytest

from rl_apps.cli.driver import main
from rl_apps.programs.gsm8k_grpo import APP
from rl_apps.settings.compose import to_yaml

INCOMPLETE_TRACKER = """
from rl_contracts.tracker import Tracker

class Lacking(Tracker):
    library, install = "no_such_library", "the-package"
    def open(self, run): return ""
    def log(self, metrics, step, time): pass
"""


@pytest.fixture
def incomplete_tracker(tmp_path, monkeypatch):
    (tmp_path / "lacking.py").write_text(INCOMPLETE_TRACKER)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop("lacking", None)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("setting", "kind"),
    [
        ("trackers=tensorboard", "tensorboard"),
        ("trackers=[tensorboard,wandb]", "tensorboard+wandb"),
        ("trackers=[]", "none"),
    ],
)
def test_trackers_setting_accepts_name_and_list(setting, kind, tmp_path):
    config = APP.config([setting, "trackers.options.mode=offline"])
    assert (config.trackers.kind, config.trackers.options) == (kind, {"mode": "offline"})
    file = tmp_path / "config.yaml"
    file.write_text(to_yaml(config))
    assert APP.config(file=file).trackers == config.trackers


def test_tracker_without_its_library_is_rejected_before_start(incomplete_tracker, tmp_path, capsys):
    assert main("gsm8k-grpo", ["trackers=lacking:Lacking", f"run_dir={tmp_path / 'run'}"]) == 2
    (error,) = [line for line in capsys.readouterr().err.splitlines() if line]
    assert "library no_such_library, which is not installed; install the-package" in error
    assert not (tmp_path / "run").exists()


def test_trackers_unknown_option_is_rejected(tmp_path, capsys):
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
from rl_trainers.run_log import tracking

class Endless(Tracker):
    def open(self, run):
        threading.Event().wait()
    def log(self, metrics, step, time): pass

def run(*_):
    with Tracking(TrackersConfig(kind="endless:Endless"), Path("run"), "sums", {}, print):
        return 3

if __name__ == "__main__":
    atexit.register(threading.Event().wait)
    driver._run = run
    tracking.CLOSE_SECONDS = 0
    sys.exit(driver.main("gsm8k-grpo"))
"""


def test_command_with_hanging_tracker_returns_its_exit_code(tmp_path):
    (tmp_path / "endless.py").write_text(ENDLESS)
    process = subprocess.run([sys.executable, "endless.py"], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert process.returncode == 3
    assert "has not sent all records within 0 s" in process.stdout
