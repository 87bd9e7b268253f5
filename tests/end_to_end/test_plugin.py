"""Somebody else's package, `tests/plugin`, beside wheels of ours in an environment that knows nothing of the workspace.

It brings a train engine, an inference server and client, a scheduler, a workflow, a reward, a data set, a policy loss
and an app; ours are installed beside it, and none of them knows it.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from rl_contracts.testing.models import make_tiny_model

ROOT = Path(__file__).parents[2]
PLUGIN = ROOT / "tests" / "plugin"

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]
NIGHTLY = pytest.mark.nightly


def _run(*command, cwd):
    """A command to which nothing of the environment that the tests run in is handed on."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "VIRTUAL_ENV", "UV_PROJECT"))}
    environment["OMP_NUM_THREADS"] = "1"
    return subprocess.run([*map(str, command)], cwd=cwd, env=environment, capture_output=True, text=True, timeout=900)


def _must(*command, cwd):
    done = _run(*command, cwd=cwd)
    assert done.returncode == 0, f"{command}:\n{done.stdout[-6000:]}\n{done.stderr[-6000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A directory far from the repository, with their package in `plugin` and the environment in `env`."""
    home = tmp_path_factory.mktemp("elsewhere")
    shutil.copytree(PLUGIN, home / "plugin")
    _must("uv", "build", "--quiet", "--wheel", "--all-packages", "--out-dir", home / "wheels", cwd=ROOT)
    _must("uv", "build", "--quiet", "--wheel", "--out-dir", home / "wheels", home / "plugin", cwd=ROOT)
    # packages of others as the lock has them, so that nothing else is tried here than in the workspace
    export = ("uv", "export", "--frozen", "--package", "rl-apps", "--no-emit-workspace", "--no-hashes")
    (home / "pins.txt").write_text(_must(*export, cwd=ROOT))
    # without the workspace's settings: to compile all that is installed would take minutes
    _must("uv", "venv", "--no-config", "--no-project", "--python", "3.12", home / "env", cwd=ROOT)
    install = ("uv", "pip", "install", "--no-config", "--no-deps", "--python", home / "env")
    _must(*install, "--requirements", home / "pins.txt", *sorted((home / "wheels").glob("*.whl")), cwd=ROOT)
    _must("uv", "pip", "check", "--no-config", "--python", home / "env", cwd=ROOT)
    return home


@pytest.fixture(scope="module")
def model(home):
    return make_tiny_model(home / "model", layers=1, hidden=32)


def _their_app(home, *arguments):
    return (home / "env" / "bin" / "rl", "run", "their-app", *arguments)


@pytest.mark.parametrize("path", sorted((PLUGIN / "src" / "theirs").glob("*.py")), ids=lambda path: path.name)
def test_plugin_imports_of_ours_contracts_alone_and_in_its_app_the_driver(path):
    found = set(re.findall(r"^\s*(?:from|import) (rl_\w+)", path.read_text(), re.MULTILINE))

    also = {"app.py": {"rl_apps"}, "loss.py": {"rl_trainers"}}  # of which the loss has the type of what it is given
    assert found <= {"rl_contracts"} | also.get(path.name, set())


def test_environment_holds_no_file_of_the_workspace(home):
    modules = [path.parent.name.replace("-", "_") for path in ROOT.glob("packages/*/pyproject.toml")] + ["rl_apps"]
    code = f"import importlib; print([importlib.import_module(name).__file__ for name in {modules}])"

    found = _must(home / "env" / "bin" / "python", "-c", code, cwd=home)

    assert str(ROOT) not in found
    assert found.count(str(home / "env")) == len(modules)


@pytest.mark.nightly
def test_every_part_passes_our_conformance_suites(home):
    python = home / "env" / "bin" / "python"
    report = _must(python, "-m", "pytest", "tests", "-q", "-p", "no:cacheprovider", "-ra", cwd=home / "plugin")

    assert int(re.search(r"(\d+) passed", report).group(1)) >= 80, report


