"""A custom app with its own engine and schema in a file of the current directory, run by the driver."""

import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

BIN = Path(sys.executable).parent

MY_APP = '''
"""Counts."""
import json, os, sys, time
from dataclasses import dataclass, field

from rl_apps.run.app import App, Run
from rl_apps.settings.config import RunConfig
from rl_contracts.config import require
from rl_contracts.engine import TrainEngineConfig

class Counter: pass

@dataclass
class CounterConfig(TrainEngineConfig):
    """Settings of counting."""
    by: int = 1
    """Increment per step."""
    def check(self, strategy, spec):
        require(strategy.tensor == 1, "allocation", "my_app:Counter:d1; counting cannot be split", str(strategy))

@dataclass
class CountingConfig(RunConfig):
    """Settings of a counting run."""
    start: int = 0
    """First value."""
    allocation: str = "my_app:Counter:d2"
    """Counters."""

def check(run: Run[CountingConfig]):
    if os.path.exists("hold"):
        open("pid", "w").write(str(os.getpid()))
        os.replace("pid", "checking")
        while os.path.exists("hold"):
            time.sleep(0.01)
    require(run.config.start >= 0, "start", "0 or more", run.config.start)
    return [f"{run.config.start} and {run.config.actor.engine.by} more in each of {run.config.total_steps} steps"]

def train(run: Run[CountingConfig]):
    if os.environ["RANK"] != "0":
        return
    with open(run.directory / "metrics.jsonl", "a") as file:
        for step in range(1, run.config.total_steps + 1):
            value = run.config.start + step * run.config.actor.engine.by
            file.write(json.dumps({"step": step, "value": value}) + "\\n")
    print("torch" in sys.modules, run.device, run.servers, os.environ["WORLD_SIZE"])

APP = App("my-app", __doc__, CountingConfig, train, check, servers="rejected", columns={"value": ("value", "d")})
'''


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "my_app.py").write_text(MY_APP)
    model = tmp_path / "model"
    model.mkdir()
    for name in ("config.json", "tokenizer.json"):
        (model / name).write_text("{}")
    (model / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    return tmp_path


def _rl(folder, *arguments):
    command = [str(BIN / "rl"), "run", "my_app:APP", *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120)


@pytest.mark.slow
def test_own_app_is_checked_and_planned_like_installed_apps(folder):
    negative = _rl(folder, "start=-1", "model.path=model")
    assert (negative.returncode, negative.stderr) == (2, "my-app: ConfigError: start: expected 0 or more, found -1.\n")
    split = _rl(folder, "allocation=my_app:Counter:t2", "model.path=model")
    assert "allocation: expected my_app:Counter:d1; counting cannot be split" in split.stderr
    plan = _rl(folder, "--dry-run", "model.path=model")
    assert plan.returncode == 0, plan.stderr
    assert "  0 and 1 more in each of 100 steps" in plan.stdout
    assert f"2 x actor: {sys.executable} -m rl_apps.run.worker my_app:APP" in plan.stdout


def test_own_app_finishes_and_its_config_runs_again(folder):
    first = _rl(folder, "start=10", "actor.engine.by=5", "total_steps=3", "run_dir=one", "model.path=model")
    again = _rl(folder, "--config", "one/config.yaml", "run_dir=two")

    for done, run in ((first, "one"), (again, "two")):
        assert done.returncode == 0, done.stderr
        assert done.stdout.splitlines()[0].startswith("CPU (no GPU was found): 2 processes")
        assert "step 3/3  value 25" in done.stdout
        assert f"Run directory: {folder / run}" in done.stdout
        values = [json.loads(line)["value"] for line in (folder / run / "metrics.jsonl").read_text().splitlines()]
        assert values == [15, 20, 25]
        assert (folder / run / "logs" / "actor-0.log").read_text().strip() == "False cpu () 2"


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("uv") is None, reason="needs uv")
def test_command_whose_uv_run_was_killed_early_starts_nothing(folder):
    (folder / "hold").touch()
    prefix = ["uv", "run", "--no-project", "--directory", str(folder)]
    command = [*prefix, str(BIN / "rl"), "run", "my_app:APP", "run_dir=run", "model.path=model"]
    with (folder / "out").open("w") as out:
        uv = subprocess.Popen(command, stdout=out, stderr=out)
    deadline = time.monotonic() + 120
    while not (folder / "checking").exists():
        assert uv.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.05)
    program = psutil.Process(int((folder / "checking").read_text()))
    assert program.ppid() == uv.pid

    uv.kill()
    uv.wait()
    (folder / "hold").unlink()
    program.wait(60)

    assert "Stopped. No recovery checkpoint was saved" in (folder / "out").read_text()
    assert not (folder / "run" / "logs").exists()
