"""The sample third-party plugin in `tests/plugin`, installed next to wheels of this project, outside the workspace.

The plugin has a train engine, an inference server and client, a scheduler, a workflow, a reward, a data set, a policy
loss and an app. No package of this project refers to it.
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
    """Run a command without the Python settings of this process."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "VIRTUAL_ENV", "UV_PROJECT"))}
    environment["OMP_NUM_THREADS"] = "1"
    return subprocess.run([*map(str, command)], cwd=cwd, env=environment, capture_output=True, text=True, timeout=900)


def _must(*command, cwd):
    done = _run(*command, cwd=cwd)
    assert done.returncode == 0, f"{command}:\n{done.stdout[-6000:]}\n{done.stderr[-6000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """Directory outside the repository, with the plugin in `plugin` and a virtual environment in `env`."""
    home = tmp_path_factory.mktemp("outside")
    shutil.copytree(PLUGIN, home / "plugin")
    _must("uv", "build", "--quiet", "--wheel", "--all-packages", "--out-dir", home / "wheels", cwd=ROOT)
    _must("uv", "build", "--quiet", "--wheel", "--out-dir", home / "wheels", home / "plugin", cwd=ROOT)
    # the locked versions of all dependencies, as in the workspace
    export = ("uv", "export", "--frozen", "--package", "rl-apps", "--no-emit-workspace", "--no-hashes")
    (home / "pins.txt").write_text(_must(*export, cwd=ROOT))
    # --no-config: the workspace compiles bytecode on installation, which takes minutes
    _must("uv", "venv", "--no-config", "--no-project", "--python", "3.12", home / "env", cwd=ROOT)
    install = ("uv", "pip", "install", "--no-config", "--no-deps", "--python", home / "env")
    _must(*install, "--requirements", home / "pins.txt", *sorted((home / "wheels").glob("*.whl")), cwd=ROOT)
    _must("uv", "pip", "check", "--no-config", "--python", home / "env", cwd=ROOT)
    return home


@pytest.fixture(scope="module")
def model(home):
    return make_tiny_model(home / "model", layers=1, hidden=32)


def _app_command(home, *arguments):
    return (home / "env" / "bin" / "rl", "run", "acme-grpo", *arguments)


def test_plugin_modules_import_only_contracts_except_app_and_loss():
    exceptions = {"app.py": {"rl_apps"}, "loss.py": {"rl_trainers"}}  # the loss imports the type of its argument
    for path in (PLUGIN / "src" / "acme_rl").glob("*.py"):
        imports = set(re.findall(r"^\s*(?:from|import) (rl_\w+)", path.read_text(), re.MULTILINE))

        assert imports <= {"rl_contracts"} | exceptions.get(path.name, set()), path.name


def test_environment_imports_no_file_of_the_workspace(home):
    modules = [path.parent.name.replace("-", "_") for path in ROOT.glob("packages/*/pyproject.toml")] + ["rl_apps"]
    code = f"import importlib; print([importlib.import_module(name).__file__ for name in {modules}])"

    files = _must(home / "env" / "bin" / "python", "-c", code, cwd=home)

    assert str(ROOT) not in files
    assert files.count(str(home / "env")) == len(modules)


@pytest.mark.nightly
def test_plugin_components_pass_conformance_suites(home):
    python = home / "env" / "bin" / "python"
    report = _must(python, "-m", "pytest", "tests", "-q", "-p", "no:cacheprovider", "-ra", cwd=home / "plugin")

    assert int(re.search(r"(\d+) passed", report).group(1)) >= 80, report


def test_help_lists_settings_of_plugin_components(home):
    text = _must(*_app_command(home, "--help", "all"), cwd=home)

    listed = set(re.findall(r"^\s*([\w.]+)=", text, re.MULTILINE))
    assert {"rollout.server.slots", "actor.engine.freeze", "launcher.options.niceness", "motto"} <= listed


@pytest.mark.parametrize(
    ("setting", "suggestion"),
    [
        ("rollout.server.slot=4", "Did you mean 'rollout.server.slots'"),
        pytest.param("launcher.options.nicenes=3", "Did you mean 'launcher.options.niceness'", marks=NIGHTLY),
        pytest.param("allocation=acmesever:d1+acmeengine:d1", "did you mean 'acmeserver'", marks=NIGHTLY),
    ],
)
def test_misspelled_setting_is_rejected_with_suggestion(home, model, setting, suggestion):
    done = _run(*_app_command(home, f"model.path={model}", setting), cwd=home)

    assert done.returncode == 2, done.stdout
    assert suggestion in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("setting", "reason"),
    [
        ("allocation=acmeserver:d1t2+acmeengine:d1", "expected one process per server"),
        pytest.param("allocation=acmeserver:d1+acmeengine:d2", "expected one rank", marks=NIGHTLY),
        pytest.param("launcher.options.niceness=30", "launcher.options.niceness: expected 0 to 19", marks=NIGHTLY),
    ],
)
def test_unsupported_plugin_setting_is_rejected_before_start(home, model, setting, reason):
    done = _run(*_app_command(home, f"model.path={model}", setting, "--dry-run"), cwd=home)

    assert done.returncode == 2, done.stdout
    assert reason in done.stderr


def _values(records, name):
    """Values of a metric, without steps that did not record it."""
    return [value for record in records if (value := record.get(name)) is not None]


def test_plugin_app_completes_a_run_with_plugin_components(home, model):
    _must(*_app_command(home, f"model.path={model}", "run_dir=run"), cwd=home)

    run_dir = home / "run"
    records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    config = OmegaConf.load(run_dir / "config.yaml")
    assert config.allocation == "acmeserver:d1+acmeengine:d1"
    assert config.launcher.kind == "acme"
    assert (run_dir / "motto.txt").read_text() == "less is more"
    assert (run_dir / "checkpoints" / "step_6" / "model.safetensors").exists()
    # each step is published, and the log-prob gap is below the warning
    assert [record["version"] for record in records if "reward/mean" in record] == [1, 2, 3, 4, 5, 6]
    assert _values(records, "applied") == [1] * 6
    assert len(_values(records, "gap/mean_abs")) == 6
    assert max(_values(records, "gap/mean_abs")) < config.gap.warn
    assert 0 < max(_values(records, "gap/fresh_mean_abs")) < config.gap.warn
    assert max(_values(records, "staleness/max")) == 1
    # reward, workflow and loss record metrics
    assert any(0 < fraction < 1 for fraction in _values(records, "vowels/any")), "the reward worker records it"
    assert 0 < max(_values(records, "acme/characters")) <= 12
    assert any(0 < fraction < 1 for fraction in _values(records, "acme/positive_advantage"))
    evaluations = [record for record in records if "eval/vowels/any" in record]
    assert [record["step"] for record in evaluations] == [0, 6]
    assert all(0 < record["eval/acme/characters"] <= 8 for record in evaluations)