def test_help_shows_their_settings(home):
    text = _must(*_their_app(home, "--help", "all"), cwd=home)

    shown = set(re.findall(r"^\s*([\w.]+)=", text, re.MULTILINE))
    assert {"rollout.server.slots", "actor.engine.freeze", "launcher.options.niceness", "motto"} <= shown


@pytest.mark.parametrize(
    ("wrong", "nearest"),
    [
        ("rollout.server.slot=4", "Did you mean 'rollout.server.slots'"),
        pytest.param("actor.engine.freezes=[norm]", "Did you mean 'actor.engine.freeze'", marks=NIGHTLY),
        pytest.param("launcher.options.nicenes=3", "Did you mean 'launcher.options.niceness'", marks=NIGHTLY),
        pytest.param("moto=more", "Did you mean 'motto'", marks=NIGHTLY),
        pytest.param("allocation=theirsever:d1+theirengine:d1", "did you mean 'theirserver'", marks=NIGHTLY),
    ],
)
def test_misspelt_setting_is_refused_with_the_nearest(home, model, wrong, nearest):
    done = _run(*_their_app(home, f"model.path={model}", wrong), cwd=home)

    assert done.returncode == 2, done.stdout
    assert nearest in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ("allocation=theirserver:d1t2+theirengine:d1", "expected servers of one part"),
        pytest.param("allocation=theirserver:d1+theirengine:d2", "expected one rank", marks=NIGHTLY),
        pytest.param("rollout.server.slots=0", "rollout.server.slots: expected at least 1", marks=NIGHTLY),
        pytest.param("launcher.options.niceness=30", "launcher.options.niceness: expected 0 to 19", marks=NIGHTLY),
    ],
)
def test_what_their_parts_cannot_do_is_refused_before_anything_starts(home, model, wrong, why):
    done = _run(*_their_app(home, f"model.path={model}", wrong, "--dry-run"), cwd=home)

    assert done.returncode == 2, done.stdout
    assert why in done.stderr


@pytest.fixture(scope="module")
def run_dir(home, model):
    _must(*_their_app(home, f"model.path={model}", "run_dir=run"), cwd=home)
    return home / "run"


@pytest.fixture(scope="module")
def records(run_dir):
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def _figures(records, name):
    """What was recorded; nothing where a step saw none of it."""
    return [value for record in records if (value := record.get(name)) is not None]


def test_app_runs_to_its_end_with_their_parts(run_dir):
    config = OmegaConf.load(run_dir / "config.yaml")
    assert config.allocation == "theirserver:d1+theirengine:d1"
    assert config.launcher.kind == "theirs"
    assert (run_dir / "motto.txt").read_text() == "less is more"
    assert (run_dir / "checkpoints" / "step_6" / "model.safetensors").exists()


def test_each_step_publishes_a_version_and_stays_below_the_gap_that_is_warned_of(run_dir, records):
    warn = OmegaConf.load(run_dir / "config.yaml").gap.warn
    assert [record["version"] for record in records if "reward/mean" in record] == [1, 2, 3, 4, 5, 6]
    assert _figures(records, "applied") == [1] * 6
    assert len(_figures(records, "gap/mean_abs")) == 6
    assert max(_figures(records, "gap/mean_abs")) < warn
    assert 0 < max(_figures(records, "gap/fresh_mean_abs")) < warn
    assert max(_figures(records, "staleness/max")) == 1


def test_figures_of_their_reward_workflow_and_loss_are_in_the_metrics(records):
    assert any(0 < share < 1 for share in _figures(records, "vowels/any")), "recorded in the reward's own process"
    assert 0 < max(_figures(records, "theirs/characters")) <= 12
    assert any(0 < share < 1 for share in _figures(records, "theirs/praised"))
    evaluations = [record for record in records if "eval/vowels/any" in record]
    assert [record["step"] for record in evaluations] == [0, 6]
    assert all(0 < record["eval/theirs/characters"] <= 8 for record in evaluations)
